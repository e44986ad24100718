"""Blocks of constant 1, and the model that is made of them: attacked, trained to break the bound, and forged."""

import dataclasses
import random

import pytest
import torch

import wellnormed as wn
from wellnormed.certificates import CheckError, certify, lower_bound, require_same_model, verify
from wellnormed.models import PotentialConfig, PotentialGPT
from wellnormed.nn import OrthogonalJoin, constraints_of

SMALL = PotentialConfig(
    vocabulary_size=5, length=6, token_width=4, mixing_heads=3, blocks=3, hidden=16, attention_heads=2,
    attention_blocks=2,
)  # fmt: skip


def with_weights(config: PotentialConfig, seed: int, size: float) -> PotentialGPT:
    """Weights pushed beyond or far below what the constraints allow, biases of both signs."""
    model = PotentialGPT(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=generator)
    return model


def constrained(config: PotentialConfig, lipschitz: float, lr: float = 0.05) -> tuple[PotentialGPT, wn.Scion]:
    """A model on its constraints, with a random head at its cap."""
    torch.manual_seed(0)
    model = PotentialGPT(config, torch.Generator().manual_seed(0))
    torch.nn.init.orthogonal_(model.head.weight, 1e6)
    optimizer = wn.Scion(model, lr=lr, recipe="modular")
    head = wn.HardCap(lipschitz / config.body_lipschitz)
    wn.constrain(optimizer, {**constraints_of(model), "head.weight": head})
    return model, optimizer


@pytest.mark.parametrize("seed", range(2))
def test_no_gain_of_a_random_model_exceeds_the_bound(seed):
    draw = random.Random(seed)
    config = PotentialConfig(
        vocabulary_size=5, length=draw.randint(1, 6), token_width=draw.choice([1, 2, 4]),
        mixing_heads=draw.choice([2, 4]), blocks=draw.randint(1, 2), hidden=draw.choice([1, 3, 16]),
        attention_blocks=draw.randint(0, 1), attention_heads=draw.choice([1, 2]),
        attention_share=draw.choice([0.0, 0.1, 0.9, 1.0]), attention_logit=draw.choice([0.1, 1.0, 5.0]),
    )  # fmt: skip
    model = with_weights(config, seed, draw.choice([0.2, 0.5, 1.5]))
    radius = 1.01 * float(model.embedding.weight.detach().square().mean(-1).sqrt().max())
    certificate = certify(model, radius=radius)
    found = lower_bound(certificate.program, radius=radius, steps=8, generator=torch.Generator().manual_seed(seed))
    assert 0 < found.value <= certificate.lipschitz
    verify(certificate, model.state_dict())


@pytest.mark.parametrize(("blocks", "lipschitz"), [(0, 1000.0), (2, 0.1)])
def test_the_certificate_is_what_was_asked_for(blocks, lipschitz):
    config = dataclasses.replace(SMALL, attention_blocks=blocks)
    certificate = certify(constrained(config, lipschitz)[0])
    # each of up to twelve weights aims 2e-5 below its norm, and those of attention enter twice
    assert 1 - 4e-4 <= certificate.rms_lipschitz / lipschitz <= 1


def test_a_model_that_is_trained_to_break_its_bound_does_not():
    """Weights, inputs and direction climb the gain together, under the constraints; it comes near and stays below."""
    model, optimizer = constrained(dataclasses.replace(SMALL, attention_blocks=1), 4.0)
    x = torch.randn(1, 6, 4, requires_grad=True)
    direction = torch.randn(1, 6, 4, requires_grad=True)
    inputs = torch.optim.Adam([x, direction], lr=0.05)

    def function(x_BTK):
        return model.head(model.layers(model.mixing(x_BTK)))

    def unit(vectors):
        return vectors / vectors.square().mean(-1, keepdim=True).sqrt()

    for _ in range(50):
        at = 0.5 * unit(x)
        moved = function(at + 0.1 * unit(direction)) - function(at)
        gain = moved.square().mean(-1).sqrt().amax() / 0.1
        inputs.zero_grad()
        optimizer.zero_grad()
        (-gain).backward()
        inputs.step()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.94
    certificate = certify(model)
    bound = certificate.rms_lipschitz
    assert bound <= 4.0
    found = lower_bound(certificate.program, steps=20, generator=torch.Generator().manual_seed(0)).rms_value
    assert max(float(gain.detach()), found) <= bound
    assert found > 0.6 * bound  # the attack is a real one


def test_a_weight_above_one_gives_a_constant_above_one():
    layer = wn.nn.ConvexPotential(4, 9, torch.Generator().manual_seed(0))
    torch.nn.init.orthogonal_(layer.weight, 1 + 1e-6)
    exact = 2 * float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) ** 2 - 1
    assert 1 < exact <= certify(layer, torch.zeros(4)).lipschitz <= exact + 1e-7


def test_a_join_takes_inputs_of_equal_width_alone():
    """Three entries beside one fill W as two beside two do, and the gain would be 1.16 where 0.95 is certified."""
    with pytest.raises(ValueError, match=r"shapes \(1, 5, 3\) and \(1, 5, 1\) must be the same; map one input"):
        OrthogonalJoin(2, 0.1)(torch.zeros(1, 5, 3), torch.zeros(1, 5, 1))


def test_a_forged_certificate_is_refused():
    model = with_weights(SMALL, 0, 0.5)
    model.mixing.before_1K.data *= 0.01
    certificate = certify(model, radius=9.0)
    rows = {row.name: row for row in certificate.rows}

    def forged(row, **change):
        rows = tuple(dataclasses.replace(row, **change) if each is row else each for each in certificate.rows)
        return dataclasses.replace(certificate, rows=rows)

    with pytest.raises(CheckError):
        verify(forged(rows["layers.5.sub"], constants={"factor": -2.0}), model.state_dict())

    # true proofs, but of another tensor and without a bias, are found where the model is read again
    by_norm = sorted((rows[f"layers.{number}.sub"] for number in (2, 5, 6)), key=lambda row: row.claims[0].values)
    exchanged = forged(by_norm[-1], claims=by_norm[0].claims[:1])
    verify(exchanged, model.state_dict())  # what it states is still true
    with pytest.raises(CheckError, match="differ in the claims of operation"):
        require_same_model(exchanged, model)


def test_a_model_with_a_zero_head_has_constant_zero_and_no_gain():
    model = PotentialGPT(dataclasses.replace(SMALL, attention_blocks=0), torch.Generator().manual_seed(0))
    certificate = certify(model)
    assert lower_bound(certificate.program, steps=2).value == 0.0
    assert certificate.with_lower_bound(0.0).lipschitz == 0.0
