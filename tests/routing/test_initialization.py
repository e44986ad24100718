"""`initialize_` starts every weight on the sphere of its radius, and says which it leaves."""

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.routing.modules import made


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 4, 3), nn.MultiheadAttention(8, 2)
    )
    model.head = nn.Linear(8, 5)
    return model


@pytest.mark.parametrize("recipe", ["modular", "language", "sign-only", "scion-gpt"])
def test_every_norm_starts_at_its_radius_and_vectors_at_zero(recipe, generator):
    norms = wn.initialize_(network(), recipe, generator=generator)
    for a in norms:
        expected = a.radius if a.parameter.ndim > 1 else 1 if a.name == "2.weight" else 0
        # float32 rounding of an orthogonal matrix, and columns that start 1e-6 inside
        assert float(a.norm.norm(a.parameter.detach())) == pytest.approx(expected, rel=1e-4), a.name


def test_a_generator_makes_it_reproducible():
    one, other = network(), network()
    wn.initialize_(one, generator=torch.Generator().manual_seed(3))
    torch.rand(7)
    wn.initialize_(other, generator=torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_gains_start_as_the_identity_also_where_a_layer_multiplies_by_one_plus_its_weight():
    one_plus = made("OnePlusNorm", weight=torch.zeros(8))
    one_plus.forward = lambda x: nn.functional.rms_norm(x, (8,)) * (1 + one_plus.weight)
    model = nn.Sequential(one_plus, nn.RMSNorm(8))
    nn.init.normal_(model[1].weight)
    wn.initialize_(model, "scion-gpt")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), nn.functional.rms_norm(x, (8,)))


def test_frozen_parameters_and_adamw_s_stay():
    model = network()
    model[1].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = wn.initialize_(model, "muon", radii={"3": 2.0})
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert moved == {a.name for a in norms if a.norm is not None}
    assert "1.weight" not in moved
    [kernel] = [a for a in norms if a.name == "3.weight"]
    assert float(kernel.norm.norm(kernel.parameter.detach())) == pytest.approx(2.0, rel=1e-4)  # float32 rounding


def test_meta_parameters_are_refused_with_the_remedy():
    with torch.device("meta"):
        model = network()
    assert "(8, 8)" in str(wn.assign_norms(model))
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device; call model.to_empty"):
        wn.initialize_(model)
    with pytest.raises(ValueError, match=r"0.weight, 1.weight, 1.bias, ... are on the meta device"):
        wn.Scion(model, lr=0.1)


@pytest.mark.parametrize("table", [nn.Embedding(5, 4, padding_idx=2), nn.EmbeddingBag(5, 4, padding_idx=-3)])
def test_the_row_of_the_padding_symbol_stays_zero(table):
    wn.initialize_(nn.Sequential(table))
    assert table.weight.any(1).tolist() == [True, True, False, True, True]
