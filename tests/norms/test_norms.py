"""Laws that every norm obeys, over one table of norms and nasty shapes and scales.

Every line of the table carries the norm's definition once more, written out for one weight in float64.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wellnormed as wn
from wellnormed.norms import BiasRMS, Euclidean, Experts, Gain, Norm, RowNorm, SpectralConv, Split, spectral

EXACT = wn.Spectral(method="svd")  # the oracle itself, without Newton-Schulz
Truth = Callable[[Tensor], Tensor]


def rms_to_rms(w: Tensor) -> Tensor:
    d_out, d_in = w.shape
    return math.sqrt(d_in / d_out) * torch.linalg.matrix_norm(w, 2)


def two_to_two(w: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(w, 2)


def over_parts(*sizes: int, dim: int = 0) -> Truth:
    return lambda w: torch.stack([rms_to_rms(part) for part in w.split(sizes, dim)]).amax()


def kernel(mode: str, groups: int = 1, transposed: bool = False) -> Truth:
    def truth(w: Tensor) -> Tensor:
        values = []
        for group in w.chunk(groups):
            one = group.transpose(0, 1) if transposed else group
            positions = one.flatten(2)
            count = positions.shape[-1]
            if mode == "positions":
                values += [count * rms_to_rms(positions[..., k]) for k in range(count)]
            else:
                channels = math.sqrt(one.shape[1] / one.shape[0])
                values.append(count * channels * torch.linalg.matrix_norm(positions.flatten(1), 2))
        return torch.stack(values).amax()

    return truth


def largest(w: Tensor) -> Tensor:
    return w.abs().amax()


def root_mean_square(w: Tensor) -> Tensor:
    return w.square().mean().sqrt()


TABLE: dict[str, tuple[Norm, tuple[int, ...], Truth]] = {
    "spectral tall": (EXACT, (12, 5), rms_to_rms),
    "spectral wide": (EXACT, (5, 12), rms_to_rms),
    "spectral row": (EXACT, (1, 7), rms_to_rms),
    "spectral column": (EXACT, (7, 1), rms_to_rms),
    "spectral number": (EXACT, (1, 1), rms_to_rms),
    "pixels, wide": (wn.Spectral(method="svd", units="pixels"), (5, 12), two_to_two),
    "pixels, tall": (wn.Spectral(method="svd", units="pixels"), (12, 5), rms_to_rms),
    "one-hot": (wn.Spectral(method="svd", units="one-hot"), (4, 7), lambda w: two_to_two(w) / 2),
    "one-hot, embedding": (
        wn.Spectral(method="svd", units="one-hot", input_axis=0),
        (7, 4),
        lambda w: two_to_two(w) / 2,
    ),
    "inputs first": (wn.Spectral(method="svd", input_axis=0), (12, 5), lambda w: rms_to_rms(w.mT)),
    "inputs first, fused": (
        Split(2, wn.Spectral(method="svd", input_axis=0), dim=1),
        (3, 8),
        lambda w: torch.stack([rms_to_rms(part.mT) for part in w.split(4, 1)]).amax(),
    ),
    "per head": (wn.norms.PerHead(3, EXACT), (12, 5), over_parts(4, 4, 4)),
    "split": (Split(3, EXACT), (12, 5), over_parts(4, 4, 4)),
    "split, unequal": (Split((6, 2, 2), EXACT), (10, 4), over_parts(6, 2, 2)),
    "split, interleaved sizes": (Split((1, 3, 1), EXACT), (5, 4), over_parts(1, 3, 1)),
    "split of inputs": (Split((2, 3), EXACT, dim=1), (4, 5), over_parts(2, 3, dim=1)),
    "experts": (Experts(EXACT), (3, 4, 5), lambda w: torch.stack([rms_to_rms(x) for x in w]).amax()),
    "fused experts": (
        Experts(Split(2, EXACT)),
        (3, 4, 5),
        lambda w: torch.stack([over_parts(2, 2)(x) for x in w]).amax(),
    ),
    "columns": (wn.ColNorm(), (6, 4), lambda w: w.square().mean(0).sqrt().amax()),
    "embedding": (wn.ColNorm(input_axis=0), (6, 4), lambda w: w.square().mean(1).sqrt().amax()),
    "one column": (wn.ColNorm(), (6, 1), root_mean_square),
    "rows": (RowNorm(), (6, 4), lambda w: (4**0.5 * w.square().sum(1).sqrt()).amax()),
    "one row": (RowNorm(), (1, 4), lambda w: 4**0.5 * w.square().sum().sqrt()),
    "sign": (wn.Sign(), (3, 4), largest),
    "scaled sign": (wn.Sign(normalized=True), (3, 4), lambda w: 4 * largest(w)),
    "scaled sign of a kernel": (wn.Sign(normalized=True, ndim=4), (2, 3, 2, 2), lambda w: 12 * largest(w)),
    "scaled sign, transposed": (wn.Sign(normalized=True, ndim=3, output_axis=1), (3, 2, 4), lambda w: 12 * largest(w)),
    "sign of a vector": (wn.Sign(ndim=1), (5,), largest),
    "gain": (Gain(), (5,), largest),
    "one gain": (Gain(ndim=0), (), largest),
    "bias": (BiasRMS(), (7,), root_mean_square),
    "bias of one": (BiasRMS(), (1,), root_mean_square),
    "bias of a layer norm": (BiasRMS(ndim=2), (3, 4), root_mean_square),
    "l2": (Euclidean(), (7,), lambda w: w.square().sum().sqrt()),
    "Frobenius": (Euclidean(ndim=2), (3, 4), lambda w: w.square().sum().sqrt()),
    "kernel": (SpectralConv(inner=EXACT), (4, 3, 2, 3), kernel("positions")),
    "kernel, 1-D": (SpectralConv(1, inner=EXACT), (3, 5, 4), kernel("positions")),
    "kernel, 3-D": (SpectralConv(3, inner=EXACT), (2, 3, 2, 1, 2), kernel("positions")),
    "kernel, groups": (SpectralConv(groups=2, inner=EXACT), (4, 3, 2, 2), kernel("positions", 2)),
    "kernel, depthwise": (SpectralConv(groups=4, inner=EXACT), (4, 1, 3, 3), kernel("positions", 4)),
    "kernel, transposed": (
        SpectralConv(groups=2, transposed=True, inner=EXACT),
        (4, 3, 2, 2),
        kernel("positions", 2, transposed=True),
    ),
    "kernel by patches": (SpectralConv(mode="patches", inner=EXACT), (4, 3, 2, 3), kernel("patches")),
    "patches, groups": (SpectralConv(2, "patches", 2, inner=EXACT), (4, 3, 2, 2), kernel("patches", 2)),
    "patches, transposed": (
        SpectralConv(1, "patches", 2, transposed=True, inner=EXACT),
        (4, 3, 5),
        kernel("patches", 2, transposed=True),
    ),
    "patches of pixels": (
        SpectralConv(mode="patches", inner=wn.Spectral(method="svd", units="pixels")),
        (2, 3, 2, 2),
        lambda w: 4 * two_to_two(w.flatten(1)),
    ),
    "patches of 1x1": (SpectralConv(mode="patches", inner=EXACT), (4, 3, 1, 1), lambda w: rms_to_rms(w[..., 0, 0])),
}
every_norm = pytest.mark.parametrize(("norm", "shape", "truth"), TABLE.values(), ids=TABLE.keys())
COUNT = 5
SCALES = torch.tensor([1e-30, 1e-12, 1.0, 1e12, 1e30], dtype=torch.float64).repeat_interleave(COUNT)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scales_for(batch: Tensor) -> Tensor:
    """`SCALES` as factors of a batch's entries."""
    return SCALES.to(batch.dtype).reshape(-1, *[1] * (batch.ndim - 1))


def draw_at_scales(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """`COUNT` weights at each scale."""
    weights = draw((len(SCALES), *shape), 0, dtype)
    return weights * scales_for(weights)


def pairings(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of each entry of a batch with that of another."""
    return (one * other).reshape(len(one), -1).sum(1)


def one_by_one(truth: Truth, batch: Tensor) -> Tensor:
    """The definition's values, which are for one weight."""
    return torch.stack([truth(weight) for weight in batch])


@every_norm
def test_the_norm_is_its_definition(norm, shape, truth):
    w = draw((25, *shape), 0)
    norm.check_shape(shape)
    torch.testing.assert_close(norm.norm(w), one_by_one(truth, w), rtol=1e-12, atol=0)


@every_norm
def test_oracle_attains_the_dual_norm_inside_the_ball(norm, shape, truth):
    g = draw_at_scales(shape)
    d = norm.dualize(g)
    torch.testing.assert_close(pairings(g, d), norm.dual_norm(g), rtol=1e-9, atol=0)  # float64 SVD, scale-free
    assert float(one_by_one(truth, d).amax()) <= norm.overshoot + 1e-9


@every_norm
def test_dual_norm_is_the_largest_pairing(norm, shape, truth):
    g, w = draw((2, 50, *shape), 0)
    assert (pairings(g, w) / one_by_one(truth, w) <= norm.dual_norm(g) * (1 + 1e-9)).all()


@every_norm
def test_the_scale_of_a_float32_gradient_does_not_matter(norm, shape, truth):
    g, scaled = draw((len(SCALES), *shape), 0, torch.float32), draw_at_scales(shape, torch.float32)
    torch.testing.assert_close(norm.dualize(scaled), norm.dualize(g), rtol=2e-4, atol=2e-5)  # rounding of g * scale
    for function in (norm.norm, norm.dual_norm):
        torch.testing.assert_close(function(scaled) / SCALES.float(), function(g), rtol=1e-5, atol=0)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initialization_lies_on_the_sphere(norm, shape, truth, dtype, generator):
    w = norm.initialize_(torch.empty(shape, dtype=dtype), generator)
    # rounding of one entry, over as many as meet in one singular value
    tolerance = 1e-5 if dtype != torch.bfloat16 else 2.0**-8 * math.sqrt(max(1, w.numel()))
    assert float(truth(w.double())) == pytest.approx(1, rel=tolerance)
    again = norm.initialize_(torch.empty(shape, dtype=dtype), torch.Generator().manual_seed(0))
    assert torch.equal(w, again)


@every_norm
def test_large_weights_start_by_products_near_where_an_svd_has_them(norm, shape, truth, generator, monkeypatch):
    exact = norm.initialize_(torch.empty(shape), torch.Generator().manual_seed(0))
    monkeypatch.setattr(spectral, "LARGE", 1)
    found = norm.initialize_(torch.empty(shape), torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)  # small singular values keep few digits in float32
    assert float(truth(found.double())) == pytest.approx(1, rel=1e-5)


@every_norm
def test_initialization_fills_a_parameter_and_a_transposed_view(norm, shape, truth, generator):
    parameter = torch.nn.Parameter(torch.full(shape, float("nan")))
    assert norm.initialize_(parameter, generator) is parameter
    assert not parameter.isnan().any()
    view = torch.full(shape[::-1], float("nan")).permute(tuple(reversed(range(len(shape)))))
    norm.initialize_(view, generator)
    assert float(truth(view.double())) == pytest.approx(1, rel=1e-5)


@every_norm
def test_upper_bound_is_above_the_float64_norm(norm, shape, truth):
    w = draw_at_scales(shape, torch.float32)
    bound = norm.upper_bound(w).double() / SCALES
    true = one_by_one(truth, w.double() / scales_for(w.double()))
    assert (true * (1 - 1e-13) <= bound).all()
    assert (bound <= true * (1 + 1e-7)).all()
    assert (norm.norm(w.double()) / SCALES <= bound * (1 + 1e-13)).all()
    # a proof leaves 1e-8; single weights, because a bound is a number
    for one, size in zip(w, norm.upper_bound(w).tolist(), strict=True):
        assert norm.within(one, size * (1 + 3e-8))
        assert not norm.within(one, size * (1 - 1e-7))


@every_norm
def test_zero_maps_to_zero(norm, shape, truth):
    zero = torch.zeros(shape)
    assert torch.equal(norm.dualize(zero), zero)
    assert float(norm.norm(zero)) == 0
    assert float(norm.dual_norm(zero)) == 0
    assert float(norm.upper_bound(zero)) == 0


@every_norm
def test_zero_rows_and_columns_do_no_harm(norm, shape, truth):
    for dim in range(len(shape)):
        g = draw(shape, 1)
        g.select(dim, 0).zero_()
        d = norm.dualize(g)
        assert bool(d.isfinite().all())
        torch.testing.assert_close((g * d).sum(), norm.dual_norm(g), rtol=1e-9, atol=0)


@every_norm
@pytest.mark.parametrize("lead", [(3,), (2, 2), (1,)], ids=str)
def test_a_batch_is_treated_entry_by_entry(norm, shape, truth, lead):
    batch = draw((*lead, *shape), 0)
    for function in (norm.norm, norm.dual_norm, norm.dualize, norm.upper_bound):
        together = function(batch)
        alone = torch.stack([torch.as_tensor(function(w)) for w in batch.reshape(-1, *shape)])
        torch.testing.assert_close(together, alone.reshape(together.shape), rtol=1e-8, atol=1e-12)
        assert together.shape[: len(lead)] == lead


@every_norm
def test_bfloat16_follows_float32(norm, shape, truth):
    g = draw(shape, 3, torch.bfloat16)
    d = norm.dualize(g)
    assert d.dtype == torch.bfloat16
    exact = norm.dualize(g.float())
    assert float((d.float() - exact).norm()) <= 2e-2 * float(exact.norm())  # a few roundings of 2^-9
    assert norm.norm(g).dtype == torch.bfloat16


@every_norm
def test_another_coefficient_set_reaches_every_oracle_that_runs_one(norm, shape, truth):
    other = norm.with_settings(coefficients="polar-express-8")
    runs_one = "Spectral" in repr(norm) or hasattr(norm, "inner")
    assert (other != norm) == runs_one
    assert ("polar-express-8" in repr(other)) == runs_one
    assert other.with_settings(coefficients="you-5-nanogpt") == norm


@every_norm
def test_a_weight_of_other_dimensions_is_refused_by_name(norm, shape, truth):
    with pytest.raises(ValueError, match=r"embed.*-dimensional weights; choose another norm"):
        norm.check_shape((*shape, 2), "embed")


@pytest.mark.parametrize("coefficients", ["polar-express-5", "jordan-5", "you-6"])
def test_declared_overshoot_bounds_the_iterated_oracle(coefficients, generator):
    norm = wn.Spectral(coefficients)
    for scale in (1.0, 1e-20, 1e20):
        d = norm.dualize(torch.randn(48, 32, generator=generator) * scale)
        assert float(norm.upper_bound(d)) <= norm.overshoot * (1 + 1e-4)  # float32 iteration


@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (8, 8)])
def test_shampoo_without_accumulation_and_mup_are_the_duality_map(shape, generator):
    """MD 4.1: `(G G^T)^(-1/4) G (G^T G)^(-1/4)`, the spectral scale, and the start of MD A.1's muP."""
    d_out, d_in = shape
    g = torch.randn(shape, generator=generator, dtype=torch.float64)

    def preconditioner(gram: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(gram)
        # of the zeros of the larger Gram matrix, G has nothing
        powers = torch.where(values > 1e-9 * values.amax(), values.abs() ** -0.25, 0.0)
        return (vectors * powers) @ vectors.mT

    shampoo = preconditioner(g @ g.mT) @ g @ preconditioner(g.mT @ g)
    torch.testing.assert_close(EXACT.dualize(g), math.sqrt(d_out / d_in) * shampoo)
    start = EXACT.initialize_(torch.empty(shape, dtype=torch.float64), generator)
    assert float(start.square().mean()) == pytest.approx(min(shape) / d_in**2)  # the variance of muP
    # signs as Adam's, of one outer product, at muP's rate of 1 / d_in: a step of norm 1, whatever the width
    signs = (g[:, :1] @ g[:1]).sign()
    assert float(EXACT.norm(signs / d_in)) == pytest.approx(1)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_step_with_all_singular_values_moves_a_wide_matrix_and_one_of_rank_1_does_not(width, generator):
    """MD 6.5: of equal spectral norm, and measured in the Frobenius norm."""
    start = EXACT.initialize_(torch.empty(width, width, dtype=torch.float64), generator)
    gradient = torch.randn(width, width, generator=generator, dtype=torch.float64)
    full, single = EXACT.dualize(gradient), EXACT.dualize(gradient[:, :1] @ gradient[:1])
    torch.testing.assert_close(EXACT.norm(full), EXACT.norm(single))
    assert float(full.norm() / start.norm()) == pytest.approx(1)
    assert float(single.norm() / start.norm()) == pytest.approx(width**-0.5)


def test_rare_symbols_are_inflated_at_most_as_asked():
    g = torch.tensor([[1.0, 1.0], [1e-4, 1e-4]])
    d = wn.ColNorm(input_axis=0, max_inflation=16).dualize(g)
    assert d[0].tolist() == [1, 1]
    assert d[1].tolist() == pytest.approx([16e-4] * 2)


def test_operator_norms_bound_what_they_say():
    """Column, row and sign norms against the largest output over the extreme points of their unit ball of inputs."""
    w = draw((3, 4), 0)
    one_hot = torch.eye(4, dtype=torch.float64)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4)
    largest_rms = (one_hot @ w.mT).square().mean(-1).sqrt().amax()
    torch.testing.assert_close(wn.ColNorm().norm(w), largest_rms)
    torch.testing.assert_close(wn.Sign().norm(w), (one_hot @ w.mT).abs().amax())
    assert float((corners @ w.mT).abs().amax()) <= float(wn.Sign(normalized=True).norm(w))
    best = 2 * w / w.norm(dim=1, keepdim=True)  # of RMS 1
    torch.testing.assert_close(RowNorm().norm(w), (best * w).sum(1).amax())
    assert float(RowNorm().norm(w)) <= float(wn.Sign(normalized=True).norm(w))
    torch.testing.assert_close(Gain().norm(w[0]), wn.Spectral().norm(w[0].diag()))


@pytest.mark.parametrize("groups", [1, 2])
def test_norms_of_kernels_bound_the_operator_on_images_and_the_largest_pixel(groups):
    """By positions at most by patches; both bound the l2 gain, and the first one the RMS of every pixel."""
    pixels = torch.eye(4 * 4 * 3, dtype=torch.float64).reshape(-1, 4, 4, 3)
    images = draw((9, 4, 6, 6), 1)
    images /= images.square().mean(1, keepdim=True).sqrt().amax((-2, -1), keepdim=True)
    positions, patches = (SpectralConv(mode=mode, groups=groups) for mode in ("positions", "patches"))
    for w in draw((20, 6, 4 // groups, 3, 2), 0):
        operator = torch.nn.functional.conv2d(pixels, w, padding=1, groups=groups).flatten(1)
        gain = float(torch.linalg.matrix_norm(operator, 2)) * math.sqrt(4 / 6)
        assert gain <= float(positions.upper_bound(w))
        assert float(positions.norm(w)) <= float(patches.norm(w)) * (1 + 1e-12)
        outputs = torch.nn.functional.conv2d(images, w, padding=1, stride=2, groups=groups)
        assert float(outputs.square().mean(1).sqrt().amax()) <= float(positions.upper_bound(w))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wn.ColNorm(input_axis=2), "input_axis"), (lambda: wn.ColNorm(max_inflation=0.5), "max_inflation"),
        (lambda: wn.Spectral(method="qr"), "method='qr'"), (lambda: wn.Spectral("nothing"), "nothing"),
        (lambda: wn.Spectral(units="image"), "units='image'"), (lambda: wn.Spectral(input_axis=2), "input_axis=2"),
        (lambda: SpectralConv(inner=wn.Spectral(input_axis=0)), "transposed=True"),
        (lambda: SpectralConv(inner=wn.Sign()), r"inner=Sign\(\) must be a Spectral"),
        (lambda: wn.Sign(normalized=True, ndim=1), "no inputs to count"),
        (lambda: wn.Sign(normalized=True, output_axis=2), "output_axis"), (lambda: Split(0), "must be positive"),
        (lambda: Split(()), "must be positive"), (lambda: Split((3, 0)), "must be positive"),
        (lambda: Split(2, dim=2), "dim=2"), (lambda: Split(2, wn.Sign()), "must be a norm of matrices, got"),
        (lambda: Experts(BiasRMS()), "must be a norm of matrices, got"),
        (lambda: SpectralConv(mode="rows"), "mode='rows'"), (lambda: SpectralConv(4), "spatial=4"),
        (lambda: SpectralConv(groups=0), "groups=0"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_that_are_not_the_defaults_are_shown():
    assert repr(wn.Sign()) == "Sign()"
    assert repr(SpectralConv(1, groups=2)) == "SpectralConv(spatial=1, groups=2)"
    assert repr(wn.norms.PerHead(4)) == "PerHead(heads=4)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [wn.norms.BiasRMS(), wn.norms.Euclidean(), wn.ColNorm(), wn.norms.RowNorm()])
def test_oracles_of_small_16_bit_gradients_have_norm_one(norm, dtype):
    """Below 6e-5 float16 has no normal numbers; the quotient must not see them."""
    shape = (64,) if norm.ndim == 1 else (8, 8)
    g = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-6 + 2e-6).to(dtype)
    # every entry is rounded to 2^-8 at worst
    assert abs(float(norm.norm(norm.dualize(g).double())) - 1) < 0.01


@pytest.mark.parametrize(
    ("norm", "method"), [(wn.Sign(), "dualize"), (wn.norms.Gain(2), "dualize"), (wn.Spectral(), "dual_norm")]
)
def test_nan_is_refused_where_it_would_be_hidden(norm, method):
    with pytest.raises(ValueError, match="gradient holds NaN or infinity"):
        getattr(norm, method)(torch.tensor([[math.nan, 1.0]]))
