"""A lower precision of products that the user allows the model reaches no direction, no cap and no matrix function."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wellnormed as wn
from wellnormed import matrix
from wellnormed._precision import all_digits
from wellnormed.constraints import HardCap, SoftCap

BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def precisions():
    """As torch says them; a backend that follows the default, which is all digits, says "none"."""
    return [getattr(backend, "fp32_precision", torch.get_float32_matmul_precision()) for backend in BACKENDS]


@pytest.fixture
def high():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


class Products(TorchDispatchMode):
    """The precisions under which products of float32 are executed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm") and value.dtype == torch.float32:
            self.seen.update(precisions())
        return value


FUNCTIONS = {
    "msign": matrix.msign,
    "semi_orthogonal": matrix.semi_orthogonal,
    "products": lambda w: matrix.spectral_hardcap(w, 1.0, "products"),
    "soft_cap": lambda w: matrix.soft_cap(w, 0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matrix_functions(name, high):
    w = 1.05 * torch.linalg.qr(torch.randn(24, 20))[0]
    with Products() as products:
        FUNCTIONS[name](w)
    assert products.seen == {"ieee"}
    assert precisions() == ["tf32", "tf32"]


@pytest.mark.parametrize("rule", [HardCap(1.0), HardCap(1.0, every=4), SoftCap(1.0)])
def test_training(rule, high):
    model = torch.nn.Linear(24, 20)
    optimizer = wn.Scion(model, lr=0.1)
    wn.constrain(optimizer, {"weight": rule})
    model(torch.randn(3, 24)).sum().backward()
    with Products() as products:
        optimizer.step()
    assert products.seen == {"ieee"}
    with Products() as products:
        model(torch.randn(3, 24))
    assert products.seen == {"tf32"}


def test_restored_after_an_error(high):
    with pytest.raises(ValueError, match="NaN"):
        matrix.msign(torch.full((20, 20), torch.nan))
    assert precisions() == ["tf32", "tf32"]


def test_the_default_is_not_written_down():
    before = precisions()
    with all_digits():
        assert precisions() == before
    torch.set_float32_matmul_precision("high")
    assert precisions() == ["tf32", "tf32"]
    torch.set_float32_matmul_precision("highest")


def test_compiles(high):
    w = torch.randn(24, 20)
    assert torch.compile(lambda w: matrix.soft_cap(w, 0.1) + 1, backend="eager", fullgraph=True)(w).shape == w.shape
