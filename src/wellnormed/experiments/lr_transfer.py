"""Whether the best learning rate stays where it is as a network widens: Adam, Scion and modular descent.

A character network of Bengio et al. (2003) reads the last `context` characters: their vectors side by side, then
`Linear`, ReLU, `hidden` times `Linear(width, width)`, ReLU, and a `Linear` to the next character's logits. The body is
the bias-free MLP of Modular Duality (MD, appendix A): all three shapes of matrix, tall, square and wide, and no
normalisation that could hide a step that is too long. All but the width stays fixed: vectors, data, steps.

- `adam`: torch's default initialisation and Adam's default settings, the "standard parameterisation" of MD A.1.
- `scion`: uSCG with the recipe "language" (ColNorm, Spectral, Sign; Norm-Constrained LMOs, section 6), radius 1.
- `modular`: dualization in the modular norm (MD section 4.3), recipe "modular", equal masses. Unlike MD A.1 with
  momentum, that of the other two.

These two start where their norms' `initialize_` puts them. The learning rate decays linearly to 0, without warm-up.

Every finished run is a line of `cells-PRESET.jsonl`, and is not run again; `summary-PRESET.json` and the figure follow
from these lines.

    python -m wellnormed.experiments.lr_transfer run --preset cpu
    python -m wellnormed.experiments.lr_transfer run --preset cpu --seeds 1 --widths 64 1024   # more, later
    python -m wellnormed.experiments.lr_transfer draw --preset cpu
"""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from wellnormed._files import write_atomically
from wellnormed.data import CharacterText, load_shakespeare
from wellnormed.experiments._header import header as header_of
from wellnormed.experiments._header import legend_below, save_figure, write_result
from wellnormed.norms import assign_norms
from wellnormed.optim import ConditionalGradient, ModularDescent, NonFiniteGradientError, Scion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("results/lr-transfer")
_REMEDY = "run `python -m wellnormed.experiments.lr_transfer run` first"
_VALIDATION_SEED = 2**31  # of the validation windows, the same for all runs

Optimizer = Literal["adam", "scion", "modular"]
Metric = Literal["validation_loss", "train_loss"]
PresetName = Literal["cpu"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """What all runs of one file share."""

    context: int = 8
    """Characters that the network sees."""
    symbol_width: int = 8
    """Entries of a character's vector; `context` of them make 64 inputs, no more than the smallest width."""
    hidden: int = 1
    """Square matrices."""
    steps: int = 80
    """Of training."""
    batch: int = 512
    """Predictions of a step."""
    momentum: float = 0.9
    """Of Scion and of modular descent, and the first beta of Adam; its second is 0.999."""
    last_steps: int = 10
    """Steps whose mean is the training loss."""
    validation_windows: int = 8192
    """Predictions of the validation loss, at fixed random places."""


@dataclass(frozen=True)
class Preset:
    """The grid."""

    training: Training = Training()
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Of the hidden layers."""
    exponents: dict[Optimizer, tuple[int, ...]] = field(
        default_factory=lambda: {
            "adam": tuple(range(-10, -2)),
            "scion": tuple(range(-6, 1)),
            "modular": tuple(range(-5, 2)),
        }
    )
    """Base-2 logarithms of the learning rates: around the best of a coarse probe at narrow widths (2^-3 for Scion, 2^-2
    for modular descent), and for Adam from above its best at width 64 (2^-4) down to where theory sends it."""
    seeds: tuple[int, ...] = (0,)
    """Of the initialisation and of the batches."""


PRESETS: dict[PresetName, Preset] = {"cpu": Preset()}


@dataclass(frozen=True)
class Run:
    """Train what is missing of the grid, and write the summary."""

    preset: PresetName = "cpu"
    """Sizes and learning rates."""
    output: Path = FOLDER
    """Where the files go."""
    optimizers: Annotated[tuple[Optimizer, ...], tyro.conf.arg(metavar="NAME ...")] = get_args(Optimizer)
    """Only these."""
    widths: tuple[int, ...] = ()
    """Instead of the preset's."""
    exponents: tuple[int, ...] = ()
    """Base-2 logarithms of learning rates instead of the preset's, as when a best one lies at the edge."""
    seeds: tuple[int, ...] = ()
    """Instead of the preset's."""
    text: str = "auto"
    """As for `load_shakespeare`."""
    threads: int = 2
    """CPU threads."""


@dataclass(frozen=True)
class Draw:
    """Draw the figure beside the runs' file."""

    preset: PresetName = "cpu"
    """Which file."""
    output: Path = FOLDER
    """Where it is."""


@dataclass(frozen=True)
class Cell:
    """One run: the learning rate is `2 ** log2_lr`."""

    optimizer: Optimizer
    width: int
    log2_lr: int
    seed: int


def grid(options: Run, preset: Preset) -> Iterator[Cell]:
    """All runs that are asked for, widths in order, so that a run that is stopped leaves whole widths."""
    for seed in options.seeds or preset.seeds:
        for width in options.widths or preset.widths:
            for optimizer in options.optimizers:
                for exponent in options.exponents or preset.exponents[optimizer]:
                    yield Cell(optimizer, width, exponent, seed)


def network(symbols: int, width: int, training: Training) -> nn.Sequential:
    """The network, as torch initialises it."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=nn.Embedding(symbols, training.symbol_width),
        flatten=nn.Flatten(),
        first=nn.Linear(training.context * training.symbol_width, width, bias=False),
        first_relu=nn.ReLU(),
    )
    for index in range(training.hidden):
        layers[f"hidden_{index}"] = nn.Linear(width, width, bias=False)
        layers[f"hidden_{index}_relu"] = nn.ReLU()
    layers["head"] = nn.Linear(width, symbols, bias=False)
    return nn.Sequential(layers)


def optimizer_of(model: nn.Module, cell: Cell, momentum: float, generator: torch.Generator) -> torch.optim.Optimizer:
    """The optimizer; Scion's and modular descent's norms also initialise the model."""
    lr = 2.0**cell.log2_lr
    if cell.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr, betas=(momentum, 0.999))
    optimizer: ConditionalGradient
    if cell.optimizer == "scion":
        optimizer = Scion(assign_norms(model, recipe="language"), lr, momentum=momentum)
    else:
        optimizer = ModularDescent(model, lr, momentum=momentum)
    for assigned in optimizer.assignment:
        assert assigned.norm is not None  # neither recipe leaves one out
        assigned.norm.initialize_(assigned.parameter, generator)
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
    optimizer = optimizer_of(model, cell, training.momentum, torch.Generator().manual_seed(cell.seed))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / training.steps)
    batches = torch.Generator().manual_seed(cell.seed)
    losses: list[float] = []
    for _ in range(training.steps):
        inputs, targets = windows(text.train, training.batch, training.context, batches)
        loss = F.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if not math.isfinite(losses[-1]):
            break
        try:
            optimizer.step()
        except NonFiniteGradientError:
            break
        schedule.step()
    finished = len(losses) == training.steps
    with torch.no_grad():
        places = torch.Generator().manual_seed(_VALIDATION_SEED)
        inputs, targets = windows(text.validation, training.validation_windows, training.context, places)
        validation = F.cross_entropy(model(inputs), targets).item()
    mean = sum(losses[-training.last_steps :]) / training.last_steps
    finite = finished and math.isfinite(mean) and math.isfinite(validation)
    return {
        **asdict(cell),
        "train_loss": mean if finite else None,
        "validation_loss": validation if finite else None,
        "diverged_at": None if finite else len(losses),
        "seconds": round(time.perf_counter() - start, 2),
    }


def run(options: Run, preset: Preset, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train what is missing, one line for each run as soon as it ends, and write the summary.

    Returns:
        The summary.

    Raises:
        ValueError: The file holds runs of other settings or of another text.
    """
    text = load_shakespeare(options.text)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"cells-{options.preset}.jsonl"
    shared = {
        "config": asdict(preset.training),
        "text": {"source": text.source, "sha256": text.sha256, "symbols": len(text.symbols)},
    }
    command = f"python -m wellnormed.experiments.lr_transfer run --preset {options.preset}"
    session = header_of(command, list(options.seeds or preset.seeds))
    header, rows = read_cells(path) if path.exists() else ({**session, **shared, "sessions": []}, [])
    if {key: header[key] for key in shared} != shared:
        raise ValueError(
            f"{path} holds runs with {header['config']} on {header['text']['source']}, not with {shared['config']} on "
            f"{text.source}; choose another --output, or remove it"
        )
    done = {_cell(row) for row in rows}
    missing = [cell for cell in grid(options, preset) if cell not in done]
    if missing:
        header["sessions"].append(session)
    for number, cell in enumerate(missing, 1):
        row = {**train(cell, preset.training, text), "session": len(header["sessions"]) - 1}
        rows.append(row)
        write_atomically(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in (header, *rows)))
        loss = "diverged" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        report(
            f"{number}/{len(missing)}  {cell.optimizer:8} width {cell.width:5}  lr 2^{cell.log2_lr:<4} seed "
            f"{cell.seed}  {loss:8}  {row['seconds']:.1f} s"
        )
    summary = summarize(header, rows)
    write_result(options.output / f"summary-{options.preset}.json", summary)
    return summary


def read_cells(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The header (settings, text, sessions) and the runs of a file.

    Raises:
        ValueError: It is missing or damaged.
    """
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {_REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and {_REMEDY}") from None
    return header, rows


def _cell(row: Row) -> Cell:
    return Cell(row["optimizer"], row["width"], row["log2_lr"], row["seed"])


@dataclass(frozen=True)
class Best:
    """The best learning rate of one curve, as base-2 logarithms."""

    log2_lr: int
    """On the grid."""
    fitted_log2_lr: float
    """Vertex of the parabola through the best and its two neighbours; that of the grid where there is no such."""
    loss: float
    """On the grid."""
    at_edge: bool
    """The best is the first or last of its grid, so that a better one may lie beyond."""


def best_of(curve: dict[int, float | None]) -> Best | None:
    """The best of `{log2 of the learning rate: loss}`, where None is a diverged run; None if all diverged.

    Example:
        >>> best_of({-3: 2.25, -2: 1.25, -1: 1.25, 0: 2.25})
        Best(log2_lr=-2, fitted_log2_lr=-1.5, loss=1.25, at_edge=False)
    """
    finite = {exponent: loss for exponent, loss in curve.items() if loss is not None}
    if not finite:
        return None
    exponents = sorted(curve)
    best = min(finite, key=lambda exponent: (finite[exponent], exponent))
    place = exponents.index(best)
    at_edge = place in (0, len(exponents) - 1)
    fitted = float(best)
    if not at_edge:
        before, after = exponents[place - 1], exponents[place + 1]
        if before in finite and after in finite:
            fitted = _vertex((before, finite[before]), (best, finite[best]), (after, finite[after]))
    return Best(best, fitted, finite[best], at_edge)


def _vertex(left: tuple[int, float], middle: tuple[int, float], right: tuple[int, float]) -> float:
    """Of the parabola through three points, the middle one the lowest."""
    (a, at_a), (b, at_b), (c, at_c) = left, middle, right
    down, up = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)
    curvature = (up - down) / (c - a)
    return (a + b) / 2 - down / (2 * curvature) if curvature > 0 else float(b)


def curves(rows: list[Row], metric: Metric) -> dict[tuple[Optimizer, int], dict[int, dict[int, float | None]]]:
    """`{(optimizer, seed): {width: {log2 of the learning rate: loss}}}`, widths in order."""
    result: dict[tuple[Optimizer, int], dict[int, dict[int, float | None]]] = {}
    for row in sorted(rows, key=lambda row: (row["seed"], row["width"], row["log2_lr"])):
        of_width = result.setdefault((row["optimizer"], row["seed"]), {})
        of_width.setdefault(row["width"], {})[row["log2_lr"]] = row[metric]
    return result


def summarize(header: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Best learning rate of every width, and how far it moves; seeds are never mixed."""
    best_rates: list[Row] = []
    drifts: list[Row] = []
    for metric in get_args(Metric):
        for (optimizer, seed), of_width in curves(rows, metric).items():
            what: Row = {"metric": metric, "optimizer": optimizer, "seed": seed}
            best = {width: found for width, curve in of_width.items() if (found := best_of(curve)) is not None}
            best_rates += [{**what, "width": width, **asdict(found)} for width, found in best.items()]
            if best:
                drifts.append({**what, **_drift(best, of_width)})
    return {
        **header,
        "seed": sorted({row["seed"] for row in rows}),
        "runs": len(rows),
        "diverged": sum(row["validation_loss"] is None for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "drift": drifts,
        "best": best_rates,
    }


def _drift(best: dict[int, Best], of_width: dict[int, dict[int, float | None]]) -> Row:
    """In factors of 2. `transferred_loss` is what the widest gets from the best learning rate of the narrowest."""
    narrow, wide = min(best), max(best)
    on_grid = [found.log2_lr for found in best.values()]
    fitted = [found.fitted_log2_lr for found in best.values()]
    return {
        "widths": list(best),
        "factors_of_2": max(on_grid) - min(on_grid),
        "fitted_factors_of_2": round(max(fitted) - min(fitted), 3),
        "fitted_narrowest_to_widest": round(best[wide].fitted_log2_lr - best[narrow].fitted_log2_lr, 3),
        "any_at_edge": any(found.at_edge for found in best.values()),
        "widest_loss": best[wide].loss,
        "transferred_loss": of_width[wide].get(best[narrow].log2_lr),
    }


_NAMES: dict[Optimizer, str] = {"adam": "Adam", "scion": "Scion", "modular": "modular descent"}
_MARKERS = "os^Dv"


def draw(rows: list[Row], settings: dict[str, Any], metric: Metric = "validation_loss") -> "Figure":
    """One panel for each optimizer, one curve for each width; a star is the best of a curve, a cross a diverged run.

    Curves of further seeds are dotted. What lies above the loss of a uniform guess is cut off.
    """
    import matplotlib.pyplot as plt

    uniform = math.log(settings["text"]["symbols"])
    found = curves(rows, metric)
    optimizers = [name for name in get_args(Optimizer) if any(optimizer == name for optimizer, _ in found)]
    widths = sorted({row["width"] for row in rows})
    losses = [row[metric] for row in rows if row[metric] is not None]
    bottom = min([*losses, uniform]) - 0.1
    colours = plt.get_cmap("viridis")([0.9 - 0.9 * i / max(1, len(widths) - 1) for i in range(len(widths))])
    figure, axes = plt.subplots(
        1, len(optimizers), figsize=(1 + 3 * len(optimizers), 4), layout="constrained", sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], optimizers, strict=True):
        first = min(seed for optimizer, seed in found if optimizer == name)
        for (optimizer, seed), of_width in found.items():
            if optimizer != name:
                continue
            for width, curve in of_width.items():
                place = widths.index(width)
                style: Row = {"color": colours[place], "zorder": 2 + place / len(widths)}
                line = {"marker": _MARKERS[place % len(_MARKERS)], "markersize": 4, "linewidth": 1.4}
                if seed != first:
                    line = {"linestyle": ":", "linewidth": 1.4}
                drawn = [(2.0**e, math.nan if loss is None else loss) for e, loss in curve.items()]
                axis.plot(*zip(*drawn, strict=True), **style, **line, label=f"width {width}" if seed == first else None)
                diverged = [2.0**e for e, loss in curve.items() if loss is None]
                axis.plot(diverged, [uniform] * len(diverged), "x", **style)
                if best := best_of(curve):
                    axis.plot(2.0**best.log2_lr, best.loss, "*", markersize=13, markeredgecolor="black", **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom, uniform + 0.1)
        axis.set_title(_NAMES[name], fontsize=11)
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"{metric.replace('_', ' ')} (nats per character)")
    legend_below(figure)
    config = settings["config"]
    figure.suptitle(
        f"Best learning rate (star) against width: {config['steps']} steps of {config['batch']} characters, "
        f"{settings['text']['source']}",
        fontsize=11,
    )
    return figure


def main() -> None:
    """Entry point."""
    options = tyro.extras.subcommand_cli_from_dict({"run": Run, "draw": Draw})
    if isinstance(options, Run):
        torch.set_num_threads(options.threads)
        run(options, PRESETS[options.preset], lambda line: print(line, flush=True))
        return
    settings, rows = read_cells(options.output / f"cells-{options.preset}.jsonl")
    if not rows:
        raise ValueError(f"{options.output} holds no runs; {_REMEDY}")
    save_figure(lambda: draw(rows, settings), options.output / f"validation-{options.preset}.png")


if __name__ == "__main__":
    main()
