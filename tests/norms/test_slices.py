"""Rules on singular values see the slices of a lifted norm, or are refused where these are not in place."""

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.norms import Experts, MatrixNorm, Norm, SpectralConv, Split

IN_PLACE: dict[str, tuple[MatrixNorm, tuple[int, ...]]] = {
    "fused": (Split(3), (12, 5)),
    "fused, sizes told": (Split((4, 4, 4)), (12, 5)),
    "experts": (Experts(), (3, 4, 5)),
    "fused experts": (Experts(Split(2)), (3, 4, 5)),
    "heads of parts": (Split(3, wn.norms.PerHead(2)), (12, 5)),
    "kernel by patches": (SpectralConv(mode="patches", groups=2), (4, 3, 2, 2)),
    "kernel of one tap": (SpectralConv(), (4, 3, 1, 1)),
    "pixels": (wn.Spectral(scaling="pixels"), (4, 9)),
}
ELSEWHERE: dict[str, tuple[MatrixNorm, tuple[int, ...], str]] = {
    "unequal": (Split((4, 2)), (6, 5), "parts of different sizes.*use PerHead"),
    "inputs": (Split(2, dim=1), (4, 6), "cut along dim=0"),
    "kernel by positions": (SpectralConv(), (4, 3, 2, 2), "use mode='patches'"),
    "transposed": (SpectralConv(mode="patches", transposed=True), (4, 3, 2, 2), "leave this weight out"),
}


def model_of(norm: Norm, shape: tuple[int, ...]) -> tuple[nn.Module, wn.norms.Assignment]:
    model = nn.Module()
    model.weight = nn.Parameter(3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return model, wn.assign_norms(model, overrides={"weight": norm})


@pytest.mark.parametrize(("norm", "shape"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_the_slices_lie_in_place_and_have_the_unit_they_say(norm, shape, generator):
    for lead in ((), (2,)):
        weight = torch.randn((*lead, *shape), generator=generator, dtype=torch.float64)
        slices = norm.matrices(weight)
        assert torch.equal(slices.reshape(weight.shape), weight)
        largest = torch.linalg.matrix_norm(slices, 2) / norm.unit(weight)
        torch.testing.assert_close(largest.reshape(*lead, -1).amax(-1), norm.norm(weight))
        torch.testing.assert_close(norm.slice_upper_bounds(weight).reshape(largest.shape), largest, rtol=1e-8, atol=0)


@pytest.mark.parametrize(("norm", "shape"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_caps_hold_on_slices(norm, shape):
    model, assignment = model_of(norm, shape)
    before = model.weight.detach().clone()
    optimizer = wn.Scion(assignment, lr=0.1)
    rules = wn.constrain(optimizer, {"weight": wn.HardCap(1.0)})
    start = norm.matrices(model.weight.detach())
    uncapped = norm.matrices(before)
    for one, was in zip(start.reshape(-1, *start.shape[-2:]), uncapped.reshape(-1, *start.shape[-2:]), strict=True):
        u, s, vh = torch.linalg.svd(was, full_matrices=False)  # the cap moves a slice's singular values alone
        torch.testing.assert_close(one, u @ torch.diag(s.clamp(max=norm.unit(before))) @ vh, rtol=1e-3, atol=1e-4)
    for _ in range(3):
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
        assert rules.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize(("norm", "shape", "message"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_rules_on_singular_values_refuse_slices_that_are_not_in_place(norm, shape, message):
    model, assignment = model_of(norm, shape)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        wn.constrain(wn.Scion(assignment, lr=0.1), {"weight": wn.HardCap(1.0)})
    assert torch.equal(model.weight, before)


def test_parts_of_a_split_are_norms_of_their_own():
    """A fused projection moves as its parts would alone, those of equal size in one batch."""
    g = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    fused = Split((4, 2, 4)).dualize(g)
    alone = torch.cat([wn.Spectral().dualize(part) for part in g.split((4, 2, 4))])
    torch.testing.assert_close(fused, alone)
    assert [tuple(x.shape) for x in Split((4, 2, 4)).cut(g)] == [(2, 4, 4), (1, 2, 4)]


def test_a_kernel_of_one_tap_is_a_matrix_and_groups_are_blocks():
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(SpectralConv().norm(w[..., None, None]), wn.Spectral().norm(w))
    blocks = torch.block_diag(w[:2, :3], w[2:, :3])
    grouped = SpectralConv(groups=2).norm(torch.cat([w[:2, :3], w[2:, :3]])[..., None, None])
    torch.testing.assert_close(grouped, wn.Spectral().norm(blocks))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"qkv has 10 entries along dimension 0.*do not divide"):
        Split(3).check_shape((10, 4), "qkv")
    with pytest.raises(ValueError, match="a part of qkv has 5 entries"):
        Split(2, wn.norms.PerHead(2)).check_shape((10, 4), "qkv")
    with pytest.raises(ValueError, match="an expert of gate has 3 entries"):
        Experts(Split(2)).check_shape((2, 3, 4), "gate")
    with pytest.raises(ValueError, match="groups=2 does not divide"):
        SpectralConv(groups=2).check_shape((3, 1, 2, 2))
