"""Forward mode, vmap and the compiler, for every function of the room: table-driven, one law per test."""

import pytest
import torch

from wellnormed.matrix import (
    leading_singular_triplet,
    msign,
    soft_cap,
    spectral_clip,
    spectral_clipped_weight_decay,
    spectral_hammer,
    spectral_hardcap,
    spectral_norm,
    spectral_normalize,
    spectral_relu,
)

FUNCTIONS = {
    "msign": msign, "msign svd": lambda w: msign(w, method="svd"), "clip": lambda w: spectral_clip(w, 0.5, 2.0),
    "hardcap": lambda w: spectral_hardcap(w, 1.5), "relu": lambda w: spectral_relu(w, 1.0),
    "decay": lambda w: spectral_clipped_weight_decay(w, 1.0, 0.5), "normalize": lambda w: spectral_normalize(w, 1.0),
    "norm": spectral_norm, "soft cap": lambda w: soft_cap(w, 0.1),
}  # fmt: skip
POLYNOMIAL = {"msign": msign, "soft cap": lambda w: soft_cap(w, 0.1)}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_the_batch(name):
    function, w = FUNCTIONS[name], normal(5, 6, 4)
    torch.testing.assert_close(torch.func.vmap(function)(w), function(w))
    torch.testing.assert_close(torch.func.vmap(function, in_dims=2, out_dims=0)(w.movedim(0, 2)), function(w))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_reverse_mode_are_adjoint(name):
    function, w, tangent = FUNCTIONS[name], normal(5, 6, 4).requires_grad_(), normal(5, 6, 4, seed=1)
    value, along = torch.func.jvp(function, (w.detach(),), (tangent,))
    cotangent = normal(*value.shape, seed=2)
    (gradient,) = torch.autograd.grad(function(w), w, cotangent)
    torch.testing.assert_close((gradient * tangent).sum(), (along * cotangent).sum())
    assert torch.autograd.gradcheck(function, w.detach()[:1, :3].requires_grad_(), check_forward_ad=True)
    # per matrix, and inside vmap
    mapped = torch.func.vmap(lambda x, t: torch.func.jvp(function, (x,), (t,))[1])(w.detach(), tangent)
    torch.testing.assert_close(mapped, along)
    torch.testing.assert_close(torch.func.jacrev(function)(w.detach()[0]), torch.func.jacfwd(function)(w.detach()[0]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_never_silently_absent(name):
    """Where singular values are distinct; hessian is forward over reverse, jacrev of jacrev reverse twice."""
    function, w = FUNCTIONS[name], normal(4, 3)

    def number(x):
        return function(x).square().sum()

    twice = torch.func.jacrev(torch.func.jacrev(number))(w)
    torch.testing.assert_close(torch.func.hessian(number)(w), twice)
    step = 1e-5
    moved = normal(4, 3, seed=1)
    found = (torch.func.grad(number)(w + step * moved) - torch.func.grad(number)(w - step * moved)) / (2 * step)
    # central differences: error step^2 times third derivatives of order 100
    torch.testing.assert_close((twice * moved).sum((-2, -1)), found, atol=1e-6, rtol=1e-6)


def test_vmap_over_the_bounds():
    w, bounds = normal(5, 2, 6, 4), torch.linspace(0.5, 2, 5, dtype=torch.float64)
    mapped = torch.func.vmap(spectral_hardcap)(w, bounds)
    torch.testing.assert_close(mapped, spectral_hardcap(w, bounds[:, None]))
    torch.testing.assert_close(torch.func.vmap(spectral_hammer)(w, bounds), spectral_hammer(w, bounds[:, None]))
    with pytest.raises(ValueError, match="upper="):
        torch.func.vmap(spectral_hardcap)(w, -bounds)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", POLYNOMIAL)
def test_compile_without_a_break(name, requires_grad):
    function = POLYNOMIAL[name]
    w = normal(20, 8).requires_grad_(requires_grad)
    torch._dynamo.reset()
    value = torch.compile(function, fullgraph=True, backend="aot_eager")(w)
    torch.testing.assert_close(value, function(w), atol=1e-7, rtol=0)
    if requires_grad:
        compiled, eager = (torch.autograd.grad(v.sum(), w)[0] for v in (value, function(w)))
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("shape", [(5, 6, 4), (5, 4, 6), (3, 2, 4, 4)])
@pytest.mark.parametrize("per_matrix", [False, True])
def test_pieces_of_a_batch_are_the_batch(shape, per_matrix, monkeypatch):
    w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    upper = torch.linspace(0.5, 1.5, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 3))
    upper = upper.expand(shape[:-2]) if per_matrix else upper[:1]
    calls = (lambda: spectral_hardcap(w, upper), lambda: msign(w), lambda: spectral_norm(w))
    whole = [call() for call in calls]
    monkeypatch.setattr("wellnormed._batching._ENTRIES_STACKED", 50)
    for call, expected in zip(calls, whole, strict=True):
        torch.testing.assert_close(call(), expected, rtol=1e-12, atol=1e-12)  # batched products may sum in other orders


def test_a_large_batch_with_its_leading_vectors(monkeypatch):
    """More entries than a piece: the triplet belongs to the whole batch."""
    monkeypatch.setattr("wellnormed._batching._ENTRIES_STACKED", 50)
    w = normal(5, 8, 6)
    triplet = leading_singular_triplet(w)
    value = spectral_hammer(w, 1.0, triplet)
    for index, matrix in enumerate(w):
        expected = spectral_hammer(matrix, 1.0, tuple(part[index] for part in triplet))
        torch.testing.assert_close(value[index], expected)
