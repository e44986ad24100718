"""Who bounds what: executed operations by name, and the primitives that a certificate's rows are made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds

F = TypeVar("F", bound=Callable[..., Any])


class Read(NamedTuple):
    """What a primitive sees of one input: bounds of the groups that the row reads, however its entries came there."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """Axes of its groups."""
    bounds: Bounds


Primitive = Callable[[Sequence[Read], Mapping[str, Any], Sequence[Claim]], Bounds]

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Name of an executed operation, such as `aten.relu.default` -> the function that bounds it."""
REFUSED: set[str] = set()
"""Names of those that have no bound, whose function says why."""
PRIMITIVES: dict[str, Primitive] = {}
"""Name of a primitive -> the bounds of its result, from those of its inputs, its constants and its claims."""


def operation(*targets: str | torch._ops.OpOverload) -> Callable[[F], F]:
    """Decorate `f(step, *arguments, **keywords)` to register it as the bound of executed operations.

    The targets are operations of `torch.ops`, or their names without `torch.ops`, such as `"aten.relu.default"`. The
    function gets the call's own arguments: a `Value` for a tensor that depends on the input, a `Stored` for one that
    does not, anything else as it stands. It returns what `step` derived from them.

    The checker proves what follows from the derived rows; that they bound the operation is yours to prove. Here every
    entry of the result moves by no more than that of x, and is no larger, so it is a `contraction`:

    Example:
        >>> import torch
        >>> import wellnormed as wn
        >>> from wellnormed.propagation import operation
        >>> @torch.library.custom_op("docs::shrink", mutates_args=())
        ... def shrink(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sign() * (x.abs() - 1).clamp(min=0)
        >>> _ = shrink.register_fake(torch.empty_like)
        >>> @operation("docs.shrink.default")
        ... def bound_shrink(step, x):
        ...     return step.derive("contraction", [(x, x.inner_axes())], shape=x.shape)
    """

    def register(function: F) -> F:
        OPERATIONS.update(dict.fromkeys(map(name_of, targets), function))
        return function

    return register


def refusal(*targets: str) -> Callable[[F], F]:
    """As `operation`, for a function that always refuses and says what to do instead."""
    REFUSED.update(targets)
    return operation(*targets)


def primitive(name: str) -> Callable[[F], F]:
    """Decorate the bound of a primitive, `f(reads, constants, claims) -> Bounds`.

    It runs in decimal arithmetic that rounds up. Besides the row's own, `constants` has the result's `shape` and the
    `axes` of its groups. A certificate with the primitive is proved only by a checker that has a rule for it too.
    """

    def register(function: F) -> F:
        PRIMITIVES[name] = function
        return function

    return register


def name_of(target: Any) -> str:
    """Name of an executed operation, as `operation` takes it."""
    return target if isinstance(target, str) else str(target).removeprefix("torch.ops.")
