"""Which constraint holds which parameter of an optimizer; what makes no sense is refused by name.

`certificates.constraining` has `constrain`, which users call.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from wellnormed._inputs import is_quantized, require_hashable, require_patterns
from wellnormed.constraints.base import Constraint
from wellnormed.constraints.caps import ColumnCap, EntryCap, SoftCap
from wellnormed.constraints.of_optimizer import Constraints
from wellnormed.constraints.step_lengths import BoundsItsSteps, attached_to
from wellnormed.constraints.weights import Constrained
from wellnormed.norms import Norm
from wellnormed.optim import Averaged
from wellnormed.optim.around import runs_hooks, stepping, within
from wellnormed.parallel.layout import local, refuse_untrainable, whole
from wellnormed.routing import AssignedParameter, Assignment, assign_norms
from wellnormed.routing.patterns import Matched

UNNAMED = "no pattern names it"
"""Why a parameter has no constraint where none was asked for."""


def constrainable(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer whose steps constraints follow: the one within an average, or within a wrapper without hooks."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"constrain: optimizer is of type {type(optimizer).__name__}; pass the optimizer itself")
    inner: torch.optim.Optimizer | None = optimizer
    while inner is not None:
        if isinstance(inner, Averaged):
            return constrainable(inner.inner)
        inner = within(inner)
    optimizer = stepping(optimizer)
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ValueError(
            "constrain: ZeroRedundancyOptimizer sends its weights after its step, past the constraints; use an "
            "optimizer of this library with process_group=, or fully_shard (FSDP2)"
        )
    if not runs_hooks(optimizer):
        raise ValueError(
            f"constrain: {type(optimizer).__name__} runs no hooks of torch in its step, so no constraint would act "
            "after it; pass the optimizer that it wraps, or call super().__init__(params, defaults) in its class"
        )
    return optimizer


def norms_of(optimizer: torch.optim.Optimizer, norms: Assignment | nn.Module | None) -> Assignment:
    """The norms in which constraints measure: those given, else those of the optimizer."""
    if norms is None and isinstance(optimizer, BoundsItsSteps):
        norms = optimizer.assignment
    if isinstance(norms, nn.Module):
        norms = assign_norms(norms)
    if not isinstance(norms, Assignment):
        raise ValueError(f"constrain: norms must be the model or its Assignment, got {norms!r}; pass norms=model")
    return norms


def matched(constraints: Mapping[str, Constraint], norms: Assignment) -> Matched:
    """Which pattern's constraint holds which parameter; a pattern that holds none is refused."""
    require_patterns("constrain: ", {"constraints": constraints})
    for pattern, constraint in constraints.items():
        _refuse_no_constraint(pattern, constraint)
    why_not = lambda pattern, a: _why_not(constraints[pattern], a)  # noqa: E731
    return norms.match(constraints, "constraints of constrain", why_not)


def require_finite(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that no constraint can bound."""
    if whole((~parameter.detach().isfinite()).sum()) > 0:
        raise ValueError(f"parameter {name!r} holds NaN or infinity, which nothing bounds; load other values")


def attach(
    optimizer: torch.optim.Optimizer,
    constraints: Mapping[str, Constraint],
    norms: Assignment,
    prove: bool,
    make: Callable[..., Constraints] = Constraints,
) -> Constraints:
    """Attach to an optimizer what `constrain` was given, of which `make` makes one object."""
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    taken = {parameter for other in attached_to(optimizer) for parameter in other.parameters()}
    owner, passed_by = matched(constraints, norms)
    assigned, constrained = {a.name: a for a in norms}, {}
    for name, pattern in owner.items():
        a, constraint = assigned[name], constraints[pattern]
        if a.parameter in taken:
            raise ValueError(
                f"parameter {name!r} has a constraint of an earlier `constrain`; call remove() on its result"
            )
        if a.parameter not in owned:
            raise ValueError(
                f"parameter {name!r} is not in this optimizer, so its constraint would never run; leave it out"
            )
        refuse_untrainable(name, a.parameter)
        if a.parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is a meta tensor and has no values for {constraint!r} to bound; make them "
                "with model.to_empty(device=...) and an initialisation, then constrain"
            )
        require_finite(name, a.parameter)
        assert a.norm is not None, "no constraint serves a parameter without a norm"
        constrained[name] = Constrained(name, a.parameter, a.norm, constraint)
    _refuse_shared_memory(norms)
    left_out = {
        a.name: "; ".join(dict.fromkeys(passed_by[a.name].values())) or UNNAMED
        for a in norms
        if a.name not in constrained
    }
    left_out |= {a.name: "an earlier `constrain` holds it" for a in norms if a.parameter in taken}
    left_out |= dict.fromkeys(norms.frozen, "it is frozen")
    return make(optimizer, tuple(constrained.values()), left_out, prove, norms.model)


def _why_not(constraint: Constraint, a: AssignedParameter) -> str:
    """Why a constraint does not act on a parameter; nothing if it does."""
    if a.norm is None:
        return "AdamW moves it, and it has no norm to bound"
    if constraint.acts_on(a.norm):
        return ""
    return f"{type(constraint).__name__} does not act on {a.norm}; {serving(a.norm)} does"


def serving(norm: Norm) -> str:
    """The name of a constraint that acts on weights in a norm: a cap, if one does."""
    return next((kind.__name__ for kind in (SoftCap, ColumnCap, EntryCap) if kind(1.0).acts_on(norm)), "Sphere")


def _refuse_no_constraint(pattern: str, constraint: object) -> None:
    if not isinstance(constraint, Constraint):
        name = constraint.__name__ if isinstance(constraint, type) else "SoftCap"
        value = constraint if isinstance(constraint, float | int) else 2.0
        raise ValueError(
            f"constrain: {pattern!r} must have a Constraint, got {constraint!r}; pass one, such as {name}({value})"
        )
    require_hashable(f"constrain: {pattern!r} is given {constraint!r}: ", constraint)


def _refuse_shared_memory(norms: Assignment) -> None:
    """Refuse two parameters on one memory: each would be moved by the steps of both."""
    storages: dict[int, list[AssignedParameter]] = defaultdict(list)
    for a in norms:
        part = local(a.parameter)
        strided = part.layout is torch.strided and not is_quantized(part) and part.numel()
        if strided and (place := part.untyped_storage().data_ptr()):  # 0 for tensors without values
            storages[place].append(a)
    for sharing in storages.values():
        ordered = sorted(sharing, key=lambda a: _span(local(a.parameter))[0])
        for number, a in enumerate(ordered):
            _, last = _span(local(a.parameter))
            near = itertools.takewhile(lambda b, last=last: _span(local(b.parameter))[0] <= last, ordered[number + 1 :])
            for b in near:
                if a.parameter is not b.parameter and _overlap(local(a.parameter), local(b.parameter)):
                    raise ValueError(
                        f"parameters {a.name!r} and {b.name!r} share memory, so that a step of one moves the other; "
                        "tie them as one parameter, `second.weight = first.weight`, or give each its own memory"
                    )


def _span(x: Tensor) -> tuple[int, int]:
    """The first byte of a view in its storage, and that of its last entry."""
    first = int(x.storage_offset()) * x.itemsize
    return first, first + x.itemsize * sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage have an entry in common; `W[:, :4]` and `W[:, 4:]` have none."""
    if a.dtype != b.dtype:
        return True
    first = min(a.storage_offset(), b.storage_offset())
    marks = torch.zeros(1 + max(_span(a)[1], _span(b)[1]) // a.itemsize - first, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())
