"""Definition 5 of Modular Duality, measured: trees of real models bound what their Jacobians do.

Weights and inputs lie in their unit balls. |y| is the largest RMS of a token's (a sample's, a pixel's) vector.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import wellnormed as wn
from wellnormed.certificates import traced_tree
from wellnormed.models import GPT, GPTConfig
from wellnormed.models.gpt import Attention
from wellnormed.modular import NormedModule, modular_tree

SMALL = GPTConfig(
    vocabulary_size=7, length=5, width=8, heads=2, blocks=2, residual_strength=0.25, biases=False, logit_scale=3.0
)


def size(y: Tensor) -> float:
    channels = 1 if y.ndim == 4 else -1
    return float(y.square().mean(channels).sqrt().max())


def mlp(generator: torch.Generator) -> nn.Module:
    layers = [nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.ReLU(), wn.nn.Scale(0.3)]
    return nn.Sequential(*layers, nn.Linear(5, 3, bias=False), wn.nn.Scale(2.0))


def residual_network(generator: torch.Generator) -> nn.Module:
    def block(strength: float) -> nn.Module:
        return wn.nn.ConvexResidual(
            nn.Sequential(nn.Linear(4, 8, bias=False), wn.nn.ScaledGELU(), nn.Linear(8, 4, bias=False)), strength
        )

    return nn.Sequential(block(0.5), nn.Linear(4, 4, bias=False), block(0.25))


def attention(generator: torch.Generator) -> nn.Module:
    return Attention(SMALL)  # with a relative bias, a weight like any


def sharp_attention(generator: torch.Generator) -> nn.Module:
    return Attention(replace(SMALL, attention_scale=4.0, output_factor=0.5))


def cnn(generator: torch.Generator) -> nn.Module:
    first, second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 6, 2, stride=2, groups=2, bias=False)
    pools = nn.AvgPool2d(2), nn.Flatten()
    return nn.Sequential(first, nn.LeakyReLU(0.1), nn.MaxPool2d(2), second, *pools, nn.Linear(6, 2, bias=False))


def transformer(generator: torch.Generator) -> nn.Module:
    return nn.Sequential(*GPT(SMALL, generator).layers)


MODELS = {
    "mlp": (mlp, (2, 4)), "residual": (residual_network, (2, 4)), "attention": (attention, (2, 5, 8)),
    "sharp attention": (sharp_attention, (2, 5, 8)), "blocks": (transformer, (2, 5, 8)), "cnn": (cnn, (2, 3, 8, 8)),
}  # fmt: skip
EXACT = wn.Spectral(method="svd")


def exact(layer: nn.Module) -> dict[str, wn.norms.Norm]:
    """Oracles without Newton-Schulz, whose overshoot would leave the sphere."""
    if isinstance(layer, nn.Conv2d):
        return {"weight": wn.norms.SpectralConv(groups=layer.groups, inner=EXACT)}
    if isinstance(layer, wn.nn.HeadProjection):
        return {"weight": wn.norms.PerHead(layer.heads, EXACT)}
    return {"weight": EXACT} if isinstance(layer, nn.Linear) else {}


def in_the_unit_ball(
    model: nn.Module, generator: torch.Generator, inside: bool = False, describe=modular_tree
) -> tuple[nn.Module, NormedModule, dict[str, Tensor]]:
    """The model in float64, every weight on the unit sphere of its norm (or inside), and its tree."""
    model = model.double()
    overrides = {f"{name}.{leaf}": n for name, layer in model.named_modules() for leaf, n in exact(layer).items()}
    assignment = wn.assign_norms(model, overrides=overrides)
    for a in assignment:
        a.norm.initialize_(a.parameter.detach(), generator)
        if inside:
            a.parameter.detach().mul_(torch.rand((), generator=generator))
    return model, describe(model, assignment), {a.name: a.parameter.detach() for a in assignment}


def unit_input(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x / x.square().mean(1 if x.ndim == 4 else -1, keepdim=True).sqrt()


class Foreign(nn.Module):
    """What no rule describes: a `forward` of its own, a norm layer, attention of torch, a weight in two places."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=0.5, elementwise_affine=False)
        self.attend = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.shared, self.gain = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.norm(torch.nn.functional.gelu(self.shared(x)))
        h = h + 0.5 * (self.attend(h, h, h, need_weights=False)[0] - h)
        return self.shared(h * self.gain) * 3


def foreign(generator: torch.Generator) -> nn.Module:
    return Foreign()


def headed(generator: torch.Generator) -> nn.Module:
    return Attention(replace(SMALL, attention_scale=4.0, output_factor=0.5, relative_bias=False))


BY_RULES = {name: (*each, lambda shape: modular_tree) for name, each in MODELS.items()}
TRACED = {
    f"{make.__name__}, traced": (
        make,
        shape,
        lambda shape: lambda m, norms: traced_tree(m, torch.ones(shape).double(), norms),
    )
    for make, shape in (
        (mlp, (2, 4)),
        (residual_network, (2, 4)),
        (cnn, (2, 3, 8, 8)),
        (headed, (2, 5, 8)),
        (foreign, (2, 5, 8)),
    )
}


@pytest.mark.parametrize(
    ("make", "shape", "describe"), [*BY_RULES.values(), *TRACED.values()], ids=[*BY_RULES, *TRACED]
)
@pytest.mark.parametrize("seed", range(3))
def test_jacobian_in_the_weights_is_at_most_the_modular_norm(make, shape, describe, seed):
    generator = torch.Generator().manual_seed(seed)
    model, tree, weights = in_the_unit_ball(make(generator), generator, seed == 2, describe(shape))
    x = unit_input(shape, generator)

    def run(w: dict[str, Tensor]) -> Tensor:
        return functional_call(model, w, (x,))

    with sdpa_kernel(SDPBackend.MATH):
        y, pull = vjp(run, weights)
        for _ in range(4):
            # the steepest direction for some output, and a random one
            (g,) = pull(torch.randn(y.shape, generator=generator, dtype=y.dtype))
            noise = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in weights.items()}
            for dw in (tree.dualize(g), tree.dualize(noise), noise):
                change = jvp(run, (weights,), (dw,))[1]
                assert 0 < size(change) <= float(tree.norm(dw)) * (1 + 1e-5)  # Spectral.norm is an estimate


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_jacobian_in_the_inputs_is_at_most_the_sensitivity(make, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    model, tree, _ = in_the_unit_ball(make(generator), generator, inside=seed == 2)
    x = unit_input(shape, generator)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        for _ in range(8):
            dx = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            dx = dx / size(dx)
            assert 0 < size(jvp(model, (x,), (dx,))[1]) <= tree.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize(("make", "shape"), [MODELS["mlp"], MODELS["residual"]], ids=["mlp", "residual"])
def test_a_traced_tree_has_the_factors_of_the_rules(make, shape, generator):
    model = make(generator)
    ruled, traced = modular_tree(model), traced_tree(model, torch.ones(shape))
    assert traced.lr_factors() == pytest.approx(ruled.lr_factors())
    assert traced.sensitivity == pytest.approx(ruled.sensitivity)
    masses = {next(iter(ruled.lr_factors())): 3.0}
    assert traced.with_masses(masses).lr_factors() == pytest.approx(ruled.with_masses(masses).lr_factors())


class Unused(Foreign):
    def forward(self, x):
        return self.norm(self.shared(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(8, 8), wn.nn.ConvexPotential(8, 8)), r"1\.weight moves the result of convex_"),
        (attention(torch.Generator()), r"a step of attend\.bias_HT moves the result is not known"),
        (Unused(), r"a step of gain, attend\.in_proj_weight, .* does not depend on it; freeze it"),
    ],
)  # fmt: skip
def test_what_moves_the_result_by_an_unknown_amount_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        traced_tree(model, torch.ones(2, 5, 8))


def test_a_tree_that_hardly_moves_a_weight_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.warns(UserWarning, match=r"what follows 0\.weight is 1e\+05, so that it moves 1e\+05 times less"):
        tree = traced_tree(model, torch.ones(2, 8))
    assert tree.sensitivity == pytest.approx(1e5, rel=1e-4)


def test_the_bounds_are_attained():
    """Identity weights in a row and an aligned step: no smaller modular norm and sensitivity would be sound."""
    model = nn.Sequential(
        nn.Linear(3, 3, bias=False), wn.nn.ConvexResidual(nn.Linear(3, 3, bias=False), 0.25), wn.nn.Scale(0.5)
    )
    model = model.double()
    assignment = wn.assign_norms(model, overrides={"*": wn.Spectral(method="svd")})
    for a in assignment:
        a.parameter.data.copy_(torch.eye(3))
    tree = modular_tree(model, assignment).with_masses({"0": 3.0})
    weights = {a.name: a.parameter.detach() for a in assignment}
    dw = tree.dualize(weights)
    x = torch.ones(1, 3, dtype=torch.float64)
    change = jvp(lambda w: functional_call(model, w, (x,)), (weights,), (dw,))[1]
    # each layer moves the output by its share of the mass: 3/4 and 1/4
    assert size(change) == pytest.approx(1, rel=1e-12)
    assert float(tree.norm(dw)) == pytest.approx(1, rel=1e-6)
    first = {"0.weight": dw["0.weight"], "1.block.weight": torch.zeros(3, 3, dtype=torch.float64)}
    assert size(jvp(lambda w: functional_call(model, w, (x,)), (weights,), (first,))[1]) == pytest.approx(0.75)
    with torch.no_grad():
        assert size(jvp(model, (x,), (x,))[1]) == pytest.approx(tree.sensitivity) == pytest.approx(0.5)


def test_every_branch_of_attention_attains_its_bound():
    """Two tokens, one entry: the second token weighs values 1 and -1 equally, then any branch tips the balance."""
    sharpness = 3.0
    layer = wn.nn.CausalAttention(heads=1, scale=sharpness, length=2, relative_bias=True).double()
    names = {name: wn.modular.Atom(name, wn.Sign()) for name in ("query", "key", "value", "bias")}
    tree = wn.modular.attention(names["query"], names["key"], names["value"], sharpness, names["bias"])
    zero, one = torch.zeros(1, 1, 2, 1, dtype=torch.float64), torch.ones(1, 1, 2, 1, dtype=torch.float64)
    opposite = torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(1, 1, 2, 1)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return functional_call(layer, {"bias_HT": bias.reshape(1, 2)}, (query, key, value))

    cases = {  # where to stand, and which way to move
        "query": ((zero, opposite, opposite, zero), one),
        "key": ((one, zero, opposite, zero), opposite),
        "value": ((zero, zero, zero, zero), one),
        "bias": ((zero, zero, opposite, zero), opposite),
    }
    stretch = {}
    with sdpa_kernel(SDPBackend.MATH):
        for i, (name, (at, direction)) in enumerate(cases.items()):
            change = jvp(run, at, tuple(direction if i == j else zero for j in range(4)))[1]
            stretch[name] = float(change[0, 0, 1].abs())
    assert stretch == pytest.approx({place.name: place.downstream for place in tree.places()})
    assert stretch == pytest.approx({"query": 3, "key": 3, "value": 1, "bias": 1})


def test_embeddings_and_positions_move_the_stream_by_their_shares(generator):
    """Tokens and positions see no continuous input, so only definition 5's first half speaks of them."""
    model, tree, weights = in_the_unit_ball(GPT(SMALL, generator), generator)
    tokens = torch.randint(7, (2, 5), generator=generator)
    with sdpa_kernel(SDPBackend.MATH):
        y, pull = vjp(lambda w: functional_call(model, w, (tokens,)), weights)
        (g,) = pull(torch.randn(y.shape, generator=generator, dtype=y.dtype))
        dw = tree.dualize(g)
        change = jvp(lambda w: functional_call(model, w, (tokens,)), (weights,), (dw,))[1]
    assert 0 < size(change) <= float(tree.norm(dw)) * (1 + 1e-5)  # Spectral.norm is an estimate


def test_max_pooling_stretches_by_the_root_of_the_window():
    """Channels that peak at different pixels: a change of RMS 1/2 in each pixel comes out with RMS 1."""
    pool = nn.MaxPool2d(2)
    x = torch.zeros(1, 4, 2, 2)
    x[0, range(4), [0, 0, 1, 1], [0, 1, 0, 1]] = 1.0
    sensitivity = modular_tree(pool).sensitivity
    per_pixel = x.square().mean(1).sqrt().max()
    out = jvp(pool, (x,), (x,))[1].square().mean(1).sqrt().max()
    assert float(out / per_pixel) == pytest.approx(sensitivity) == pytest.approx(2)


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Hardtanh(), nn.Softplus(), nn.Softsign(), nn.LogSigmoid(), nn.Sigmoid(),
    nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.1), nn.LeakyReLU(-1.5), nn.ELU(0.5), nn.ELU(2.0),
    wn.nn.ScaledGELU(),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
def test_slope_of_every_activation_is_its_sensitivity_and_hardly_less(layer):
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    slope = float(jvp(layer, (x,), (torch.ones_like(x),))[1].abs().max())
    sensitivity = modular_tree(layer).sensitivity
    assert sensitivity * (1 - 1e-4) <= slope <= sensitivity * (1 + 1e-12)  # the grid may miss the steepest point


def test_sensitivity_is_not_forward_scale():
    """A factor of the model changes its output and its sensitivity; an estimate of sensitivity, no output at all."""
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    weight = torch.eye(2)

    class Estimated(nn.Module):
        """Tells the tree whatever sensitivity it is told; its forward pass does not know it."""

        def __init__(self, sensitivity: float) -> None:
            super().__init__()
            self.sensitivity = sensitivity

        def modular_tree(self, builder) -> NormedModule:
            return wn.modular.Bond("estimated", self.sensitivity)

        def forward(self, x: Tensor) -> Tensor:
            return x

    def build(last: nn.Module) -> tuple[Tensor, NormedModule]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), last)
        model[0].weight.data.copy_(weight)
        return model(x), modular_tree(model)

    plain, tree = build(Estimated(1.0))
    estimated, estimated_tree = build(Estimated(8.0))
    multiplied, multiplied_tree = build(wn.nn.Scale(8.0))
    assert torch.equal(plain, estimated)
    assert torch.equal(8 * plain, multiplied)
    assert (tree.sensitivity, estimated_tree.sensitivity, multiplied_tree.sensitivity) == (1, 8, 8)
    # both make the weight move an eighth as far
    assert estimated_tree.lr_factors() == multiplied_tree.lr_factors() == {"0.weight": 1 / 8}
