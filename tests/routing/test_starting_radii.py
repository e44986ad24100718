"""A vector's radius is its size at the start, or that of the layer that it serves."""

import math

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.routing.starting_radii import starting_radii


def normal(parameter: torch.Tensor, std: float) -> None:
    """Entries whose RMS is exactly `std`, so that no draw is near the edge between two powers of two."""
    with torch.no_grad():
        parameter.normal_(generator=torch.Generator().manual_seed(0))
        parameter.mul_(std / parameter.square().mean().sqrt())


def radii_of(model: nn.Module) -> dict[str, float]:
    return starting_radii(wn.assign_norms(model))


LAYERS = {  # a layer in which 64 inputs add up to one output, and the shape of its input
    "linear": (nn.Linear(64, 24), (64,)),
    "patches": (nn.Conv2d(16, 24, 2, stride=2), (16, 2, 2)),
    "convolution of sequences": (nn.Conv1d(32, 24, 2), (32, 2)),
    "groups": (nn.Conv2d(128, 24, 1, groups=2), (128, 1, 1)),
    "transposed convolution": (nn.ConvTranspose2d(64, 24, 1), (64, 1, 1)),
    "transposed, groups": (nn.ConvTranspose2d(128, 24, 1, groups=2), (128, 1, 1)),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_a_bias_moves_by_the_rms_of_the_output_of_its_layer(layer, shape):
    normal(layer.weight, 1 / 32)
    assert radii_of(layer) == {"bias": 0.25}  # 1/32 times the root of 64
    with torch.no_grad():
        layer.bias.zero_()
        outputs = layer(torch.randn(512, *shape, generator=torch.Generator().manual_seed(1)))
    # the mean of 512 x 24 squares has a relative deviation of 1.3%, its root half of that; 5% is seven of them
    assert float(outputs.square().mean().sqrt()) == pytest.approx(0.25, rel=0.05)


KERNELS = {  # a convolution on images whose windows overlap, 64 inputs to one output, and its positions
    "4 x 4": (nn.Conv2d(4, 24, 4), 16.0),
    "strides of one axis": (nn.Conv2d(16, 24, 2, stride=(1, 2)), 4.0),
    "volumes": (nn.Conv3d(8, 24, 2), 8.0),
    "every channel by itself": (nn.Conv2d(24, 24, 8, groups=24), 64.0),
    "transposed": (nn.ConvTranspose2d(16, 24, 2), 4.0),
}


@pytest.mark.parametrize(("layer", "positions"), KERNELS.values(), ids=list(KERNELS))
def test_a_kernel_moves_by_its_positions_and_what_stands_beside_it_by_as_much_more(layer, positions):
    normal(layer.weight, 1 / 64)
    model = nn.Sequential(layer, nn.BatchNorm2d(24))
    assert radii_of(model) == {
        "0.weight": positions, "0.bias": positions / 8, "1.weight": positions / 16, "1.bias": positions / 32,
    }  # fmt: skip
    normal(layer.weight, 100.0)
    assert radii_of(model)["0.bias"] == positions  # a size above the radius of the kernel is that radius
    held = {name: radius for group in wn.Scion(model).param_groups for name, radius in group["vector_radii"].items()}
    assert held == radii_of(model)
    wn.initialize_(layer)
    assert float(wn.assign_norms(layer).assigned[0].norm.norm(layer.weight.detach())) == pytest.approx(1.0, rel=1e-3)


ONE_AXIS = (
    nn.Conv1d(16, 24, 4), nn.Conv2d(16, 24, (4, 1)), nn.ConvTranspose2d(16, 24, (1, 4)), nn.Conv3d(16, 24, (1, 4, 1)),
)  # fmt: skip


@pytest.mark.parametrize("layer", ONE_AXIS, ids=repr)
def test_a_kernel_along_one_axis_keeps_radius_1_however_it_is_written(layer):
    assert [a.radius for a in wn.assign_norms(layer) if a.name == "weight"] == [1.0]


def test_layers_with_several_weights_or_fused_ones_have_one_size():
    recurrent, attention = nn.LSTM(64, 64), nn.MultiheadAttention(64, 4)
    for layer in (recurrent, attention):
        for weight in (p for p in layer.parameters() if p.ndim == 2):
            normal(weight, 1 / 32)
    assert set(radii_of(recurrent).values()) == set(radii_of(attention).values()) == {0.25}


def test_other_vectors_move_by_their_own_size_and_at_least_by_a_quarter_of_their_surroundings():
    block = nn.ModuleDict({"norm": nn.LayerNorm(64), "linear": nn.Linear(64, 64)})
    normal(block["linear"].weight, 1 / 32)
    model = nn.ModuleDict(
        {"block": block, "norm": nn.LayerNorm(64), "far": nn.Linear(64, 64), "head": nn.Linear(64, 5)}
    )
    normal(model["far"].weight, 1 / 8)
    nn.init.zeros_(model["head"].weight)
    starts = {"cls_token": 1 / 4, "mask_token": 0.0, "register_token": 1e-6}  # 1e-6 as in timm
    for name, start in starts.items():
        model.register_parameter(name, nn.Parameter(torch.full((1, 1, 64), start)))
    found = radii_of(model)
    assert (found["block.linear.bias"], found["far.bias"]) == (0.25, 1.0)
    assert found["block.norm.bias"] == 0.25 / 4  # the nearest module that holds a weight
    around = math.sqrt(0.25 * 1.0)  # the geometric mean of all weights but zeros
    assert found["head.bias"] == around
    assert found["cls_token"] == 1 / 4
    assert found["norm.bias"] == found["mask_token"] == found["register_token"] == around / 4


def test_tables_move_by_their_own_size_and_at_least_by_twice_that_of_their_surroundings():
    model = nn.ModuleDict(
        {"small": nn.Embedding(9, 64), "large": nn.Embedding(9, 64), "layer": nn.Linear(64, 64, False)}
    )
    normal(model["layer"].weight, 1 / 32)
    normal(model["small"].weight, 0.02)
    normal(model["large"].weight, 1.0)
    assert radii_of(model) == {"small.weight": 0.5, "large.weight": 1.0}


def test_a_table_that_is_a_head_as_well_is_a_table_under_any_name():
    for first, second in (("table", "head"), ("head", "table")):
        layers = {"table": nn.Embedding(9, 64), "head": nn.Linear(64, 9, bias=False)}
        model = nn.ModuleDict({first: layers[first], second: layers[second], "body": nn.Linear(64, 64, bias=False)})
        model["table"].weight = model["head"].weight
        normal(model["head"].weight, 0.02)
        normal(model["body"].weight, 1 / 32)
        assert radii_of(model) == {f"{first}.weight": 0.5}


def test_a_start_in_the_norm_leaves_biases_at_1_and_nothing_exceeds_it():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 32))
    wn.initialize_(model)
    assert radii_of(model) == {"0.bias": 1.0, "1.weight": 0.5, "1.bias": 0.25, "2.bias": 1.0}
    normal(model[0].weight, 100.0)
    model[1].bias.data.fill_(3.0)
    assert set(radii_of(model).values()) == {1.0}


def test_gains_move_by_half_the_size_around_them_whatever_they_start_at():
    """Layer scales start at 1e-6, and gains of layers that multiply by `1 + weight` at 0."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(64), "slopes": nn.PReLU(64), "linear": nn.Linear(64, 64, False)})
    for name, start in {"layer_scale": 1e-6, "gamma": 0.0, "gamma_1": 40.0}.items():
        model.register_parameter(name, nn.Parameter(torch.full((64,), start)))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.7)))
    gains = {a.name for a in wn.assign_norms(model) if isinstance(a.norm, wn.norms.Gain)}
    assert len(gains) == 6
    for std, radius in ((1 / 32, 1 / 8), (1 / 8, 1 / 2), (1.0, 1.0)):
        normal(model["linear"].weight, std)
        assert {name: found for name, found in radii_of(model).items() if name in gains} == dict.fromkeys(gains, radius)


def test_the_magnitudes_of_weight_norm_move_by_half_of_what_they_are():
    layer = nn.Linear(64, 64, bias=False)
    normal(layer.weight, 1 / 32)
    magnitude = "parametrizations.weight.original0"
    assert radii_of(nn.utils.parametrizations.weight_norm(layer)) == {magnitude: 0.25 / 2}
    assert float(layer.get_parameter(magnitude).detach().square().mean().sqrt()) == pytest.approx(0.25)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30, math.inf, math.nan], ids=str)
def test_sizes_at_the_ends_of_float32_and_memory_that_is_not_filled_yet_give_a_positive_radius_of_at_most_1(size):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(size)
    assert all(0 < radius <= 1 for radius in radii_of(model).values())


def test_a_frozen_weight_counts():
    model = nn.Linear(64, 64)
    normal(model.weight, 1 / 32)
    model.weight.requires_grad_(False)
    assert radii_of(model) == {"bias": 0.25}


def test_frozen_weights_whose_entries_are_no_numbers_to_multiply_by_do_not_count():
    """As 8-bit integers with scales of their own, or a weight whose memory is elsewhere."""
    for weight in (torch.ones(64, 64, dtype=torch.uint8), torch.ones(64, 64, device="meta"), torch.eye(64).to_sparse()):
        model = nn.ModuleDict({"linear": nn.Linear(64, 64), "other": nn.Linear(64, 64)})
        normal(model["other"].weight, 1 / 32)
        model["linear"].weight = nn.Parameter(weight, requires_grad=False)
        assert radii_of(model)["linear.bias"] == 0.25


def test_norms_that_are_chosen_and_other_recipes_keep_radius_1():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, bias=False))
    normal(model[0].weight, 1 / 32)
    chosen = {"0.bias": wn.norms.BiasRMS(), "1.weight": wn.norms.Gain()}
    assert starting_radii(wn.assign_norms(model, overrides=chosen)) == {}
    for recipe in ("language", "image", "sign-only", "scion-gpt", "muon"):
        assert starting_radii(wn.assign_norms(model, recipe)) == {}
