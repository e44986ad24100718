"""Operations that only move entries, such as views, slices, padding, windows, repetition and concatenation."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.moves import add, number, pick, side_by_side, spread
from wellnormed.program.operation import operation
from wellnormed.proof.arithmetic import Dtype, Executed
from wellnormed.proof.value import Value

aten = torch.ops.aten

_ONE_RESULT = {
    "default": "view _unsafe_view reshape permute t swapaxes swapdims unsqueeze squeeze expand broadcast_to narrow "
    "diagonal unfold flip fliplr flipud rot90 roll repeat tile tril triu diag_embed im2col pixel_shuffle "
    "pixel_unshuffle channel_shuffle mT numpy_T matrix_H mH reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d",
    "int": "transpose unflatten movedim select",
    "intlist": "movedim",
    "using_ints": "flatten",
    "dim": "squeeze",
    "dims": "squeeze",
    "Tensor": "slice",
    "self_int": "repeat_interleave",
}
_LIKE_ANOTHER = {"default": "view_as reshape_as expand_as"}
_NEAREST = dict.fromkeys(
    ("default", "vec"),
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d",
)
_SEVERAL_RESULTS = {
    "Tensor": "split unsafe_split",
    "sizes": "split",
    "default": "split_with_sizes unsafe_split_with_sizes chunk unsafe_chunk",
    "sections": "tensor_split",
    "indices": "tensor_split",
    "int": "unbind",
}
"""Name of an overload -> the operations with this overload; one table for each way to bound them."""
_IDENTITIES = "clone contiguous alias detach lift_fresh_copy lift_fresh positive type_as _to_copy"


def _plain(argument: Any) -> Any:
    """Replace stored tensors in an argument by tensors, and values by empty tensors of their shape."""
    if isinstance(argument, Stored):
        return argument.tensor
    if isinstance(argument, Value):
        return torch.empty(argument.shape)
    return [_plain(each) for each in argument] if isinstance(argument, list | tuple) else argument


def _moving(target: Any, like_another: bool = False) -> Callable[..., Value | Stored]:
    def move(ledger: Ledger, x: Value | Stored, *arguments: Any, **keywords: Any) -> Value | Stored:
        arguments, keywords = _plain(arguments), {key: _plain(each) for key, each in keywords.items()}
        if not isinstance(x, Value) and like_another:  # only the shape of the other tensor matters
            ledger.require_known(x)
            return ledger.computed(ledger.name, target(x.tensor, *arguments, **keywords))
        if not isinstance(x, Value):
            raise ledger.refuse("the positions that it takes entries from depend on the input; only the entries may")
        return pick(ledger, x, lambda t: target(t, *arguments, **keywords))

    return move


def _parting(target: Callable[..., Any]) -> Callable[..., list[Value]]:
    def part(ledger: Ledger, x: Value, *arguments: Any, **keywords: Any) -> list[Value]:
        count = len(target(torch.empty(x.shape), *arguments, **keywords))
        return [
            pick(ledger, x, lambda t, number=number: target(t, *arguments, **keywords)[number])
            for number in range(count)
        ]

    return part


def _nearest(target: Callable[..., Any]) -> Callable[..., Value]:
    """As `_moving`, for operations that compute the position of a source entry in their input's precision."""

    def move(ledger: Ledger, x: Value, *arguments: Any, **keywords: Any) -> Value:
        dtype = torch.promote_types(ledger.dtype, torch.float32)

        def moved(positions: Tensor) -> Tensor:  # split in two parts that float32 represents exactly
            low, high = (
                target(each.to(dtype), *arguments, **keywords) for each in (positions % 2**20, positions // 2**20)
            )
            return low.double() + 2**20 * high.double()

        return pick(ledger, x, moved)

    return move


_BOUNDS: tuple[tuple[dict[str, str], Callable[..., Any], tuple[int, ...]], ...] = (
    (_ONE_RESULT, _moving, ()), (_LIKE_ANOTHER, partial(_moving, like_another=True), (1,)), (_NEAREST, _nearest, ()),
    (_SEVERAL_RESULTS, _parting, ()),
)  # fmt: skip
for _table, _bound, _shape_only in _BOUNDS:
    for _overload, _names in _table.items():
        for _name in _names.split():
            # some releases of torch lack some of them
            if (_target := getattr(getattr(aten, _name, None), _overload, None)) is not None:
                operation(_target, kind="move", shape_only=_shape_only)(_bound(_target))


for _name in ("embedding", "index", "index_select", "gather", "take", "take_along_dim"):
    operation(f"aten.{_name}.{'Tensor' if _name == 'index' else 'default'}", kind="lookup")(
        _moving(getattr(aten, _name))
    )


@operation(*(f"aten.{name}.default" for name in _IDENTITIES.split()), kind="copy")
@operation(*(f"aten.to.{kind}" for kind in ("dtype", "device", "dtype_layout", "other")), kind="copy")
def identity(ledger: Ledger, x: Value | Stored, *arguments: Any, **keywords: Any) -> Value | Stored:
    """The entries unchanged. The walk adds rows for rounding, and refuses all dtypes but floats of 16 bits or more.

    A stored tensor, as in `stored.type_as(value)`, is converted.
    """
    return _converted(ledger, x) if isinstance(x, Stored) else x


@operation("aten.cat.default", "aten.concat.default", "aten.concatenate.default", kind="move")
def cat(ledger: Ledger, xs: Sequence[Value | Stored], dim: int = 0) -> Value:
    """Concatenation along an axis."""
    kept = [x for x in xs if math.prod(x.shape)]  # empty tensors are left out
    return side_by_side(ledger, [as_value(ledger, x) for x in kept], lambda ts: torch.cat(ts, dim))


@operation("aten.stack.default", kind="move")
def stack(ledger: Ledger, xs: Sequence[Value | Stored], dim: int = 0) -> Value:
    """Concatenation along a new axis."""
    return side_by_side(ledger, [as_value(ledger, x) for x in xs], lambda ts: torch.stack(ts, dim))


@operation("aten.constant_pad_nd.default", "aten.pad.default", kind="move")
def pad(ledger: Ledger, x: Value, pad: Sequence[int], *rest: Any, **keywords: Any) -> Value:
    """Padding with zeros, with another number, or with copies of entries, as the mode says."""
    options = [*rest, *keywords.values()]
    mode = next((each for each in options if isinstance(each, str)), "constant")
    fill = ledger.in_dtype(next((each for each in options if isinstance(each, int | float)), 0.0))
    if mode != "constant" or not fill:
        return pick(ledger, x, lambda t: aten.pad.default(t, list(pad), mode, None if mode != "constant" else 0.0))
    inside = pick(ledger, x, lambda t: aten.constant_pad_nd.default(t, list(pad), 0.0))
    around = aten.constant_pad_nd.default(torch.zeros(x.shape, dtype=torch.float64), list(pad), fill)
    return add(ledger, [inside, ledger.constant(ledger.computed(f"{ledger.name}.fill", around))], roundings=0)


def _scattering(target: Callable[..., Tensor]) -> Callable[..., Value]:
    def scatter(ledger: Ledger, x: Any, source: Any, *arguments: Any, **keywords: Any) -> Value:
        """The entries of x, some of which are replaced by those of the source."""
        xs = [as_value(ledger, x), written(ledger, source)]
        return side_by_side(ledger, xs, lambda ts: target(*ts, *arguments, **keywords))

    return scatter


for _name in ("slice_scatter", "select_scatter", "diagonal_scatter"):
    operation(f"aten.{_name}.default", kind="move")(_scattering(getattr(aten, _name).default))


@operation("aten.copy.default", kind="filler")
def copy(ledger: Ledger, x: Any, source: Any, *arguments: Any) -> Value:
    """The entries of the source, broadcast to the shape of x."""
    return spread(ledger, written(ledger, source), x.shape)


@operation("aten.fill.Scalar", "aten.fill.Tensor", "aten.zero.default", kind="filler")
def fill(ledger: Ledger, x: Any, content: Value | Stored | float = 0.0) -> Value:
    """One number, broadcast to the shape of x. Assigning a number to a slice executes this operation."""
    if isinstance(content, Stored):
        content = float(content.tensor)
    return spread(ledger, written(ledger, content), x.shape)


def _converted(ledger: Ledger, source: Stored) -> Stored:
    """A stored tensor in the dtype of the result."""
    if source.tensor.dtype == ledger.dtype:
        return source
    ledger.require_known(source)
    converted = source.tensor.to(ledger.dtype)
    rounded = converted.double() != source.tensor.double()
    ledger.beside = max(ledger.beside, float(source.tensor.double().abs().where(rounded, 0.0).max()))
    return ledger.computed(f"{ledger.name}.written", converted, made_of=[source])


def written(ledger: Ledger, source: Value | Stored | float) -> Value:
    """The source of a write as a value; stored tensors and numbers are converted to the dtype of the result."""
    if isinstance(source, Value):
        return source
    value = as_value(ledger, _converted(ledger, source) if isinstance(source, Stored) else ledger.in_dtype(source))
    if ledger.beside:
        value, ledger.beside = ledger.move("times", [value], value.shape, {"factor": 1.0}), 0.0
    return value


def _like(target: Callable[..., Tensor]) -> Callable[..., Stored]:
    def make(ledger: Ledger, x: Value, *arguments: Any, **keywords: Any) -> Stored:
        """A constant tensor of the shape of a value."""
        return ledger.computed(ledger.name, target(torch.empty(x.shape, dtype=ledger.dtype), *arguments, **keywords))

    return make


for _name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"):
    operation(f"aten.{_name}.default", kind="filler", makes="constant", shape_only=(0,))(
        _like(getattr(aten, _name).default)
    )
for _name, _zeros in (("empty_like", aten.zeros_like), ("new_empty", aten.new_zeros)):  # the capture writes zeros
    operation(f"aten.{_name}.default", kind="filler", makes="memory", shape_only=(0,))(_like(_zeros.default))
operation("aten.empty.memory_format", "aten.empty_strided.default", "aten.empty_permuted.default", kind="filler",
          makes="memory")(_like(torch.zeros_like))  # fmt: skip


@operation("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", kind="affine", family="masked_fill", executed=True)
def masked_fill(ledger: Ledger, x: Value, mask: Stored, fill: Value | Stored | float) -> Value:
    """The entries of x, replaced by a number where a mask is true. The mask may not depend on the input."""
    return where(ledger, mask, fill, x)


@operation(
    "aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", kind="affine", family="where", executed=True
)
def where(ledger: Ledger, mask: Stored, x: Any, y: Any) -> Value:
    """The entries of x where a mask is true, and those of y elsewhere. The mask may not depend on the input."""
    if isinstance(mask, Value):
        raise ledger.refuse("its condition depends on the input, so its result is not continuous; use an activation")
    ledger.require_known(mask)
    keep, parts = mask.tensor.bool(), []
    for each, chosen in ((x, keep), (y, ~keep)):
        value = written(ledger, each)
        if bool(chosen.any()):
            parts.append(pick(ledger, value, lambda t, chosen=chosen: torch.where(chosen, t, 0.0)))
    shapes = [each.shape if isinstance(each, Value) else torch.as_tensor(_plain(each)).shape for each in (x, y)]
    shape = torch.broadcast_shapes(keep.shape, *shapes)
    return spread(ledger, add(ledger, parts, roundings=0), shape)


def as_value(ledger: Ledger, x: Value | Stored | float) -> Value:
    """Return x as a value: a stored tensor and a number get a row, parameters of unknown entries that of a promise."""
    if isinstance(x, Value):
        return x
    if not isinstance(x, Stored):
        return number(ledger, x)
    if ledger.unknown(x):
        dtype = str(x.tensor.dtype).removeprefix("torch.")
        with ledger.executing(Executed(cast(Dtype, dtype))):
            zeros = ledger.computed("zeros", torch.zeros_like(x.tensor))
            return shifted(ledger, ledger.constant(zeros), x, roundings=0)
    return x.value_of() if x.value_of else ledger.constant(x)


def shifted(ledger: Ledger, x: Value, shift: Any, roundings: int | None) -> Value:
    """The sum with a parameter whose entries are unknown, bounded by the promise of its constraint.

    The bound uses the norm of the parameter's rows if the groups of the result contain whole rows, and the largest
    absolute entry otherwise.
    """
    x = spread(ledger, x, np.broadcast_shapes(x.shape, tuple(shift.tensor.shape)))
    parameter, axes, sizes = ledger.unknown(shift), inner_axes(x), shift.tensor.shape
    assert parameter is not None  # the caller has asked
    over = [axis - len(sizes) + len(x.shape) for axis, size in enumerate(sizes) if size > 1][-1:]
    whole = bool(over) and over[0] in axes and x.shape[over[0]] == parameter.tensor.shape[-1]
    claim, constants = ledger.prove("row_norm" if whole else "max_abs", parameter), {"over": over} if whole else {}
    return ledger.derive("shift", [(x, axes)], shape=x.shape, claims=[claim], constants=constants, roundings=roundings)
