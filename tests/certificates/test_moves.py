"""Every move: its row and its value say the same as torch does, entry by entry."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.certificates import certify
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.moves import add, pick, times
from wellnormed.lowering.operations import movement
from wellnormed.program.operation import OPERATIONS, name_of
from wellnormed.proof import Row
from wellnormed.proof.value import Base, Value

from .adversary import Net, attack, begin

aten = torch.ops.aten
_I = torch.tensor
CASES: dict[str, list[tuple[tuple[int, ...], tuple]]] = {
    "view.default": [((2, 3, 4), ([4, 6],))],
    "_unsafe_view.default": [((2, 3, 4), ([6, 4],))],
    "reshape.default": [((2, 3, 4), ([-1, 2],))],
    "flatten.using_ints": [((2, 3, 4), (1, 2))],
    "unflatten.int": [((2, 6), (1, [2, 3]))],
    "permute.default": [((2, 3, 4), ([2, 0, 1],))],
    "transpose.int": [((2, 3, 4), (-1, 0))],
    "t.default": [((2, 3), ())],
    "mT.default": [((2, 3, 4), ())],
    "mH.default": [((2, 3, 4), ())],
    "numpy_T.default": [((2, 3), ())],
    "matrix_H.default": [((2, 3), ())],
    "movedim.int": [((2, 3, 4), (0, 2))],
    "movedim.intlist": [((2, 3, 4), ([0, 1], [2, 0]))],
    "swapaxes.default": [((2, 3, 4), (0, 1))],
    "swapdims.default": [((2, 3, 4), (0, 1))],
    "unsqueeze.default": [((2, 3), (1,))],
    "squeeze.default": [((1, 2, 1, 3), ())],
    "squeeze.dim": [((1, 2, 1, 3), (2,))],
    "squeeze.dims": [((1, 2, 1, 3), ([0, 2],))],
    "expand.default": [((2, 1, 3), ([4, 2, 5, 3],))],
    "broadcast_to.default": [((1, 3), ([4, 3],))],
    "slice.Tensor": [((2, 9), (1, 1, 8, 3)), ((4, 3), (0, -2, 9))],
    "select.int": [((2, 3, 4), (1, -1))],
    "narrow.default": [((2, 5), (1, 1, 3))],
    "diagonal.default": [((3, 4), ()), ((2, 3, 4), (1, 1, 2))],
    "unfold.default": [((2, 7), (1, 3, 2))],
    "flip.default": [((2, 3, 4), ([0, 2],))],
    "fliplr.default": [((2, 3), ())],
    "flipud.default": [((2, 3), ())],
    "rot90.default": [((2, 3, 4), (1, [1, 2]))],
    "roll.default": [((2, 5), ([2], [1])), ((2, 5), ([3],))],
    "repeat.default": [((2, 3), ([2, 1, 2],))],
    "tile.default": [((2, 3), ([2],))],
    "repeat_interleave.self_int": [((2, 3), (2, 1)), ((2, 3), (2,))],
    "index_select.default": [((4, 3), (0, _I([3, 0, 0])))],
    "index.Tensor": [
        ((4, 3), ([_I([3, 0, 0]), _I([0, 2, 2])],)),
        ((2, 4, 3), ([None, _I([[3, 0], [1, 1]])],)),
        ((2, 3), ([_I([[True, False, True], [False, True, False]])],)),
        ((4, 3, 2), ([_I([-1, 0]), None, _I([1, 0])],)),
    ],
    "take_along_dim.default": [((2, 3), (_I([[2, 0], [1, 1]]), 1))],
    "gather.default": [((2, 3), (1, _I([[2, 0], [1, 1]])))],
    "tril.default": [((3, 4), (1,)), ((2, 3, 3), ())],
    "triu.default": [((3, 4), (-1,))],
    "diag_embed.default": [((2, 3), (1,))],
    "im2col.default": [((1, 2, 4, 5), ([2, 2], [1, 1], [1, 1], [2, 1]))],
    "pixel_shuffle.default": [((1, 8, 2, 3), (2,))],
    "pixel_unshuffle.default": [((1, 2, 4, 6), (2,))],
    "channel_shuffle.default": [((1, 6, 2, 2), (3,))],
    "reflection_pad1d.default": [((1, 2, 4), ([2, 1],))],
    "reflection_pad2d.default": [((1, 2, 4, 3), ([2, 1, 1, 0],))],
    "reflection_pad3d.default": [((1, 1, 3, 3, 3), ([1, 2, 0, 1, 1, 1],))],
    "replication_pad1d.default": [((1, 2, 4), ([2, 1],))],
    "replication_pad2d.default": [((1, 2, 4, 3), ([2, 1, 1, 0],))],
    "replication_pad3d.default": [((1, 1, 3, 3, 3), ([1, 2, 0, 1, 1, 1],))],
    "upsample_nearest1d.default": [((1, 2, 4), ([7],))],
    "upsample_nearest2d.default": [((1, 2, 4, 3), ([7, 2],))],
    "upsample_nearest3d.default": [((1, 1, 2, 2, 2), ([3, 4, 2],))],
    "upsample_nearest1d.vec": [((1, 2, 4), (None, [2.5]))],
    "upsample_nearest2d.vec": [((1, 2, 4, 3), ([3, 5], None))],
    "upsample_nearest3d.vec": [((1, 1, 2, 2, 2), (None, [1.5, 2.0, 1.0]))],
    "_upsample_nearest_exact1d.default": [((1, 2, 4), ([7],))],
    "_upsample_nearest_exact2d.default": [((1, 2, 4, 3), ([7, 2],))],
    "_upsample_nearest_exact3d.default": [((1, 1, 2, 2, 2), ([3, 4, 2],))],
    "_upsample_nearest_exact1d.vec": [((1, 2, 4), (None, [2.5]))],
    "_upsample_nearest_exact2d.vec": [((1, 2, 4, 3), ([3, 5], None))],
    "_upsample_nearest_exact3d.vec": [((1, 1, 2, 2, 2), (None, [1.5, 2.0, 1.0]))],
    "constant_pad_nd.default": [((2, 3), ([1, 2, -1, 0],)), ((2, 3), ([1, 2], 3.5))],
    "pad.default": [
        ((2, 3), ([1, 2],)), ((2, 3), ([1, -1], "constant", 2.0)), ((1, 2, 4), ([3, 2], "reflect")),
        ((1, 2, 4), ([3, 2], "replicate")), ((1, 2, 4), ([3, 2], "circular")),
    ],
    "split.Tensor": [((2, 5), (2, 1))],
    "split.sizes": [((2, 5), ([1, 4], 1))],
    "split_with_sizes.default": [((2, 5), ([1, 4], 1))],
    "unsafe_split.Tensor": [((2, 5), (2, 1))],
    "unsafe_split_with_sizes.default": [((2, 5), ([1, 4], 1))],
    "chunk.default": [((2, 5), (2, 1))],
    "unsafe_chunk.default": [((2, 5), (2, 1))],
    "tensor_split.sections": [((2, 5), (2, 1))],
    "tensor_split.indices": [((2, 5), ([1, 3], 1))],
    "unbind.int": [((2, 5), (1,))],
    "masked_fill.Scalar": [((2, 3), (_I([True, False, True]), 4.0))],
}  # fmt: skip
_LIKE = {
    "view_as.default": ((2, 3, 4), (6, 4)),
    "reshape_as.default": ((2, 3, 4), (6, 4)),
    "expand_as.default": ((2, 1, 3), (2, 4, 3)),
}


def _stored(argument):
    if isinstance(argument, Tensor):
        return Stored("positions", argument)
    return [_stored(each) for each in argument] if isinstance(argument, list) else argument


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


def replay(ledger: Ledger, bases: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every row's result from its row alone, in NumPy."""
    results = dict(bases)
    for row in ledger.proof.rows.values():
        if row.name not in results:
            results[row.name] = _replayed(row, [results[name] for name in row.inputs], stored)
    return results


def _replayed(row: Row, inputs: list[np.ndarray], stored: dict[str, np.ndarray]) -> np.ndarray:
    c = row.constants
    if row.operation == "add":
        return sum(inputs[1:], inputs[0])
    if row.operation == "constant":
        return np.asarray(c["number"]) if "number" in c else stored[c["tensor"]]
    if row.operation == "times":
        (key, factor), (x,) = next(iter(c.items())), inputs
        factor = stored[factor] if isinstance(factor, str) else factor
        return x / factor if key == "divisor" else x * factor
    assert row.operation == "pick"
    return _picked(row, inputs[0], stored)


def _picked(row: Row, x: np.ndarray, stored: dict[str, np.ndarray]) -> np.ndarray:
    c, positions = row.constants, np.zeros(row.shape, dtype=np.int64)
    missing = np.zeros(row.shape, dtype=bool)
    if "positions" in c:
        positions = stored[c["positions"]]
        missing = positions < 0
    else:
        assert len(c["tables"]) == len(row.shape)
        positions += c["offset"]
        for axis, (table, size) in enumerate(zip(c["tables"], row.shape, strict=True)):
            line = np.arange(size) * table if isinstance(table, int) else np.asarray(table)
            assert len(line) == size
            gone = np.zeros(size, dtype=bool) if isinstance(table, int) else line < 0
            view = [size if i == axis else 1 for i in range(len(row.shape))]
            positions = positions + line.reshape(view)
            missing = missing | gone.reshape(view)
    return np.where(missing, 0.0, x.reshape(-1)[np.where(missing, 0, positions)])


def evaluated(value: Value, bases: dict[str, np.ndarray]) -> np.ndarray:
    """`sum factor * base[index]`."""
    total = np.zeros(value.shape)
    for term in value.terms:
        content, index = bases[term.base.name] if isinstance(term.base, Base) else term.base, term.index
        entries = np.where(index < 0, 0.0, content.reshape(-1)[np.where(index < 0, 0, index)])
        total = total + entries * (1.0 if term.factor is None else term.factor)
    return total


def _check(ledger, results, expected, x):
    stored = {name: s.tensor.double().numpy() if s.tensor.is_floating_point() else s.tensor.numpy()
              for name, s in ledger.used.items()}  # fmt: skip
    replayed = replay(ledger, {"x": x.numpy()}, stored)
    for result, right in zip(results, expected, strict=True):
        assert result.shape == tuple(right.shape)
        np.testing.assert_allclose(evaluated(result, {"x": x.numpy()}), right.numpy(), rtol=1e-14)
        np.testing.assert_allclose(replayed[result.name], right.numpy(), rtol=1e-14)


@pytest.mark.parametrize(("name", "number"), [(n, i) for n, cases in CASES.items() for i in range(len(cases))])
def test_rows_and_values_move_as_torch_does(name, number):
    shape, arguments = CASES[name][number]
    ledger, value = begin(shape)
    x = torch.randn(shape, dtype=torch.float64)
    results = OPERATIONS[f"aten.{name}"].lowering(ledger, value, *map(_stored, arguments))
    expected = _overload(name)(x, *arguments)
    several = isinstance(expected, list | tuple)
    _check(ledger, results if several else [results], expected if several else [expected], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["upsample_nearest1d.default", "_upsample_nearest_exact1d.default"])
def test_the_nearest_entry_is_that_of_the_dtype(name, dtype):
    """Which entry is the nearest depends on the digits in which positions are computed; (6, 74) and (4, 41) differ."""
    differing = 0
    for count, size in [(6, 74), (4, 41), *((count, size) for count in (6, 11, 46) for size in range(31, 131, 9))]:
        ledger, value = begin((1, 1, count))
        ledger.dtype = dtype
        x = torch.arange(float(count)).reshape(1, 1, count)
        result = OPERATIONS[f"aten.{name}"].lowering(ledger, value, [size])
        _check(ledger, [result], [_overload(name)(x.to(dtype), [size]).double()], x.double())
        differing += not torch.equal(_overload(name)(x, [size]).double(), _overload(name)(x.double(), [size]))
    assert differing > 0


@pytest.mark.parametrize("name", _LIKE)
def test_moves_that_take_another_tensors_shape(name):
    shape, other = _LIKE[name]
    ledger, value = begin(shape)
    x = torch.randn(shape, dtype=torch.float64)
    result = OPERATIONS[f"aten.{name}"].lowering(ledger, value, Stored("other", torch.zeros(other)))
    _check(ledger, [result], [_overload(name)(x, torch.zeros(other))], x)


@pytest.mark.parametrize(("name", "axis"), [("cat", 0), ("cat", -1), ("stack", 1), ("stack", -1)])
def test_side_by_side(name, axis):
    ledger, value = begin((2, 3))
    x, fixed = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    moved = OPERATIONS["aten.flip.default"].lowering(ledger, value, [1])
    result = OPERATIONS[f"aten.{name}.default"].lowering(ledger, [value, Stored("fixed", fixed), moved, value], axis)
    _check(ledger, [result], [getattr(torch, name)([x, fixed, x.flip(1), x], axis)], x)


def test_chains_of_moves_and_constants():
    ledger, value = begin((2, 3, 4))
    x, factor = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    scaled = OPERATIONS["aten.mul.Tensor"].lowering(ledger, value, Stored("factor", factor))
    turned = OPERATIONS["aten.transpose.int"].lowering(ledger, scaled, 1, 2)
    padded = OPERATIONS["aten.constant_pad_nd.default"].lowering(ledger, turned, [1, 0], -2.0)
    halved = OPERATIONS["aten.div.Tensor"].lowering(ledger, padded, -4.0)
    total = OPERATIONS["aten.add.Tensor"].lowering(ledger, halved, halved, alpha=3)
    right = torch.nn.functional.pad((x * factor).transpose(1, 2), (1, 0), value=-2.0) / -4.0
    _check(ledger, [total], [right + 3 * right], x)


def test_every_registered_move_has_a_case():
    tables = (movement._ONE_RESULT, movement._SEVERAL_RESULTS)
    listed = {f"{name}.{kind}" for table in tables for kind, names in table.items() for name in names.split()}
    assert {name for name in listed if f"aten.{name}" in OPERATIONS} <= set(CASES) | set(_LIKE)


@pytest.mark.parametrize("name", movement._IDENTITIES.split())
def test_identities_keep_the_entries(name):
    overload = getattr(getattr(aten, name, None), "default", None)
    if overload is None or name == "type_as":
        pytest.skip("not in this release of torch, or takes another argument")
    x = torch.randn(2, 3)
    assert torch.equal(overload(x), x)


def test_a_view_of_the_bits_has_no_bound():
    assert "aten.view.dtype" not in OPERATIONS


@pytest.mark.parametrize("seed", range(20))
def test_random_positions(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(torch.randint(1, 5, (3,), generator=generator).tolist())
    ledger, value = begin(shape)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    count = math.prod(shape)
    # arithmetic in one axis, arbitrary in another, zeros in between
    index = torch.randint(0, count, (3, 4), generator=generator)
    if seed % 2:
        index = (index[:, :1] // 2 + torch.arange(4) * int(index[0, 1])) % count
    keep = torch.rand(3, 4, generator=generator) < 0.7 if seed % 3 else torch.ones(3, 4, dtype=torch.bool)
    if seed % 3 == 2:
        keep = keep[:1].expand(3, 4)
    result = pick(ledger, value, lambda t: torch.where(keep, t.reshape(-1)[index], 0.0))
    _check(ledger, [result], [torch.where(keep, x.reshape(-1)[index], 0.0)], x)


def test_like_slices_are_told_from_unlike_ones():
    """Slices that differ in one entry, one factor or one group are not taken together."""
    ledger, x = begin((1, 4, 2))
    factor = torch.ones(1, 4, 2)
    factor[0, 3, 1] = 5.0
    scaled = times(ledger, x, Stored("factor", factor.double()))
    moved = pick(ledger, scaled, lambda t: t.flip(1).unflatten(1, (2, 2)))
    gains = ledger.bounds(moved, [3]).gain.astype(float)
    assert gains.shape == (1, 2, 2, 1)
    assert gains.flatten().tolist() == pytest.approx([5 * 2**0.5, 2**0.5, 2**0.5, 2**0.5])
    # both tokens of a pair in one group: the entries of two input groups do not mix
    assert ledger.bounds(moved, [2, 3]).gain.astype(float).flatten().tolist() == pytest.approx([52**0.5, 2])


def test_entries_of_two_groups_that_mix_add_up():
    ledger, x = begin((1, 2, 2))
    total = add(ledger, [x, pick(ledger, x, lambda t: t.flip(1))])
    assert float(max(ledger.bounds(total, [-1]).gain.flat)) == pytest.approx(2 * 2**0.5)
    twice = add(ledger, [x, times(ledger, x, -1.0)])
    assert float(max(ledger.bounds(twice, [-1]).gain.flat)) >= 0


def test_names_are_those_of_operations():
    assert all(f"aten.{name}" in OPERATIONS or movement._overload(name) is None for name in CASES)
    assert name_of(aten.view.default) == "aten.view.default"


def _beside(*functions: Callable[[Tensor], Tensor], dim: int = -1) -> nn.Module:
    def model(_: nn.Module, x: Tensor) -> Tensor:
        parts = x.chunk(len(functions), dim)
        return torch.cat([f(part) for f, part in zip(functions, parts, strict=True)], dim)

    return Net(model)


def _assigned(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 1] = F.leaky_relu(y[..., 1], 0.5)
    return y


_TWICE = Net(lambda _, x: torch.cat([x[..., :2].abs(), x[..., :2]], -1))


@pytest.mark.parametrize(("model", "shape", "constant"), [
    (_beside(torch.abs, lambda x: x), (1, 3, 4), 1.0),
    (_beside(F.relu, lambda x: -3 * x.abs()), (1, 3, 4), 3.0),
    (_beside(lambda x: torch.tanh(F.gelu(x)), F.relu6, lambda x: 0.5 * torch.sin(x)), (1, 3, 6), 1.1289042),
    (_beside(torch.abs, lambda x: x, dim=1), (1, 4, 2, 2), 1.0),
    (Net(lambda _, x: torch.stack([x[..., :2].abs(), x[..., 2:]], -1).flatten(-2)), (1, 3, 4), 1.0),
    (Net(lambda _, x: torch.where(torch.arange(4) % 2 == 0, x.relu(), x)), (1, 3, 4), 1.0),
    (Net(_assigned), (1, 3, 4), 1.0),
    (_TWICE, (1, 3, 4), math.sqrt(2)),
    (Net(lambda _, x: x + x.relu()), (1, 3, 4), 2.0),
], ids=["halves", "scaled", "chains", "channels", "stacked", "chosen", "assigned", "twice", "overlapping"])  # fmt: skip
def test_functions_of_entries_put_together_cost_the_largest_of_them(model, shape, constant):
    """Each part alone may move by as much as all: bounded apart, two halves cost the root of 2."""
    x = torch.zeros(shape)
    assert certify(model, x).lipschitz == pytest.approx(constant, rel=1e-7)
    if model.function is not _assigned:  # which changes what its derivative needs
        for radius in (0.1, 3.0):
            attack(model, x, radius, steps=10, restarts=2)


def test_only_functions_that_keep_zero_are_put_together():
    """A sigmoid is 1/2 at 0, so it is no contraction, and has a bound beside the other half's."""
    model = _beside(torch.sigmoid, lambda x: x)
    assert certify(model, torch.zeros(1, 3, 4)).lipschitz == pytest.approx(math.sqrt(1 + 1 / 16), rel=1e-7)
    attack(model, torch.zeros(1, 3, 4), steps=10, restarts=2)
