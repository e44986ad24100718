"""One table of executed operations: the name of each, its kind, and the function that lowers it to rows of a proof.

The modules of `lowering.operations` register the records when `wellnormed.lowering` is imported. Every question about
an operation is answered from its record; no other table of their names exists.
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
- `affine`: computes a function that is affine in all its arguments together, with flags for training off.
- `product`: computes a function that is affine in each argument alone; bounds on its factors bound the product.
- `function`: anything else.
"""


@dataclass(frozen=True)
class Operation:
    """The facts about an executed operation."""

    name: str
    """Its name with its namespace, such as `aten.relu.default`."""
    kind: Kind
    lowering: Callable[..., Any]
    """Lowers a call of it to rows of a proof."""
    bounded: bool = True
    """Whether it has a bound; if not, the lowering says why it has none."""
    makes: Literal["", "constant", "memory"] = ""
    """Whether it makes a tensor whose entries do not depend on its arguments: a constant, or uninitialised memory."""
    shape_only: tuple[int, ...] = ()
    """The positions of arguments of which only the shape and dtype count."""
    statistics: tuple[int, ...] = ()
    """The positions of running statistics, which it writes in training mode, uncounted by torch."""
    slides: bool = False
    """Whether it reads windows along the axes after the second, as convolutions and pooling do."""
    executed: bool = False
    """Whether a call of it executes the rows of its lowering one after the other, so that their rounding errors bound
    its own."""
    family: str = ""
    """The common name in patterns of operations that compute the same from the same arguments, such as `add` for
    `aten.add.Tensor` and `aten.add.Scalar`; by default the operation's name without torch's namespace."""


PLACING = ("move", "copy", "lookup", "filler", "random")
"""Kinds of operations that compute no new entries."""
OPERATIONS: dict[str, Operation] = {}
"""Name -> record."""


def operation(
    *targets: str | torch._ops.OpOverload,
    kind: Kind = "function",
    bounded: bool = True,
    makes: Literal["", "constant", "memory"] = "",
    shape_only: tuple[int, ...] = (),
    statistics: tuple[int, ...] = (),
    slides: bool = False,
    executed: bool | None = None,
    family: str = "",
) -> Callable[[F], F]:
    """Decorate `f(ledger, *arguments, **keywords)` to register it as the bound of executed operations.

    The targets are operations of `torch.ops`, or their names without `torch.ops`, such as `"aten.relu.default"`. The
    function gets the arguments of the call: a `Value` for a tensor that depends on the input, a `Stored` for a tensor
    that does not, and other arguments unchanged. It returns the value that `ledger.derive` returned for the result.

    The proof checks the bounds that follow from the rows; you must prove that the rows bound the operation. In the
    example, every entry of the result moves by no more than that of x, and is no larger, so it is a `contraction`:

    Args:
        targets: The operations.
        kind: What they do with the entries of their first argument; see `Kind`.
        bounded: Whether they have a bound; if not, the function always refuses, with a remedy.
        makes: As in `Operation`.
        shape_only: As in `Operation`.
        statistics: As in `Operation`.
        slides: As in `Operation`.
        executed: As in `Operation`; by default whether they only place, keep or drop entries.
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
    executed = kind in PLACING if executed is None else executed

    def register(function: F) -> F:
        for name in map(name_of, targets):
            OPERATIONS[name] = Operation(
                name, kind, function, bounded, makes, shape_only, statistics, slides, executed, family
            )
        return function

    return register


def record_of(node: fx.Node) -> Operation | None:
    """The record of a node's operation; None for inputs, stored tensors and operations without a record."""
    return OPERATIONS.get(name_of(node.target)) if node.op == "call_function" else None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a node's operation, if it has a record."""
    record = record_of(node)
    return None if record is None else record.kind


def family_of(node: fx.Node) -> str:
    """The name of a node's operation in patterns; see `Operation.family`."""
    record = record_of(node)
    name = name_of(node.target).removeprefix("aten.")
    return name if record is None else record.family or name


def name_of(target: Any) -> str:
    """Name of an executed operation, as `operation` takes it."""
    return target if isinstance(target, str) else str(target).removeprefix("torch.ops.")


def packet(node: fx.Node) -> str:
    """The name of an operation for a reader: without the name of its overload, and without torch's namespace."""
    return name_of(node.target).removeprefix("aten.").rpartition(".")[0] or name_of(node.target)
