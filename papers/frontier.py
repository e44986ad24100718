"""Validation loss against the certificate: what a proved Lipschitz constant costs a character transformer.

Every point is a whole run of a preset with some settings replaced ("Training Transformers with Enforced Lipschitz
Constants", figure 2, with bounds that hold). Each run leaves one JSON file, points that have one are not run again, and
the figure is drawn from the files: a grid can be run in pieces, in several processes or on several machines. A point
whose process was killed goes on from its newest checkpoint, under `runs/frontier`.

    python -m papers.frontier run                              # all points that have no file yet
    python -m papers.frontier run --only attention-10-seed-0   # one point
    python -m papers.frontier draw                             # the figure from all files
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
from matplotlib.figure import Figure

from papers._figures import panels, save_figure
from papers.header import from_environment, write_result
from wellnormed._files import read_json
from wellnormed.models.config import GPTConfig, PotentialConfig
from wellnormed.train.config import Caps, TrainConfig
from wellnormed.train.presets import PRESETS

FOLDER = Path("results/frontier")
RUNS = Path("runs/frontier")
PEERS = Path("results/frontier_peers.json")
CONSTANTS = (2, 3, 5, 10, 21, 50)
SEEDS = (0, 1, 2)
CURVES: dict[str, tuple[str, str]] = {
    "positions": ("blocks of constant 1, mixing by position", "#009E73"),
    "attention": ("the same with attention that reads the content", "#D55E00"),
    "caps": ("the published architecture: the constants of its layers multiply", "#0072B2"),
}
"""Prefix of the points of a curve -> what they are, and the colour."""
_REMEDY = "run that point again"


def _grid() -> dict[str, TrainConfig]:
    asked = {
        f"{curve}-{constant}-seed-{seed}": replace(PRESETS[preset], lipschitz=float(constant), seed=seed)
        for seed in SEEDS
        for constant in CONSTANTS
        for curve, preset in (("positions", "positions"), ("attention", "cpu"))
    }
    wide = replace(PRESETS["cpu"], model=PotentialConfig(length=256, token_width=32), batch=64)
    asked |= {
        f"{name}-{constant}-seed-0": replace(wide, lipschitz=float(constant), steps=steps)
        for constant in (2, 6)
        for name, steps in (("paper-size", 2000), ("paper-size-half", 1000))
    }
    base = PRESETS["caps"]
    assert isinstance(base.model, GPTConfig)
    deep = replace(base.model, blocks=2, residual_strength=0.25, expansion=4, heads=4, sharpness=1.0)
    loose = Caps(query=0.5, key=0.5, value=2.0, output=2.0, feed_in=2.5, feed_out=2.5, head=2.0)
    sharp = replace(loose, query=1.5, key=1.5)
    return asked | {
        **{f"caps-default-seed-{seed}": replace(base, seed=seed) for seed in SEEDS},
        "caps-looser": replace(base, caps=replace(base.caps, output=2.0, feed_in=2.5, feed_out=2.5)),
        "caps-tighter": replace(base, caps=replace(base.caps, output=1.2, feed_out=1.5, head=0.35)),
        "caps-tightest": replace(base, caps=replace(base.caps, output=1.2, feed_in=1.5, feed_out=1.5, head=0.3)),
        "caps-narrow-hidden": replace(base, model=replace(base.model, expansion=4)),
        "caps-two-blocks": replace(base, model=deep, caps=loose),
        "caps-no-relative-bias": replace(
            base, model=replace(deep, relative_bias=False, attention_scale=8.0), caps=sharp
        ),
        "caps-soft-cap": replace(base, constraint="soft-cap"),
    }


GRID = _grid()
_NOT_DRAWN = ("caps-narrow-hidden", "caps-two-blocks", "caps-no-relative-bias", "caps-soft-cap")


def run(only: tuple[str, ...] = (), folder: Path = FOLDER, threads: int = 1) -> None:
    """Train points of the grid that have no file yet, and write one each.

    Args:
        only: Points to run; all of them if none is named.
        folder: Where the files go.
        threads: CPU threads of a run.
    """
    from papers._shakespeare import scores_as_published
    from wellnormed.data import load_shakespeare
    from wellnormed.models import load
    from wellnormed.train import resume, train

    unknown = [name for name in only if name not in GRID]
    if unknown:
        raise ValueError(f"no point {', '.join(unknown)} in the grid; the points are {', '.join(GRID)}")
    for name in only or GRID:
        path = folder / f"{name}.json"
        if path.exists():
            continue
        config = replace(GRID[name], threads=threads, sample_tokens=0, precision="float32")
        trained = resume(RUNS / name) if (RUNS / name / "config.json").exists() else train(config, RUNS / name)
        config, _ = trained.read_config(TrainConfig)
        results = read_json(trained.results_file, _REMEDY)
        split = load_shakespeare(config.source).validation
        results["loss_as_published"], _ = scores_as_published(load(trained.path), split, config.model.length)
        environment = read_json(trained.environment_file, _REMEDY)["sessions"][0]
        command = f"python -m papers.frontier run --only {name}"
        content = {**from_environment(command, config.seed, environment), "point": name, "runs": 1, "results": results}
        write_result(path, {**content, "config": asdict(config)})
        shutil.rmtree(trained.path)


def draw(folder: Path = FOLDER) -> None:
    """Draw `frontier.png` from the files, beside them."""
    points = [read_json(path, _REMEDY) for path in sorted(folder.glob("*.json"))]
    if not points:
        raise ValueError(f"{folder} holds no points; run `python -m papers.frontier run` first")
    peers = {}
    if PEERS.exists():
        rows = read_json(PEERS, "run benchmarks.frontier_peers again")["rows"]
        for model, name in (("nanoGPT", "nanoGPT's model"), ("speedrun", "the speedrun's model")):
            losses = [at_best for kind, at_best in best_losses(rows).items() if kind.startswith(model)]
            if losses:
                peers[f"{name}, our optimizer, best rate"] = min(mean(each) for each in losses)
    save_figure(figure_of(points, peers), folder / "frontier.png")


def best_losses(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The losses of every kind of peer at the rate that is best for seed 0, over the seeds that have run there.

    Example:
        >>> shared = {"kind": "a", "seed": 0}
        >>> rows = [shared | {"rate": rate, "validation_loss": loss} for rate, loss in ((0.1, 2.0), (0.2, 1.5))]
        >>> best_losses([*rows, {"kind": "a", "seed": 1, "rate": 0.2, "validation_loss": 1.6}])
        {'a': [1.5, 1.6]}
    """
    rates = {kind: best_rate(rows, kind) for kind in dict.fromkeys(row["kind"] for row in rows)}
    return {
        kind: [row["validation_loss"] for row in rows if (row["kind"], row["rate"]) == (kind, rate)]
        for kind, rate in rates.items()
    }


def best_rate(rows: list[dict[str, Any]], kind: str) -> float:
    """The rate of a kind of peer with the least loss for seed 0."""
    searched = [row for row in rows if row["kind"] == kind and row["seed"] == 0]
    return min(searched, key=lambda row: row["validation_loss"])["rate"]


def over_seeds(points: list[dict[str, Any]], curve: str) -> list[dict[str, float]]:
    """For each constant of a curve, rising: the constant, the largest gain found, mean, least and largest loss."""
    runs: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for point in points:
        if point["point"].startswith(curve) and point["point"] not in _NOT_DRAWN:
            runs[point["point"].partition("-seed")[0]].append(point["results"])
    rows = [
        {
            "constant": max(10 ** result["log10_lipschitz"] for result in results),
            "found": max(result["lower_bound"] for result in results),
            "mean": mean(result["validation_loss"] for result in results),
            "least": min(result["validation_loss"] for result in results),
            "largest": max(result["validation_loss"] for result in results),
        }
        for results in runs.values()
    ]
    return sorted(rows, key=lambda row: row["constant"])


def figure_of(points: list[dict[str, Any]], peers: Mapping[str, float]) -> Figure:
    """Loss against certified constant; the true constant lies between the two ends of each horizontal bar.

    `peers` have no certificate: what each is -> its loss.
    """
    figure, ((axes,),) = panels(1, 1, (8.5, 6.2))
    for curve, (label, colour) in CURVES.items():
        rows = over_seeds(points, curve)
        constants, losses = [row["constant"] for row in rows], [row["mean"] for row in rows]
        axes.plot(constants, losses, "o-", color=colour, markersize=6, label=label)
        for row in rows:
            axes.plot([row["found"], row["constant"]], [row["mean"]] * 2, color=colour, linewidth=1, alpha=0.4)
            axes.plot(row["found"], row["mean"], "|", color=colour, markersize=7)
            axes.plot([row["constant"]] * 2, [row["least"], row["largest"]], color=colour, linewidth=3, alpha=0.5)
    where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 9}
    for label, loss in peers.items():
        axes.axhline(loss, color="#555555", linestyle="--", linewidth=1.2)
        lowest = loss == min(peers.values())
        text = f"{label}, no certificate: {loss:.3f}"
        axes.annotate(text, (0.99, loss), (0, -12 if lowest else 4), color="#555555", ha="right", **where)
    axes.annotate(
        "better", (0.03, 0.05), (0.11, 0.15), xycoords="axes fraction", fontsize=12, fontweight="bold",
        arrowprops={"arrowstyle": "-|>", "linewidth": 2, "color": "black"},
    )  # fmt: skip
    axes.plot([], [], "o", color="#555555", label="proved: no change of the input is stretched by more")
    axes.plot([], [], "|", color="#555555", label="found by search: some change is stretched by so much")
    axes.plot([], [], color="#555555", linewidth=3, alpha=0.5, label="from the least to the largest loss of the seeds")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks(CONSTANTS, [str(constant) for constant in CONSTANTS])
    axes.minorticks_off()
    axes.margins(y=0.09)
    axes.set_xlabel("certified Lipschitz constant, from the embedded text to the logits (per token, root mean square)")
    axes.set_ylabel("validation loss (nats per character)")
    axes.set_title("What a proved constant costs: transformers on Tiny Shakespeare, 1.5 million training tokens")
    return figure


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})
