"""Validation loss against the certificate: what a sound Lipschitz bound costs a character transformer.

Every point is a whole run of the `cpu` preset with some settings replaced ("Training Transformers with Enforced
Lipschitz Constants", figure 2, with a bound that holds). Each run leaves one JSON file, and the figure is drawn from
the files, so a grid can be run in pieces or on several machines.

    python -m wellnormed.experiments.frontier run --only default          # one point
    python -m wellnormed.experiments.frontier draw                        # the figure from all files
"""

import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from wellnormed._files import read_json
from wellnormed.experiments._figures import panels, save_figure
from wellnormed.experiments._header import from_environment, write_result
from wellnormed.models.config import GPTConfig
from wellnormed.train.config import PRESETS, Caps, TrainConfig

FOLDER = Path("results/frontier")
PEER = Path("results/nanogpt.json")
_REMEDY = "run that point again"


def _grid() -> dict[str, TrainConfig]:
    base = PRESETS["caps"]
    assert isinstance(base.model, GPTConfig)
    deep = replace(base.model, blocks=2, residual_strength=0.25, expansion=4, heads=4, sharpness=1.0)
    loose = Caps(query=0.5, key=0.5, value=2.0, output=2.0, feed_in=2.5, feed_out=2.5, head=2.0)
    sharp = replace(loose, query=1.5, key=1.5)
    return {
        "default": base,
        "looser": replace(base, caps=replace(base.caps, output=2.0, feed_in=2.5, feed_out=2.5)),
        "tighter": replace(base, caps=replace(base.caps, output=1.2, feed_out=1.5, head=0.35)),
        "tightest": replace(base, caps=replace(base.caps, output=1.2, feed_in=1.5, feed_out=1.5, head=0.3)),
        "narrow-hidden": replace(base, model=replace(base.model, expansion=4)),
        "two-blocks": replace(base, model=deep, caps=loose),
        "no-relative-bias": replace(base, model=replace(deep, relative_bias=False, attention_scale=8.0), caps=sharp),
        "soft-cap": replace(base, constraint="soft-cap"),
        "seed-1": replace(base, seed=1),
        "seed-2": replace(base, seed=2),
    }


GRID = _grid()

WHAT_DIFFERS = {
    "default": ("default,\nthree seeds", (-8, -14), "right"),
    "looser": ("larger caps", (10, -5), "left"),
    "tighter": ("smaller caps", (9, -8), "left"),
    "tightest": ("smallest caps", (8, 6), "left"),
    "narrow-hidden": ("hidden layer a quarter as wide", (9, -3), "left"),
    "two-blocks": ("two blocks instead of one,\nnarrow hidden layer, larger caps", (9, 4), "left"),
    "no-relative-bias": ("two blocks, and large queries and\nkeys instead of learned biases", (-8, -28), "right"),
    "soft-cap": ("soft cap instead\nof hard cap", (9, -4), "left"),
}
"""For a reader of the figure: what sets a point apart, where its label stands (points of 1/72 inch), and alignment."""


def run(only: tuple[str, ...] = (), folder: Path = FOLDER, threads: int = 2) -> None:
    """Train points of the grid and write one file each.

    Args:
        only: Points to run; all of them if none is named.
        folder: Where the files go.
        threads: CPU threads of a run.
    """
    from wellnormed.train import train

    unknown = [name for name in only if name not in GRID]
    if unknown:
        raise ValueError(f"no point {', '.join(unknown)} in the grid; the points are {', '.join(GRID)}")
    for name in only or GRID:
        config = replace(GRID[name], threads=threads, sample_characters=0)
        with tempfile.TemporaryDirectory() as scratch:
            trained = train(config, Path(scratch) / name)
            results = read_json(trained.results_file, _REMEDY)
            environment = read_json(trained.environment_file, _REMEDY)["sessions"][0]
        command = f"python -m wellnormed.experiments.frontier run --only {name} --threads {threads}"
        content = {**from_environment(command, config.seed, environment), "point": name, "runs": 1, "results": results}
        write_result(folder / f"{name}.json", {**content, "config": asdict(config)})


def draw(folder: Path = FOLDER) -> None:
    """Draw `frontier.png` from the files, beside them."""
    points = [read_json(path, _REMEDY) for path in sorted(folder.glob("*.json"))]
    if not points:
        raise ValueError(f"{folder} holds no points; run `python -m wellnormed.experiments.frontier run` first")
    peer = read_json(PEER, "run benchmarks/nanogpt.py again") if PEER.exists() else None
    save_figure(figure_of(points, peer), folder / "frontier.png")


def figure_of(points: list[dict[str, Any]], peer: dict[str, Any] | None) -> Figure:
    """Loss against certified constant; the true constant lies between the two ends of each point's bar."""
    figure, ((axes,),) = panels(1, 1, (8.5, 5.5))
    note = partial(axes.annotate, textcoords="offset points", fontsize=9)
    for point in points:
        results = point["results"]
        proved, found, loss = 10 ** results["log10_lipschitz"], results["lower_bound"], results["validation_loss"]
        colour = "#D55E00" if point["point"] in ("default", "seed-1", "seed-2") else "#0072B2"
        axes.plot([found, proved], [loss, loss], color=colour, linewidth=1, alpha=0.5)
        axes.plot(found, loss, "|", color=colour, markersize=7)
        axes.plot(proved, loss, "o", color=colour, markersize=7)
        if point["point"] in WHAT_DIFFERS:
            label, offset, side = WHAT_DIFFERS[point["point"]]
            place = (found if point["point"] == "default" else proved, loss)
            note(label, place, xytext=offset, ha=side, color=colour)
    if peer is not None:
        loss = peer["validation_loss"]
        axes.axhline(loss, color="#555555", linestyle="--", linewidth=1.2)
        label, at_right = (
            f"nanoGPT's settings, AdamW, layer norms: {loss:.3f}, no certificate",
            ("axes fraction", "data"),
        )
        note(label, (0.99, loss), xycoords=at_right, xytext=(0, -12), ha="right", color="#555555")
    axes.annotate(
        "better", (0.8, 0.07), (0.88, 0.17), xycoords="axes fraction", fontsize=12, fontweight="bold",
        arrowprops={"arrowstyle": "-|>", "linewidth": 2, "color": "black"},
    )  # fmt: skip
    axes.plot([], [], "o", color="#555555", label="proved: the network stretches no change of its input by more")
    axes.plot([], [], "|", color="#555555", label="found by search: it does stretch some change by so much")
    axes.legend(loc="upper left", bbox_to_anchor=(0.34, 0.85), fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(left=2)
    axes.margins(y=0.09)
    axes.set_xlabel("certified Lipschitz constant, from the embedded text to the logits (per token, root mean square)")
    axes.set_ylabel("validation loss (nats per character)")
    axes.set_title("What a proved bound costs: transformers on Tiny Shakespeare, 1.5 million training tokens")
    return figure


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})
