"""Bounds of convex-potential layers, which are lower than those that follow from their single operations."""

from collections.abc import Sequence
from typing import Any

from wellnormed.certificates.axes import inner_axes
from wellnormed.certificates.ledger import Ledger, Stored
from wellnormed.certificates.moves import each_axis
from wellnormed.certificates.operations.convolution import alone
from wellnormed.proof.value import Value


def convex_potential(ledger: Ledger, x: Value, weight: Stored, bias: Stored | None, factor: float) -> Value:
    """`x - factor W^T relu(W x + b)` along the last axis, for a stored matrix W, `(hidden, width)`."""
    if not isinstance(weight, Stored) or weight.tensor.ndim != 2 or isinstance(bias, Value):
        raise ledger.refuse("it needs a stored matrix as its weight, and a bias that does not depend on the input")
    claims = [ledger.prove("spectral", weight)]
    claims += [] if bias is None else [ledger.prove("positive_norm", bias)]
    axes = {*inner_axes(x), len(x.shape) - 1}
    return ledger.derive("convex_potential", [(x, axes)], shape=x.shape, constants={"factor": factor}, claims=claims)


def convolutional_potential(
    ledger: Ledger,
    x: Value,
    weight: Stored,
    bias: Stored | None,
    factor: float,
    forward: Sequence[Any],
    back: Sequence[Any],
) -> Value:
    """`x - factor A^T relu(A x + b)` for a convolution A of stride 1 with a stored kernel.

    A^T is the transposed convolution with the same kernel and settings. `forward` holds the arguments of the
    convolution after its bias, and `back` those of the transposed convolution after its kernel.
    """
    if not isinstance(weight, Stored) or isinstance(bias, Value):
        raise ledger.refuse("its kernel or its bias depends on the input; only stored ones have a bound")
    count = weight.tensor.ndim - 2
    if len(x.shape) == count + 1:
        return alone(convolutional_potential, ledger, x, weight, bias, factor, forward, back)
    stride, padding, dilation, groups = (*forward, *(1, 0, 1, 1)[len(forward) :])
    other_bias, *rest = (*back, *(None, 1, 0, 0, 1, 1)[len(back) :])
    settings = [each_axis(each, count) for each in (stride, padding, dilation)]
    same = [each_axis(each, count) for each in (rest[0], rest[1], rest[4])] == settings and rest[3] == groups
    if other_bias is not None or not same or settings[0] != [1] * count or any(each_axis(rest[2], count)):
        raise ledger.refuse("its convolutions are not adjoint; give both the same settings, and a stride of 1")
    size = [n + 2 * p for n, p in zip(x.shape[2:], settings[1], strict=True)]
    claims = [ledger.prove("convolution", weight, size=size, stride=settings[0], dilation=settings[2], groups=groups)]
    claims += [] if bias is None else [ledger.prove("positive_norm", bias)]
    constants = {"factor": factor, "padding": settings[1]}
    axes = {*inner_axes(x), *range(1, len(x.shape))}
    return ledger.derive("convex_potential", [(x, axes)], shape=x.shape, constants=constants, claims=claims)
