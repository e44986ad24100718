"""Decides whether a captured graph computes the same function of every sample, whatever the size of the batch.

The graph was captured with a symbolic size of the batch, which may occur in shapes alone. If the size becomes a float,
an entry of a tensor or a part of a comparison, or if samples are mixed in what does not depend on the certified input,
such as constants and masks, a certificate holds only for the size of the batch of its example.
"""

import math
import operator
import re
import zlib
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from wellnormed.propagation.dependence import EMPTY, packet, reached
from wellnormed.propagation.operations.movement import MOVES

_SHAPE_ARGUMENT = {
    **dict.fromkeys(("full", "ones", "zeros"), 0),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "expand", "repeat", "new_full", "new_ones", "new_zeros"), 1),
}
"""Name of an operation -> the position of the shape among its arguments."""
_FILLS = (
    "full", "ones", "zeros", "new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like", "zero",
    *EMPTY,
)  # fmt: skip
"""Operations whose result has the same entry everywhere, and does not depend on the entries of a tensor."""
_SAME_SAMPLES = (
    "expand", "expand_as", "repeat", "unsqueeze", "squeeze", "view", "view_as", "reshape", "reshape_as", "_unsafe_view",
    "flatten", "permute", "transpose", "clone", "contiguous", "alias", "detach", "_to_copy", "to", "type_as", "where",
    "fill", "copy", "embedding", "__and__", "__or__", "__xor__",
)  # fmt: skip
"""Operations that compute each sample of the result from the same sample of their arguments."""
_ALONG_AN_AXIS = (
    "slice", "select", "cat", "stack", "split", "index_select", "cumsum", "diff", "sum", "any", "all", "amax", "amin",
    "slice_scatter", "select_scatter",
)  # fmt: skip
"""Operations of which this holds only where their axes `dim` are not that of the batch."""
_LAST_AXES = {"tril": 2, "triu": 2, "im2col": 2, "pixel_shuffle": 3, "pixel_unshuffle": 3}
"""Operations that place entries by their positions along so many last axes. Those of windows say so in their names."""
_AT_POSITIONS = (
    "slice", "select", "narrow", "index_select", "gather", "take_along_dim", "slice_scatter", "select_scatter",
    "unfold",
)  # fmt: skip
"""Operations that take or place entries by their positions along one axis."""
_ON_ONE_AXIS = {"channel_shuffle": 1, "fliplr": 1, "flipud": 0, "take": None, "embedding": 0}
"""The same for operations of which the axis is always this one, or all."""
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
"""Operations that may merge the axis of the batch with others, or split such an axis."""
_WHOLE_AXES = {
    "permute", "t", "swapaxes", "swapdims", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "mT",
    "numpy_T", "matrix_H", "mH", "transpose", "movedim", "repeat", "tile", "repeat_interleave", "split", "unsafe_split",
    "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "tensor_split", "unbind", "diag_embed",
    "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "lift_fresh", "positive", "type_as", "_to_copy", "to",
    "copy", "cat", "stack", "_assert_tensor_metadata", *_RESHAPES,
}  # fmt: skip
"""Operations that move whole axes, or change the size of one; what they do to the size of the batch is seen in it."""


def is_any_size(nodes: list[fx.Node], constants: set[fx.Node], guards: list[Any]) -> bool:
    """Whether the size of the batch reaches only shapes, no samples are mixed up, and all guards hold from size 2 on.

    Args:
        nodes: The graph, in order of execution, with symbolic shapes in `meta["val"]`.
        constants: The nodes whose values do not depend on the certified input; see `constants_of`.
        guards: What the capture assumes about the size: relations of sympy, or booleans where it decided them.
    """
    needed = reached(nodes[-1], lambda node: node.all_input_nodes)
    counts: set[fx.Node] = set()
    outer: dict[fx.Node, int | None] = {}
    for node in (each for each in nodes if each in needed and each.op == "call_function"):
        if _counts_samples(node, counts):
            counts.add(node)
            continue
        own = _takes_each_its_own(node, counts)
        if not own and (_places_samples(node) or not counts.isdisjoint(node.all_input_nodes)):
            return False
        if not _reaches_shapes_only(node) or not _keeps_samples_in_order(node, outer):
            return False
        if packet(node) in _FILLS or _is_size(node):
            continue
        if node in constants:
            if not own and not _is_by_sample(node):
                return False
        elif batch_axis(node) is None:  # of a result that depends on the input: all samples are in it
            return False
    return all(_holds_from_two_on(guard) for guard in guards)


def constants_of(program: fx.GraphModule, inputs: list[Any], variable: set[fx.Node]) -> set[fx.Node]:
    """The operations of a graph that have the same value for other entries of the certified input.

    An operation that takes only the shape or the dtype of the input has such a value. So may one that does not let the
    entries through, such as a clamp.

    Args:
        program: The graph.
        inputs: The values of its placeholders.
        variable: The nodes whose values are the certified input.
    """
    as_given, changed = _Seeing(program, set()), _Seeing(program, variable)
    as_given.run(*inputs)
    changed.run(*inputs)
    return {node for node, bits in as_given.seen.items() if changed.seen[node] == bits}


class _Seeing(fx.Interpreter):
    """Notes checksums of every operation's value, and changes the values of some nodes at random."""

    def __init__(self, program: fx.GraphModule, variable: set[fx.Node]) -> None:
        super().__init__(program)
        self.seen: dict[fx.Node, list[Any]] = {}
        self._variable, self._generator = variable, torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._variable:
            value = torch.randn(value.shape, generator=self._generator, dtype=torch.float64).to(value)
        if n.op == "call_function":
            leaves = torch.utils._pytree.tree_leaves(value)
            self.seen[n] = [_checksum(each) if isinstance(each, Tensor) else each for each in leaves]
        return value


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _counts_samples(node: fx.Node, counts: set[fx.Node]) -> bool:
    """Whether every entry is the number of its own sample: `arange` over the batch, perhaps with more axes."""
    source: Any = next(iter(node.args), None)
    if packet(node) == "arange":
        size = source.meta["val"] if _is_size(source) and len(node.args) == 1 else None
        # numbers of other types than int64 are rounded, or come to an end, at some size of the batch
        return size is not None and size.node.expr.is_Symbol and node.meta["val"].dtype == torch.int64
    return (packet(node) == "unsqueeze" or (packet(node) == "slice" and _is_whole_slice(node))) and source in counts


def _takes_each_its_own(node: fx.Node, counts: set[fx.Node]) -> bool:
    """Whether an operation takes of each sample entries of that sample alone, as `x[arange(B)[:, None], places]`."""
    if packet(node) != "index":
        return False
    source, (first, *others) = _argument(node, "self"), _argument(node, "indices")
    return (
        first in counts
        and source not in counts
        and batch_axis(source) == 0
        and all(each is None or (batch_axis(each) is None and each.meta["val"].dtype == torch.int64) for each in others)
    )


def _is_size(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymInt)


def _is_multiple(size: Any) -> bool:
    """Whether a size is a number, or a positive number times the size of the batch."""
    if not isinstance(size, torch.SymInt):
        return isinstance(size, int)
    factor, rest = size.node.expr.as_coeff_Mul()
    return bool(factor > 0 and factor.is_Integer and rest.is_Symbol)


def batch_axis(node: fx.Node) -> int | None:
    """The first axis whose size is symbolic; None if no axis has such a size."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    axes = [axis for axis, size in enumerate(getattr(value, "shape", ())) if isinstance(size, torch.SymInt)]
    return axes[0] if axes else None


def _reaches_shapes_only(node: fx.Node) -> bool:
    value = node.meta.get("val")
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.SymFloat | torch.SymBool):
            return False
        shape = tuple(getattr(each, "shape", ()))
        if not all(map(_is_multiple, shape)) or sum(isinstance(size, torch.SymInt) for size in shape) > 1:
            return False
    if _is_size(node):
        return _is_multiple(value) and (packet(node) == "sym_size" or node.target is operator.mul)
    if _is_whole_slice(node):
        return True
    others = [each for place, each in enumerate(node.args) if place != _SHAPE_ARGUMENT.get(packet(node))]
    return not any(map(_is_size, torch.utils._pytree.tree_leaves((others, dict(node.kwargs)))))


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether an operation takes or replaces, without a step, everything along an axis."""
    name = packet(node)
    if name not in ("slice", "slice_scatter") or len(node.args) == (5 if name == "slice" else 6):
        return False
    source, part = node.args[0], node if name == "slice" else node.args[1]
    return source.meta["val"].shape == part.meta["val"].shape  # type: ignore[union-attr]


def _places_samples(node: fx.Node) -> bool:
    """Whether an operation places entries by their position along the axis of the batch, as a roll by 12 does.

    The bounds of two sizes of the batch say nothing then about larger ones: a batch of 12 samples comes back as it was.
    """
    source: Any = next(iter(node.args), None)
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or (axis := batch_axis(source)) is None:
        return False
    name, count = packet(node), value.ndim
    if windows := re.search(r"(\d)d(_with_indices)?$", name):
        axes: Any = range(-int(windows[1]), 0)
    elif name in ("constant_pad_nd", "pad"):
        pads = _argument(node, "pad")
        axes = [-1 - each // 2 for each, amount in enumerate(pads) if amount]
    elif name in _LAST_AXES:
        axes = range(-_LAST_AXES[name], 0)
    elif name in ("roll", "rot90", "flip"):
        axes = _argument(node, "dims") or range(count)
    elif name in ("fft_fftshift", "fft_ifftshift"):
        dim = _argument(node, "dim")
        axes = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    elif name in ("diagonal", "diagonal_scatter"):
        axes = _argument(node, "dim1"), _argument(node, "dim2")
    elif name in _AT_POSITIONS and not _is_whole_slice(node):
        axes = (_argument(node, "dimension" if name == "unfold" else "dim"),)
    elif name in _ON_ONE_AXIS:
        axes = range(count) if _ON_ONE_AXIS[name] is None else (_ON_ONE_AXIS[name],)
    elif name == "index":
        axes = [axis for axis, each in enumerate(_argument(node, "indices")) if each is not None]
    else:
        return name in MOVES - _WHOLE_AXES and not _is_whole_slice(node)
    return axis in {axis if each is None else each % count for each in axes}


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of an operation, or its default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next(place for place, each in enumerate(schema) if each.name == name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, schema[place].default_value)


def _keeps_samples_in_order(node: fx.Node, outer: dict[fx.Node, int | None]) -> bool:
    """Whether an operation keeps samples apart and in order where the axis of the batch is merged with other axes.

    For every node it stores in `outer` the product of the sizes of the axes that were merged before the axis of the
    batch. For B samples, it is 5 for the axes `(5, B)` merged into one axis of `5 B` entries, and 1 for the axis `B`
    alone or for `(B, 5)` merged. It is None for a constant that is the same along the whole axis.
    """
    sources = [each for each in node.all_input_nodes if batch_axis(each) is not None]
    if packet(node) in _FILLS or batch_axis(node) is None or not sources:
        outer[node] = None if packet(node) in _FILLS or (not sources and packet(node) != "repeat") else 1
        return packet(node) not in _RESHAPES or not sources
    found = {each for source in sources if (each := outer.get(source, 1)) is not None}
    if len(found) > 1:
        return False
    between = found.pop() if found else None
    outer[node] = between
    if packet(node) not in _RESHAPES:
        return all(_factor(source) == _factor(node) for source in sources)
    if between is None:
        place, new = (_entries_before(sources[0]), _factor(sources[0])), (_entries_before(node), _factor(node))
        if place == new:
            return True  # the axis of the batch is as it was, and the constant is the same along it
        between = 1
    between, rest = divmod(_entries_before(sources[0]) * between, _entries_before(node))
    outer[node] = between
    return rest == 0 and between > 0 and _factor(node) % between == 0


def _factor(node: fx.Node) -> int:
    """The factor of the size of the batch in the size of the axis that has it, such as 5 in `5 B`."""
    value, axis = node.meta["val"], batch_axis(node)
    factor, _ = (value[0] if isinstance(value, list | tuple) else value).shape[axis].node.expr.as_coeff_Mul()
    return int(factor)


def _entries_before(node: fx.Node) -> int:
    """The product of the sizes of the axes before the axis that has the batch."""
    return math.prod(node.meta["val"].shape[: batch_axis(node)])


def _is_by_sample(node: fx.Node) -> bool:
    """Whether each sample of a result is computed from the same sample of the arguments, and in the same way for all.

    Constants that are equal for all samples then stay equal, and inputs that may differ, such as masks, stay apart.
    """
    name = packet(node)
    if node.target is operator.getitem or (name == "slice" and _is_whole_slice(node)):
        return True
    batched = [each for each in node.all_input_nodes if batch_axis(each) is not None]
    if not batched:
        return batch_axis(node) is None or name in ("expand", "expand_as", "repeat")
    if name in _SAME_SAMPLES or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    if name not in _ALONG_AN_AXIS:
        return False
    axes = _argument(node, "dim")
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return bool(axes) and all(
        None not in axes and batch_axis(each) not in {axis % len(each.meta["val"].shape) for axis in axes}
        for each in batched
    )


def _holds_from_two_on(guard: Any) -> bool:
    """Whether a relation holds for every size from 2 on. The answer is False for relations that are not linear."""
    if isinstance(guard, bool | sympy.logic.boolalg.BooleanAtom):
        return bool(guard)
    sizes = getattr(guard, "free_symbols", set())
    if not sizes or not isinstance(guard, sympy.core.relational.Relational):
        return False
    size = min(sizes, key=str)
    guard = guard.subs(dict.fromkeys(sizes, size))  # all symbols are sizes of first axes of inputs, which are equal
    if isinstance(guard, sympy.logic.boolalg.BooleanAtom):
        return bool(guard)
    difference: Any = guard.lhs - guard.rhs  # type: ignore[unsupported-operation]
    if not difference.is_polynomial(size):
        return False
    polynomial = sympy.Poly(difference, size)
    if polynomial.degree() > 1 or not all(each.is_Rational for each in polynomial.all_coeffs()):
        return False
    slope, constant = polynomial.coeff_monomial(size), polynomial.coeff_monomial(1)
    if isinstance(guard, sympy.Ne):
        root = -constant / slope
        return not (root.is_Integer and root >= 2)
    rises = isinstance(guard, sympy.Gt | sympy.Ge)
    falls = isinstance(guard, sympy.Lt | sympy.Le)
    at_two = guard.func(2 * slope + constant, 0)
    return bool(at_two) and ((rises and slope >= 0) or (falls and slope <= 0))
