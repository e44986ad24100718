"""Floating-point operations of the functions, counted while they run, as overhead of a training step.

The table is that of Spectral clipping (SC), section 5, for the NanoGPT-140M run: operations of one call on a 768 x 768
matrix over `6 * 768 * 768 * B`, what forward and backward cost for that matrix at `B = 393,216` tokens. The paper's
percentages are its formulas at m = n = 768 and T = 5 steps (so `T m / B` for `msign`); its code runs T = 6, and that is
what `nested`, `block` and `blockwise` here run. Beside it the same over the 72 hidden matrices of GPT-2 small.

torch's `FlopCounterMode` counts products (two per multiplication and addition); elementwise work is left out, as in the
paper. Decompositions are counted by Golub and Van Loan, Matrix Computations (4th edition): a symmetric
eigendecomposition 9 n^3 (section 8.3), an SVD 14 m n^2 + 8 n^3 (section 8.6), a Cholesky factorisation n^3 / 3
(section 4.2). An operation in float64 counts like one in float32. Under any dispatch mode torch computes eigenvectors
for `eigvalsh`, too, so `spectral_normalize` (4/3 n^3 instead of 9 n^3) is counted too high.

    python -m benchmarks.matrix.operations
"""

import argparse
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from papers import published_matrix
from papers.published_matrix import clip
from wellnormed.matrix import (
    msign,
    soft_cap,
    spectral_clip,
    spectral_clipped_weight_decay,
    spectral_hardcap,
    spectral_normalize,
    spectral_relu,
)

from .inputs import GPT2_LAYER, GPT2_LAYERS, GPT2_TOKENS, gaussian
from .record import write

SIDE = 768
SITUATIONS = (0.5, 1.5, 10.0)
"""Largest singular value over the cap. The exact clips choose their way by it; the most expensive is reported."""
aten = torch.ops.aten

PAPER: dict[str, Callable[[int], int]] = {
    "msign": lambda t: 6 * t,
    "spectral_clip": lambda t: 18 * t + 6,
    "spectral_relu": lambda t: 12 * t + 4,
    "spectral_hardcap": lambda t: 12 * t + 4,
    "spectral_clipped_weight_decay": lambda t: 12 * t + 4,
    "spectral_hardcap, block": lambda t: 48 * t,
    "spectral_hardcap, blockwise": lambda t: 36 * t + 1,
}
"""SC section 5: operations over n^3 of a square matrix, for T steps."""
PRINTED = (0.98, 3.13, 2.08, 2.08, 2.08, 7.81, 5.89)
"""The per cents printed there, in the same order."""

FUNCTIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "msign": ("msign", msign),
    "msign, jordan-5": ("msign", partial(msign, coefficients="jordan-5")),
    "msign, eigh": ("msign", published_matrix.eigh),
    "spectral_clip": ("spectral_clip", partial(spectral_clip, lower=0.3, upper=1.0)),
    "spectral_clip, nested": ("spectral_clip", partial(clip, lower=0.3, upper=1.0, method="nested")),
    "spectral_relu": ("spectral_relu", partial(spectral_relu, lower=0.3)),
    "spectral_relu, nested": ("spectral_relu", partial(clip, lower=0.3, upper=None, method="nested")),
    "spectral_hardcap": ("spectral_hardcap", partial(spectral_hardcap, upper=1.0)),
    "spectral_hardcap, nested": ("spectral_hardcap", partial(clip, lower=None, upper=1.0, method="nested")),
    "spectral_hardcap, block": ("spectral_hardcap, block", partial(clip, lower=None, upper=1.0, method="block")),
    "spectral_hardcap, blockwise": (
        "spectral_hardcap, blockwise",
        partial(clip, lower=None, upper=1.0, method="blockwise"),
    ),
    "spectral_clipped_weight_decay": (
        "spectral_clipped_weight_decay",
        partial(spectral_clipped_weight_decay, upper=1.0, decay=0.5),
    ),
    "spectral_normalize": ("spectral_hardcap", partial(spectral_normalize, upper=1.0)),
    "soft_cap": ("spectral_hardcap", partial(soft_cap, strength=0.1)),
}
"""What is counted, and the row of the paper that it stands beside."""


def _eigh(shape: tuple[int, ...], *_, **__) -> int:
    return prod(shape[:-2]) * 9 * shape[-1] ** 3


def _svd(shape: tuple[int, ...], *_, **__) -> int:
    short, long = sorted(shape[-2:])
    return prod(shape[:-2]) * (14 * long * short**2 + 8 * short**3)


def _cholesky(shape: tuple[int, ...], *_, **__) -> int:
    return prod(shape[:-2]) * shape[-1] ** 3 // 3


DECOMPOSITIONS = {aten._linalg_eigh: _eigh, aten._linalg_svd: _svd, aten.linalg_cholesky_ex: _cholesky}


def count(function: Callable[[Tensor], Tensor], w: Tensor) -> int:
    """Operations of one call."""
    with FlopCounterMode(display=False, custom_mapping=DECOMPOSITIONS) as counter:
        function(w)
    return counter.get_total_flops()


def paper_overhead(row: str, steps: int, side: int) -> float:
    """Share of a training step by the paper's formula."""
    return PAPER[row](steps) * side / (6 * GPT2_TOKENS)


def run(side: int = SIDE, layer: tuple[tuple[int, int], ...] = GPT2_LAYER) -> list[dict]:
    """One row per function: operations and shares, ours and the paper's."""
    rows = []
    published = dict(zip(PAPER, PRINTED, strict=True))
    shapes = {shape: gaussian(*shape).float() for shape in {(side, side), *(tuple(sorted(s)) for s in layer)}}
    for name, (row, function) in FUNCTIONS.items():
        # the published forms do the same work whatever the values
        ratios = (1.5,) if name.endswith(("nested", "block", "blockwise")) else SITUATIONS
        counts = {shape: {r: count(function, w * r) for r in ratios} for shape, w in shapes.items()}
        most = {shape: max(found.values()) for shape, found in counts.items()}
        hidden = sum(m * n for m, n in layer)
        rows.append(
            {
                "function": name,
                "paper_row": row,
                "operations_by_ratio": {f"{r:g}": value for r, value in counts[side, side].items()},
                "operations": most[side, side],
                "over_n3": most[side, side] / side**3,
                "overhead": most[side, side] / (6 * side**2 * GPT2_TOKENS),
                "overhead_gpt2": sum(most[tuple(sorted(s))] for s in layer) / (6 * hidden * GPT2_TOKENS),
                "paper_overhead_5_steps": paper_overhead(row, 5, side),
                "paper_overhead_6_steps": paper_overhead(row, 6, side),
                "paper_printed_percent": published[row],
            }
        )
    return rows


def main() -> None:
    """Count, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = run()
    show(rows)
    content = {"side": SIDE, "tokens": GPT2_TOKENS, "matrices": GPT2_LAYERS * len(GPT2_LAYER), "rows": rows}
    write("operations", "python -m benchmarks.matrix.operations", content)


def show(rows: list[dict]) -> None:
    """The rows, for the terminal."""
    print(f"{'function':32} {'over n^3':>9} {'768 x 768':>10} {'GPT-2 small':>12} {'paper, T=5':>11} {'printed':>8}")
    for row in rows:
        print(
            f"{row['function']:32} {row['over_n3']:9.1f} {row['overhead']:10.2%} {row['overhead_gpt2']:12.2%} "
            f"{row['paper_overhead_5_steps']:11.2%} {row['paper_printed_percent']:7.2f}%"
        )


if __name__ == "__main__":
    main()
