"""Constraints on singular values see the slices of every lifted norm, wherever these lie in the weight."""

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.norms import Experts, Norm, SpectralConv, Split
from wellnormed.norms.spectral import MatrixNorm
from wellnormed.routing import Assignment

LIFTED: dict[str, tuple[MatrixNorm, tuple[int, ...]]] = {
    "fused": (Split(3), (12, 5)), "fused, sizes told": (Split((4, 4, 4)), (12, 5)), "experts": (Experts(), (3, 4, 5)),
    "fused experts": (Experts(Split(2)), (3, 4, 5)), "heads of parts": (Split(3, wn.norms.PerHead(2)), (12, 5)),
    "kernel by patches": (SpectralConv(mode="patches", groups=2), (4, 3, 2, 2)),
    "kernel of one tap": (SpectralConv(), (4, 3, 1, 1)), "pixels": (wn.Spectral(units="pixels"), (4, 9)),
    "unequal parts": (Split((4, 2)), (6, 5)),
    "parts of the inputs": (Split(2, wn.Spectral(input_axis=0), dim=1), (4, 6)),
    "unequal parts of experts": (Experts(Split((4, 2))), (3, 6, 5)),
    "kernel by positions": (SpectralConv(), (4, 3, 2, 2)), "depthwise kernel": (SpectralConv(groups=4), (4, 1, 3, 3)),
    "depthwise kernel by patches": (SpectralConv(mode="patches", groups=4), (4, 1, 3, 3)),
    "transposed kernel": (SpectralConv(transposed=True, groups=2), (4, 3, 2, 2)),
    "transposed kernel by patches": (SpectralConv(mode="patches", transposed=True), (4, 3, 2, 2)),
}  # fmt: skip


def model_of(norm: Norm, shape: tuple[int, ...]) -> tuple[nn.Module, Assignment]:
    model = nn.Module()
    model.weight = nn.Parameter(3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return model, wn.assign_norms(model, overrides={"weight": norm})


every_norm = pytest.mark.parametrize(("norm", "shape"), LIFTED.values(), ids=LIFTED.keys())


@every_norm
def test_the_slices_make_up_the_weight_and_have_the_units_they_say(norm, shape, generator):
    for lead in ((), (2,)):
        weight = torch.randn((*lead, *shape), generator=generator, dtype=torch.float64)
        slices = norm.slices(weight)
        assert torch.equal(norm.from_slices(slices, weight), weight)
        largest = [
            (torch.linalg.matrix_norm(x, 2) / unit).reshape(*lead, -1)
            for x, unit in zip(slices, norm.slice_units(weight), strict=True)
        ]
        torch.testing.assert_close(torch.cat(largest, -1).amax(-1), norm.norm(weight))
        torch.testing.assert_close(norm.upper_bound(weight), torch.cat(largest, -1).amax(-1), rtol=1e-8, atol=0)


@every_norm
@pytest.mark.parametrize("rule", [wn.SoftCap(1.0), wn.constraints.SpectralInterval(0.1, 1.0)], ids=repr)
def test_constraints_hold_on_slices(norm, shape, rule):
    model, assignment = model_of(norm, shape)
    rules = wn.constrain(optimizer := wn.Scion(assignment, lr=0.1), {"weight": rule})
    for _ in range(3):
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
        assert rules.proved_ratios()["weight"] <= 1
    state = rules.state_dict()
    rules.load_state_dict(state)


@every_norm
def test_a_hard_cap_moves_the_singular_values_of_every_slice_alone(norm, shape):
    model, assignment = model_of(norm, shape)
    before = model.weight.detach().clone()
    wn.constrain(wn.Scion(assignment, lr=0.1), {"weight": wn.HardCap(1.0)})
    after, units = norm.slices(model.weight.detach()), norm.slice_units(before)
    for now, was, unit in zip(after, norm.slices(before), units, strict=True):
        u, s, vh = torch.linalg.svd(was, full_matrices=False)
        # the cap aims 1e-5 below, and these entries have a size of about 1
        torch.testing.assert_close(now, u @ torch.diag_embed(s.clamp(max=unit)) @ vh, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", [wn.constraints.Hammer(1.0), wn.constraints.SpectralWeightDecay(0.5)])
def test_leading_vectors_are_kept_for_every_size_of_slices(rule):
    model, assignment = model_of(Split((4, 2, 4)), (10, 5))
    rules = wn.constrain(optimizer := wn.Scion(assignment, lr=1e-9), {"weight": rule})
    assert {name: tuple(x.shape) for name, x in rules.state_dict().items()} == {
        "weight.vector": (2, 5),
        "weight.vector1": (1, 5),
    }
    largest = [torch.linalg.matrix_norm(x, 2) for x in model.weight.detach().split((4, 2, 4))]
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    now = [torch.linalg.matrix_norm(x, 2) for x in model.weight.detach().split((4, 2, 4))]
    assert all(b < a for a, b in zip(largest, now, strict=True))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"qkv has 10 entries along dimension 0.*do not divide"):
        Split(3).check_shape((10, 4), "qkv")
    with pytest.raises(ValueError, match="a part of qkv has 5 entries"):
        Split(2, wn.norms.PerHead(2)).check_shape((10, 4), "qkv")
    with pytest.raises(ValueError, match="an expert of gate has 3 entries"):
        Experts(Split(2)).check_shape((2, 3, 4), "gate")
    with pytest.raises(ValueError, match="groups=2 does not divide"):
        SpectralConv(groups=2).check_shape((3, 1, 2, 2))
