"""Symmetric products on a GPU by a Triton kernel that computes one triangle; `msign` loads this file when asked to.

The kernel does half the multiplications of a dense product. The same product on a CPU lives elsewhere.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton  # pyrefly: ignore[missing-import]
    import triton.language as tl  # pyrefly: ignore[missing-import]
except ImportError:  # `require` tells the user; without triton there is no kernel
    triton = None


class Tiles(NamedTuple):
    """How a product is cut: output tiles of `side x side`, `depth` of the inner dimension at a time."""

    side: int
    depth: int
    warps: int
    stages: int


# At most 96 KiB of shared memory, in `stages` buffers of two operands: consumer GPUs have 99.
LARGE = Tiles(128, 64, warps=8, stages=3)
SMALL = Tiles(64, 64, warps=4, stages=4)
FLOAT32 = Tiles(64, 32, warps=4, stages=3)
"""Of full float32 products, which run outside the tensor cores and hold operands twice as large."""
INTERPRETED = Tiles(16, 32, warps=1, stages=1)
"""Under the interpreter, where small matrices must have several tiles; side and depth differ to tell them apart."""

if triton is not None:

    @triton.jit
    def _kernel(
        a, b, c, out, n, k,
        a_matrix, a_row, a_column, b_matrix, b_row, b_column, c_matrix, c_row, c_column,
        beta, alpha, SIDE: tl.constexpr, DEPTH: tl.constexpr
    ):  # fmt: skip
        """One tile of the lower triangle of `out = beta c + alpha a b`, and its mirror image; `c` may be None.

        `a_matrix`, `a_row` and `a_column` are the strides of `a` `(matrices, n, k)`, and so on; `out` is contiguous.
        """
        tiles = (n + SIDE - 1) // SIDE
        triangle = tiles * (tiles + 1) // 2
        matrix = (tl.program_id(0) // triangle).to(tl.int64)  # a batch may hold more than 2^31 entries
        index = tl.program_id(0) % triangle

        # The triangle folded into a rectangle, exactly, in integers: line i holds row `tiles - 1 - i` of the triangle
        # and, after it, row i (of an even number) or i - 1 (odd), which makes `tiles + 1` or `tiles` places a line.
        odd = tiles % 2
        width = tiles + 1 - odd
        line = index // width
        place = index % width
        length = tiles - line
        row = tl.where(place < length, length - 1, line - odd)
        column = tl.where(place < length, place, place - length)

        rows = (row * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        columns = (column * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        inner = tl.arange(0, DEPTH).to(tl.int64)
        a_tile = a + matrix * a_matrix + rows[:, None] * a_row + inner[None, :] * a_column
        b_tile = b + matrix * b_matrix + inner[:, None] * b_row + columns[None, :] * b_column
        a_advance = tl.cast(a_column, tl.int64) * DEPTH  # a stride of 1 is a constant, which has no method `to`
        b_advance = tl.cast(b_row, tl.int64) * DEPTH
        total = tl.full((SIDE, SIDE), 0.0, tl.float32)
        for start in range(0, k, DEPTH):
            left = tl.load(a_tile, mask=(rows[:, None] < n) & (inner[None, :] < k - start), other=0.0)
            right = tl.load(b_tile, mask=(inner[:, None] < k - start) & (columns[None, :] < n), other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")  # all bits of float32, not TF32
            a_tile += a_advance
            b_tile += b_advance

        total = alpha * total
        inside = (rows[:, None] < n) & (columns[None, :] < n)
        if c is not None:
            c_tile = c + matrix * c_matrix + rows[:, None] * c_row + columns[None, :] * c_column
            total = total + beta * tl.load(c_tile, mask=inside, other=0.0).to(tl.float32)
        value = total.to(out.dtype.element_ty)
        corner = out + matrix * n * n
        if row == column:
            # no rule says that the two halves of a tile round alike
            value = tl.where(rows[:, None] >= columns[None, :], value, tl.trans(value))
        else:
            mirrored = (columns[:, None] < n) & (rows[None, :] < n)
            tl.store(corner + columns[:, None] * n + rows[None, :], tl.trans(value), mask=mirrored)
        tl.store(corner + rows[:, None] * n + columns[None, :], value, mask=inside)

    _INTERPRETER = not isinstance(_kernel, triton.JITFunction)


def require(x: Tensor) -> None:
    """Refuse what the kernel cannot take.

    Args:
        x: The matrices, `(*batch, m, n)`.

    Raises:
        ValueError: triton is not installed, `x` is not on a CUDA device (and the kernel not interpreted), or `x` is
            neither bfloat16, float16 nor float32.
    """
    if triton is None:
        raise ValueError(
            "method='triton' needs the package triton, which is not installed: pip install triton (torch for CUDA on "
            "Linux brings it), or take method='newton-schulz', the same iteration without it"
        )
    if x.device.type != "cuda" and not _INTERPRETER:
        raise ValueError(
            f"method='triton' needs a CUDA device, and x is on {x.device}: move it there, take method='newton-schulz', "
            "or try the kernel on a CPU, slowly, with TRITON_INTERPRET=1 in the environment from the start"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"method='triton' multiplies bfloat16, float16 or float32, and x has dtype {x.dtype}: convert it, or take "
            "method='newton-schulz'"
        )


def tiles_for(n: int, matrices: int, x: Tensor) -> Tiles:
    """The cut for `matrices` products of side `n`, with the dtype and on the device of `x`.

    A rule instead of a search at run time, so that replicas that update the same weight on the same kind of GPU round
    alike. Large tiles read half as much memory; small ones are four times as many, and so serve where the large ones
    would leave multiprocessors idle.
    """
    if _INTERPRETER:
        return INTERPRETED
    if x.dtype == torch.float32:
        return FLOAT32
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return LARGE if matrices * triangle(n, LARGE.side) >= processors else SMALL


def triangle(n: int, side: int) -> int:
    """Tiles on and below the diagonal: the programs of one matrix."""
    tiles = -(-n // side)
    return tiles * (tiles + 1) // 2


def symmetric_product(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0, tiles: Tiles | None = None
) -> Tensor:
    """`beta c + alpha a b`, known to be symmetric: one triangle of tiles is computed and each is written twice.

    Accumulates in float32 and rounds once. The lower triangle is what is computed, and the upper one its mirror image
    to the last bit, whether or not the product is symmetric. NaN and infinity propagate as in `a @ b`.

    Args:
        a: `(*batch, n, k)` in bfloat16, float16 or float32, of any strides: transposed and expanded views are not
            copied, except batches of several dimensions that no single one can view.
        b: `(*batch, k, n)`, of the dtype of `a`.
        c: `(*batch, n, n)`, of any strides; symmetric.
        beta: Factor of `c`.
        alpha: Factor of the product.
        tiles: How to cut it; `tiles_for` decides unless given.

    Returns:
        `(*batch, n, n)`, contiguous, of the dtype of `a`.
    """
    *batch, n, k = a.shape
    assert b.shape == (*batch, k, n)
    assert b.dtype == a.dtype
    assert c is None or c.shape == (*batch, n, n)
    if _INTERPRETER and a.dtype == torch.bfloat16:  # whose bits the interpreter multiplies as integers
        wide = symmetric_product(a.float(), b.float(), c, beta=beta, alpha=alpha, tiles=tiles)
        return wide.to(a.dtype)
    matrices = math.prod(batch)
    tiles = tiles or tiles_for(n, matrices, a)
    out = a.new_empty(*batch, n, n)
    a, b = a.reshape(matrices, n, k), b.reshape(matrices, k, n)
    c = None if c is None else c.reshape(matrices, n, n)
    strides = (*a.stride(), *b.stride(), *((0, 0, 0) if c is None else c.stride()))
    factors = float(beta), float(alpha)  # integers would be compiled into the kernel
    launch: Any = _kernel[(matrices * triangle(n, tiles.side),)]
    with torch.cuda.device(a.get_device()):  # triton launches on the current device
        launch(a, b, c, out, n, k, *strides, *factors, SIDE=tiles.side, DEPTH=tiles.depth,
               num_warps=tiles.warps, num_stages=tiles.stages)  # fmt: skip
    return out
