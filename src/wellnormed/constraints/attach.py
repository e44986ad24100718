"""Attach constraints to an optimizer through its step hooks, and measure whether they hold."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellnormed.constraints.rules import Constraint
from wellnormed.norms import Assignment, Norm
from wellnormed.norms.assignment import match_patterns
from wellnormed.optim import ConditionalGradient


@dataclass(frozen=True)
class _Constrained:
    name: str
    parameter: Tensor
    norm: Norm
    rule: Constraint


class Constraints:
    """The rules attached to one optimizer. Before a step they check that they can hold; after it they hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, constrained: tuple[_Constrained, ...]) -> None:
        self._optimizer = optimizer
        self._constrained = constrained
        self._check()
        self._project()
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._check()),
            optimizer.register_step_post_hook(lambda *_: self._apply()),
        )

    def __str__(self) -> str:
        width = max((len(c.name) for c in self._constrained), default=0)
        return "\n".join(f"{c.name:{width}}  {c.rule!r}" for c in self._constrained)

    def remove(self) -> None:
        """Detach from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def norm_ratios(self) -> dict[str, float]:
        """Estimated norm over cap of every constrained parameter; cheap enough for every logged step."""
        buckets = defaultdict(list)
        for c in self._constrained:
            buckets[c.norm, c.parameter.shape, c.parameter.dtype, c.parameter.device].append(c)
        ratios = {}
        for (norm, *_), members in buckets.items():
            values = norm.norm(torch.stack([c.parameter for c in members])).tolist()
            ratios |= {c.name: value / c.rule.max_norm for c, value in zip(members, values, strict=True)}
        return ratios

    def proved_ratios(self) -> dict[str, float]:
        """Proved bound on the norm over cap of every constrained parameter: at most 1, or the promise is broken."""
        return {c.name: float(c.norm.upper_bound(c.parameter.detach())) / c.rule.max_norm for c in self._constrained}

    def _update_norm(self, name: str) -> float | None:
        return self._optimizer.update_norm(name) if isinstance(self._optimizer, ConditionalGradient) else None

    def _check(self) -> None:
        for c in self._constrained:
            c.rule.check(c.norm, self._update_norm(c.name), c.name)

    @torch.no_grad()
    def _project(self) -> None:
        for c in self._constrained:
            c.parameter.copy_(c.rule.project(c.parameter, c.norm))

    @torch.no_grad()
    def _apply(self) -> None:
        buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for c in self._constrained:
            step = (self._update_norm(c.name) or 0.0) if c.rule.needs_update_norm else 0.0
            key = (c.rule, c.norm, step, c.parameter.shape, c.parameter.dtype, c.parameter.device)
            buckets[key].append(c.parameter)
        for (rule, norm, step, *_), parameters in buckets.items():
            capped = rule.apply(torch.stack(parameters), norm, step)
            torch._foreach_copy_(parameters, list(capped.unbind()))


def constrain(
    optimizer: torch.optim.Optimizer, rules: Mapping[str, Constraint], norms: Assignment | None = None
) -> Constraints:
    """Keep weights in bounds after every `optimizer.step()`.

    Weights above their cap are brought below it at once; from then on every step is checked before and corrected
    after.

    Args:
        optimizer: Any optimizer. Those of `wellnormed.optim` know their parameters' names and norms and the norm of
            their steps; for any other pass `norms`.
        rules: Name pattern (`fnmatch`; a module's name stands for all below it) -> rule. Every rule must act on at
            least one parameter that its pattern matches (a spectral rule passes by biases; `print` shows what is
            constrained), and no parameter may have two.
        norms: What `assign_norms` returned for the model; needed for optimizers of other libraries.

    Returns:
        The attached rules, with `norm_ratios()` (estimates), `proved_ratios()` and `remove()`.

    Raises:
        ValueError: Naming parameter, value, rule and remedy.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.Scion(wn.assign_norms(model), lr=0.5)
        >>> rules = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> rules.proved_ratios()["weight"] <= 1
        True
    """
    if norms is None:
        if not isinstance(optimizer, ConditionalGradient):
            raise ValueError(
                f"{type(optimizer).__name__} does not know its parameters' norms; pass norms=wn.assign_norms(model)"
            )
        norms = optimizer.assignment
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    constrained: dict[str, _Constrained] = {}
    for pattern, rule in rules.items():
        named = [a for a in norms if a.name in match_patterns([pattern], (a.name for a in norms), "rules of constrain")]
        acting = [a for a in named if rule.acts_on(a.norm)]
        if not acting:
            raise ValueError(
                f"{rule!r} acts on none of the parameters that {pattern!r} matches: "
                + ", ".join(f"{a.name} lives in {a.norm!r}" for a in named)
                + "; use ColumnCap for ColNorm, and SoftCap, HardCap or SpectralNormalize for Spectral and PerHead"
            )
        for a in acting:
            if a.name in constrained:
                raise ValueError(
                    f"parameter {a.name!r} has two rules, {constrained[a.name].rule!r} and {rule!r}; "
                    "make the patterns disjoint"
                )
            if id(a.parameter) not in owned:
                raise ValueError(
                    f"parameter {a.name!r} is not in this optimizer, so its rule would never run; leave it out"
                )
            constrained[a.name] = _Constrained(a.name, a.parameter, a.norm, rule)
    return Constraints(optimizer, tuple(constrained.values()))
