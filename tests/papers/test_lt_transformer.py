"""What appendix F of LT varies: the inflation as its code has it, halved rates, and projections in bfloat16."""

import pytest
import torch

import wellnormed as wn
from papers import inflation
from papers._lt_transformer import Bfloat16SoftCap, InflatedAsPublished, TransformerRun, largest_norm, lt_transformer
from wellnormed.matrix import soft_cap, soft_cap_strength
from wellnormed.train.task import fit

TINY = {"width": 8, "blocks": 2, "length": 8, "batch": 2, "steps": 3}
pytestmark = pytest.mark.usefixtures("line")


def test_the_published_inflation_is_its_formula():
    gradient = torch.tensor([[3.0, 4.0], [0.003, 0.004], [0.0, 0.0]])
    rms = gradient.square().mean(1, keepdim=True).sqrt()
    expected = gradient / rms.clamp(min=1 / 16)  # LT's `_embed_project`, with its maximum
    assert torch.equal(InflatedAsPublished(input_axis=0, max_inflation=16).dualize(gradient), expected)


def test_the_published_inflation_depends_on_the_scale_of_the_gradient_and_ours_does_not():
    gradient = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    ours, published = (kind(input_axis=0, max_inflation=16) for kind in (wn.ColNorm, InflatedAsPublished))
    torch.testing.assert_close(ours.dualize(1e-4 * gradient), ours.dualize(gradient))
    # entries of 1e-4 times 16 are far below 1
    torch.testing.assert_close(published.dualize(1e-4 * gradient), 16e-4 * gradient)


def rates(**settings):
    """Name -> learning rate of a run at rate 1."""
    task = lt_transformer(TransformerRun(1.0, **settings, **TINY), torch.device("cpu"))
    places = {id(p): group["lr"] for group in task.optimizer.param_groups for p in group["params"]}
    return {a.name: places[id(a.parameter)] for a in task.optimizer.assignment}


def test_a_rate_is_halved_once_for_every_residual_that_follows():
    # mass 32 for two blocks of six matrices; 1 each for the embedding and the head
    halved, share = rates(halved=True), 32 / 12 / 34
    assert halved["head.weight"] == pytest.approx(1 / 34)
    assert halved["embedding.weight"] == pytest.approx(1 / 34 / 16)
    assert halved["layers.0.block.query.0.weight"] == pytest.approx(share / 8)
    assert halved["layers.0.block.output.weight"] == pytest.approx(share / 8)
    assert halved["layers.3.block.output.weight"] == pytest.approx(share)


def test_unhalved_rates_are_those_of_the_modular_norm():
    modular, share = rates(blocks_mass=2), 2 / 12 / 4
    assert modular["head.weight"] == modular["embedding.weight"] == pytest.approx(1 / 4)
    # the residual's share of 1/4 and, for queries, keys and values, the factor 1/3 follow
    assert modular["layers.3.block.output.weight"] == pytest.approx(share * 4)
    assert modular["layers.0.block.query.0.weight"] == pytest.approx(share * 12)


def test_a_cap_in_bfloat16_is_the_soft_cap_but_for_rounding():
    weights = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0)) / 4
    unit, step = 1.0, 0.1
    after, _ = Bfloat16SoftCap(2.0)._act(weights, unit, step, {})
    assert torch.equal(after, after.bfloat16().float())
    exact = soft_cap(weights, soft_cap_strength(2.0, step))
    # the last rounding is 2^-9 of an entry, here of at most 1; the sums before it are some ten of them
    assert float((after - exact).abs().max()) < 30 * 2**-9
    assert not torch.equal(after, exact)


@pytest.mark.parametrize("projection", ["float32", "bfloat16"])
def test_matrices_stay_at_their_cap(projection):
    task = lt_transformer(TransformerRun(3.0, projection=projection, **TINY | {"steps": 20}), torch.device("cpu"))
    fit(task)
    # bfloat16 rounds by up to 2^-8 relatively, in every step
    assert 0.5 < largest_norm(task) / 2 <= (1 if projection == "float32" else 1.05)


def test_the_factor_decides_the_embedding_s_steps_as_published():
    def moved(factor):
        run = TransformerRun(1.0, factor, "as published", **TINY)
        task = lt_transformer(run, torch.device("cpu"))
        start = task.model.embedding.weight.detach().clone()
        fit(task)
        return float((task.model.embedding.weight.detach() - start).norm())

    assert 0 < moved(1) < 0.1 * moved(65536)


def test_rare_symbols_are_the_rarer_half():
    rare, frequent = inflation.by_frequency(torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3]), 5)
    assert (set(rare.tolist()), set(frequent.tolist())) == ({4, 1}, {3, 0, 2})
