"""An optimizer around another one: its groups, state and settings are those of the optimizer within."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellnormed.optim.parts import Group


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
