"""Formats are what their standards say, and no entry that a model makes exceeds what its table of ranges proves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wellnormed as wn
from wellnormed.certificates import largest_entries, number_formats
from wellnormed.certificates.formats import FORMATS
from wellnormed.models import GPT, GPTConfig

from .adversary import Net


def test_largest_numbers_are_those_of_torch_and_of_the_lists_of_values():
    assert FORMATS["E4M3"] == torch.finfo(torch.float8_e4m3fn).max
    assert FORMATS["E5M2"] == torch.finfo(torch.float8_e5m2).max
    assert FORMATS["E2M1"] == 1.5 * 2.0 ** (0b11 - 1)  # OCP Microscaling Formats, table of FP4


def test_ranges_hold_for_executed_entries_as_far_as_rounding_errors_have_a_bound():
    """Torch computes this power by a logarithm, whose rounding errors have no bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Net(lambda _, x: x.pow(4)), nn.Linear(7, 3))
    x = torch.zeros(1, 5)
    executed, real = (number_formats(wn.certify(model, x, arithmetic=each)) for each in (None, "real"))
    assert executed.unbounded_at == "1.pow"
    assert "without rounding errors from 1.pow on" in str(executed)
    above = {a.name: a.proved - b.proved for a, b in zip(executed.ranges, real.ranges, strict=True)}
    bounds = {row.name: row.bounds for row in wn.certify(model, x).rows}
    assert above.pop("0.linear") == pytest.approx(bounds["0.linear"].error.max())
    assert 0 < bounds["0.linear"].error.max() < 1e-4
    assert not any(above.values())


def mix(self, x):
    x = x + 0.5 * F.relu(self.first(x * self.gain + self.shift))
    return self.second(torch.cat([self.first(x), x], -1))


def mixed() -> nn.Module:
    """A stored tensor added and multiplied, parts side by side, a residual sum, and a layer that is called twice."""
    shift, gain = (nn.Parameter(torch.randn(6)) for _ in range(2))
    return Net(mix, shift=shift, gain=gain, first=nn.Linear(6, 6), second=nn.Linear(12, 4))


MODELS = {
    "plain": lambda: (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.zeros(1, 5)),
    "mixed": lambda: (mixed(), torch.zeros(1, 6)),
    "tokens": lambda: (mixed(), torch.zeros(1, 3, 6)),
    "normalised": lambda: (nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)), torch.zeros(1, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_observed_exceeds_what_is_proved(name):
    torch.manual_seed(0)
    model, example = MODELS[name]()
    table = number_formats(wn.certify(model, example), weights=model.state_dict())
    proved = {each.name: float(each.proved) for each in table.ranges}
    closest = 0.0
    for _ in range(50):
        x = torch.randn(16, *example.shape[1:])
        one = F.one_hot(torch.randint(x.shape[-1], x.shape[:-1]), x.shape[-1]).float()
        x = torch.where(torch.rand(16, *[1] * (x.ndim - 1)) < 0.5, x, one)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        seen = largest_entries(model, x)
        shared = [each for each in seen if each in proved]
        assert any(each.startswith("input of") for each in shared)
        assert any(each.endswith("weight") for each in shared)
        for each in shared:
            assert seen[each] <= proved[each], each
            closest = max(closest, seen[each] / proved[each])
    assert closest > 0.5  # the bounds are of these entries, and not of larger ones


def test_the_input_of_a_linear_map_behind_moves_is_what_they_make_of_the_proved_entries():
    """Largest entry 2 of a vector of norm 2; times 3, plus the largest entry of a constant."""
    shift = nn.Parameter(torch.tensor([1.0, -5.0, 2.0, 0.0]))
    model = Net(lambda s, x: s.linear(x.flip(-1) * 3.0 + s.shift), shift=shift, linear=nn.Linear(4, 1))
    certificate = wn.certify(model, torch.zeros(1, 4))
    inputs = number_formats(certificate, weights=model.state_dict()).inputs
    assert inputs == {"linear": pytest.approx(2 * 3 + 5, rel=1e-6)}
    with pytest.raises(ValueError, match=r"shift matter .*weights=model\.state_dict\(\)"):
        number_formats(certificate)
    with torch.no_grad():
        model.shift[0] = 1.5
    with pytest.raises(ValueError, match="shift is not the certified tensor"):
        number_formats(certificate, weights=model.state_dict())


def test_a_table_says_which_formats_hold_what():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[0].weight)
    for scale, held in [(1.0, "E5M2 E4M3 E2M1"), (16.0, "E5M2 E4M3"), (1e3, "E5M2")]:
        with torch.no_grad():
            model[0].weight.copy_(scale * torch.eye(4))
        table = number_formats(wn.certify(model, torch.zeros(1, 4)))  # entries of up to 2, then 2 scale
        assert " ".join(table.holding_all) == held
        by_name = {each.name: each for each in table.ranges}
        assert float(by_name["0.linear"].proved) == pytest.approx(2 * scale)
        assert by_name["input of 0"].formats == tuple(FORMATS)
        assert str(table).endswith(f"all of them: {held}")


def test_logits_and_every_layer_of_a_transformer_have_a_line(tmp_path):
    config = GPTConfig(vocabulary_size=17, length=6, width=16, heads=2, blocks=1, rotary=True, stream_radius=None)
    model = GPT(config, torch.Generator().manual_seed(0))
    certificate = wn.certify(model)
    certificate.save(tmp_path / "certificate.json")
    table = number_formats(
        certificate.load(tmp_path / "certificate.json"), largest_entries(model, model.example_input())
    )
    linear = ("query.0", "key.0", "value", "output")
    wanted = {*(f"layers.0.block.{name}" for name in linear), "layers.1.block.input", "layers.1.block.output", "head"}
    assert table.inputs.keys() == wanted
    lines = {each.name: each for each in table.ranges}
    logits = lines["logits of layers.0.block.attend.scaled_dot_product_attention"]
    assert float(logits.proved) == pytest.approx(certificate.largest_logit)
    for name in wanted:
        for line in (f"input of {name}", f"{name}.weight"):
            assert 0 <= lines[line].observed <= float(lines[line].proved) * (1 + 1e-5), line


def test_largest_entries_leave_no_hooks():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    with pytest.raises(RuntimeError):
        largest_entries(model, torch.zeros(1, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_result_of_a_module_and_the_logits_of_attention_are_observed():
    config = GPTConfig(width=16, blocks=1, heads=2, length=8, rotary=True, relative_bias=False)
    model, tokens = GPT(config, torch.Generator().manual_seed(0)), torch.arange(8)[None]
    seen = largest_entries(model, tokens)
    with torch.no_grad():
        end = model.layers(model.embedding(tokens))
        attention, stream = model.layers[1].block, model.layers[0](model.embedding(tokens))
        logits = attention.query(stream) @ attention.key(stream).mT / 8
        assert seen["head"] == float(model.head(end).abs().max())
        assert seen["logits of layers.1.block.attend"] == pytest.approx(float(logits.abs().max()), rel=1e-5)


def test_every_query_of_grouped_heads_is_observed():
    model = Net(lambda _, q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    q, k = torch.zeros(1, 4, 2, 4), torch.ones(1, 2, 3, 4)
    q[0, 3] = 2.0  # the second head of the second group
    assert largest_entries(model, q, k)["logits of "] == 4.0


def test_only_the_result_of_a_layer_is_observed_beside_it():
    """A gated layer has a row for its gate, too, whose entries are not those of the layer's result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 3)).double()
    x = 50 * torch.randn(8, 4).double()
    table = number_formats(wn.certify(model, x[:1], radius=100.0), largest_entries(model, x))
    shown = {each.name: each.observed for each in table.ranges if each.name.startswith("1.glu")}
    (gate, result) = shown.values()
    assert gate is None
    assert result == float(model[:2](x).detach().abs().max())
    assert all(each.observed is None or each.observed <= each.proved for each in table.ranges)
