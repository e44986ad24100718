"""Executed operations by name, each with the function that lowers it to rows of a proof."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Name of an executed operation, such as `aten.relu.default` -> the function that bounds it."""
REFUSED: set[str] = set()
"""Names of those that have no bound, whose function says why."""


def operation(*targets: str | torch._ops.OpOverload) -> Callable[[F], F]:
    """Decorate `f(step, *arguments, **keywords)` to register it as the bound of executed operations.

    The targets are operations of `torch.ops`, or their names without `torch.ops`, such as `"aten.relu.default"`. The
    function gets the call's own arguments: a `Value` for a tensor that depends on the input, a `Stored` for one that
    does not, anything else as it stands. It returns what `step` derived from them.

    The proof checks what follows from the rows; that they bound the operation is yours to prove. Here every
    entry of the result moves by no more than that of x, and is no larger, so it is a `contraction`:

    Example:
        >>> import torch
        >>> import wellnormed as wn
        >>> from wellnormed.propagation import inner_axes, operation
        >>> @torch.library.custom_op("docs::shrink", mutates_args=())
        ... def shrink(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sign() * (x.abs() - 1).clamp(min=0)
        >>> _ = shrink.register_fake(torch.empty_like)
        >>> @operation("docs.shrink.default")
        ... def bound_shrink(step, x):
        ...     return step.derive("contraction", [(x, inner_axes(x))], shape=x.shape)
    """

    def register(function: F) -> F:
        OPERATIONS.update(dict.fromkeys(map(name_of, targets), function))
        return function

    return register


def refusal(*targets: str) -> Callable[[F], F]:
    """As `operation`, for a function that always refuses and says what to do instead."""
    REFUSED.update(targets)
    return operation(*targets)


def name_of(target: Any) -> str:
    """Name of an executed operation, as `operation` takes it."""
    return target if isinstance(target, str) else str(target).removeprefix("torch.ops.")
