"""Conversions between floating dtypes: those that round are the identity in real arithmetic, and part of no pattern."""

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.lowering.ledger import Ledger
from wellnormed.proof.value import Value


def rounds(node: fx.Node, among: Container[fx.Node] | None = None) -> bool:
    """Whether a result has a dtype that does not hold all numbers of the tensors that it is computed from.

    A conversion may be silent: a `dtype=` of an operation, or an assignment into a tensor of another dtype.

    Args:
        node: The operation.
        among: The operands that count. By default all except single numbers beside tensors, which are taken to be
            constants of the operation.
    """
    result = _floats(node)
    source = node.args[0] if node.target is operator.getitem else node
    if result is None or not isinstance(source, fx.Node):
        return False
    nodes = [each for each in source.all_input_nodes if among is None or each in among]
    operands = [own for each in nodes if (own := _floats(each)) is not None]
    counted = [own for own in operands if own.ndim or len(operands) == 1 or among is not None]
    return any(not _holds(result.dtype, own.dtype) for own in counted)


def rounded(ledger: Ledger, x: Value, dtype: torch.dtype) -> Value:
    """A value rounded to another dtype, with the same radii and gains.

    The result no longer counts as linear in its tokens, so that attention's bounds for linear keys and values do not
    apply to it.
    """
    return ledger.move("rounding", [x], x.shape, {"dtype": str(dtype).removeprefix("torch.")})


def _floats(node: fx.Node) -> Tensor | None:
    value: Any = node.meta.get("val")
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype has every number of another one."""
    ours, theirs = torch.finfo(dtype), torch.finfo(other)
    smallest = [each.smallest_normal * each.eps for each in (ours, theirs)]
    return ours.eps <= theirs.eps and ours.max >= theirs.max and smallest[0] <= smallest[1]
