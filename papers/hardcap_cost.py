"""SC 5: what capping singular values costs, in products of the matrix with its transpose.

SC counts operations: for an m x n matrix with m the short side one such product is `2 n m^2`, and the nested, dense and
block-wise forms with 6 Newton-Schulz steps are what `PUBLISHED` says. Times are measured in one
process, where the methods take turns so that the machine's drift hits all, and compared as ratios only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._hardcaps import METHODS, STYLES, draw
from papers._table import Row
from wellnormed.matrix import soft_cap, soft_cap_strength

STEPS = 6
ASPECTS = (1, 4)
PUBLISHED: dict[tuple[str, int], float] = {
    **{("nested", aspect): (12 * STEPS + 4) / 2 for aspect in ASPECTS},
    **{("block", aspect): 6 * STEPS * (1 + aspect) ** 3 / (2 * aspect) for aspect in ASPECTS},
    ("blockwise", 1): (36 * STEPS + 1) / 2,  # which SC counts for square matrices alone
}
"""Operations of SC's table over those of one product, for a matrix whose long side is so many short ones."""
NEAR, FAR = 1.1, 100.0
"""Norms of the inputs, in caps: after a step, and far from it, where the Gram form computes in float64."""
WITHIN = 0.25
"""How far a ratio of times may be from the ratio of operations; a call does not only multiply."""


@dataclass(frozen=True)
class Cell:
    """Every method on one float32 matrix, `rounds` times."""

    short: int
    aspect: int
    rounds: int
    seed: int


def cells(preset: Preset) -> list[Cell]:
    """Sizes and shapes, over seeds; SC's 1024 x 4096 on a CPU with one."""
    shapes = [*product(ASPECTS, (64, 128, 256, 512)), (1, 1024), (4, 1024)]
    found = [Cell(short, aspect, 3, seed) for seed in range(3) for aspect, short in shapes]
    return [cell for cell in found if preset == "paper" or cell.seed == 0 or cell.short * cell.aspect < 4096]


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Method -> median seconds of a call."""
    return [_times(cell, device) for cell in cells]


def _times(cell: Cell, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(cell.seed)
    entries = torch.randn(cell.short, cell.aspect * cell.short, generator=generator).to(device)
    w = entries / torch.linalg.matrix_norm(entries, 2)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        **{method: (cap, NEAR * w) for method, cap in METHODS.items()},
        "gram, far": (METHODS["gram"], FAR * w),
        "soft cap": (partial(soft_cap, strength=soft_cap_strength(1.0, NEAR - 1)), NEAR * w),
        "one product": (lambda x: x @ x.mT, NEAR * w),
    }
    rounds = [{name: _seconds(*call) for name, call in calls.items()} for _ in range(1 + cell.rounds)]
    return {name: median(times[name] for times in rounds[1:]) for name in calls}  # the first round warms up


def _seconds(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of one call; short ones are repeated until a hundredth of a second has passed."""
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < 0.01:
        function(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - start) / calls


def ratios(rows: Sequence[Row], aspect: int, method: str, peer: str = "one product") -> list[tuple[int, float]]:
    """Short side and time over that of the peer in the same cell."""
    own = [row for row in rows if row["config"]["aspect"] == aspect]
    return [(row["config"]["short"], row["results"][method] / row["results"][peer]) for row in own]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Times in products, against the size; what SC's operations would give is dotted."""
    figure, axes = panels(1, 2, (10, 4.8))
    for axis, aspect in zip(axes[0], ASPECTS, strict=True):
        draw(axis, {method: ratios(rows, aspect, method) for method in STYLES if method != "one product"})
        for method in (name for name in STYLES if (name, aspect) in PUBLISHED):
            count, colour = PUBLISHED[method, aspect], STYLES[method][0]
            axis.axhline(count, color=colour, linestyle=":", linewidth=1, label=f"_{method}")
        axis.set(title="n x n" if aspect == 1 else f"n x {aspect} n", xlabel="n", xscale="log", yscale="log")
        sizes = sorted({row["config"]["short"] for row in rows})
        axis.set_xticks(sizes, list(map(str, sizes)))
        axis.minorticks_off()
    axes[0, 0].set_ylabel("time of one call over that of W W^T")
    legend_below(figure, "Hard caps, float32 (dotted: operations as SC counts them)")
    return {"cost": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Ratios at the largest size of each shape, against SC's operations."""
    found, (good, bad) = [], ANSWERS[preset]
    for aspect in sorted({row["config"]["aspect"] for row in rows}):
        largest = max(row["config"]["short"] for row in rows if row["config"]["aspect"] == aspect)
        shape = f"{largest} x {aspect * largest}"

        def at_largest(
            method: str, peer: str = "one product", aspect: int = aspect, largest: int = largest
        ) -> list[float]:
            return sorted(ratio for short, ratio in ratios(rows, aspect, method, peer) if short == largest)

        for method in (name for name in STYLES if name != "one product"):
            values, published, verdict, why = at_largest(method), "-", "measured", ""
            if (method, aspect) in PUBLISHED:
                count = PUBLISHED[method, aspect]
                published = f"{count:.3g} times the operations"
                verdict = good if abs(median(values) / count - 1) <= WITHIN else bad
                if verdict == bad:
                    share = median(values) / count
                    why = f"an operation takes {share:.2g} of the time it has in one product, at this size and device"
            what, ours = f"{method}, {shape}: time over one product", f"{median(values):.3g} times the time"
            found.append(Verdict.of(what, published, values, verdict, why, digits=".3g", ours=ours))
        values = at_largest("block", "nested")
        ratio = PUBLISHED["block", aspect] / PUBLISHED["nested", aspect]
        verdict, why = good if abs(median(values) / ratio - 1) <= WITHIN else bad, ""
        if not 3 <= ratio <= 4:
            verdict, why = ("corrected", f"SC's own formulas say {ratio:.1f}; 3 to 4 is of square matrices")
        what, ours = f"block over nested, {shape}", f"{median(values):.3g}"
        found.append(Verdict.of(what, "3 to 4", values, verdict, why, digits=".3g", ours=ours))
    return found


EXPERIMENT = Experiment(
    name="hardcap-cost",
    source="SC 5",
    shows="what each way of capping singular values costs, beside the operations that the paper counts",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    together=lambda cell: None,  # all in one process, so that nothing else of this run computes beside them
    differs={
        "cpu": "1024 x 4096 once",
        "paper": "SC counts operations, and states them as a share of a speedrun's step; here times of single "
        "matrices in float32 are measured beside the counts",
    },
)
