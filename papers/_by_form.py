"""LT's table 1 at a small proved constant: models whose form keeps it, beside peers whose rates were searched.

LT is Training Transformers with Enforced Lipschitz Bounds. Its own row at a bound of 10 has the loss 5.047 where its
NanoGPT has 3.41. A model "by form" is a `PotentialGPT`: everything but its head has a constant close to 1 whatever the
weights are. Here models with equal numbers of parameters in their blocks, 1.0 million, read bytes of books in windows
of 128, 32 in a step, at rates that fall to 0 linearly; a peer is trained by Muon with AdamW for tables, as LT does it,
or by Scion alone. The rate of each is the best of its `rates` for seed 0, at the table's steps and at four times as
many; seed 0 counts in the means as well. Products of the models are in bfloat16 while they train, and in float32 when
they are evaluated, which is what the certificates are about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from papers._experiment import Verdict, between
from papers._figures import legend_below, panels
from papers._table import Row
from papers._tokens import byte_corpus, results
from papers.training import PaperVariant, paper_preset
from wellnormed.models import build
from wellnormed.proof.decimals import shown
from wellnormed.train.config import TrainConfig
from wellnormed.train.setup import blocks, with_vocabulary


@dataclass(frozen=True)
class Kind:
    """A model and how it is trained."""

    variant: PaperVariant
    optimizer: Literal["scion", "muon"]
    rates: dict[int, tuple[float, ...]]
    """Tokens -> the rates that are tried, of which `RATE` has the best."""
    lipschitz: float | None = None
    """The constant that is asked for, and proved."""
    model: dict[str, Any] = field(default_factory=dict)
    """How the model differs from that of the variant."""


POSITIONS = {"attention_blocks": 0, "token_width": 32, "mixing_heads": 8, "hidden": 1280}
"""Positions alone decide how the past is read, and vectors of tokens are wider: the best of 18 changes, with one seed
at four times the tokens; there, vectors of 48 are as good."""

KINDS = {
    "NanoGPT, Muon": Kind("nanogpt", "muon", {1: (0.0125, 0.025, 0.05, 0.1), 4: (0.0125, 0.025, 0.05, 0.1)}),
    "NanoGPT, Scion": Kind("nanogpt", "scion", {1: (0.01, 0.02, 0.04, 0.08, 0.16), 4: (0.01, 0.02, 0.04, 0.08)}),
    "speedrun, Muon": Kind("speedrun", "muon", {1: (0.025, 0.05, 0.1, 0.2), 4: (0.025, 0.05, 0.1)}),
    "speedrun, Scion": Kind("speedrun", "scion", {1: (0.01, 0.02, 0.04, 0.08), 4: (0.01, 0.02, 0.04, 0.08)}),
    "by form, proved 3": Kind(
        "potential", "scion", {1: (0.01, 0.02, 0.04, 0.08, 0.16), 4: (0.01, 0.02, 0.04, 0.08)}, 3.0
    ),
    "by form, proved 10": Kind("potential", "scion", {1: (0.01, 0.02, 0.04, 0.08), 4: (0.01, 0.02, 0.04)}, 10.0),
    "by form, proved 100": Kind("potential", "scion", {1: (0.005, 0.01, 0.02, 0.04), 4: (0.005, 0.01, 0.02)}, 100.0),
    "by position, proved 10": Kind(
        "potential", "scion", {1: (0.02, 0.04, 0.08), 4: (0.01, 0.02, 0.04)}, 10.0, POSITIONS
    ),
}
RATE = {
    "NanoGPT, Muon": {1: 0.05, 4: 0.05}, "NanoGPT, Scion": {1: 0.08, 4: 0.04},
    "speedrun, Muon": {1: 0.1, 4: 0.05}, "speedrun, Scion": {1: 0.04, 4: 0.04},
    "by form, proved 3": {1: 0.08, 4: 0.04}, "by form, proved 10": {1: 0.04, 4: 0.02},
    "by form, proved 100": {1: 0.02, 4: 0.01}, "by position, proved 10": {1: 0.04, 4: 0.02},
}  # fmt: skip
"""Kind -> tokens -> the best of its rates there, for seed 0."""
WIDE = ("NanoGPT, Muon", "by form, proved 10", "by position, proved 10")
"""The kinds that are trained with a context of 512 as well."""


STEPS, TOKENS = 105, 32 * 128
"""The steps of the shortest runs, and the tokens of a step."""


@dataclass(frozen=True)
class Matched:
    """One training run."""

    kind: str
    rate: float
    tokens: int
    """The tokens, as a multiple of the 430,080 of the table's other rows."""
    length: int = 128
    seed: int = 0


def rate(kind: str, tokens: int) -> float:
    """The rate of a kind with so many tokens; with the most of them that of a quarter."""
    return RATE[kind][min(tokens, 4)]


def cells() -> list[Matched]:
    """Rates for one seed, three seeds at the best ones, then more tokens and a longer context for one seed."""
    searched = [Matched(name, each, t) for t in (4, 1) for name, kind in KINDS.items() for each in kind.rates[t]]
    main = [Matched(name, rate(name, t), t, seed=seed) for t in (4, 1) for seed in range(3) for name in KINDS]
    wide = [Matched(name, rate(name, 4), 4, length=512) for name in WIDE]
    long = [Matched(name, rate(name, 16), 16) for name in KINDS]
    return list(dict.fromkeys(searched + main + wide + long))


def config_of(cell: Matched) -> TrainConfig:
    """The training run of a cell."""
    kind = KINDS[cell.kind]
    run = paper_preset("1m", kind.variant)
    model = replace(run.model, length=cell.length, **kind.model)
    settings: dict[str, Any] = {} if kind.lipschitz is None else {"lipschitz": kind.lipschitz}
    return replace(
        run, model=model, steps=STEPS * cell.tokens, batch=TOKENS // cell.length, seed=cell.seed,
        schedule="linear", optimizer=kind.optimizer, learning_rate=cell.rate,
        attack_steps=20 if kind.lipschitz else 0, validation_tokens=2**19, precision="bfloat16", **settings,
    )  # fmt: skip


def run(cell: Matched, device: torch.device, folder: Path) -> dict[str, Any]:
    """Loss, accuracy, proved bound and largest gain found of a trained model, and its parameters."""
    corpus, config = byte_corpus(), config_of(cell)
    model = build(with_vocabulary(config, corpus).model)
    counts = {"parameters": sum(p.numel() for p in model.parameters())}
    counts["block_parameters"] = sum(p.numel() for block in blocks(model) for p in block.parameters())
    return counts | results(config, corpus, device, folder)


def found(rows: Sequence[Row], kind: str, key: str = "validation_loss", **config: Any) -> list[float]:
    """A result of every run of a kind with these settings that has it."""
    wanted = {"kind": kind, "length": 128} | config
    known = ((row["config"], row["results"]) for row in rows)
    return [results[key] for settings, results in known if wanted.items() <= settings.items() and key in results]


def at_best(rows: Sequence[Row], kind: str) -> list[float]:
    """The losses of a kind after as many tokens as the table's other rows; an unknown kind has none."""
    return found(rows, kind, rate=rate(kind, 1), tokens=1) if kind in KINDS else []


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Losses over tokens at the chosen rates, with the extremes of the seeds; and over the rates, of one seed."""
    figure, axes = panels(1, 3, (13, 5), sharey=False)
    for number, (name, kind) in enumerate(KINDS.items()):
        style = {"color": f"C{number}", "marker": "o", "linestyle": "-" if kind.lipschitz else "--", "label": name}
        points = [(t, found(rows, name, rate=rate(name, t), tokens=t)) for t in (1, 4, 16)]
        points = [(tokens, losses) for tokens, losses in points if losses]
        axes[0, 0].plot([t for t, _ in points], [fmean(losses) for _, losses in points], **style)
        for tokens, losses in points:
            axes[0, 0].plot([tokens, tokens], [min(losses), max(losses)], color=style["color"])
        for axis, tokens in zip(axes[0, 1:], (4, 1), strict=True):
            searched = [(each, found(rows, name, rate=each, tokens=tokens, seed=0)) for each in kind.rates[tokens]]
            searched = [(each, losses[0]) for each, losses in searched if losses]
            axis.plot([each for each, _ in searched], [loss for _, loss in searched], **style)
    axes[0, 0].set(xscale="log", xlabel="training tokens, in 430,080", ylabel="validation loss, nats a byte")
    axes[0, 0].set_xticks([1, 4, 16], ["1", "4", "16"])
    axes[0, 1].set(xscale="log", xlabel="learning rate, at 4 times the tokens, seed 0")
    axes[0, 2].set(xscale="log", xlabel="learning rate, at the least tokens, seed 0")
    legend_below(figure, "A million parameters in blocks, bytes of books. Dashed: no norm is kept")
    return {"by-form": figure}


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every kind at its chosen rate and length of training; those with a proved constant beside the better peer."""
    lines = []
    for tokens, length in sorted({(row["config"]["tokens"], row["config"]["length"]) for row in rows}):
        rates = {name: rate(name, tokens) for name in KINDS}
        at = {"tokens": tokens, "length": length}
        losses = {name: found(rows, name, rate=rates[name], **at) for name in KINDS}
        peers = {name: fmean(losses[name]) for name, kind in KINDS.items() if not kind.lipschitz and losses[name]}
        for name, kind in KINDS.items():
            if not losses[name]:
                continue
            words = [f"loss {fmean(losses[name]):.3f} at rate {rates[name]:g}"]
            if bounds := found(rows, name, "log10_lipschitz", rate=rates[name], **at):
                most = max(bounds)
                words.append("proved bound " + (shown(10**most, ".4g") if most < 6 else f"10^{shown(most, '.1f')}"))
            if gains := found(rows, name, "lower_bound", rate=rates[name], **at):
                words.append(f"largest gain found {max(gains):.3g}")
            why = ""
            if kind.lipschitz and peers:
                best = min(peers, key=lambda peer: peers[peer])
                above = fmean(losses[name]) - peers[best]
                why = f"{above:+.3f} beside {best}, the best peer here"
            interval = f"loss {between(losses[name])}"
            what = f"{name}; {tokens} times the tokens, context {length}"
            lines.append(Verdict(what, "-", ", ".join(words), interval, len(losses[name]), "measured", why))
    return lines
