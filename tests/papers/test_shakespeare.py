"""What the Shakespeare experiments and Modula's GPT are made of: formulas, shares of a step, forward passes."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import wellnormed as wn
from papers import _nanogpt, _shakespeare, as_published, modula_gpt, shakespeare_best, shakespeare_tradeoff
from papers._first_modula import NormalizedAdam
from papers._shakespeare import LTRun, lt_model, lt_task, rate_factors, scores_as_published
from papers.modula_gpt import Cell
from wellnormed.certificates import certify
from wellnormed.data.characters import CharacterText
from wellnormed.routing import assign_norms

SMALL = LTRun("muon", "weight decay", 0.0, 2.0, steps=4, batch=2, length=8, width=8, blocks=3)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def text(monkeypatch):
    line = CharacterText("To be, or not to be: that is the question. " * 20, "a line")
    for module in (_shakespeare, _nanogpt, modula_gpt):
        monkeypatch.setattr(module, "shakespeare", lambda: line)
    return line


def at_caps(cap, blocks=3):
    """LT's transformer with every matrix at the cap."""
    model, generator = lt_model(replace(SMALL, blocks=blocks), None), torch.Generator().manual_seed(0)
    for assigned in assign_norms(model, overrides=_shakespeare.MATRICES):
        assigned.norm.initialize_(assigned.parameter.data, generator)
        if not assigned.name.startswith("embedding"):
            assigned.parameter.data *= cap
    return model


def published(cap, blocks=3):
    """LT appendix D, equations 13, 14, 16, 21 and 22, all norms being the cap."""
    share, radius, lipschitz = 1 / (2 * blocks), 1.0, 1.0
    for _ in range(blocks):
        attention = max(1.0, cap * radius * cap * radius) * 3 * cap * cap / 3
        feed_forward = cap * cap / 1.1289
        lipschitz *= (1 - share + share * attention) * (1 - share + share * feed_forward)
        radius *= (1 - share + share * cap * cap) * (1 - share + share * feed_forward)
    return lipschitz * cap


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0])
def test_the_published_formula(cap, blocks):
    # bounds of float32 weights exceed their norms by a few units of 1e-7
    assert 10 ** as_published.transformer(at_caps(cap, blocks)) == pytest.approx(published(cap, blocks), rel=1e-4)


def test_caps_are_those_at_which_the_formula_says_what_was_published():
    for bound, cap in shakespeare_best.CAPS.items():
        assert published(cap) <= bound < published(cap + 0.001)


@pytest.mark.slow
def test_the_formula_is_below_what_is_proved_and_what_is_proved_is_no_less_than_what_is_found():
    model = at_caps(1.0).eval()
    certificate = certify(model)
    found = wn.certificates.lower_bound(model, steps=10, generator=torch.Generator().manual_seed(0))
    assert found.value <= certificate.lipschitz
    assert as_published.transformer(model) < certificate.log10_lipschitz


def test_rates_are_masses_halved_for_every_residual_connection_that_follows():
    factors = rate_factors(blocks=3)
    assert factors["head"] == pytest.approx(1 / 34)
    assert factors["layers.5"] == pytest.approx(32 / 34 / 18)
    for i in range(5):
        assert factors[f"layers.{i + 1}"] == 2 * factors[f"layers.{i}"]
    assert factors["embedding"] == pytest.approx(1 / 34 / 64)


def test_a_step_of_muon_has_the_share_of_each_part():
    task = lt_task(SMALL, CPU)
    task.advance()  # of the head alone, which starts at zero
    start = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    task.advance()
    factors = rate_factors(SMALL.blocks)
    moved = {"head.weight": factors["head"], "layers.5.block.output.weight": factors["layers.5"]}
    for name, share in moved.items():
        size = float(wn.Spectral().norm(task.model.get_parameter(name).detach() - start[name]))
        # the rate has fallen by a quarter; the set of coefficients overshoots nothing and reaches 0.9955
        assert size == pytest.approx(0.75 * SMALL.lr * share, rel=0.02), name


@pytest.mark.parametrize("method", ["spectral normalization", "soft cap"])
def test_caps_hold_whole_matrices_and_vectors_of_the_embedding(method):
    task = lt_task(replace(SMALL, method=method, strength=1.2, lr=5.0), CPU)
    for _ in range(4):
        task.advance()
    for name, p in task.model.named_parameters():
        if name != "embedding.weight":
            assert float(wn.Spectral().upper_bound(p.detach())) <= 1.2, name
    assert float(task.model.embedding.weight.detach().square().mean(1).max()) <= 1


def test_muon_saves_what_lies_between_the_bounds_at_the_loss_of_adamw():
    def row(optimizer, bound, loss):
        config = {"optimizer": optimizer, "method": "weight decay", "seed": 0}
        return {"config": config, "results": {"loss": loss, "log10_proved": bound}}

    rows = [row("adamw", 3.0, 2.5), row("adamw", 5.0, 2.0), row("muon", 2.0, 2.2), row("muon", 4.0, 1.9)]
    assert shakespeare_tradeoff.saving(rows, "weight decay", "log10_proved", 0) == 1.0
    assert shakespeare_tradeoff.saving(rows[:3], "weight decay", "log10_proved", 0) == -math.inf
    assert shakespeare_tradeoff.saving(rows[:2], "weight decay", "log10_proved", 0) is None


def test_rates_and_gradients_of_nanogpt(text):
    model = _nanogpt.PlainGPT(len(text.symbols), 8, 8, 2, 1)
    task = _nanogpt.NanoGPTTask(model, text, steps=300, length=8, batch=2, seed=0)
    assert task.rate_factor(0) == pytest.approx(1 / 101)
    assert task.rate_factor(100) == pytest.approx(1.0)
    assert task.rate_factor(200) == pytest.approx(0.55)
    assert task.rate_factor(300) == pytest.approx(0.1)
    with torch.no_grad():
        model.tokens.weight *= 1000
    task.advance()
    size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(size) == pytest.approx(1.0, rel=1e-3)  # clipped, in float32


@torch.no_grad()
def test_scores_as_published_see_the_first_windows_alone(text):
    model, tokens = lt_model(SMALL, torch.Generator().manual_seed(0)).eval(), text.validation
    model.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    windows = [tokens[start : start + 9] for start in range(5)]
    logits = [model(w[None, :-1])[0] for w in windows]
    losses = [float(F.cross_entropy(x, w[1:])) for x, w in zip(logits, windows, strict=True)]
    right = [float((x.argmax(-1) == w[1:]).float().mean()) for x, w in zip(logits, windows, strict=True)]
    published = scores_as_published(model, tokens, 8, windows=5)
    assert published == pytest.approx((sum(losses) / 5, sum(right) / 5), rel=1e-5)  # float32 means of 40 numbers
    changed = tokens.clone()
    changed[13:] = 0
    assert scores_as_published(model, changed, 8, windows=5) == published


@pytest.mark.parametrize("library", ["Modula", "first Modula"])
def test_shares_of_modula(library):
    """As `hello-gpt` prints them, worked out by hand: 24 atoms share 5 of 7, eight residual connections."""
    factors = modula_gpt.shares(modula_gpt.config_of(Cell(library, 0, width=8)))
    query = "layers.0.block.query.0.weight" if library == "Modula" else "layers.0.block.query.weight"
    expected = {"embedding.weight": Fraction(1, 7), "head.weight": Fraction(1, 7), query: Fraction(5, 7)}
    expected |= {"layers.6.block.output.weight": Fraction(5, 21), "layers.1.block.input.weight": Fraction(5, 21)}
    if library == "first Modula":
        expected["position.weight"] = Fraction(1, 7)
    for name, share in expected.items():
        assert factors[name] == pytest.approx(float(share)), name


def test_the_forward_pass_of_the_first_modula(text):
    cell = Cell("first Modula", 0, steps=2, batch=2, length=6, width=8, blocks=1)
    model = modula_gpt.task_of(cell, CPU).model
    tokens = text.train[None, :6]

    def norm(x):
        x = x - x.mean(-1, keepdim=True)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    with torch.no_grad():
        x = 0.5 * model.embedding.weight[tokens] + 0.5 * model.position.weight[:6]
        attend, feed = model.layers[0].block[1], model.layers[1].block[1]
        heads = lambda part: (norm(x) @ part.weight.T).unflatten(-1, (4, 2)).transpose(1, 2) / 3  # noqa: E731
        q, k, v = (heads(part) for part in (attend.query, attend.key, attend.value))
        logits = (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        x = 0.5 * x + 0.5 * (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ attend.output.weight.T
        x = 0.5 * x + 0.5 * math.sqrt(2) * F.gelu(norm(x) @ feed.input.weight.T) @ feed.output.weight.T
        # layer norms have a floor of 1e-5 under the variance, which is about 1
        torch.testing.assert_close(model(tokens), norm(x) @ model.head.weight.T, rtol=1e-3, atol=1e-4)


def test_a_step_of_the_first_modula_has_the_norm_of_its_share():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(5, 4), "matrix": torch.nn.Linear(4, 6, bias=False)})
    norms = assign_norms(model, overrides={"matrix": wn.Spectral()})
    optimizer = NormalizedAdam(norms, {"table.weight": 0.5, "matrix.weight": 0.25}, lr=0.2, decay=0.0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    for _ in range(60):  # the power iteration settles: Adam's direction is that of the same gradient
        before = model["matrix"].weight.detach().clone()
        optimizer.step()
    size = float(wn.Spectral().norm(model["matrix"].weight.detach() - before))
    assert size == pytest.approx(0.2 * 0.25, rel=1e-3)
    torch.testing.assert_close(model["table"].weight.square().mean(1), torch.ones(5))
