"""The Triton kernel under Triton's interpreter, compiled for GPUs that are not there, and (marked `gpu`) on one.

The interpreter shows that the arithmetic and the addresses are right, the compiler that the code is accepted and fits;
speed, and agreement of the two on hardware, only a GPU shows.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.matrix import REGISTRY, _triton
from wellnormed.matrix._msign_methods import newton_schulz

triton = pytest.importorskip("triton")

SIDE = _triton.INTERPRETED.side
FUSION = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
"""Triton 3.9 announces with its first compilation that a default will change; this kernel needs neither."""
LAYOUTS = {"x.mT, x": lambda x: (x.mT, x), "x, x.mT": lambda x: (x, x.mT)}


@pytest.fixture(scope="module")
def kernel(interpreted_triton):
    return interpreted_triton


class Recorder:
    """Stands before the kernel and notes grids and arguments."""

    def __init__(self, kernel):
        self.kernel, self.grids, self.arguments = kernel, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.grids.append(grid)
            self.arguments.append(arguments)
            self.kernel[grid](*arguments, **options)

        return launch


@pytest.fixture
def launches(kernel, monkeypatch):
    recorder = Recorder(kernel._kernel)
    monkeypatch.setattr(kernel, "_kernel", recorder)
    return recorder


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype)


def symmetric(*shape, seed=1, dtype=torch.float32):
    c = normal(*shape, seed=seed, dtype=dtype)
    return c.tril() + c.tril(-1).mT


def assert_is_product(value, a, b, c=None, beta=1.0, alpha=1.0):
    """Entry by entry within k + 3 float32 roundings of the sum of absolute values, and one of the result."""
    wide = [t.double() for t in (a, b, torch.zeros_like(value) if c is None else c)]
    truth = beta * wide[2] + alpha * (wide[0] @ wide[1])
    size = abs(beta) * wide[2].abs() + abs(alpha) * (wide[0].abs() @ wide[1].abs())
    accumulated = (a.shape[-1] + 3) * torch.finfo(torch.float32).eps * size
    info = torch.finfo(value.dtype)
    rounded = info.eps / 2 * (truth.abs() + accumulated) + info.smallest_normal * info.eps
    assert ((value.double() - truth).abs() <= accumulated + rounded).all()
    assert value.dtype == a.dtype
    assert value.is_contiguous()


@settings(max_examples=40)
@given(
    st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    st.integers(1, 3 * SIDE + 1),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([None, (1.0, 1.0), (-4.775, 2.0315), (0.5, 0), (0, 1)]),
)
def test_is_the_product_and_symmetric(kernel, batch, n, k, dtype, layout, factors):
    a, b = LAYOUTS[layout](normal(*batch, *((k, n) if layout == "x.mT, x" else (n, k)), dtype=dtype))
    if factors is None:
        arguments = {}
    else:
        arguments = {"c": symmetric(*batch, n, n, dtype=dtype), "beta": factors[0], "alpha": factors[1]}
    value = kernel.symmetric_product(a, b, **arguments)
    assert_is_product(value, a, b, **arguments)
    assert torch.equal(value, value.mT)


@pytest.mark.parametrize("tiles", [1, 2, 3, 6, 7])
def test_one_program_for_each_tile_of_the_triangle(kernel, launches, tiles):
    """And every entry is written: memory that nothing has written yet is NaN."""
    x = normal(2, 3, tiles * SIDE - 1)
    torch.use_deterministic_algorithms(True)
    try:
        value = kernel.symmetric_product(x.mT, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_is_product(value, x.mT, x)
    assert launches.grids == [(2 * tiles * (tiles + 1) // 2,)]


def test_the_lower_triangle_is_what_counts_and_each_operand_has_its_strides(kernel):
    n = 2 * SIDE + 5
    a, b = normal(n, 9).expand(3, -1, -1), normal(3, 9, n, seed=1)
    c = normal(3, 2 * n, 3 * n, seed=2)[:, ::2, 1::3]
    value = kernel.symmetric_product(a, b, c, beta=2.0)
    assert torch.equal(value, value.mT)
    torch.testing.assert_close(value.tril(), (2 * c + a @ b).tril(), atol=1e-5, rtol=0)  # ten terms of size 1 to 10


def test_views_are_read_where_they_lie(kernel, launches):
    base = normal(4, 40, 60)
    views = [base[1], base[:, ::2, 1::3], base[1:2].expand(3, -1, -1), base.flip(0)[:, 3:], base.mT, base[0, :1]]
    for x in views:
        for a, b in ((x.mT, x), (x, x.mT)):
            value = kernel.symmetric_product(a, b, c := torch.eye(a.shape[-2]).expand(*a.shape[:-1], a.shape[-2]))
            assert_is_product(value, a, b, c)
            pointers = [t.data_ptr() for t in launches.arguments[-1][:3]]
            assert pointers == [t.data_ptr() for t in (a, b, c)]
    x = normal(2, 3, 5, 20).transpose(0, 1)  # no single stride leads through this batch: copied
    assert_is_product(kernel.symmetric_product(x, x.mT), x, x.mT)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, which the interpreter runs
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_propagates(kernel, bad):
    x = normal(SIDE + 7, 2 * SIDE + 3)
    x[3, SIDE + 2] = bad
    value = kernel.symmetric_product(x.mT, x)
    assert torch.equal(value.isfinite(), (x.mT @ x).isfinite())
    g = torch.eye(x.shape[-1])
    assert not kernel.symmetric_product(g, g, value)[SIDE + 2, 0].isfinite()


@pytest.mark.parametrize("shape", [(60, 37), (2, 40, 33)])
def test_newton_schulz_with_the_kernel_is_newton_schulz(kernel, shape):
    x = normal(*shape)
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    steps = REGISTRY["jordan-5"].steps
    # five steps, each of slope 3.4 at most, of float32 roundings of a matrix of norm 1
    torch.testing.assert_close(by_products(kernel, x, steps), newton_schulz(x, steps), atol=2e-5, rtol=0)


def by_products(kernel, x, steps):
    for a, b, c in steps:
        g = kernel.symmetric_product(x.mT, x)
        x = a * x + x @ kernel.symmetric_product(g, g, g, beta=b, alpha=c)
    return x


def test_refusals_name_the_remedy(kernel, monkeypatch):
    kernel.require(torch.eye(2))
    with pytest.raises(ValueError, match=r"torch.float64.*newton-schulz"):
        kernel.require(torch.eye(2, dtype=torch.float64))
    if not _triton._INTERPRETER:
        with pytest.raises(ValueError, match=r"CUDA device, and x is on cpu.*newton-schulz"):
            _triton.require(torch.eye(2))
    monkeypatch.setattr(kernel, "triton", None)
    with pytest.raises(ValueError, match=r"not installed: pip install triton.*newton-schulz"):
        kernel.require(torch.eye(2))


def compiled(capability, dtype, tiles, ones, none=(), divisible=True):
    """The kernel compiled as its launch would for these arguments: strides that are 1, and `c` or not."""
    names = _triton._kernel.arg_names
    constants = {"SIDE": tiles.side, "DEPTH": tiles.depth} | dict.fromkeys(ones, 1) | dict.fromkeys(none)
    kinds = dict.fromkeys(("a", "b", "c", "out"), f"*{dtype}") | dict.fromkeys(("beta", "alpha"), "fp32")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if divisible and signature[name][0] in "*i"]
    source = triton.compiler.ASTSource(
        _triton._kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target, {"num_warps": tiles.warps, "num_stages": tiles.stages})


@pytest.mark.skipif(_triton._INTERPRETER, reason="TRITON_INTERPRET is set: nothing is compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_gpus(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton 3.9 warns that its default will change
    gram, square = ("a_row", "b_column"), ("a_column", "b_column", "c_column")
    code = [
        compiled(capability, "bf16", _triton.LARGE, gram, none=("c",)),
        compiled(capability, "bf16", _triton.SMALL, square),
        compiled(capability, "fp32", _triton.FLOAT32, square, divisible=False),
        compiled(capability, "fp16", _triton.SMALL, (*gram, "n", "k"), none=("c",), divisible=False),
    ]
    assert all(found.metadata.shared <= 99 * 1024 for found in code)
    assert all(("wgmma" if capability == 90 else "mma.sync") in code[i].asm["ptx"] for i in (0, 1))
    assert "tf32" not in code[2].asm["ptx"]


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
@FUSION
@pytest.mark.parametrize("tiles", [None, _triton.LARGE, _triton.SMALL])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(768, 3072), (3072, 768), (12, 768, 768), (3, 129, 65)])
def test_on_a_gpu(cuda, shape, layout, tiles):
    x = normal(*shape, dtype=torch.bfloat16, device=cuda)
    a, b = LAYOUTS[layout](x)
    value = _triton.symmetric_product(a, b, tiles=tiles)
    assert_is_product(value, a, b)
    assert torch.equal(value, value.mT)
    scaled = value / torch.linalg.matrix_norm(value.float(), keepdim=True).to(value.dtype)
    arguments = {"c": scaled, "beta": -4.775, "alpha": 2.0315}
    assert_is_product(_triton.symmetric_product(scaled, scaled, tiles=tiles, **arguments), scaled, scaled, **arguments)


@pytest.mark.gpu
@FUSION
def test_on_a_gpu_float32_in_full_and_newton_schulz(cuda):
    x = normal(300, 200, device=cuda)
    assert_is_product(_triton.symmetric_product(x.mT, x), x.mT, x)
    x = normal(3072, 768, device=cuda)
    x = (x / torch.linalg.matrix_norm(x)).bfloat16()
    steps = REGISTRY["jordan-5"].steps
    # roundings to bfloat16 of sums in another order differ now and then: 2e-3 in small matrices
    difference = by_products(_triton, x, steps).double() - newton_schulz(x, steps).double()
    assert torch.linalg.matrix_norm(difference, 2) < 0.02


@pytest.mark.gpu
@FUSION
def test_on_a_gpu_batches_beyond_32_bits(cuda):
    base = torch.zeros(2**31 + 70 * 70, dtype=torch.bfloat16, device=cuda)
    x = base.as_strided((2, 70, 70), (2**31, 70, 1)).copy_(normal(2, 70, 70))
    assert_is_product(_triton.symmetric_product(x.mT, x), x.mT, x)
