"""The one file that needs torch alone: its steps are the library's, its caps hold, its proofs are above every norm."""

import ast
import sys

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.examples.test_examples import EXAMPLES, load

one = load("one_file")


def models():
    """The same small model twice, with an embedding, biases, and matrices of both shapes."""
    for _ in range(2):
        torch.manual_seed(1)
        yield nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 6))


def train(model, optimizers, steps=6):
    torch.manual_seed(2)
    for _ in range(steps):
        tokens = torch.randint(12, (32,))
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens % 6).backward()
        for optimizer in optimizers:
            optimizer.step()


def require_equal_weights(ours, library):
    for (name, weight), expected in zip(ours.named_parameters(), library.parameters(), strict=True):
        # float32 products in two orders differ by some roundings, and six steps of the polynomial magnify them
        torch.testing.assert_close(weight, expected, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_it_imports_torch_and_the_standard_library_alone():
    tree = ast.parse((EXAMPLES / "one_file.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("cap", [None, 0.7])
def test_the_steps_of_scion_with_caps_are_the_library_s(cap):
    ours, library = models()
    train(ours, [one.Scion(one.scion_groups(ours, cap), lr=0.1)])
    optimizer = wn.Scion(library, lr=0.1, radius=1.0)
    if cap is not None:
        wn.constrain(optimizer, {"0": wn.ColumnCap(cap), "1.weight": wn.HardCap(cap), "3.weight": wn.HardCap(cap)})
    before = [p.detach().clone() for p in library.parameters()]
    train(library, [optimizer])
    assert all((p - q).abs().max() > 0.01 for p, q in zip(library.parameters(), before, strict=True))
    require_equal_weights(ours, library)


def test_the_steps_of_muon_are_the_library_s():
    ours, library = models()
    hidden, others = [ours[1].weight], [ours[0].weight, ours[1].bias, ours[3].weight, ours[3].bias]
    train(ours, one.muon(hidden, others, lr=0.05, adamw_lr=1e-3))
    settings = wn.optim.AdamWSettings(lr=1e-3, betas=(0.9, 0.999))
    train(library, [wn.Muon(library, lr=0.05, recipe="muon", adamw=settings)])
    require_equal_weights(ours, library)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 40), (32, 32)])
def test_proofs_are_above_every_norm_and_close_to_it(shape, scale):
    generator = torch.Generator().manual_seed(3)
    for weight in (
        torch.randn(shape, generator=generator),
        torch.ones(shape),
        torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator),
        torch.eye(*shape),
    ):
        proved = one.proved_singular_value(weight * scale)
        largest = float(torch.linalg.matrix_norm((weight * scale).double(), 2))
        assert largest * (1 - 1e-14) <= proved <= largest * (1 + 1e-6)  # an SVD may be some roundings above the norm
    rows = torch.randn(shape, generator=generator) * scale
    largest = float((rows / scale).double().square().mean(-1).sqrt().max() * scale)
    assert largest * (1 - 1e-7) <= one.LargestRMS().proved(rows) <= largest * (1 + 1e-7)  # of float32 products


def test_a_matrix_of_zeros_and_one_with_nan():
    assert one.proved_singular_value(torch.zeros(3, 4)) == 0
    assert not one.msign(torch.zeros(3, 4), one.YOU).any()
    with pytest.raises(ValueError, match="NaN or infinity"):
        one.proved_singular_value(torch.full((2, 2), torch.nan))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_a_cap_is_proved_and_leaves_what_is_below_it(size):
    norm, weight = one.Spectral(), torch.randn(12, 30, generator=torch.Generator().manual_seed(4)) * size
    capped = norm.cap(weight, 0.5)
    assert norm.proved(capped) <= 0.5
    values, after = (torch.linalg.svdvals(w.double()) for w in (weight, capped))
    expected = values.clamp(max=0.5 * one.TARGET * norm.unit(weight))
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-7 * float(values[0]))  # float32 rounding of the weight


def test_the_program_trains_within_its_proof(capsys):
    loss, constant = one.main(steps=60)
    assert constant <= 1.5**3
    assert loss < 0.5  # the variance of the wave, which a constant would leave
    assert "proved Lipschitz constant" in capsys.readouterr().out
