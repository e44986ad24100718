import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn
from papers.lipsformer import (
    CenterNorm,
    CosineAttention,
    LearnedResidual,
    LipsFormer,
    LipsFormerConfig,
    lipsformer_bound_as_published,
)
from papers.peers import ModulaConfig, SpeedrunConfig
from wellnormed.models import GPTConfig, NanoGPTConfig, build, export, load

SIZES = {"vocabulary_size": 11, "length": 5, "width": 16, "heads": 2, "blocks": 2}
CONFIGS = {
    "speedrun": SpeedrunConfig(without_attention=1, **SIZES),
    "nanogpt": NanoGPTConfig(**SIZES),
    "modula": ModulaConfig(**SIZES),
    "lipsformer": LipsFormerConfig(**SIZES),
}
every_model = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
every_transformer = pytest.mark.parametrize("config", [*CONFIGS.values(), GPTConfig(**SIZES)], ids=[*CONFIGS, "gpt"])
SPEEDRUN = CONFIGS["speedrun"]


def moved(config, generator):
    """A model in evaluation mode with no parameter where it starts."""
    model = build(config, generator).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@every_transformer
def test_no_token_sees_the_future(config, generator):
    model = moved(config, generator)
    tokens = torch.randint(11, (2, 5), generator=generator)
    changed = tokens.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 11
    logits, others = model(tokens), model(changed)
    assert logits.shape == (2, 5, 11)
    torch.testing.assert_close(logits[:, :3], others[:, :3])
    assert not torch.allclose(logits[:, 3:], others[:, 3:])


@every_transformer
def test_earlier_tokens_are_seen_in_their_order(config, generator):
    model = moved(config, generator)
    logits = model(torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1], rtol=1e-4)


@every_transformer
def test_the_generator_decides_the_weights(config):
    first, second, other = (build(config, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_weights_return_from_a_folder(generator, tmp_path):
    model = moved(replace(SPEEDRUN, blocks=1), generator)
    loaded = load(export(model, tmp_path / "model", certificate=False, onnx=False))
    tokens = torch.randint(11, (3, 5), generator=generator)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


@every_model
@pytest.mark.parametrize("optimizer", [wn.Scion, wn.Muon])
def test_every_parameter_has_a_norm_and_the_loss_falls(config, optimizer, generator):
    model = build(replace(config, drop_path=0.0) if config.architecture == "lipsformer" else config, generator)
    norms = wn.assign_norms(model)
    kinds = {a.name: type(a.norm).__name__ for a in norms}
    for name, parameter in model.named_parameters():
        table = name.startswith(("embedding", "tables"))
        vector = "BiasRMS" if name.endswith("bias") else "Gain"
        assert kinds[name] == ("ColNorm" if table else "Spectral" if parameter.ndim == 2 else vector)
    tokens = torch.randint(11, (4, 6), generator=generator)
    steps, losses = optimizer(model, lr=0.01), []
    for _ in range(5):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("config", [SPEEDRUN, CONFIGS["modula"], CONFIGS["lipsformer"]])
def test_the_certificate_holds_against_a_search(config, generator):
    model = moved(replace(config, blocks=1, length=3), generator)
    certificate = wn.certify(model, radius=2.5)
    found = wn.lower_bound(certificate.program, radius=2.5, steps=4, generator=generator)
    assert 0 < found.value <= certificate.lipschitz
    # normed queries and keys bound every logit, whatever the weights
    largest = {"speedrun": 0.12 * 8, "modula": 1.0, "lipsformer": 12.0}[config.architecture]
    assert certificate.largest_logit == pytest.approx(largest, rel=1e-6)
    if isinstance(model, LipsFormer):
        # which multiplies by the number of tokens, and does not ask whether it holds for several heads
        assert certificate.rms_lipschitz.log10 < lipsformer_bound_as_published(model) - 2


# the speedrun and LT's baselines


def stream(model, tokens):
    """What leaves the last block, and the first activation."""
    kept = []
    handle = model.blocks[-1].register_forward_hook(lambda block, inputs, output: kept.extend([output, inputs[1]]))
    model(tokens)
    handle.remove()
    return kept


def set_numbers(sums, values):
    with torch.no_grad():
        for part, numbers in zip(sums, values, strict=True):
            part.weight.copy_(torch.tensor(numbers))


@pytest.mark.parametrize("blocks", [4, 5])
def test_blocks_after_the_middle_get_what_left_those_before_it(blocks, generator):
    model = build(replace(SPEEDRUN, blocks=blocks), generator)  # its branches start at zero
    mixes = [(0.9, 0.1), (0.8, 0.3), (1.1, -0.2), (0.7, 0.5), (1.2, 0.4)][:blocks]
    set_numbers([block.mix for block in model.blocks], mixes)
    set_numbers(model.skips, [(0.5,), (2.0,)])
    outputs, expected = [], 1.0
    for number, (a, b) in enumerate(mixes):
        if number == blocks - 2:
            expected += 0.5 * outputs[1]
        if number == blocks - 1:
            expected += 2.0 * outputs[0]
        expected = a * expected + b
        outputs.append(expected)
    last, first = stream(model, torch.randint(11, (2, 5), generator=generator))
    torch.testing.assert_close(last, expected * first)


def test_tables_reach_the_values_of_the_first_and_last_blocks(generator):
    model = moved(replace(SPEEDRUN, blocks=8, without_attention=4), generator)
    assert len(model.tables) == 3
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[2]))
    tokens = torch.randint(11, (2, 5), generator=generator)
    model(tokens)
    for number, values in enumerate(seen):
        table = {0: 0, 1: 1, 2: 2, 5: 0, 6: 1, 7: 2}.get(number)
        assert values is None if table is None else torch.equal(values, model.tables[table](tokens))
    assert [block.attention is None for block in model.blocks] == [number == 4 for number in range(8)]


def test_attention_of_the_speedrun_is_its_formula(generator):
    block = moved(SPEEDRUN, generator).blocks[0]
    attend = block.attention
    x, table = torch.randn(2, 1, 5, 16, generator=generator)
    q, k, v = (part(x).view(5, 2, 8).transpose(0, 1) for part in (attend.query, attend.key, attend.value))
    q, k = (attend.rotary(F.rms_norm(part, (8,))[None])[0] for part in (q, k))
    own, other = attend.mix.weight
    v = own * v + other * table.view(5, 2, 8).transpose(0, 1)
    logits = (0.12 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = attend.output((logits.softmax(-1) @ v).transpose(0, 1).reshape(1, 5, 16))
    torch.testing.assert_close(attend(x, table), expected)


def test_the_stream_of_modula_stays_in_its_ball(generator):
    model = build(replace(CONFIGS["modula"], blocks=3), generator)
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, output: sizes.append(output.square().mean(-1).max().item()))
    tokens = torch.randint(11, (8, 5), generator=generator)
    for _ in range(2):
        model(tokens)
        # from its own start, and with all matrices of norm 1: a layer of size at most 1 does not grow the stream
        wn.initialize_(model, generator=generator)
    assert max(sizes) <= 1 + 1e-6


def test_branches_of_modula_have_the_share_of_their_number(generator):
    convex = moved(CONFIGS["modula"], generator)
    assert [(block.kept, block.added) for block in convex.blocks] == [(0.75, 0.25)] * 2
    block, x = convex.blocks[0], torch.randn(2, 5, 16, generator=generator)
    after = 0.75 * x + 0.25 * block.attention(F.rms_norm(x, (16,)))
    torch.testing.assert_close(
        block(x), 0.75 * after + 0.25 * block.feed_forward(F.rms_norm(after, (16,))), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        # four tables and a head of 50,304 vectors, 11 layers of attention, 12 feed-forward layers, 52 learned numbers;
        # the record pads its head alone, and has 275,598,388
        (SpeedrunConfig, 275_742_772),
        (NanoGPTConfig, 162_201_600),
        (ModulaConfig, 162_201_600),
    ],
)
def test_parameters_at_full_size(kind, count):
    with torch.device("meta"):
        model = build(kind())
    assert sum(p.numel() for p in model.parameters()) == count
    if kind is SpeedrunConfig:
        padding = 4 * (50304 - 50257) * 768
        assert count - padding == 275_598_388
        assert [block.attention is None for block in model.blocks].index(True) == 7


@pytest.mark.parametrize("kind", [NanoGPTConfig, LipsFormerConfig])
def test_widths_that_rotary_positions_cannot_turn_are_refused(kind):
    with pytest.raises(ValueError, match=r"width=12 must be a multiple of 4 x heads=2"):
        build(kind(width=12, heads=2))


# LipsFormer


def test_center_norm_is_its_formula(generator):
    layer, x = CenterNorm(7), torch.randn(3, 7, generator=generator)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)
    projection = torch.eye(7) - torch.full((7, 7), 1 / 7)
    torch.testing.assert_close(layer(x), 7 / 6 * (x @ projection) * layer.weight + layer.bias)


def test_cosine_attention_is_its_formula(generator):
    config = replace(CONFIGS["lipsformer"], epsilon=0.5, value_scale=2.0)
    layer, x = CosineAttention(config), torch.randn(1, 5, 16, generator=generator)
    q, k, v = (part(x).view(5, 2, 8).transpose(0, 1) for part in (layer.query, layer.key, layer.value))
    q, k, v = (part / (part.square().sum(-1, keepdim=True) + 0.5).sqrt() for part in (q, k, v))
    q, k = (layer.rotary(part[None])[0] for part in (q, k))
    logits = (12 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    heads = 2.0 * (logits.softmax(-1) @ v) / 2
    torch.testing.assert_close(layer(x), layer.output(heads.transpose(0, 1).reshape(1, 5, 16)))


def test_matrices_start_with_spectral_norm_one_and_strengths_at_one_over_their_number(generator):
    model = LipsFormer(CONFIGS["lipsformer"], generator)
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(matrices) == 13
    for matrix in matrices:
        assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1, rel=1e-5)
    assert all(bool((layer.strength == 1 / 4).all()) for layer in model.layers)
    rms = model.embedding.weight.square().mean(-1)
    torch.testing.assert_close(rms, torch.ones(11))


def test_training_drops_branches_of_samples_and_keeps_their_expectation():
    layer, x = LearnedResidual(nn.Identity(), 3, 0.5, drop_path=0.75), torch.ones(40_000, 2, 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = layer.train()(x)
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))  # whole samples
    assert set(dropped.unique().tolist()) == {1.0, 1.0 + 0.5 / 0.25}
    # the mean of 40,000 draws of 2 with probability 1/4: five standard deviations
    assert dropped.mean().item() == pytest.approx(1.5, abs=5 * 2 * math.sqrt(0.25 * 0.75 / 40_000))
    assert torch.equal(layer.eval()(x), torch.full_like(x, 1.5))


@pytest.mark.parametrize("drop_path", [-0.1, 1.0])
def test_probabilities_of_dropping_all_are_refused(drop_path):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
        LearnedResidual(nn.Identity(), 3, 0.5, drop_path)


def test_the_published_bound_is_theorem_1_in_equation_19(generator):
    model = moved(CONFIGS["lipsformer"], generator)
    logarithm = 0.0
    for residual in model.layers:
        layer, alpha = residual.block[1], residual.strength.abs().max().item()
        norms = {name: torch.linalg.matrix_norm(p, 2).item() for name, p in layer.named_parameters()}
        if isinstance(layer, CosineAttention):
            q, k, v = (norms[f"{name}.weight"] for name in ("query", "key", "value"))
            # 2 N (N - 1) nu tau / sqrt(eps) |K| + 2 (N - 1) nu tau / sqrt(eps) |Q| + 2 N nu / sqrt(eps) |V|
            constant = (2 * 128 * 127 * 12 * k + 2 * 127 * 12 * q + 2 * 128 * v) * 1e3
        else:
            constant = norms["input.weight"] * norms["output.weight"]
        logarithm += math.log10(1 + alpha * constant)
    assert lipsformer_bound_as_published(model) == pytest.approx(logarithm, rel=1e-5)
    # with the tokens of the paper in the place of the entries of a head: 64 times larger in each of two layers
    assert lipsformer_bound_as_published(model, tokens=1024) - logarithm == pytest.approx(
        2 * math.log10(64.5), abs=0.01
    )
