"""Layers do what their formula says and never stretch more than they promise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import wellnormed as wn
from wellnormed.nn.activation import GELU_MAX_SLOPE


def test_gelu_slope_is_bounded_where_the_published_constant_is_not():
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(x).sum(), x)
    assert float(slope.amax()) / 1.1289 > 1  # as published: rounded down, not 1-Lipschitz
    assert float(slope.amax()) / GELU_MAX_SLOPE <= 1
    assert float(slope.amax()) / GELU_MAX_SLOPE > 1 - 1e-9  # and hardly more than needed


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0, 100.0])
def test_scaled_gelu_is_1_lipschitz_at_every_sharpness(sharpness):
    x = torch.linspace(-6 / sharpness, 6 / sharpness, 20_001, dtype=torch.float64).requires_grad_()
    y = wn.nn.ScaledGELU(sharpness)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert float(slope.abs().amax()) <= 1
    assert bool((y.abs() <= x.abs()).all())


@pytest.mark.parametrize(("dim", "shape"), [(-1, (2, 6)), (-1, (2, 3, 4)), (1, (2, 4, 3, 3))])
def test_maxmin_orders_pairs_by_a_permutation_also_of_equal_entries(dim, shape):
    layer = wn.nn.MaxMin(dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    larger, lesser = layer(x).chunk(2, dim)
    assert bool((larger >= lesser).all())
    torch.testing.assert_close(layer(x).sort(dim).values, x.sort(dim).values, rtol=0, atol=0)
    for point in (x, torch.zeros(shape)):
        jacobian = torch.func.jacrev(layer)(point).reshape(x.numel(), x.numel())
        torch.testing.assert_close(jacobian @ jacobian.mT, torch.eye(x.numel()), rtol=0, atol=0)
    # beside 1, the certificate has a margin for the rounding of sums of products, one for each entry
    assert wn.certify(layer, x).lipschitz == pytest.approx(1, abs=1e-13)
    assert wn.lower_bound(layer, x, steps=10).value == pytest.approx(1, rel=1e-4)  # float64 at finite distances


@given(scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e15]), width=st.integers(1, 9))
def test_ball_projection_is_the_nearest_point(scale, width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * scale
    y = wn.nn.BallProjection(0.7)(x)
    size = y.square().mean(-1).sqrt()
    assert bool((size <= 0.7 * (1 + 1e-6)).all())  # float32
    inside = x.square().mean(-1).sqrt() <= 0.7
    assert torch.equal(y[inside], x[inside])
    assert bool(y.isfinite().all())


def test_ball_projection_has_finite_gradients_everywhere():
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 0.0]], requires_grad=True)
    wn.nn.BallProjection(1.0)(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def jacobian_norm(layer, x):
    jacobian = torch.func.jacrev(lambda each: layer(each[None])[0])(x)
    return float(torch.linalg.matrix_norm(jacobian.detach(), 2))


@pytest.mark.parametrize("size", [0.5, 1.0, 1.1])
@pytest.mark.parametrize(("width", "hidden"), [(4, 9), (9, 4), (6, 6)])
def test_a_convex_potential_has_the_constant_that_it_states(size, width, hidden):
    """max(1, 2 |W|^2 - 1), attained where all units are active or none; its Jacobian is symmetric."""
    torch.manual_seed(0)
    layer = wn.nn.ConvexPotential(width, hidden).double()
    torch.nn.init.orthogonal_(layer.weight, size)
    layer.bias.data.normal_()
    bound = max(1.0, 2 * size**2 - 1)
    for x in torch.randn(50, width, dtype=torch.float64):
        jacobian = torch.func.jacrev(lambda each: layer(each[None])[0])(x).detach()
        torch.testing.assert_close(jacobian, jacobian.mT, rtol=0, atol=1e-13)  # float64, sums of nine terms
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound * (1 + 1e-13)
    layer.bias.data.fill_(100.0)
    attained = 2 * size**2 - 1 if hidden >= width else bound
    assert jacobian_norm(layer, torch.zeros(width, dtype=torch.float64)) == pytest.approx(abs(attained), abs=1e-13)


def test_a_convex_potential_is_the_gradient_step_of_its_potential():
    """x - grad of sum relu(W x + b)^2."""
    torch.manual_seed(0)
    layer = wn.nn.ConvexPotential(4, 9).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((x @ layer.weight.mT + layer.bias).relu().square().sum(), x)
    torch.testing.assert_close(layer(x), x - gradient, rtol=1e-13, atol=1e-13)  # float64, two orders of summation


def test_position_mixing_is_its_formula():
    torch.manual_seed(0)
    layer = wn.nn.PositionAverages(7, 3, 4).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    shares = layer.logits_HT.softmax(-1)
    for i in range(5):
        for h in range(4):
            past = [x[:, i - d] if d <= i else layer.before_1K.expand(2, 3) for d in range(7)]
            mean = sum(shares[h, d] * past[d] for d in range(7))
            found = layer(x)[:, i, 3 * h : 3 * h + 3]
            torch.testing.assert_close(found, layer.gain_H[h] * mean, rtol=1e-13, atol=1e-13)  # float64, two ways


def test_position_mixing_is_causal_and_refuses_more_tokens_than_it_knows():
    layer = wn.nn.PositionAverages(6, 3, 8)
    x = torch.randn(1, 6, 3)
    changed = x.clone()
    changed[:, 4:] = 0
    assert torch.equal(layer(x)[:, :4], layer(changed)[:, :4])
    with pytest.raises(ValueError, match="7 tokens exceed the 6 distances"):
        layer(torch.zeros(1, 7, 3))


@pytest.mark.parametrize(("length", "heads"), [(64, 8), (3, 8), (256, 16), (1, 1)])
def test_position_mixing_starts_on_its_sphere_with_different_heads(length, heads):
    layer = wn.nn.PositionAverages(length, 2, heads)
    assert layer.gain_H.square().mean().item() == pytest.approx(1, rel=1e-6)  # float32
    shares = layer.logits_HT.detach().softmax(-1)
    near = min(6, length, heads)
    assert [int(row.argmax()) for row in shares[:near]] == list(range(near))
    assert float(shares[-1].max()) < 0.9 or length == 1 or heads <= 6


def test_layers_state_the_constraints_that_their_bounds_need():
    model = torch.nn.Sequential(
        wn.nn.CappedEmbedding(5, 4), wn.nn.PositionAverages(4, 4, 2), wn.nn.ConvexPotential(8, 9)
    )
    assert list(wn.nn.constraints_of(model)) == ["0.weight", "1.gain_H", "1.before_1K", "2.weight"]
    held = wn.constrain(wn.Scion(model), wn.nn.constraints_of(model))
    assert all(ratio <= 1 for ratio in held.proved_ratios().values())


def test_layers_that_share_a_weight_share_its_constraint():
    first, second = wn.nn.ConvexPotential(4, 9), wn.nn.ConvexPotential(4, 9)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    held = wn.constrain(wn.Scion(model), wn.nn.constraints_of(model))
    assert held.names == ["0.weight"]
    assert (
        1 <= wn.certify(model, torch.zeros(4)).lipschitz <= 1 + 1e-6
    )  # float32 rounding of the weight is in the proof


def reference_attention(layer, q, k, v):
    """The readable version: softmax over the past, row by row."""
    tokens, entries = q.shape[-2:]
    logits = layer.scale / entries * q @ k.mT
    for i in range(tokens):
        for j in range(tokens):
            if layer.bias_HT is not None:
                logits[..., i, j] += layer.bias_HT[:, max(i - j, 0)]
            if j > i:
                logits[..., i, j] = float("-inf")
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("relative_bias", [False, True])
def test_attention_equals_its_formula(relative_bias, generator):
    layer = wn.nn.CausalAttention(heads=2, scale=3.0, length=6, relative_bias=relative_bias)
    if layer.bias_HT is not None:
        layer.bias_HT.data.normal_(generator=generator)
    q, k, v = (torch.randn(3, 2, 5, 4, generator=generator) for _ in range(3))
    torch.testing.assert_close(layer(q, k, v), reference_attention(layer, q, k, v))


def test_rotary_is_multiplication_by_complex_numbers_of_modulus_one(generator):
    x = torch.randn(2, 3, 7, 6, generator=generator, dtype=torch.float64)
    turned = wn.nn.Rotary(6, base=100.0)(x)
    angle = torch.arange(7.0)[:, None] * 100.0 ** (-torch.arange(3.0) / 3)
    expected = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
    # the layer computes angles in float32: up to 6 radians, hence errors of some 1e-7
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)


def test_half_rotary_turns_the_first_half_of_the_pairs(generator):
    x = torch.randn(2, 3, 7, 12, generator=generator, dtype=torch.float64)
    turned = wn.nn.HalfRotary(12)(x)
    angle = torch.arange(7.0)[:, None] * torch.tensor([1.0, 1 / 32, 1 / 1024, 0, 0, 0])
    expected = torch.complex(x[..., :6], x[..., 6:]) * torch.polar(torch.ones_like(angle), angle)
    # the layer computes angles in float32, as above
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-5)
    assert torch.equal(turned[..., 3:6], x[..., 3:6])
    assert torch.equal(turned[..., 9:], x[..., 9:])


def test_projections_and_merge_are_inverse_in_shape(generator):
    project = wn.nn.HeadProjection(8, 2)
    x = torch.randn(3, 5, 8, generator=generator)
    heads = project(x)
    assert heads.shape == (3, 2, 5, 4)
    torch.testing.assert_close(wn.nn.MergeHeads()(heads), x @ project.weight.T)
    torch.testing.assert_close(heads[:, 1], x @ project.weight[4:].T)


def test_a_plain_residual_adds_1_to_the_constant_of_its_block():
    block = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(block.weight)
    layer = wn.nn.Residual(block).eval()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), x + block(x))
    # 2 is attained by the identity; a norm is proved with a slack of 1e-9
    assert wn.certify(layer, x).lipschitz == pytest.approx(2.0, rel=1e-8)


def test_residual_and_mix_are_convex():
    x = torch.ones(2, 3, 4)
    block = wn.nn.ConvexResidual(wn.nn.Scale(0.0), 0.25)
    torch.testing.assert_close(block(x), 0.75 * x)
    mix = wn.nn.PositionEmbedding(3, 4, token_share=0.75)
    torch.testing.assert_close(mix(x), 0.75 * x + 0.25 * mix.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: wn.nn.PositionAverages(0, 4, 3),
            "PositionAverages: length=0 must be positive.*; pass 1 or more",
        ),
        (lambda: wn.nn.ConvexPotential(-1, 3), "ConvexPotential: width=-1 must be positive and finite; pass 1 or more"),
        (lambda: wn.nn.ConvexPotential(3, 0), "ConvexPotential: hidden=0 must be positive and finite; pass 1 or more"),
        (lambda: wn.nn.OrthogonalJoin("a", 1), "OrthogonalJoin: width='a' is of type str; pass a whole number"),
        (lambda: wn.nn.OrthogonalJoin(0, 0.5), "OrthogonalJoin: width=0 must be positive and finite; pass 1 or more"),
        (lambda: wn.nn.OrthogonalJoin(2, None), "OrthogonalJoin: share=None is of type NoneType; pass a number"),
        (lambda: wn.nn.OrthogonalJoin(2, 1.5), r"OrthogonalJoin: share=1.5 must lie in \[0, 1\].*; 0 leaves"),
        (lambda: wn.nn.constraints_of("model"), "constraints_of: model is of type str; pass the model itself"),
        (lambda: wn.nn.ScaledGELU(0.0), "sharpness=0.0"),
        (lambda: wn.nn.MaxMin(0.5), "MaxMin: dim=0.5 is of type float; pass a whole number"),
        (lambda: wn.nn.MaxMin()(torch.zeros(3)), "MaxMin: 3 features along dim=-1 make no pairs; use an even number"),
        (lambda: wn.nn.BallProjection(-1.0), "radius=-1.0"),
        (lambda: wn.nn.ConvexResidual(wn.nn.Scale(1.0), 1.5), "strength=1.5"),
        (lambda: wn.nn.Scale(float("nan")), "factor=nan"),
        (lambda: wn.nn.FlooredNorm(8, 0.0), "FlooredNorm: floor=0.0 must be positive"),
        (lambda: wn.nn.HeadProjection(8, 0), "HeadProjection: heads=0 must be positive and finite; pass 1 or more"),
        (lambda: wn.nn.CausalAttention(0), "CausalAttention: heads=0 must be positive"),
        (lambda: wn.nn.CappedEmbedding(0, 4), "CappedEmbedding: symbols=0 must be positive"),
        (lambda: wn.nn.PositionEmbedding(4, 0), "PositionEmbedding: width=0 must be positive"),
        (lambda: wn.nn.HeadProjection(8, 3), "heads=3"),
        (lambda: wn.nn.Rotary(3), "entries=3"),
        (lambda: wn.nn.Rotary(4, base=0.0), "base=0.0"),
        (lambda: wn.nn.HalfRotary(6), "entries=6"),
        (lambda: wn.nn.CausalAttention(2, relative_bias=True), "length=0"),
        (lambda: wn.nn.CausalAttention(2, scale=-1.0), "scale=-1.0"),
        (lambda: wn.nn.PositionEmbedding(4, 4, token_share=0.0), "token_share=0.0"),
        (lambda: wn.nn.PositionEmbedding(2, 4)(torch.zeros(3, 4)), "3 tokens exceed"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("sizes", [5, (3, 4)])
def test_a_floored_norm_is_a_norm_layer_above_its_floor_and_linear_below(sizes, centred):
    torch.manual_seed(0)
    layer = wn.nn.FlooredNorm(sizes, 0.1, centred).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    shape = layer.normalized_shape
    x = torch.randn(20, *shape, dtype=torch.float64)
    normal = F.layer_norm(x, shape, layer.weight, layer.bias, 0.0)
    expected = normal if centred else F.rms_norm(x, shape, layer.weight, 0.0) + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)  # float64, two ways
    small = 1e-3 * x
    flat = small - centred * small.mean(layer.axes, keepdim=True)
    torch.testing.assert_close(layer(small), layer.weight * flat / 0.1 + layer.bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("centred", [True, False])
def test_a_floored_norm_stretches_by_the_reciprocal_of_its_floor_and_by_no_more(centred):
    layer = wn.nn.FlooredNorm(6, 0.3, centred, elementwise_affine=False).double()
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(6, dtype=torch.float64, generator=generator) * 10.0**k for k in range(-4, 3)]
    gains = [jacobian_norm(layer, x) for x in points]
    assert max(gains) == pytest.approx(1 / 0.3, rel=1e-12)
    proved = wn.certify(layer, torch.zeros(1, 6, dtype=torch.float64)).lipschitz
    assert 1 / 0.3 <= proved < 1.001 / 0.3


def test_torchs_fused_encoder_layer_does_not_pass_by_a_floored_norm():
    """In evaluation without gradients it reads eps and weights of its norm layers in the place of calling them."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layer.norm1, layer.norm2 = wn.nn.FlooredNorm(8, 3.0), wn.nn.FlooredNorm(8, 3.0)
    x = torch.randn(2, 3, 8)
    expected = layer(x)
    with torch.inference_mode():
        torch.testing.assert_close(layer.eval()(x), expected)
