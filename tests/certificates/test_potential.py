"""Blocks of constant 1, and the model that is made of them: attacked, trained to break the bound, and forged."""

import dataclasses
import random

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates import CheckError, certify, lower_bound, require_same_model, verify
from wellnormed.models import PotentialConfig, PotentialGPT
from wellnormed.nn import ConvexPotential, OrthogonalJoin, PositionMixing, constraints_of

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
        vocabulary_size=5,
        length=draw.randint(1, 6),
        token_width=draw.choice([1, 2, 4]),
        mixing_heads=draw.choice([2, 4]),
        blocks=draw.randint(1, 2),
        hidden=draw.choice([1, 3, 16]),
        attention_blocks=draw.randint(0, 1),
        attention_heads=draw.choice([1, 2]),
        attention_share=draw.choice([0.0, 0.1, 0.9, 1.0]),
        attention_logit=draw.choice([0.1, 1.0, 5.0]),
    )
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
    assert 1 - 4e-4 <= certificate.lipschitz / lipschitz <= 1


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
    bound = certificate.lipschitz
    assert bound <= 4.0
    found = lower_bound(certificate.program, steps=20, generator=torch.Generator().manual_seed(0)).value
    assert max(float(gain.detach()), found) <= bound
    assert found > 0.6 * bound  # the attack is a real one


def test_a_weight_above_one_gives_a_constant_above_one():
    layer = wn.nn.ConvexPotential(4, 9, torch.Generator().manual_seed(0))
    torch.nn.init.orthogonal_(layer.weight, 1 + 1e-6)
    exact = 2 * float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) ** 2 - 1
    assert 1 < exact <= certify(layer, torch.zeros(4)).lipschitz <= exact + 1e-7


class Fused(nn.Module):
    """A convex potential whose factor and difference are those of one `addmm`."""

    def __init__(self, **settings: float) -> None:
        super().__init__()
        self.layer, self.settings = ConvexPotential(4, 9, torch.Generator().manual_seed(0)), settings

    def forward(self, x):
        hidden = torch.relu(nn.functional.linear(x, self.layer.weight, self.layer.bias))
        return torch.addmm(x, hidden, self.layer.weight, **self.settings)


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({"alpha": -2}, (1, 1 + 1e-6)),
        ({"alpha": -1}, (1, 1 + 1e-6)),
        ({"alpha": 2}, (3, 3 + 1e-5)),
        ({"beta": -2}, (2, 4)),  # the factor of the other summand is no alpha
        ({"alpha": -2, "beta": 0.5}, (1.5, 3)),
        ({}, (2, 2 + 1e-5)),
    ],
)
def test_a_product_that_is_added_is_a_potential_where_it_is_subtracted(settings, bounds):
    model, x = Fused(**settings), torch.randn(7, 4)
    model.layer.bias.data.fill_(1.0)
    certificate = certify(model, x)
    assert bounds[0] <= certificate.lipschitz <= bounds[1]
    found = lower_bound(certificate.program, steps=20, generator=torch.Generator().manual_seed(0)).value
    assert found <= certificate.lipschitz
    verify(certificate, model.state_dict())


class Joined(nn.Module):
    """A join of the input and of what a map makes of it, or of a stored tensor."""

    def __init__(self, width: int, second: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.join = OrthogonalJoin(width, 0.1)
        self.second = second

    def forward(self, x):
        return self.join(x, self.second(x) if isinstance(self.second, nn.Module) else self.second)


def test_a_join_takes_inputs_of_equal_width_alone():
    """Three entries beside one fill W as two beside two do, and the gain would be 1.16 where 0.95 is certified."""
    model = Joined(2, nn.Linear(3, 1, bias=False))
    nn.init.zeros_(model.second.weight)
    with pytest.raises(ValueError, match=r"shapes \(1, 5, 3\) and \(1, 5, 1\) must be the same; map one input"):
        model(torch.zeros(1, 5, 3))


def tampered(layer: nn.Module, **attributes) -> nn.Module:
    """The layer with attributes that its own constructor would not give it."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("model", "least"),
    [
        # every entry with a gain of its own: RMS 1, and one entry is stretched by 1.41
        (tampered(PositionMixing(2, 2, 2), gain_H=nn.Parameter(torch.tensor([[2**0.5, 0.0]] * 2))), 2**0.5),
        (Joined(2, nn.Parameter(torch.ones(1, 2, 2))), 0.9),
        (tampered(Joined(2, nn.Identity()), join=tampered(OrthogonalJoin(2, 0.1), share=2)), None),
        (nn.Sequential(tampered(ConvexPotential(2, 3), _call_impl=lambda x: 9 * x)), 9),
    ],
    ids=["gains", "join of a stored tensor", "share", "call"],
)
def test_layers_that_were_changed_into_others_are_bounded_as_they_are_executed_or_refused(model, least):
    example = torch.zeros(1, 2, 2)
    if least is None:
        with pytest.raises(ValueError, match="Joined itself fails"):
            certify(model.eval(), example, radius=2.0)
        return
    certificate = certify(model.eval(), example, radius=2.0)
    found = lower_bound(model, example, 2.0, steps=15, generator=torch.Generator().manual_seed(0)).value
    assert 0.9 * least < found <= certificate.lipschitz


def test_a_forged_certificate_is_refused():
    """Proofs of another tensor, positive biases left out, a factor that is none: each fails."""
    model = with_weights(SMALL, 0, 0.5)
    model.mixing.before_1K.data *= 0.01
    certificate = certify(model, radius=9.0)
    rows = {row.name: row for row in certificate.rows}
    potential = rows["layers.5.sub"]

    def forged(row, **change):
        rows = tuple(dataclasses.replace(row, **change) if each is row else each for each in certificate.rows)
        return dataclasses.replace(certificate, rows=rows)

    spectral, positive = potential.claims
    lie = dataclasses.replace(spectral, values=(0.1,))
    quiet = dataclasses.replace(positive, values=(positive.values[0] / 2,))
    average = next(row for row in certificate.rows if row.operation == "average")
    join = rows["layers.1.join.linear"]
    for document in (
        forged(potential, claims=(lie, positive)),
        forged(potential, claims=(spectral, quiet)),
        forged(potential, claims=(positive, spectral)),
        forged(potential, constants={"factor": -2.0}),
        forged(join, claims=()),
        forged(join, inputs=()),
        forged(average, claims=()),
        forged(average, inputs=average.inputs[:1] * 2),
    ):
        with pytest.raises(CheckError):
            verify(document, model.state_dict())

    # true proofs, but of another tensor and without a bias, are found where the model is read again
    by_norm = sorted((rows[f"layers.{number}.sub"] for number in (2, 5, 6)), key=lambda row: row.claims[0].values)
    exchanged = forged(by_norm[-1], claims=by_norm[0].claims[:1])
    verify(exchanged, model.state_dict())  # what it states is still true
    with pytest.raises(CheckError, match="of the model uses"):
        require_same_model(exchanged, model)


def test_a_model_with_a_zero_head_has_constant_zero_and_no_gain():
    model = PotentialGPT(dataclasses.replace(SMALL, attention_blocks=0), torch.Generator().manual_seed(0))
    certificate = certify(model)
    assert lower_bound(certificate.program, steps=2).value == 0.0
    assert certificate.with_lower_bound(0.0).lipschitz == 0.0
