"""How far each way of capping singular values ends from the cap, and what it costs (Spectral clipping, SC).

Three grids, one JSON file each; the figures are drawn from the files.

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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from wellnormed._files import read_json
from wellnormed.experiments._header import header, legend_below, save_figure, write_result
from wellnormed.matrix import soft_cap, soft_cap_strength, spectral_hardcap, spectral_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("results/spectral-clipping")
METHODS = ("nested", "block", "blockwise", "gram", "svd")
NEAR, FAR = 1.1, 100.0  # norms of the weights of `cost`, in caps: after a step, and far from it
_OTHERS = (0.1, 0.9)  # singular values beside the cluster are spread over this part of the cap
_BLOCK_PRODUCTS = 18  # of side m + n in one block form: three in each of six steps
_REMEDY = "run `python -m wellnormed.experiments.spectral_clipping run` first"

Grid = Literal["norm", "distance", "cost"]
PresetName = Literal["cpu", "paper"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """Sizes of the three grids. The cap is 1, so norms and errors are in caps."""

    shape: tuple[int, int] = (256, 1024)
    """Of the matrices of `norm`."""
    norms: tuple[float, ...] = tuple(4.0**k for k in range(8))
    """Spectral norms of the input. Scaling by powers of two is exact, so one float64 SVD serves all of them."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of the input of `norm`; the other grids are in float32."""
    cluster_shape: tuple[int, int] = (96, 384)
    """Of the matrices of `distance`; a quarter of their singular values is in the cluster."""
    distances: tuple[float, ...] = tuple(10 ** (k / 2 - 6) for k in range(12))
    """Of the cluster from the cap."""
    outliers: tuple[float, ...] = (1.0, 100.0)
    """Norms of the input of `distance`: 1 for nothing above the cluster, else one singular value there."""
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Short sides of `cost`."""
    aspects: tuple[int, ...] = (1, 4)
    """Long side over short side of `cost`."""
    rounds: int = 5
    """Calls of each method; they take turns, and the median counts."""
    limit_seconds: float = 5.0
    """Methods that need longer for one call are left out, and the file says so."""


PRESETS: dict[PresetName, Preset] = {
    "cpu": Preset(),
    "paper": Preset(shape=(1024, 4096), limit_seconds=60.0),
}


@dataclass(frozen=True)
class Run:
    """Measure, and write one file for each grid."""

    preset: PresetName = "cpu"
    """Sizes."""
    only: Annotated[tuple[Grid, ...], tyro.conf.arg(metavar="GRID ...")] = ("norm", "distance", "cost")
    """Grids to run."""
    folder: Path = FOLDER
    """Where the files go."""
    limit_seconds: float | None = None
    """Instead of the preset's."""
    seed: int = 0
    """Of the random matrices."""
    threads: int = 2
    """CPU threads."""
    device: str = "cpu"
    """Where the methods run, and their float64 references."""


@dataclass(frozen=True)
class Draw:
    """Draw one figure from each file there is, beside it."""

    preset: PresetName = "cpu"
    """Which files."""
    folder: Path = FOLDER
    """Where they are."""


def error_against_norm(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """Gaussian matrices of every norm, every method, every dtype; the reference is that of the rounded input."""
    entries = torch.randn(preset.shape, generator=generator, dtype=torch.float64).to(device)
    entries /= torch.linalg.matrix_norm(entries, 2)
    for dtype in preset.dtypes:
        w = entries.to(getattr(torch, dtype))
        u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
        for method in METHODS:
            row: Row = {"method": method, "dtype": dtype}
            if method.startswith("block") and (expected := _block_seconds(w)) > preset.limit_seconds:
                yield row | {"left_out": _too_slow(expected, preset)}
                continue
            for norm in preset.norms:
                result = spectral_hardcap(norm * w, 1.0, method).double()
                error = result - (u * (norm * s).clamp_max(1)) @ vh
                yield row | {"norm": norm, "error": _norm(error), "norm_after": _norm(result)}


def error_against_distance(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """A cluster at `1 + d` (side 1) or `1 - d` (side -1); the error is that between the cluster's own vectors."""
    short, long = preset.cluster_shape
    u, v = (
        torch.linalg.qr(torch.randn(side, short, generator=generator, dtype=torch.float64)).Q.to(device)
        for side in (short, long)
    )
    many = short // 4
    spread = torch.linspace(*_OTHERS, short - many, dtype=torch.float64, device=device)
    for outlier in preset.outliers:
        for side in (1, -1):
            for distance in preset.distances:
                s = torch.cat((torch.full((many,), 1 + side * distance).to(spread), spread))
                if outlier > 1:
                    s[-1] = outlier
                w = ((u * s) @ v.mT).float()
                exact_u, exact_s, exact_vh = torch.linalg.svd(w.double(), full_matrices=False)
                exact = (exact_u * exact_s.clamp_max(1)) @ exact_vh
                for method in METHODS:
                    error = spectral_hardcap(w, 1.0, method).double() - exact
                    row = {"method": method, "outlier": outlier, "side": side, "distance": distance}
                    of_cluster = u[:, :many].mT @ error @ v[:, :many]
                    yield row | {"error": _norm(of_cluster), "error_of_all": _norm(error)}


def cost_against_size(preset: Preset, generator: torch.Generator, device: str) -> Iterator[Row]:
    """Median seconds of one call in float32; the methods take turns, so that the machine's drift hits all."""
    for aspect in preset.aspects:
        before: dict[str, tuple[int, float]] = {}
        for size in preset.sizes:
            entries = torch.randn(size, aspect * size, generator=generator).to(device)
            tasks = _tasks(entries / torch.linalg.matrix_norm(entries, 2))
            shape: Row = {"short": size, "aspect": aspect}
            for name, (smaller, seconds) in before.items():
                if (expected := seconds * (size / smaller) ** 3) > preset.limit_seconds:
                    yield shape | {"method": name, "left_out": _too_slow(expected, preset)}
                    del tasks[name]
            times = {name: [_seconds(task, device)] for name, task in tasks.items()}  # the first call warms up
            for _ in range(preset.rounds):
                for name, task in tasks.items():
                    times[name].append(_seconds(task, device))
            for name, (_, *warm) in times.items():
                before[name] = size, statistics.median(warm)
                yield shape | {"method": name, "seconds": statistics.median(warm), "fastest": min(warm)}


GRIDS: dict[Grid, Callable[[Preset, torch.Generator, str], Iterator[Row]]] = {
    "norm": error_against_norm,
    "distance": error_against_distance,
    "cost": cost_against_size,
}


def measure(grid: Grid, options: Run, preset: Preset) -> dict[str, Any]:
    """The content of one file: rows, and what is needed to make them again."""
    command = (
        f"python -m wellnormed.experiments.spectral_clipping run --preset {options.preset} --only {grid} "
        f"--limit-seconds {preset.limit_seconds:g} --seed {options.seed} --threads {options.threads} "
        f"--device {options.device}"
    )
    described = header(command, options.seed, options.device)
    start = time.perf_counter()
    rows = list(GRIDS[grid](preset, torch.Generator().manual_seed(options.seed), options.device))
    return {
        **described,
        "grid": grid,
        "runs": 1,
        "config": asdict(preset),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }


def _norm(x: Tensor) -> float | None:
    return float(spectral_norm(x)) if bool(x.isfinite().all()) else None


def _too_slow(expected: float, preset: Preset) -> str:
    return f"about {expected:.0f} seconds for one call, limit {preset.limit_seconds:g}"


def _tasks(w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What `cost` times, for a matrix of norm 1."""
    near, far, strength = NEAR * w, FAR * w, soft_cap_strength(1.0, NEAR - 1)
    tasks: dict[str, Callable[[], Tensor]] = {name: lambda n=name: spectral_hardcap(near, 1.0, n) for name in METHODS}
    tasks["gram, far"] = lambda: spectral_hardcap(far, 1.0, "gram")
    tasks["soft cap"] = lambda: soft_cap(near, strength)
    tasks["one product"] = lambda: near @ near.mT
    return tasks


def _seconds(task: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    task()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _block_seconds(w: Tensor) -> float:
    """Of one block form, from one product of a quarter of its side."""
    side = sum(w.shape) // 4
    small = torch.ones(side, side, dtype=w.dtype, device=w.device)
    seconds = min(_seconds(lambda: small @ small, w.device.type) for _ in range(3))
    return _BLOCK_PRODUCTS * 4**3 * seconds


_STYLES = {
    "nested": ("#D55E00", "o-"),
    "block": ("#0072B2", "s-"),
    "blockwise": ("#56B4E9", "x--"),
    "gram": ("#009E73", "^-"),
    "svd": ("#000000", "+:"),
    "gram, far": ("#009E73", "v:"),
    "soft cap": ("#CC79A7", "D-"),
    "one product": ("#999999", ".-"),
}
"""Colours of Okabe and Ito, which all kinds of colour vision tell apart, and a marker each."""


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: which rows, and what of them."""

    title: str
    where: Row
    x: str
    y: str
    x_label: str
    y_label: str


def draw(result: dict[str, Any]) -> "Figure":
    """The figure of one file. Axes are logarithmic; what was left out, not finite or zero is not drawn."""
    import matplotlib.pyplot as plt

    panels, title = _PANELS[result["grid"]](result)
    height = 0.6 + 2.4 * len(panels)
    figure, axes = plt.subplots(
        len(panels), len(panels[0]), figsize=(7, height), layout="constrained", squeeze=False, sharex=True, sharey="row"
    )
    for axis, panel in zip(axes.flat, chain.from_iterable(panels), strict=True):
        for method, (colour, style) in _STYLES.items():
            rows = [r for r in result["rows"] if r["method"] == method and panel.where.items() <= r.items()]
            points = [(r[panel.x], r[panel.y]) for r in rows if r.get(panel.y)]
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(x, y, style, color=colour, label=method, linewidth=1.2, fillstyle="none")
        axis.set(xscale="log", yscale="log")
        axis.set_title(panel.title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis, panel in zip(axes[-1], panels[-1], strict=True):
        axis.set_xlabel(panel.x_label)
    for axis, row in zip(axes[:, 0], panels, strict=True):
        axis.set_ylabel(row[0].y_label)
    if result["grid"] == "cost":
        sizes = result["config"]["sizes"]
        axes[0, 0].set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axes[0, 0].minorticks_off()
    legend_below(figure)
    figure.suptitle(title, fontsize=11)
    return figure


def _panels_of_norm(result: dict[str, Any]) -> tuple[list[list[_Panel]], str]:
    m, n = result["config"]["shape"]
    kinds = (("error", "norm of the error (caps)"), ("norm_after", "norm of the result (caps)"))
    panels = [
        [
            _Panel(f"{dtype} input" * (y == "error"), {"dtype": dtype}, "norm", y, "norm of the input (caps)", label)
            for dtype in result["config"]["dtypes"]
        ]
        for y, label in kinds
    ]
    return panels, f"Hard cap of {m} x {n} Gaussian matrices"


def _panels_of_distance(result: dict[str, Any]) -> tuple[list[list[_Panel]], str]:
    m, n = result["config"]["cluster_shape"]
    panels = [
        [
            _Panel(
                f"{word} the cap; " + ("nothing larger" if outlier <= 1 else f"one value at {outlier:g}"),
                {"side": side, "outlier": outlier},
                "distance",
                "error",
                "distance from the cap (caps)",
                "error of the cluster (caps)",
            )
            for outlier in result["config"]["outliers"]
        ]
        for side, word in ((1, "above"), (-1, "below"))
    ]
    return panels, f"Hard cap of {m} x {n} matrices with a cluster of singular values near it, float32"


def _panels_of_cost(result: dict[str, Any]) -> tuple[list[list[_Panel]], str]:
    panels = [
        _Panel("n x n" if a == 1 else f"n x {a} n", {"aspect": a}, "short", "seconds", "n", "one call (seconds)")
        for a in result["config"]["aspects"]
    ]
    return [panels], f"float32, {result['machine']}, {result['environment']['threads']} threads"


_PANELS: dict[str, Callable[[dict[str, Any]], tuple[list[list[_Panel]], str]]] = {
    "norm": _panels_of_norm,
    "distance": _panels_of_distance,
    "cost": _panels_of_cost,
}


def read(grid: Grid, preset: PresetName = "cpu", folder: Path = FOLDER) -> dict[str, Any]:
    """The content of one file.

    Raises:
        ValueError: It is missing or damaged.
    """
    return read_json(folder / f"{grid}-{preset}.json", _REMEDY)


def main() -> None:
    """Entry point."""
    options = tyro.extras.subcommand_cli_from_dict({"run": Run, "draw": Draw})
    if isinstance(options, Run):
        torch.set_num_threads(options.threads)
        preset = PRESETS[options.preset]
        if options.limit_seconds is not None:
            preset = replace(preset, limit_seconds=options.limit_seconds)
        for grid in options.only:
            write_result(options.folder / f"{grid}-{options.preset}.json", measure(grid, options, preset))
        return
    for path in sorted(options.folder.glob(f"*-{options.preset}.json")):
        content = read_json(path, _REMEDY)
        save_figure(lambda shown=content: draw(shown), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
