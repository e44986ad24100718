"""One table of executed operations: the name of each, its kind, and the function that lowers it to rows of a proof.

The records stand beside the lowerings, which register them when `wellnormed.lowering` is imported, and are read by
everyone who asks what an operation does. No other table of their names exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import fx

F = TypeVar("F", bound=Callable[..., Any])

Kind = Literal["move", "copy", "lookup", "filler", "random", "affine", "product", "function"]
"""What an operation does with the entries of its first argument.

- `move`: places them, repeats them or leaves them out, and puts zeros or other tensors' entries in between.
- `copy`: keeps all in their places; it may convert their dtype.
- `lookup`: a move to places that integers of another argument say.
- `filler`: takes their shape and dtype alone.
- `random`: drops some of them, as dropout does, with a probability and while a flag is set, its next arguments; else
  it is a copy.
- `affine`: computes an affine function of all its arguments together; its flags for training are off.
- `product`: computes what is affine in each of its arguments, and with the sizes of factors bounds that of the product.
- `function`: anything else.
"""


@dataclass(frozen=True)
class Operation:
    """What is known of an executed operation."""

    name: str
    """Its name with its namespace, such as `aten.relu.default`."""
    kind: Kind
    lowering: Callable[..., Any]
    """Lowers a call of it to rows of a proof."""
    bounded: bool = True
    """Whether it has a bound; if not, the lowering says why it has none."""
    makes: Literal["", "constant", "memory"] = ""
    """Whether it makes a new tensor, of which nothing is computed from its arguments: a constant, or memory whose
    entries nobody has written."""
    shape_only: tuple[int, ...] = ()
    """The positions of arguments of which it takes the shape and dtype alone."""
    family: str = ""
    """The name that formulas have for it and for the others that compute the same of the same arguments, such as `add`
    for `aten.add.Tensor` and `aten.add.Scalar`; its own without torch's namespace if it has no such others."""


OPERATIONS: dict[str, Operation] = {}
"""Name -> record."""


def operation(
    *targets: str | torch._ops.OpOverload,
    kind: Kind = "function",
    bounded: bool = True,
    makes: Literal["", "constant", "memory"] = "",
    shape_only: tuple[int, ...] = (),
    family: str = "",
) -> Callable[[F], F]:
    """Decorate `f(ledger, *arguments, **keywords)` to register it as the bound of executed operations.

    The targets are operations of `torch.ops`, or their names without `torch.ops`, such as `"aten.relu.default"`. The
    function gets the call's own arguments: a `Value` for a tensor that depends on the input, a `Stored` for one that
    does not, anything else as it stands. It returns what `ledger` derived from them.

    The proof checks what follows from the rows; that they bound the operation is yours to prove. Here every
    entry of the result moves by no more than that of x, and is no larger, so it is a `contraction`:

    Args:
        targets: The operations.
        kind: What they do with the entries of their first argument; see `Kind`.
        bounded: Whether they have a bound; if not, the function always refuses, and says what to do instead.
        makes: As in `Operation`.
        shape_only: As in `Operation`.
        family: As in `Operation`.

    Example:
        >>> import torch
        >>> import wellnormed as wn
        >>> from wellnormed.certificates import inner_axes, operation
        >>> @torch.library.custom_op("docs::shrink", mutates_args=())
        ... def shrink(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sign() * (x.abs() - 1).clamp(min=0)
        >>> _ = shrink.register_fake(torch.empty_like)
        >>> @operation("docs.shrink.default")
        ... def bound_shrink(ledger, x):
        ...     return ledger.derive("contraction", [(x, inner_axes(x))], shape=x.shape)
    """

    def register(function: F) -> F:
        for name in map(name_of, targets):
            OPERATIONS[name] = Operation(name, kind, function, bounded, makes, shape_only, family)
        return function

    return register


def record_of(node: fx.Node) -> Operation | None:
    """The record of a node's operation; None for an input, a stored tensor, and an operation that has no record."""
    return OPERATIONS.get(name_of(node.target)) if node.op == "call_function" else None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a node's operation, if it has a record."""
    record = record_of(node)
    return None if record is None else record.kind


def family_of(node: fx.Node) -> str:
    """The name that formulas have for a node's operation."""
    record = record_of(node)
    own = name_of(node.target).removeprefix("aten.")
    return own if record is None else record.family or own


def name_of(target: Any) -> str:
    """Name of an executed operation, as `operation` takes it."""
    return target if isinstance(target, str) else str(target).removeprefix("torch.ops.")


def packet(node: fx.Node) -> str:
    """The name of an operation for a reader: without the name of its overload, and without torch's namespace."""
    return name_of(node.target).removeprefix("aten.").rpartition(".")[0] or name_of(node.target)
