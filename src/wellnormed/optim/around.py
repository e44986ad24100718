"""An optimizer around another one: its groups, state and settings are those of the optimizer within."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellnormed.optim.parts import Group


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch calls an optimizer's hooks in its `step`: not unless its class has called torch's `__init__`."""
    # which has added this attribute last; some wrappers make those before it by hand
    return getattr(type(optimizer).step, "hooked", False) and "_optimizer_load_state_dict_post_hooks" in vars(optimizer)


def within(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The one optimizer that another one holds as an attribute and takes its parameters from; None without one."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    held = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    found = [each for each in held if known == {p for group in each.param_groups for p in group["params"]}]
    return found[0] if len(found) == 1 else None


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose steps hooks can follow: this one, or one within it, as accelerate and opacus wrap them.

    A wrapper that has no hooks of its own is passed by, whatever its class.
    """
    inner = None if runs_hooks(optimizer) else within(optimizer)
    return optimizer if inner is None else stepping(inner)


class Around(torch.optim.Optimizer):
    """An optimizer around `optimizer`, to whose parameter groups, state and defaults it leads."""

    _kept: ClassVar[tuple[str, ...]]
    """The attributes that are copied and pickled."""

    inner: torch.optim.Optimizer

    def _require_optimizer(self, optimizer: object) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, type(self)):
            raise ValueError(
                f"{type(self).__name__}: optimizer must be an optimizer of torch, got {optimizer!r}; pass wn.Scion(...)"
            )
        needed = [p for p in inspect.signature(optimizer.step).parameters.values() if p.default is p.empty]
        if needed := [p.name for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
            raise ValueError(
                f"{type(self).__name__}: a step of {type(optimizer).__name__} needs {', '.join(needed)}, and within "
                "this optimizer it is called without; pass one whose gradients are made before its step, as wn.Scion"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self._kept}

    @property
    def param_groups(self) -> list[Group]:  # pyrefly: ignore[bad-override]
        """The groups of the optimizer within."""
        return self.inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # pyrefly: ignore[bad-override]
        """The defaults of the optimizer within."""
        return self.inner.defaults

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # pyrefly: ignore[bad-override]
        """The state of the optimizer within."""
        return self.inner.state  # pyrefly: ignore

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to the optimizer within."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the optimizer within does."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer within."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.inner.load_state_dict(state_dict)
