"""Layers with 8-bit products compute what rounding gives, refuse what does not fit, and train as float32 does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wellnormed as wn
from papers import float8_layers as float8
from papers.float8_layers import Float8HeadProjection, Float8Linear, to_float8_
from tests.certificates.adversary import Net
from wellnormed.certificates import UncertifiableError, number_formats
from wellnormed.models import GPT, GPTConfig
from wellnormed.modular import modular_tree
from wellnormed.nn import HeadProjection

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x, dtype):
    return x.detach().to(dtype).to(x.dtype)


def small_gpt():
    config = GPTConfig(
        vocabulary_size=17, length=16, width=32, heads=2, blocks=1, rotary=True, stream_radius=None, relative_bias=False
    )
    return GPT(config, torch.Generator().manual_seed(0))


def test_every_value_of_the_formats_passes_unchanged_in_both_directions():
    """Times the unit matrix, inputs and weights of E4M3 and gradients of E5M2 are fixed points."""
    for dtype, what in ((E4M3, "input"), (E4M3, "weight"), (E5M2, "gradient")):
        values = torch.arange(256).to(torch.uint8).view(dtype).float()
        values = values[values.isfinite()]
        layer, x = Float8Linear(len(values), len(values), bias=False), torch.eye(len(values))
        with torch.no_grad():
            layer.weight.copy_(torch.diag(values) if what == "weight" else x)
        x = (torch.diag(values) if what == "input" else x).requires_grad_()
        y = layer(x)
        y.backward(torch.diag(values) if what == "gradient" else torch.ones_like(y))
        assert torch.equal((x.grad if what == "gradient" else y).detach(), torch.diag(values)), what


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_products_and_gradients_are_those_of_rounded_factors(dtype, scale):
    torch.manual_seed(0)
    layer = Float8Linear(6, 5, gradient_scale=scale).to(dtype)
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert y.dtype == dtype
    x8, w8 = rounded(x, E4M3), rounded(layer.weight, E4M3)
    assert torch.equal(y, (x8.flatten(0, 1) @ w8.T).unflatten(0, (2, 3)) + layer.bias)
    gradient = torch.randn_like(y) / 300
    y.backward(gradient)
    g8 = rounded(gradient * scale, E5M2).flatten(0, 1)
    torch.testing.assert_close(x.grad.flatten(0, 1), g8 @ w8 / scale)
    torch.testing.assert_close(layer.weight.grad, g8.T @ x8.flatten(0, 1) / scale)
    torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)))


def test_one_vector_and_heads_have_the_shapes_of_the_layers_they_replace():
    layer = Float8Linear(3, 2)
    assert layer(torch.ones(3)).shape == (2,)
    assert layer(torch.ones(0, 3)).shape == (0, 2)
    torch.manual_seed(0)
    plain, heads = HeadProjection(8, 2), Float8HeadProjection(8, 2)
    heads.load_state_dict(plain.state_dict())
    x, slim = rounded(torch.randn(2, 5, 8), E4M3), rounded(plain.weight, E4M3)
    plain.weight.data.copy_(slim)
    assert torch.equal(heads(x), plain(x))


def test_rounding_errs_by_at_most_a_sixteenth_of_an_entry():
    """3 bits after the leading one: half a unit in the last place is 2^-4; below the normals half of 2^-9."""
    x = torch.cat([torch.logspace(-12, 2.6, 2001), torch.tensor([448.0])])[None]
    layer = Float8Linear(x.shape[1], x.shape[1], bias=False)
    nn.init.eye_(layer.weight)
    assert bool(((layer(x) - x).abs() <= torch.maximum(x / 16, torch.tensor(2.0**-10))).all())


@pytest.mark.parametrize("bad", [448.5, -1e6, float("inf"), float("nan")])
def test_what_does_not_fit_is_an_error_and_never_saturates(bad):
    layer = Float8Linear(2, 2, layer="blocks.3.output")
    nn.init.ones_(layer.weight)
    with pytest.raises(ValueError, match=r"blocks\.3\.output: the input .*float8_e4m3fn.* 448"):
        layer(torch.tensor([[1.0, bad]]))
    with torch.no_grad():
        layer.weight[0, 0] = bad
    with pytest.raises(ValueError, match=r"blocks\.3\.output: the weight .* 448"):
        layer(torch.ones(1, 2))
    layer = Float8Linear(2, 2, layer="blocks.3.output", gradient_scale=1e3)
    with pytest.raises(ValueError, match=r"blocks\.3\.output: the gradient .* 1000, .*float8_e5m2.* 57344"):
        layer(torch.ones(1, 2)).backward(torch.full((1, 2), bad))


def test_conversion_changes_the_forward_and_nothing_else():
    model = small_gpt()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    tokens = torch.arange(16)[None]
    expected = model(tokens)
    norms, tree = [str(each.norm) for each in wn.assign_norms(model)], str(modular_tree(model))
    inputs = number_formats(wn.certify(model)).inputs
    random = torch.get_rng_state()
    turned = to_float8_(model, inputs, ["layers"])
    assert torch.equal(torch.get_rng_state(), random)
    assert turned == [name for name in inputs if name != "head"]
    assert type(model.head) is nn.Linear
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert [str(each.norm) for each in wn.assign_norms(model)] == norms
    assert str(modular_tree(model)) == tree
    got, expected = model(tokens).detach(), expected.detach()
    assert not torch.equal(got, expected)
    assert float((got - expected).abs().max()) < 0.1 * float(expected.abs().max())  # six layers of 2^-4 at most each


def test_ranges_that_do_not_fit_are_refused_by_name_and_nothing_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight[0, 0] = 449.0
    fits = {"0": 448.0, "1": 448.0, "2": 1.0}
    for ranges, layers, message in [
        (fits | {"1": 448.1}, ["?"], "the input of 1 has entries of up to 448.1, but E4M3 ends at 448"),
        (fits | {"1": float("inf")}, ["?"], "the input of 1 has entries of up to inf"),
        (fits, ["?"], "the weight of 2 has entries of up to 449, but E4M3 ends at 448"),
        ({"0": 1.0}, ["0", "1"], "nothing is proved of the input of 1"),
        (fits, ["0", "missing"], "'missing' means no Linear or HeadProjection"),
    ]:
        with pytest.raises(ValueError, match=message):
            to_float8_(model, ranges, layers)
        assert all(type(layer) is nn.Linear for layer in model)
    for setting, message in [({"gradient_scale": 0.0}, "positive"), ({"product": "exact"}, "emulated, scaled_mm")]:
        with pytest.raises(ValueError, match=message):
            to_float8_(model, fits, ["0"], **setting)
    assert to_float8_(model, fits, ["0", "1"]) == ["0", "1"]


def rounds(dtype):
    return Net(lambda _, x: x.to(dtype).to(x.dtype))


def test_certificates_of_rounded_models_are_refused():
    layer = nn.Sequential(Float8Linear(4, 4))
    with pytest.raises(UncertifiableError, match=r"float8_product.* module `0`.*certify the model before `to_float8_`"):
        wn.certify(layer, torch.zeros(1, 4))
    for dtype in (E4M3, E5M2):  # rounding by hand, which has steps of an eighth of an entry
        with pytest.raises(UncertifiableError, match=f"{dtype}, which is not continuous"):
            wn.certify(rounds(dtype), torch.zeros(1, 4))
    assert wn.certify(rounds(torch.bfloat16), torch.zeros(1, 4)).lipschitz >= 1  # in real arithmetic, as ever


def test_training_in_emulated_8_bits_is_near_float32():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(17, (16, 1), generator=generator) * 3 ** torch.arange(17) % 17 for _ in range(30)]
    losses = {}
    for name, scale in (("float32", None), ("float8", 16.0 * 16)):
        model = small_gpt()
        if scale is not None:
            to_float8_(model, number_formats(wn.certify(model)).inputs, ["layers"], gradient_scale=scale)
        optimizer = wn.Scion(model, lr=0.05)
        wn.constrain(optimizer, {"embedding": wn.ColumnCap(1.0), "*.block.*.weight": wn.SoftCap(2.0)})
        for tokens in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.setdefault(name, []).append(float(loss.detach()))
    first, last = losses["float32"][0], losses["float32"][-1]
    assert last < first / 2  # it learns
    assert losses["float8"] != losses["float32"]
    assert abs(losses["float8"][-1] - last) < 0.1 * (first - last)


def test_torch_compile_sees_one_operation():
    layer = Float8Linear(8, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    assert torch.equal(compiled(x), layer(x))


def test_the_operations_keep_the_contract_of_torch():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    checks = ("test_faketensor", "test_autograd_registration")  # another one multiplies, which float8 tensors cannot
    torch.library.opcheck(float8._product, (x, w, 1.0, False, "a layer"), test_utils=checks)


def test_the_kernel_must_have_a_device_that_has_it():
    layer = Float8Linear(16, 16, product="scaled_mm", layer="head")
    with pytest.raises(ValueError, match=r"head: product='scaled_mm' needs a CUDA device .* is on cpu"):
        layer(torch.ones(16, 16))


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_the_kernel_multiplies_what_the_emulation_multiplies(monkeypatch, scale):
    """torch has the same function for CPUs: layouts and scales are tested here, the hardware is not."""
    monkeypatch.setattr(float8, "require_device", lambda device, layer: None)
    same_products(torch.device("cpu"), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_the_kernel_on_hardware(scale):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device does not multiply 8-bit floats")
    same_products(torch.device("cuda"), scale)


def same_products(device, scale):
    """Sums of 16 or 32 products in float32, rounded to bfloat16: half a unit of 8 bits, and what the order adds."""
    results = []
    for product in ("emulated", "scaled_mm"):
        torch.manual_seed(0)
        layer = Float8Linear(32, 48, product=product, gradient_scale=scale).to(device)
        x = torch.randn(2, 8, 32, device=device, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y) / 16)
        assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.float32,) * 3
        results.append(((y - layer.bias).detach(), x.grad, layer.weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2.0**-8, atol=1e-5 * float(expected.abs().max()))
