"""One HTML page about a run, self-contained, drawn only from the files of its folder."""

import html
import io
import json
import math
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wellnormed._files import read_files, read_json, write_atomically
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.formats import number_formats
from wellnormed.certificates.printing import PROOF, factors, sentence
from wellnormed.certificates.sizes import entries_of, largest_rms, short, slope
from wellnormed.models.files import WEIGHTS, read_config, read_tensors
from wellnormed.proof.decimals import shown
from wellnormed.proof.reading import printable, word
from wellnormed.train.run_folder import RunFolder

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2330; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d5dae3 }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem } .figures svg { width: 100%; height: auto }
@media (max-width: 48rem) { .figures { grid-template-columns: 1fr } }
.facts { display: flex; flex-wrap: wrap; gap: 1rem; padding: 0; margin-top: 1.2rem }
.facts div { background: #f2f5fa; border-radius: 6px; padding: .6rem 1rem; flex: 1 8rem; overflow-wrap: anywhere }
.facts b { display: block; font-size: 1.35rem } .facts span { color: #566176; font-size: .85rem }
table { border-collapse: collapse; font-size: .82rem; width: 100%; min-width: 40rem }
td, th { padding: .15rem .6rem .15rem 0; text-align: left; border-bottom: 1px solid #e7ebf1; vertical-align: top }
td:first-child, td:nth-child(2), p, pre { overflow-wrap: anywhere } .table { overflow-x: auto }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
pre { background: #f2f5fa; border-radius: 6px; padding: 1rem; white-space: pre-wrap; font-size: .85rem }
.none { color: #566176 } summary { cursor: pointer; margin: 1rem 0 }
"""
KINDS = {
    "gpt": "A transformer whose weights have capped norms",
    "potential": "A transformer of blocks whose form keeps their Lipschitz constants at 1 or little more",
    "nanogpt": "A transformer whose weights have no caps",
}
"""The architectures of this package in words."""
BLUE, ORANGE, GREY = "#2458a6", "#c8641b", "#8a94a6"


def write_report(folder: str | Path) -> Path:
    """Draw `report.html` from the files of a run folder or exported model, and return its path.

    Sections whose file is missing say so; a damaged file is a `ValueError`.
    """
    run = RunFolder(folder)
    config = read_config(run.path)
    metrics = run.read_metrics()
    again = f"{run.resume_command} writes it again"
    certificate = Certificate.load(run.certificate_file) if run.certificate_file.exists() else None
    results = read_json(run.results_file, again, sealed=True) if run.results_file.exists() else None
    environment = read_json(run.environment_file, "remove it", sealed=True) if run.environment_file.exists() else None
    name = html.escape(run.path.resolve().name)
    figures = [_loss_figure(metrics, results)] if len(metrics) > 1 else []
    if len(metrics) > 1 and "norms_over_caps" in metrics[0]:
        figures.append(_norms_figure(metrics))
    if any("largest_entry" in row for row in metrics):
        figures.append(_entries_figure(metrics))
    if sum("tokens_per_second" in row for row in metrics) > 1:
        figures.append(_speed_figure(metrics))
    if certificate and math.isfinite(certificate.lipschitz.log10):
        figures += [_growth_figure(certificate), _budget_figure(certificate)]
    known = ([] if results else _facts_so_far(metrics)) + facts(config, results, certificate)
    boxes = [f"<div><b>{x}</b><span>{html.escape(what)}</span></div>" for x, what in known]
    proved = _certificate_table(certificate) if certificate else _prose((results or {}).get("refused", ""))
    if certificate is not None and results is not None and "observed" in results:
        proved += _formats(run, certificate, results)
    state = _state(run, config, metrics)
    about = _about(config, environment)
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}: {state}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><h1>{name}</h1><p><b>{state}.</b> {html.escape(about)}</p>",
        f"<div class='facts'>{''.join(boxes)}</div>",
        _section("Figures", f"<div class='figures'>{''.join(map(_svg, figures))}</div>" if figures else None),
        _section("Sample", f"<pre>{html.escape(printable(results['sample']))}</pre>" if results else None),
        _section("Certificate", proved),
        _section("Config", _settings(config)),
        _section("Environment", _settings(environment) if environment else None),
        "</body></html>",
    ]
    write_atomically(run.report_file, "\n".join(parts))
    return run.report_file


def _state(run: RunFolder, config: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    """The progress of the run, in words."""
    if "train" not in config:
        return "exported model"
    done, steps = metrics[-1]["step"] if metrics else 0, config["train"]["steps"]
    return f"finished, {steps:,} steps" if run.manifest_file.exists() else f"unfinished, {done:,} of {steps:,} steps"


def _about(config: dict[str, Any], environment: dict[str, Any] | None) -> str:
    """A sentence on the run: its model, its text, its start and version."""
    model, train, text = config["model"], config.get("train", {}), config.get("text", {})
    words = [KINDS.get(model["architecture"], f"A model of the architecture {model['architecture']}")]
    if "source" in text:
        words.append(f"on {text['source']} (digest {text['digest'][:12]}), seed {train['seed']}")
    if environment:
        first = environment["sessions"][0]
        commit = f", commit {first['commit'][:12]}" if first["commit"] else ""
        words.append(f"begun at {first['started']} by wellnormed {first['packages']['wellnormed']}{commit}")
    return ", ".join(words) + "."


def _facts_so_far(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The newest losses of a run that has no results yet."""
    names = {"loss": "loss of a batch", "validation_loss": "validation loss"}
    newest = {name: row for row in metrics for name in names if name in row}
    return [(f"{row[name]:.4f}", f"{names[name]}, step {row['step']:,}") for name, row in newest.items()]


def facts(
    config: dict[str, Any], results: dict[str, Any] | None, certificate: Certificate | None
) -> list[tuple[str, str]]:
    """The known figures of a run, each with its description."""
    figures = []
    asked = config.get("train", {}).get("lipschitz")
    if results:
        split = f"{results['validation_tokens']:,} tokens of {results['source']}"
        after = f"after {results['training_tokens']:,} training tokens"
        figures.append((f"{results['validation_loss']:.4f}", f"validation loss, {split}, {after}"))
        if "bits_per_byte" in results:
            figures.append((f"{results['bits_per_byte']:.4f}", "validation bits a byte of text"))
        if "validation_accuracy" in results:
            figures.append((f"{results['validation_accuracy']:.4f}", "validation accuracy"))
    if certificate:
        limit = "" if asked is None else f"; at most {asked:g} was asked for"
        figures.append((short(certificate.rms_lipschitz.exact), f"certified Lipschitz bound from RMS to RMS{limit}"))
        if found := certificate.rms_lower_bound:
            figures.append((shown(found, ".4g", up=False), "largest gain found by search, from RMS to RMS"))
        figures.append((short(certificate.lipschitz.exact), "certified Lipschitz bound in Euclidean norms per token"))
    if results:
        if "largest_entry" in results:
            figures.append((f"{results['largest_entry']:.4g}", "largest activation entry seen"))
        if results.get("proved_norm_over_cap"):
            figures.append((shown(results["proved_norm_over_cap"], ".6f"), "largest proved norm / cap"))
        figures += _settled(results["settled"]) if "settled" in results else []
        figures.append((f"{results['parameters']:,}", "parameters"))
    return figures


def _settled(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The shares of predictions that no machine changes, rounded down."""
    lines = []
    for arithmetic, share in found["shares"].items():
        error = shown(found["errors"][arithmetic], ".2g")
        what = f"of {found['tokens']:,} validation predictions are the same on every machine: {arithmetic}"
        lines.append((f"{shown(100 * share, '.1f', up=False)}%", f"{what}, logits are within {error} of the real ones"))
    if "not_kept" in found:
        lines.append(("-", f"the same in float32 with partial sums: none are kept, this machine {found['not_kept']}"))
    return lines


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    if x.startswith(("step", "operation")):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e7ebf1")
    return figure, axes


def _with_legend(figure: Figure) -> Figure:
    """The figure with a legend below it, so that it hides no curve."""
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _loss_figure(metrics: list[dict[str, Any]], results: dict[str, Any] | None) -> Figure:
    figure, axes = _axes("Loss", "step", "nats a character or token")
    for key, label, style in (
        ("loss", "training batch", {"color": GREY, "lw": 0.8}),
        ("validation_loss", "validation, at checkpoints", {"color": BLUE, "marker": "o", "ms": 4}),
    ):
        rows = [row for row in metrics if key in row]
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], label=label, **style)
    if results:
        end = results["validation_loss"]
        label = f"on {results['validation_tokens']:,} tokens, at the end: {end:.3f}"
        axes.axhline(end, color=ORANGE, ls="--", lw=1, label=label)
    return _with_legend(figure)


def _norms_figure(metrics: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("Weight norms after every step", "step", "norm / cap (estimated)")
    steps = [r["step"] for r in metrics]
    last = metrics[-1]["norms_over_caps"]
    ranked = sorted(last, key=last.__getitem__)
    low, high = ranked[0], ranked[-1]
    for name in ranked:
        style = {"color": GREY, "lw": 0.7, "alpha": 0.6}
        if name in (low, high):
            which = "largest" if name == high else "smallest"
            style = {"color": BLUE, "ls": "-" if name == high else ":", "label": f"{which} at the end: {name}"}
        axes.plot(steps, [r["norms_over_caps"][name] for r in metrics], **style)
    if len(ranked) > 2:
        axes.plot([], [], color=GREY, lw=0.7, label=f"the {len(ranked) - 2} other weights")
    axes.axhline(1, color=ORANGE, ls="--", lw=1, label="cap")
    largest = max(ratio for row in metrics for ratio in row["norms_over_caps"].values())
    axes.set_ylim(0, max(1.08, 1.05 * largest))
    return _with_legend(figure)


def _entries_figure(metrics: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("Largest activation entry and attention logit", "step", "absolute value")
    for key, label, colour in (("largest_entry", "entry", BLUE), ("largest_logit", "attention logit", ORANGE)):
        for what, name, style in ((key, "seen", ".-"), (f"proved_{key}", "proved", ".--")):
            points = [(row["step"], row[what]) for row in metrics if row.get(what)]
            if points:
                axes.semilogy(*zip(*points, strict=True), style, color=colour, label=f"{label}, {name}")
    return _with_legend(figure)


def _speed_figure(metrics: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("Speed", "step", "tokens a second")
    rows = [row for row in metrics if "tokens_per_second" in row]
    axes.plot([r["step"] for r in rows], [r["tokens_per_second"] for r in rows], color=BLUE, lw=1)
    axes.set_ylim(bottom=0)
    return figure


def _growth_figure(certificate: Certificate) -> Figure:
    entries = entries_of(certificate.rows, "euclidean")
    figure, axes = _axes("Bounds through the network", "operation, by its number in the certificate's table", "log10")
    for values, colour, label in (
        ([slope(row, entries) for row in certificate.layers], BLUE, "Lipschitz bound L, Euclidean"),
        ([largest_rms(row, "radius") for row in certificate.layers], ORANGE, "largest RMS R"),
    ):
        points = [(i, float(v.log10())) for i, v in enumerate(values, 1) if v > 0]
        axes.plot([i for i, _ in points], [v for _, v in points], color=colour, lw=1.5, label=label)
    return _with_legend(figure)


def _budget_figure(certificate: Certificate) -> Figure:
    """The factor of every layer in the constant, from the first one on; each layer of a list has its own bar."""
    figure, axes = _axes("Where the constant goes", "log10 of a layer's factor; all add up to that of L", "")
    parts: dict[str, float] = {}
    for row, factor in reversed(factors(certificate.rows)):
        part = re.match(r"[^.]*(\.\d+)?", word(row.name))
        assert part is not None  # it matches any text
        parts[part[0]] = parts.get(part[0], 0.0) + factor
    axes.barh(list(parts), list(parts.values()), color=[BLUE if each > 0 else GREY for each in parts.values()])
    axes.tick_params("y", labelsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _prose(text: str) -> str:
    """A paragraph of plain text with names in backticks; an empty text gives none."""
    marked = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))
    return text and f"<p>{marked}</p>"


def _section(title: str, body: str | None) -> str:
    return f"<h2>{html.escape(title)}</h2>" + (body or "<p class='none'>Not recorded in this folder.</p>")


def _table(rows: list[str]) -> str:
    return f"<div class='table'><table>{''.join(rows)}</table></div>"


def _row(words: list[str], numbers: list[str], cell: str = "td") -> str:
    cells = [f"<{cell}>{html.escape(word)}</{cell}>" for word in words]
    cells += [f"<{cell} class='n'>{number}</{cell}>" for number in numbers]
    return f"<tr>{''.join(cells)}</tr>"


def _certificate_table(certificate: Certificate) -> str:
    rows = [_row(["", "operation", "primitive", "constants"], ["RMS at most", "Lipschitz, Euclidean"], "th")]
    entries = entries_of(certificate.rows, "euclidean")
    for number, row in enumerate(certificate.layers, 1):
        numbers = {name: value for name, value in row.constants.items() if isinstance(value, float)}
        constants = ", ".join(f"{word(name)} {value:.6g}" for name, value in numbers.items())
        bounds = [shown(bound, ".4g") for bound in (largest_rms(row, "radius"), slope(row, entries))]
        rows.append(_row([str(number), word(row.name), word(row.operation), constants], bounds))
    meaning = [sentence(certificate), "RMS is the root of the mean of the squares of a vector's entries."]
    if (replaced := certificate.substitution) is not None:
        meaning.append(
            f"Replacing any number of tokens moves no vector of the result by more than {short(replaced.exact)} in l2."
        )
    meaning.append("All of this is proved from the weights, for every input of the domain; nothing is sampled.")
    about = f"Norms: {certificate.norms}. Domain: {certificate.domain}. The proof is {PROOF}."
    return f"{_prose(' '.join(meaning))}{_prose(about)}{_table(rows)}"


def _formats(run: RunFolder, certificate: Certificate, results: dict[str, Any]) -> str:
    """A table of the largest entries of results, weights and logits, proved and seen, with formats that hold them."""
    _, files = read_files(run.path, f"{run.resume_command} writes it again", only=WEIGHTS)
    weights = read_tensors(files[WEIGHTS], str(run.weights_file))
    seen = results["observed"] | {name: float(x.abs().max()) for name, x in weights.items() if x.numel()}
    formats = number_formats(certificate, seen, weights=weights)
    rows = [_row(["largest entry of", "held by"], ["proved", "seen"], "th")]
    for each in formats.ranges:
        seen = "-" if each.observed is None else f"{each.observed:.4g}"
        rows.append(_row([each.shown, " ".join(each.formats) or "none"], [shown(each.proved, ".4g"), seen]))
    held = f"Number formats of 4 and 8 bits that hold every entry: {' '.join(formats.holding_all) or 'none'}"
    return f"<details><summary>{held}</summary>{_table(rows)}</details>"


def _settings(content: dict[str, Any]) -> str:
    return f"<pre>{html.escape(json.dumps(content, indent=1))}</pre>"
