"""Whether the best learning rate stays where it is as a network widens: Adam, Scion and modular descent.

A character network of Bengio et al. (2003) reads the last `context` characters: their vectors side by side, then the
bias-free MLP of Modular Duality (MD, appendix A): all three shapes of matrix, tall, square and wide, and no
normalisation that could hide a step that is too long. All but the width stays fixed. The optimizers are Adam on torch's
own initialisation, the "standard parameterisation" of MD A.1; Scion with the recipe "language" (Norm-Constrained LMOs,
section 6) and radius 1; and modular descent (MD section 4.3), which unlike MD A.1 has the momentum of the other two.
These two start where their norms' `initialize_` puts them. The learning rate decays linearly to 0, without warm-up.

Every finished run is a line of `cells-PRESET.jsonl`, and is not run again; `summary-PRESET.json` and the figure follow
from these lines.

    python -m benchmarks.lr_transfer run --preset cpu
    python -m benchmarks.lr_transfer run --preset cpu --seeds 1 --widths 64 1024   # more, later
    python -m benchmarks.lr_transfer draw --preset cpu
"""

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import matplotlib
import torch
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn

from wellnormed._files import json_text, parse_json, read_bytes, write_atomically
from wellnormed.data import CharacterText, load_shakespeare
from wellnormed.experiments._figures import legend_below, panels, save_figure
from wellnormed.experiments._header import header, write_result
from wellnormed.norms import initialize_
from wellnormed.optim import ModularDescent, NonFiniteGradientError, Scion

FOLDER = Path("results/lr-transfer")
_REMEDY = "run `python -m benchmarks.lr_transfer run` first"

Optimizer = Literal["adam", "scion", "modular"]
Row = dict[str, Any]
Curve = dict[int, float | None]  # base-2 logarithm of the learning rate -> loss, None where the run diverged


@dataclass(frozen=True)
class Training:
    """What all runs of one file share."""

    context: int = 8  # characters that the network sees
    symbol_width: int = 8  # entries of a character's vector; `context` of them are no more than the smallest width
    hidden: int = 1  # square matrices
    steps: int = 80  # of training
    batch: int = 512  # predictions of a step
    momentum: float = 0.9  # of Scion and of modular descent, and the first beta of Adam; its second is 0.999
    last_steps: int = 10  # steps whose mean is the training loss
    validation_windows: int = 8192  # predictions of the validation loss, at fixed random places


# Base-2 logarithms of learning rates, around the best of a coarse probe at narrow widths (-3 for Scion, -2 for modular
# descent), and for Adam from above its best at width 64 (-4) down to where theory sends it.
EXPONENTS: dict[Optimizer, tuple[int, ...]] = {
    "adam": tuple(range(-10, -2)), "scion": tuple(range(-6, 1)), "modular": tuple(range(-5, 2))
}  # fmt: skip
PRESETS = {"cpu": (Training(), (64, 128, 256, 512, 1024), EXPONENTS)}  # what is trained, widths, learning rates


class Cell(NamedTuple):
    """One run: the learning rate is `2 ** log2_lr`."""

    optimizer: Optimizer
    width: int
    log2_lr: int
    seed: int


def network(symbols: int, width: int, training: Training) -> nn.Sequential:
    """The network, as torch initialises it."""
    layers: list[nn.Module] = [nn.Embedding(symbols, training.symbol_width), nn.Flatten()]
    for d_in, d_out in pairwise((training.context * training.symbol_width, *[width] * (training.hidden + 1))):
        layers += [nn.Linear(d_in, d_out, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, symbols, bias=False))


def optimizer_of(model: nn.Module, cell: Cell, momentum: float) -> torch.optim.Optimizer:
    """The optimizer; Scion's and modular descent's norms also initialise the model."""
    lr = 2.0**cell.log2_lr
    if cell.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr, betas=(momentum, 0.999))
    if cell.optimizer == "scion":
        optimizer = Scion(model, lr, recipe="language", momentum=momentum)
    else:
        optimizer = ModularDescent(model, lr, momentum=momentum)
    initialize_(optimizer.assignment, generator=torch.Generator().manual_seed(cell.seed))
    return optimizer


def windows(tokens: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` random windows, `(count, context)`, and the characters that follow them."""
    places = tokens.unfold(0, context + 1, 1)
    drawn = places[torch.randint(len(places), (count,), generator=generator)]
    return drawn[:, :-1], drawn[:, -1]


def train(cell: Cell, training: Training, text: CharacterText) -> Row:
    """One run. Losses are in nats a character, and None if one of them stopped being finite.

    Batches depend on the seed alone, so that all runs of a seed see the same ones.
    """
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell.seed)
        model = network(len(text.symbols), cell.width, training)
    optimizer = optimizer_of(model, cell, training.momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / training.steps)
    batches = torch.Generator().manual_seed(cell.seed)
    losses: list[float] = []
    with suppress(NonFiniteGradientError):
        for _ in range(training.steps):
            inputs, targets = windows(text.train, training.batch, training.context, batches)
            loss = F.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    places = torch.Generator().manual_seed(2**31)  # the same for all runs
    inputs, targets = windows(text.validation, training.validation_windows, training.context, places)
    with torch.no_grad():
        validation = F.cross_entropy(model(inputs), targets).item()
    mean = sum(losses[-training.last_steps :]) / training.last_steps
    finite = len(losses) == training.steps and math.isfinite(mean) and math.isfinite(validation)
    return {
        **cell._asdict(),
        "train_loss": mean if finite else None,
        "validation_loss": validation if finite else None,
        "diverged_at": None if finite else len(losses),
        "seconds": round(time.perf_counter() - start, 2),
    }


def run(
    preset: Literal["cpu"] = "cpu",
    output: Path = FOLDER,
    optimizers: tuple[Optimizer, ...] = get_args(Optimizer),
    widths: tuple[int, ...] = (),
    exponents: tuple[int, ...] = (),
    seeds: tuple[int, ...] = (0,),
    text: str = "auto",
    threads: int = 2,
) -> Row:
    """Train what is missing of the grid, one line for each run as soon as it ends, and write the summary.

    Widths come in order, so that a run that is stopped leaves whole widths. A file that holds runs of other settings or
    of another text is refused.

    Args:
        preset: Sizes and learning rates.
        output: Where the files go.
        optimizers: Only these.
        widths: Instead of the preset's.
        exponents: Base-2 logarithms of learning rates instead of the preset's, as when a best one lies at the edge.
        seeds: Of the initialisation and of the batches.
        text: As for `load_shakespeare`.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    training, all_widths, all_exponents = PRESETS[preset]
    characters, path = load_shakespeare(text), output / f"cells-{preset}.jsonl"
    source = {"source": characters.source, "sha256": characters.sha256, "symbols": len(characters.symbols)}
    session = header(f"python -m benchmarks.lr_transfer run --preset {preset}", list(seeds))
    settings: Row = {**session, "config": asdict(training), "text": source, "sessions": []}
    rows: list[Row] = []
    if path.exists():
        stored, rows = read_cells(path)
        if any(stored[key] != settings[key] for key in ("config", "text")):
            raise ValueError(
                f"{path} holds runs with {stored['config']} on {stored['text']['source']}, not with "
                f"{settings['config']} on {characters.source}; choose another --output, or remove it"
            )
        settings = stored
    done = {tuple(row[key] for key in Cell._fields) for row in rows}
    missing = [
        cell
        for seed, width, optimizer in product(seeds, widths or all_widths, optimizers)
        for exponent in exponents or all_exponents[optimizer]
        if (cell := Cell(optimizer, width, exponent, seed)) not in done
    ]
    if missing:
        settings["sessions"].append(session)
    for number, cell in enumerate(missing, 1):
        rows.append({**train(cell, training, characters), "session": len(settings["sessions"]) - 1})
        write_atomically(path, "".join(map(json_text, (settings, *rows))))
        print(f"{number}/{len(missing)}  {rows[-1]}", flush=True)
    summary = summarize(settings, rows)
    write_result(output / f"summary-{preset}.json", summary)
    return summary


def read_cells(path: Path) -> tuple[Row, list[Row]]:
    """Settings, text and sessions of a file, and its runs."""
    lines = read_bytes(path, _REMEDY).splitlines()
    settings, *rows = [parse_json(line, str(path), f"remove it, and {_REMEDY}") for line in lines]
    return settings, rows


def best_of(curve: Curve) -> Row | None:
    """The best learning rate of a curve, on the grid and fitted; None if every run diverged.

    `fitted_log2_lr` is the vertex of the parabola through the best and its two neighbours, where both are finite. At
    the edge of the grid a better rate may lie beyond.

    Example:
        >>> best_of({-3: 2.25, -2: 1.25, -1: 1.25, 0: 2.25})
        {'log2_lr': -2, 'fitted_log2_lr': -1.5, 'loss': 1.25, 'at_edge': False}
    """
    exponents, finite = sorted(curve), {e: loss for e, loss in curve.items() if loss is not None}
    if not finite:
        return None
    loss, best = min((loss, e) for e, loss in finite.items())  # of equal ones the smallest rate
    place, fitted = exponents.index(best), float(best)
    around = [e for e in exponents[max(0, place - 1) : place + 2] if e in finite]
    if len(around) == 3:
        a, b, c = around
        down, up = ((finite[right] - finite[left]) / (right - left) for left, right in pairwise(around))
        fitted = (a + b) / 2 - down * (c - a) / (up - down) / 2
    return {"log2_lr": best, "fitted_log2_lr": fitted, "loss": loss, "at_edge": place in (0, len(exponents) - 1)}


def curves_of(rows: list[Row], metric: str) -> dict[tuple[Optimizer, int], dict[int, Curve]]:
    """`{(optimizer, seed): {width: curve}}`, widths in order."""
    result: dict[tuple[Optimizer, int], dict[int, Curve]] = {}
    for row in sorted(rows, key=lambda row: (row["seed"], row["width"], row["log2_lr"])):
        of_width = result.setdefault((row["optimizer"], row["seed"]), {})
        of_width.setdefault(row["width"], {})[row["log2_lr"]] = row[metric]
    return result


def summarize(settings: Row, rows: list[Row]) -> Row:
    """Best learning rate of every width, and how far it moves, in factors of 2; seeds are never mixed.

    `transferred_loss` is what the widest gets from the best learning rate of the narrowest.
    """
    summary: Row = {
        **settings,
        "seed": sorted({row["seed"] for row in rows}),
        "runs": len(rows),
        "diverged": sum(row["validation_loss"] is None for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "drift": [],
        "best": [],
    }
    for metric in ("validation_loss", "train_loss"):
        for (optimizer, seed), of_width in curves_of(rows, metric).items():
            what = {"metric": metric, "optimizer": optimizer, "seed": seed}
            best = [{"width": width, **found} for width, curve in of_width.items() if (found := best_of(curve))]
            summary["best"] += [{**what, **each} for each in best]
            if best:
                on_grid, fitted = ([each[key] for each in best] for key in ("log2_lr", "fitted_log2_lr"))
                summary["drift"].append({
                    **what,
                    "widths": [each["width"] for each in best],
                    "factors_of_2": max(on_grid) - min(on_grid),
                    "fitted_factors_of_2": round(max(fitted) - min(fitted), 3),
                    "fitted_narrowest_to_widest": round(fitted[-1] - fitted[0], 3),
                    "any_at_edge": any(each["at_edge"] for each in best),
                    "widest_loss": best[-1]["loss"],
                    "transferred_loss": of_width[best[-1]["width"]].get(on_grid[0]),
                })  # fmt: skip
    return summary


def figure_of(settings: Row, rows: list[Row]) -> Figure:
    """One panel for each optimizer, one curve for each width; a star is the best of a curve, a cross a diverged run.

    What lies above the loss of a uniform guess is cut off.
    """
    config, uniform = settings["config"], math.log(settings["text"]["symbols"])
    curves, names = curves_of(rows, "validation_loss"), {"adam": "Adam", "scion": "Scion", "modular": "modular descent"}
    shown = [name for name in names if any(optimizer == name for optimizer, _ in curves)]
    widths = sorted({row["width"] for row in rows})
    viridis = matplotlib.colormaps["viridis"]
    figure, axes = panels(1, len(shown), (1 + 3 * len(shown), 4))
    for (optimizer, _), of_width in curves.items():
        axis = axes[0, shown.index(optimizer)]
        for width, curve in of_width.items():
            style: Row = {"color": viridis(1 - (1 + widths.index(width)) / len(widths))}
            rates = {exponent: 2.0**exponent for exponent in curve}
            losses = [math.nan if loss is None else loss for loss in curve.values()]
            axis.plot(rates.values(), losses, ".-", label=f"width {width}", **style)
            diverged = [rates[exponent] for exponent, loss in curve.items() if loss is None]
            axis.plot(diverged, [uniform] * len(diverged), "x", **style)
            if best := best_of(curve):
                axis.plot(rates[best["log2_lr"]], best["loss"], "*", markersize=13, markeredgecolor="black", **style)
        axis.set_xscale("log", base=2)
        axis.set(title=names[optimizer], xlabel="learning rate")
    bottom = min(uniform, *(row["validation_loss"] or uniform for row in rows))
    axes[0, 0].set(ylim=(bottom - 0.1, uniform + 0.1), ylabel="validation loss (nats per character)")
    what = f"{config['steps']} steps of {config['batch']} characters, {settings['text']['source']}"
    legend_below(figure, f"Best learning rate (star) against width: {what}")
    return figure


def draw(preset: Literal["cpu"] = "cpu", output: Path = FOLDER) -> None:
    """Draw the figure beside the runs' file."""
    settings, rows = read_cells(output / f"cells-{preset}.jsonl")
    save_figure(figure_of(settings, rows), output / f"validation-{preset}.png")


def main() -> None:
    """Entry point."""
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})


if __name__ == "__main__":
    main()
