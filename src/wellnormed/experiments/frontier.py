"""Validation loss against the certificate: what a sound Lipschitz bound costs a character transformer.

Every point is a whole run of the `cpu` preset with some settings replaced (LT figure 2, with a bound that holds). Runs
leave one JSON file each; table and figure are drawn from the files, so a grid can be run in pieces or elsewhere.

    python -m wellnormed.experiments.frontier run --only default          # one point
    python -m wellnormed.experiments.frontier draw                        # table and figure from all files
"""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from wellnormed._files import read_json, write_json
from wellnormed.train.config import PRESETS, Caps, TrainConfig

FOLDER = Path("results/frontier")
_REMEDY = "run that point again"


def _grid() -> dict[str, TrainConfig]:
    base = PRESETS["cpu"]
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


@dataclass(frozen=True)
class Run:
    """Train points of the grid and write one file each."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Points to run; all of them if none is named."""
    folder: Path = FOLDER
    """Where the files go."""
    threads: int = 2
    """CPU threads of a run."""


@dataclass(frozen=True)
class Draw:
    """Draw `frontier.md` and `frontier.png` from the files."""

    folder: Path = FOLDER
    """Where the files are."""


def run_point(name: str, threads: int) -> dict[str, Any]:
    """One whole training run; returns what its run folder recorded."""
    from wellnormed.train import train

    config = replace(GRID[name], threads=threads, sample_characters=0)
    with tempfile.TemporaryDirectory() as scratch:
        run = train(config, Path(scratch) / name)
        results = read_json(run.results_file, _REMEDY)
        environment = read_json(run.environment_file, _REMEDY)
    return {
        "command": f"python -m wellnormed.experiments.frontier run --only {name} --threads {threads}",
        "point": name,
        "runs": 1,
        "results": results,
        "environment": environment,
        "config": asdict(config),
    }


def draw(folder: Path) -> None:
    """Table and figure of all points that have a file.

    Raises:
        ValueError: There is none.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    points = [read_json(path, _REMEDY) for path in sorted(folder.glob("*.json"))]
    if not points:
        raise ValueError(f"{folder} holds no points; run `python -m wellnormed.experiments.frontier run` first")
    points.sort(key=lambda p: p["results"]["log10_lipschitz"])
    lines = [
        "Drawn by `python -m wellnormed.experiments.frontier draw` from the files beside it; one run each.",
        "",
        "| point | blocks | width | expansion | caps: q, k, v, out; in, out; head | rule | log10 L | L at least "
        "| validation loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for point in points:
        results, model, caps = point["results"], point["config"]["model"], point["config"]["caps"]
        x, y = results["log10_lipschitz"], results["validation_loss"]
        lines.append(
            f"| {point['point']} | {model['blocks']} | {model['width']} | {model['expansion']} | "
            f"{', '.join(f'{cap:g}' for cap in caps.values())} | {point['config']['constraint']} | {x:.3f} | "
            f"{results['lower_bound']:.3g} | {y:.4f} |"
        )
        axes.plot(x, y, "o", color="tab:red" if point["point"] == "default" else "tab:blue")
        axes.annotate(point["point"], (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set_xlabel("log10 of the certified Lipschitz constant (RMS of embeddings to RMS of logits)")
    axes.set_ylabel("validation loss, nats per character")
    axes.set_title(f"Loss against certificate, text {points[0]['results']['source']}")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "frontier.png", dpi=140)
    (folder / "frontier.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Entry point."""
    command = tyro.extras.subcommand_cli_from_dict({"run": Run, "draw": Draw})
    if isinstance(command, Draw):
        draw(command.folder)
        return
    unknown = [name for name in command.only if name not in GRID]
    if unknown:
        raise ValueError(f"no point {', '.join(unknown)} in the grid; the points are {', '.join(GRID)}")
    command.folder.mkdir(parents=True, exist_ok=True)
    for name in command.only or GRID:
        write_json(command.folder / f"{name}.json", run_point(name, command.threads))


if __name__ == "__main__":
    main()
