"""How far each way of capping singular values ends from the cap, and what it costs (Spectral clipping, SC).

Three grids, one JSON file each; the figures are drawn from the files. The cap is 1, so norms and errors are in caps.

- `norm`: error and resulting norm against the norm of the input (SC section 6.1: 1024 x 4096, cap 1).
- `distance`: error of a cluster of singular values against its distance from the cap. Not in SC: there a sign is
  taken of values near zero, where six Newton-Schulz steps have not converged.
- `cost`: seconds of one call against the size.

    python -m wellnormed.experiments.spectral_clipping run --preset cpu   # all three
    python -m wellnormed.experiments.spectral_clipping run --preset paper --only norm
    python -m wellnormed.experiments.spectral_clipping draw --preset cpu
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

from wellnormed._files import read_json
from wellnormed.experiments._figures import legend_below, panels, save_figure
from wellnormed.experiments._header import header, write_result
from wellnormed.matrix import soft_cap, soft_cap_strength, spectral_hardcap, spectral_norm

Grid = Literal["norm", "distance", "cost"]
PresetName = Literal["cpu", "paper"]
Row = dict[str, Any]
Function = Callable[[Tensor], Tensor]

FOLDER = Path("results/spectral-clipping")
METHODS: dict[str, Function] = {
    name: partial(spectral_hardcap, upper=1.0, method=name) for name in ("nested", "block", "blockwise", "gram", "svd")
}
NEAR, FAR = 1.1, 100.0  # norms of the weights of `cost`, in caps: after a step, and far from it
_COMMAND = "python -m wellnormed.experiments.spectral_clipping"


@dataclass(frozen=True)
class Preset:
    """Sizes of the three grids; those of `distance` and `cost` are in float32."""

    shape: tuple[int, int] = (256, 1024)  # of the matrices of `norm`
    norms: tuple[float, ...] = tuple(4.0**k for k in range(8))  # spectral norms of its input
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of its input
    cluster_shape: tuple[int, int] = (96, 384)  # of `distance`; a quarter of the singular values is in the cluster
    distances: tuple[float, ...] = tuple(10 ** (k / 2 - 6) for k in range(12))  # of the cluster from the cap
    outliers: tuple[float, ...] = (1.0, 100.0)  # one singular value above the cluster; 1 for none
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)  # short sides of `cost`
    aspects: tuple[int, ...] = (1, 4)  # long side over short side of `cost`
    rounds: int = 5  # calls of each method; they take turns, and the median counts
    limit_seconds: float = 5.0  # methods that need longer for one call are left out, and the file says so


PRESETS = {"cpu": Preset(), "paper": Preset(shape=(1024, 4096), limit_seconds=60.0)}


def error_against_norm(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """Gaussian matrices of every norm, every method, every dtype; the reference is that of the rounded input.

    Scaling by powers of two is exact, so one float64 SVD serves all norms.
    """
    entries = torch.randn(preset.shape, generator=generator, dtype=torch.float64).to(device)
    entries /= torch.linalg.matrix_norm(entries, 2)
    for dtype in preset.dtypes:
        w = entries.to(getattr(torch, dtype))
        u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
        for method, cap in METHODS.items():
            row: Row = {"method": method, "dtype": dtype}
            if left_out := _left_out(cap, w, preset):
                yield row | left_out
                continue
            for norm in preset.norms:
                result = cap(norm * w).double()
                error = result - (u * (norm * s).clamp_max(1)) @ vh
                yield row | {"norm": norm, "error": _norm(error), "norm_after": _norm(result)}


def error_against_distance(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """A cluster at `1 + d` (side 1) or `1 - d` (side -1); the error is that between the cluster's own vectors."""
    short = preset.cluster_shape[0]
    u, v = (
        torch.linalg.qr(torch.randn(side, short, generator=generator, dtype=torch.float64)).Q.to(device)
        for side in preset.cluster_shape
    )
    many = short // 4
    others = torch.linspace(0.1, 0.9, short - many, dtype=torch.float64, device=device)
    for outlier, side, distance in product(preset.outliers, (1, -1), preset.distances):
        s = torch.cat((torch.full((many,), 1 + side * distance).to(others), others))
        if outlier > 1:
            s[-1] = outlier
        w = ((u * s) @ v.mT).float()
        exact_u, exact_s, exact_vh = torch.linalg.svd(w.double(), full_matrices=False)
        exact = (exact_u * exact_s.clamp_max(1)) @ exact_vh
        for method, cap in METHODS.items():
            error = cap(w).double() - exact
            row = {"method": method, "outlier": outlier, "side": side, "distance": distance}
            yield row | {"error": _norm(u[:, :many].mT @ error @ v[:, :many]), "error_of_all": _norm(error)}


def cost_against_size(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """Median seconds of one call in float32; the methods take turns, so that the machine's drift hits all."""
    strength = soft_cap_strength(1.0, NEAR - 1)
    for aspect, size in product(preset.aspects, preset.sizes):
        entries = torch.randn(size, aspect * size, generator=generator).to(device)
        w = entries / torch.linalg.matrix_norm(entries, 2)
        tasks: dict[str, tuple[Function, Tensor]] = {
            **{method: (cap, NEAR * w) for method, cap in METHODS.items()},
            "gram, far": (METHODS["gram"], FAR * w),
            "soft cap": (partial(soft_cap, strength=strength), NEAR * w),
            "one product": (lambda x: x @ x.mT, NEAR * w),
        }
        for name, task in list(tasks.items()):
            if left_out := _left_out(*task, preset):
                yield {"short": size, "aspect": aspect, "method": name, **left_out}
                del tasks[name]
        rounds = [{name: _seconds(*task) for name, task in tasks.items()} for _ in range(1 + preset.rounds)]
        for name in tasks:
            warm = [times[name] for times in rounds[1:]]  # the first round warms up
            times = {"seconds": statistics.median(warm), "fastest": min(warm)}
            yield {"short": size, "aspect": aspect, "method": name, **times}


GRIDS = {"norm": error_against_norm, "distance": error_against_distance, "cost": cost_against_size}


def _norm(x: Tensor) -> float | None:
    return float(spectral_norm(x)) if bool(x.isfinite().all()) else None


def _left_out(function: Function, x: Tensor, preset: Preset) -> Row:
    """What a row says instead of results if one call takes too long, going by a quarter of the rows and columns."""
    expected = 4**3 * min(_seconds(function, x[: len(x) // 4, : x.shape[1] // 4]) for _ in range(3))
    if expected <= preset.limit_seconds:
        return {}
    return {"left_out": f"about {expected:.0f} seconds for one call, limit {preset.limit_seconds:g}"}


def _seconds(function: Function, x: Tensor) -> float:
    start = time.perf_counter()
    function(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run(
    preset: PresetName = "cpu",
    only: tuple[Grid, ...] = get_args(Grid),
    folder: Path = FOLDER,
    limit_seconds: float | None = None,
    seed: int = 0,
    threads: int = 2,
    device: str = "cpu",
) -> None:
    """Measure, and write one file for each grid.

    Args:
        preset: Sizes.
        only: Grids to run.
        folder: Where the files go.
        limit_seconds: Instead of the preset's.
        seed: Of the random matrices.
        threads: CPU threads.
        device: Where the methods run, and their float64 references.
    """
    torch.set_num_threads(threads)
    sizes = PRESETS[preset]
    if limit_seconds is not None:
        sizes = replace(sizes, limit_seconds=limit_seconds)
    for grid in only:
        options = f"--limit-seconds {sizes.limit_seconds:g} --seed {seed} --threads {threads} --device {device}"
        command = f"{_COMMAND} run --preset {preset} --only {grid} {options}"
        content = {**header(command, seed, device), "grid": grid, "runs": 1, "config": asdict(sizes)}
        start = time.perf_counter()
        rows = list(GRIDS[grid](sizes, torch.Generator().manual_seed(seed), device))
        content |= {"seconds": round(time.perf_counter() - start, 1), "rows": rows}
        write_result(folder / f"{grid}-{preset}.json", content)


def read(grid: Grid, preset: PresetName = "cpu", folder: Path = FOLDER) -> Row:
    """The content of one file; a `ValueError` says what to run if it is missing."""
    return read_json(folder / f"{grid}-{preset}.json", f"run `{_COMMAND} run` first")


_STYLES = {
    "nested": ("#D55E00", "o-"), "block": ("#0072B2", "s-"), "blockwise": ("#56B4E9", "x--"),
    "gram": ("#009E73", "^-"), "svd": ("#000000", "+:"), "gram, far": ("#009E73", "v:"),
    "soft cap": ("#CC79A7", "D-"), "one product": ("#999999", ".-"),
}  # fmt: skip
"""Colours of Okabe and Ito, which all kinds of colour vision tell apart, and a marker each."""


def figure_of(result: Row) -> Figure:
    """The figure of one file. Axes are logarithmic; what was left out, not finite or zero is not drawn."""
    config, grid = result["config"], result["grid"]
    # for each row of panels: what is drawn and its name, and for each panel its title and what all its points share
    rows: list[tuple[str, str, list[tuple[str, Row]]]]
    if grid == "norm":
        title = "Hard cap of {} x {} Gaussian matrices".format(*config["shape"])
        x, x_label = "norm", "norm of the input (caps)"
        inputs = [(f"{dtype} input", {"dtype": dtype}) for dtype in config["dtypes"]]
        rows = [("error", "norm of the error (caps)", inputs), ("norm_after", "norm of the result (caps)", inputs)]
    elif grid == "distance":
        title = "Hard cap of {} x {} matrices with a cluster of singular values near it, float32"
        title, x, x_label = title.format(*config["cluster_shape"]), "distance", "distance from the cap (caps)"
        larger = {size: "nothing larger" if size <= 1 else f"one value at {size:g}" for size in config["outliers"]}
        rows = [
            ("error", "error of the cluster (caps)",
             [(f"{word} the cap; {words}", {"side": side, "outlier": outlier}) for outlier, words in larger.items()])
            for side, word in ((1, "above"), (-1, "below"))
        ]  # fmt: skip
    else:
        title = f"float32, {result['machine']}, {result['environment']['threads']} threads"
        x, x_label = "short", "n"
        shapes = {aspect: "n x n" if aspect == 1 else f"n x {aspect} n" for aspect in config["aspects"]}
        rows = [("seconds", "one call (seconds)", [(shape, {"aspect": aspect}) for aspect, shape in shapes.items()])]
    figure, axes = panels(len(rows), len(rows[0][2]), (7, 0.6 + 2.4 * len(rows)), sharex=True)
    for row_of_axes, (y, y_label, shown) in zip(axes, rows, strict=True):
        row_of_axes[0].set_ylabel(y_label)
        for axis, (panel_title, where) in zip(row_of_axes, shown, strict=True):
            points = [row for row in result["rows"] if where.items() <= row.items() and row.get(y)]
            for method, (colour, style) in _STYLES.items():
                if own := [(point[x], point[y]) for point in points if point["method"] == method]:
                    axis.loglog(*zip(*own, strict=True), style, color=colour, label=method, fillstyle="none")
            axis.set_title(panel_title, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel(x_label)
    if grid == "cost":
        axes[0, 0].set_xticks(config["sizes"], [str(size) for size in config["sizes"]], minor=False)
        axes[0, 0].minorticks_off()
    legend_below(figure, title)
    return figure


def draw(preset: PresetName = "cpu", folder: Path = FOLDER) -> None:
    """Draw one figure from each file there is, beside it."""
    for grid in get_args(Grid):
        if (folder / f"{grid}-{preset}.json").exists():
            save_figure(figure_of(read(grid, preset, folder)), folder / f"{grid}-{preset}.png")


def main() -> None:
    """Entry point."""
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})


if __name__ == "__main__":
    main()
