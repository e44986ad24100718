"""Write docs/results.md, and tables of README.md and docs/certified-vision.md: `python -m docs.make_results`.

No figure there is typed by hand; a test compares all with what this script writes. Below the end of that part
docs/results.md has the tables of closed questions, whose scripts and rows are in the history.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.constant_one import JOBS
from benchmarks.constant_one import OURS as KIT
from benchmarks.constant_one import best as best_jobs
from benchmarks.fine_tuning import SEARCHED
from benchmarks.public_curves import SCION
from benchmarks.public_curves import best as curves
from benchmarks.public_defaults import ARMS, MODELS, PEERS, means, missing
from benchmarks.settled import OTHERWISE, PROVED, STATED
from docs.harnesses import pass_rates
from docs.make_claims import claims
from papers._table import Table
from papers.certified_vision import BUDGETS, TITLES, Best, Data, Kind, best, distance, mean, named
from papers.certified_vision import PEERS as LIBRARIES
from papers.certified_vision import ROOT as LEAD
from papers.certified_vision import cells as vision_cells
from papers.frontier import best_losses, best_rate
from wellnormed.proof.decimals import shown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
VISION = ROOT / "results" / "reproduce" / "certified-vision-cpu" / "rows.jsonl"
_BEGIN, _END = "<!-- written by docs/make_results.py -->", "<!-- end -->"
MUON = "torch.optim.Muon"
CURVES, DEFAULTS = "public-curves.json", "public-defaults.json"
HEAD = """# Measured results

Figures as they stand in the files under `results/`. Each section names its file, command, commit, machine and seed
(`+changes`: uncommitted changes were present). Losses are in nats over the whole validation split, times are medians:
compare ratios within one file, never times of two. Lipschitz constants are from RMS to RMS, as in papers.
[The four papers](reproduction.md) have a page of their own."""
LONG = 12
"""Rows of a table that is shown without a click."""
Lines = Iterator[str]


def load(name: str) -> dict[str, Any]:
    """A file under `results/`."""
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def origin(name: str, content: Mapping[str, Any]) -> list[str]:
    """The line that says where the numbers of a file come from."""
    commit, _, changed = content["commit"].partition("+")
    seeds = content["seed"] if isinstance(content["seed"], list) else [content["seed"]]
    return [
        f"[{name}](../results/{name}): `{content['command']}` at commit {commit[:10]}{'+' * bool(changed)}{changed}, "
        f"{content['machine']}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        "",
    ]


def table(columns: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table; the names of its columns are separated by bars. A long one is folded."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    whole = [f"| {columns} |", f"|{'---|' * len(columns.split(' | '))}", *lines, ""]
    if len(lines) <= LONG:
        return whole
    return ["<details>", f"<summary>{len(lines)} rows</summary>", "", *whole, "</details>", ""]


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits; a dash where there is no number."""
    return "-" if value is None else f"{value:.{digits}g}"


def span(values: Iterable[float | None], form: str = ".3g") -> str:
    """From the least to the largest, or the one value that there is."""
    known = [format(value, form) for value in sorted(value for value in values if value is not None)]
    return "-" if not known else known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """The rows by what they have under these keys, in their order."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def frontier() -> Lines:
    """Transformers with a certificate, and their peers."""
    points = [load(f"frontier/{path.name}") for path in sorted((ROOT / "results" / "frontier").glob("*.json"))]
    runs: dict[tuple[float, str, int], list[dict[str, Any]]] = {}
    capped = []
    for point in points:
        found, config = point["results"], point["config"]
        if config.get("lipschitz") is None:
            capped.append((point["point"], found))
        else:
            reads = "content, position" if config["model"]["attention_blocks"] else "position"
            runs.setdefault((config["lipschitz"], reads, found["training_tokens"]), []).append(found)
    first, commits = points[0], sorted({point["commit"][:10] for point in points})
    yield from ("## Character transformers: loss and certificate", "")
    yield from ("![Validation loss against the certified Lipschitz constant](../results/frontier/frontier.png)", "")
    yield from (
        f"`python -m papers.frontier run`, one file a run in `results/frontier/`; {', '.join(commits)}, "
        f"{first['machine']}; {first['results']['source']}. First by the constant that was asked for, then by caps.",
        "",
    )
    yield from table(
        "asked for | reads the past by | training tokens | seeds | validation loss | most of proved over found",
        [
            (f"{constant:g}", reads, f"{tokens:,}", len(each), span((run["validation_loss"] for run in each), ".4f"),
             shown(max(10 ** run["log10_lipschitz"] / run["lower_bound"] for run in each), ".2f"))
            for (constant, reads, tokens), each in sorted(runs.items())
        ],
    )  # fmt: skip
    yield from table(
        "caps | parameters | validation loss | log10 of the proved constant | gain found",
        [
            (name.removeprefix("caps-"), f"{found['parameters']:,}", f"{found['validation_loss']:.4f}",
             shown(found["log10_lipschitz"], ".3f"), number(found["lower_bound"]))
            for name, found in sorted(capped, key=lambda each: each[1]["log10_lipschitz"])
        ],
    )  # fmt: skip
    content = load("frontier_peers.json")
    yield from ("Peers without a certificate, at the best of the rates that were tried for seed 0:", "")
    yield from origin("frontier_peers.json", content)
    yield from table(
        "model, optimizer | parameters | best rate | validation loss | seeds",
        [
            (kind, f"{rows[0]['parameters']:,}", f"{best_rate(content['rows'], kind):g}", span(losses, ".4f"),
             len(losses))
            for (kind,), rows in grouped(content["rows"], "kind").items()
            for losses in [best_losses(content["rows"])[kind]]
        ],
    )  # fmt: skip


def public_curves() -> Lines:
    """Three optimizers on a public model."""
    content = load(CURVES)
    yield from ("## Three optimizers on a public model", "", *origin(CURVES, content))
    yield from ("![Validation loss of GPT-2 by AdamW, Muon and wn.Scion](../results/public-curves.png)", "")
    yield from (
        f"{content['model']}, random weights, {content['steps']} steps; rates fall to zero, but for the",
        "average's.",
        "",
    )
    yield from table(
        "optimizer | rate | validation loss at the end",
        [
            (name, f"{rows[0]['rate']:g}", span((row["curve"][-1][1] for row in rows), ".3f"))
            for name, rows in curves(content["rows"]).items()
        ],
    )


def public_defaults() -> Lines:
    """The defaults of Scion and Muon on other people's models, of which each has run in every arm."""
    content = load(DEFAULTS)
    models = [each for each in MODELS if not any(missing(content["rows"], content["seed"], each))]
    shown_arms = [name for name, arm in ARMS.items() if not arm.once]
    best = {arm: [min(means(content["rows"], each, arm).values()) for each in models] for arm in shown_arms}
    yield from ("## Defaults on public models", "", *origin(DEFAULTS, content))
    yield f"{len(models)} models of `transformers`, random weights, {content['steps']} steps: the loss of 20 further"
    yield "batches, at the best rate of three or more for AdamW and torch's Muon, at 0.02 for ours. ConvNeXt and ResNet"
    yield "ran before the default moved kernels by their number of positions."
    yield ""
    ahead = (sum(own <= peer for own, peer in zip(losses, best[PEERS[0]], strict=True)) for losses in best.values())
    yield from table(
        " | ".join(["arm", *models, "at most AdamW's"]),
        [(arm, *(f"{loss:.3g}" for loss in losses), n) for (arm, losses), n in zip(best.items(), ahead, strict=True)],
    )


def steps() -> Lines:
    """Times of training steps and optimizer steps."""
    content = load("step_time.json")
    yield from ("## A training step", "")
    yield from origin("step_time.json", content)
    peers = ("adamw", "torch_muon", "without_constraints", "ours")
    yield from table(
        "preset | tokens | AdamW, ms | torch's Muon with AdamW | ours without constraints | ours | norm estimates | "
        "ours over AdamW | with `every=8`",
        [
            (name, f"{row['tokens_per_step']:,}", *(f"{1e3 * row[f'{peer}_seconds']:.1f}" for peer in peers),
             f"{1e3 * row['norm_estimates_seconds']:.1f} every {row['log_every']} steps", f"{row['ratio']:.2f}",
             f"{row['amortised_ratio']:.2f}" if "amortised_ratio" in row else "-")
            for name, row in content.items()
            if isinstance(row, dict) and "ratio" in row
        ],
    )  # fmt: skip
    content = load("optimizer_step.json")
    yield from ("## An optimizer step on the 72 hidden matrices of GPT-2 small", "")
    yield from origin("optimizer_step.json", content)
    seconds = content["seconds"]
    yield from table(
        "optimizer | seconds | ours over it | ours with a hard cap over it",
        [
            (name, f"{value:.3f}", f"{seconds['ours'] / value:.2f}", f"{seconds['ours with a hard cap'] / value:.2f}")
            for name, value in seconds.items()
        ],
    )
    yield from (f"Memory beyond weights and gradients, on {content['memory_blocks']} blocks:", "")
    yield from table(
        "optimizer | MiB of torch's tensors | MiB of the process",
        [
            (name, *(f"{found[key] / 2**20:.1f}" for key in ("tensors", "resident")))
            for name, found in content["memory_bytes"].items()
        ],
    )
    content = load("soak.json")
    yield from (f"## {content['steps']:,} steps on {content['ranks']} processes that are killed", "")
    yield from origin("soak.json", content)
    losses = " and ".join(f"{loss:.3f}" for loss in content["first_and_last_validation_loss"])
    memory = " and ".join(map(str, content["peak_memory_mib_first_and_last_row"]))
    yield from (
        f"{content['kills']} kills at random moments, {content['starts']} starts; the end was "
        f"{'' if content['finished'] else 'not '}reached, with the rows of metrics "
        f"{'in order and none twice' if content['rows_in_order'] else 'out of order'}. {content['checkpoints']} "
        "checkpoints, at which all ranks have the same bits; largest proved norm over its cap "
        f"{shown(content['largest_proved_norm_over_cap'], '.6f')}; first and last loss {losses}; "
        f"MiB of a rank {memory}.",
        "",
    )


def matrix() -> Lines:
    """Speed, accuracy and operations of the matrix functions."""
    content = load("matrix/speed.json")
    yield from ("## Matrix functions: time", "")
    yield from origin("matrix/speed.json", content)
    yield from ("From the least to the largest over the shapes, whose rows are in the file.", "")
    rows = [row | {"on": row["input"].partition(", ")[2]} for row in content["rows"]]
    yield from table(
        "function | on | peer | shapes | time over the peer's | our error | peer's error",
        [
            (function, on or "weights", peer.partition(", 1")[0].removesuffix(", well").removesuffix(", ill"),
             len(each), span((row["ratio"] for row in each), ".2f"), span((row["ours_error"] for row in each), ".1e"),
             span((row["peer_error"] for row in each), ".1e"))
            for (function, on, peer), each in grouped(rows, "function", "on", "peer").items()
        ],
    )  # fmt: skip
    content = load("matrix/accuracy.json")
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in content["limits"].items())
    yield from ("## Matrix functions: error against a float64 SVD", "")
    yield from origin("matrix/accuracy.json", content)
    yield from (f"Errors are over the largest singular value, the worst of the functions; the limit is {limits}.", "")
    kinds = [row | {"kind": row["function"] if "msign" in row["function"] else "cap"} for row in content["summary"]]
    yield from table(
        "function | method | dtype | miss the limit | largest error | norm above the cap by",
        [
            (", ".join(row["function"].removeprefix("spectral_") for row in alike), method, dtype,
             f"{sum(row['missed'] for row in alike)} of {sum(row['cases'] for row in alike)}",
             number(max(row["worst_error"] for row in alike)),
             number(max((row["worst_excess"] for row in alike if row["worst_excess"] is not None), default=None)))
            for (_, method, dtype), alike in grouped(kinds, "kind", "method", "dtype").items()
        ],
    )  # fmt: skip
    content = load("matrix/operations.json")
    yield from ("## Matrix functions: operations", "")
    yield from origin("matrix/operations.json", content)
    yield from (f"Of a training step of NanoGPT-140M at {content['tokens']:,} tokens; SC is the clipping paper.", "")
    yield from table(
        "function | share of a step | as SC prints it | share of a step of GPT-2 small",
        [
            (row["function"], f"{row['overhead']:.2%}", f"{row['paper_printed_percent']:.2f}%",
             f"{row['overhead_gpt2']:.2%}")
            for row in content["rows"]
        ],
    )  # fmt: skip


def gpu() -> Lines:
    """What was measured on a GPU."""
    content = load("first_on_gpu.json")
    peers = {row["model"]: row["seconds"] for row in content["rows"] if row["optimizer"] == MUON}
    yield from ("## On a GPU", "")
    yield from origin("first_on_gpu.json", content)
    yield from (
        "A step of Muon on hidden matrices, launches and waits included. Memory is beside weights, gradients and "
        "state. A wait is one of the host for the device. The run was cut after 22 seconds.",
        "",
    )
    yield from table(
        "model | optimizer | ms | over torch's Muon | MiB at most | waits | a CUDA graph records it",
        [
            (row["model"], row["optimizer"], f"{row['seconds'] * 1e3:.1f}",
             f"{row['seconds'] / peers[row['model']]:.2f}" if row["model"] in peers else "-",
             f"{row['peak_bytes'] / 2**20:.0f}", row["waits"], "yes" if row["graph"] == "yes" else "no")
            for row in content["rows"]
        ],
    )  # fmt: skip
    content = load("matrix/gpu.json")
    yield from origin("matrix/gpu.json", content)
    yield from (f"The matrix sign by jordan-5 in bfloat16, on {content['gpu']}, over the time of torch's Muon.", "")
    ratios = {key: row["ratio"] for key, (row, *_) in grouped(content["rows"], "contender", "input").items()
              if "missing" not in row}  # fmt: skip
    names = [name for name in dict.fromkeys(name for name, _ in ratios) if name != MUON]
    yield from table(
        " | ".join(("input", *names)),
        [
            (shape, *(f"{ratios[name, shape]:.2f}" if (name, shape) in ratios else "-" for name in names))
            for shape in dict.fromkeys(shape for _, shape in ratios)
        ],
    )


def functions() -> Lines:
    """Rounding errors of functions of floats."""
    content = load("ulps.json")
    yield from ("## Rounding errors of functions", "")
    yield from origin("ulps.json", content)
    yield from (
        "The largest error of torch's functions, as a share of what a certificate's [bound of rounding](rounding.md) "
        "allows: of all floats of 16 bits, where rounding the result alone takes nearly all, and of every "
        f"{content['step']}th of float32.",
        "",
    )
    yield from table(
        "function | float32 | bfloat16 | float16",
        [
            (row["name"], *(f"{row[each]:.3f}" for each in ("float32", "bfloat16", "float16")))
            for row in content["rows"]
        ],
    )


def executions() -> Lines:
    """Random models, executed."""
    content = load("rounding.json")
    status, searched = content["status"], content["pairs"]
    yield from ("## Attacks on bounds of rounding errors", "")
    yield from origin("rounding.json", content)
    yield from (
        f"{content['models']:,} random programs: {status.get('within', 0):,} executed within their "
        f"[bound of rounding](rounding.md), {status.get('beyond', 0)} beyond it, {status.get('crashed', 0)} crashed, "
        f"{status.get('refused', 0)} refused, {status.get('no bound', 0):,} without a bound. The shares of the bound "
        "are those that executions reached, and that the stated arithmetic allows if each operation errs in the "
        f"direction that moves the result most. Of {searched['models']:,} classifiers with {searched['inputs']:,} "
        f"inputs, {len(searched['broken'])} had another prediction within a certified radius, or one that was settled "
        "and changed; the least distance of another prediction is in radii.",
        "",
    )
    yield from table(
        "dtype | programs | executed, most | median | allowed, most | median",
        [
            (row["name"], row["models"],
             *(f"{row[each]:.3f}" for each in ("executed", "median_executed", "adverse", "median_adverse")))
            for row in content["rows"] if row["kind"] == "dtype"
        ],
    )  # fmt: skip
    yield from table(
        "logits | classifiers | inputs | least distance",
        [
            (row["name"], row["models"], f"{row['inputs']:,}", f"{row['least_distance']:.3f}")
            for row in searched["rows"] if row["by"] == "form"
        ],
    )  # fmt: skip


def attacks() -> Lines:
    """Random models, public models and images, attacked."""
    content = load("soundness.json")
    yield from ("## Attacks on certificates of random models", "")
    yield from origin("soundness.json", content)
    yield from (
        f"{content['models']:,} random models: {content['sound']:,} sound, {len(content['violations'])} with a "
        f"violated bound, {len(content['crashes'])} crashed, {content['refused']} refused, {content['not_finite']} "
        f"beyond float64. Of {content['verified']} the whole certificate was made and proved again, and "
        f"{len(content['not_proved'])} were refused. The share is that of the proved gain that a short search found; a "
        "small one is a loose bound, or too short a search.",
        "",
    )
    yield from table(
        "kind | names | models | median of the best shares | best shares below 0.9",
        [
            (kind, len(rows), sum(row["models"] for row in rows),
             f"{median(row['best_share'] for row in rows):.3f}",
             ", ".join(f"{row['name']} {row['best_share']:.3f}" for row in least) or "-")
            for (kind,), rows in grouped(content["rows"], "kind").items()
            for least in [sorted((r for r in rows if r["best_share"] < 0.9), key=lambda row: row["best_share"])]
        ],
    )  # fmt: skip
    content = load("public-models.json")
    yield from ("## Public models with random weights", "")
    yield from origin("public-models.json", content)
    yield from table(
        "model | parameters | rows | log10 of the constant | proved largest attention logit | seconds | of the checker",
        [
            (name, f"{found['parameters']:,}", found["rows"], shown(found["log10_lipschitz"], ".2f"),
             shown(found["largest_logit"], ".1f") if found["largest_logit"] else "-", f"{found['seconds']:.1f}",
             f"{found['seconds_of_the_checker']:.1f}")
            if "refused" not in found
            else (name, "-", "-", f"refused: {found['refused'].split('` in')[0]}`", "-", "-", "-")
            for name, found in content["results"].items()
        ],
    )  # fmt: skip


def harnesses() -> Lines:
    """Benchmarks of optimizers that others wrote."""
    content = load("lightbench.json")
    said, rows = pass_rates(content)
    yield from ("## LightBench", "", *origin("lightbench.json", content), said, "")
    yield from table("optimizer | matrices: trivial | easy | vectors: trivial | easy", rows)


def means_of_jobs() -> dict[tuple[str, str], dict[str, float]]:
    """Job and arm of `benchmarks.constant_one` -> the means over seeds."""
    found, means = best_jobs(load("constant-one.json")["rows"]), {}
    for key, rows in found.items():
        names = [name for name in rows[0] if name not in ("job", "arm", "seed", "commit")]
        means[key] = {name: fmean(row[name] for row in rows) for name in names}
    return means


FIGURES = {"Wasserstein-1": ".1%", "signed distance": ".4f", "digits": ".1%"}


def job(name: str) -> str:
    """The table of one job, for its page."""
    rows = {arm: row for (each, arm), row in means_of_jobs().items() if each == name}
    fields = [key for key in rows[KIT] if key not in ("rate", "constant", "seconds")]
    titles = " | ".join(key.replace("_", " ") for key in fields)
    return "\n".join(
        table(
            f" | {titles} | proved constant | best rate | processor seconds",
            [
                (arm, *(f"{row[key]:{FIGURES[name]}}" for key in fields), f"{row['constant']:.4f}",
                 f"{row['rate']:g}", f"{row['seconds']:.1f}")
                for arm, row in rows.items()
            ],
        )
    ).rstrip()  # fmt: skip


def constant_one() -> Lines:
    """Jobs for networks of constant 1."""
    content = load("constant-one.json")
    yield from ("## Networks of constant 1", "", *origin("constant-one.json", content))
    yield from (f"Means of three seeds, {content['steps']} steps, each at the best of three rates of seed 0.", "")
    for name in JOBS:
        yield from (f"{name[0].upper()}{name[1:]}:", "", job(name), "")


def trained_models() -> str:
    """The table of models that others trained."""
    return "\n".join(
        table(
            "model | parameters | operations | proved | found | seconds | of the checker | why it is large",
            [
                (row["model"], f"{row['parameters']:,}", f"{row['operations']:,}", _power(row["log10_lipschitz"], True),
                 _power(row["log10_found"], False), f"{row['seconds']:.1f}", f"{row['seconds_of_the_checker']:.1f}",
                 row["why"].split(". ")[0] or "-")
                for row in load("trained-models.json")["rows"]
            ],
        )
    ).rstrip()  # fmt: skip


def changed_weights() -> str:
    """The table of changed weights."""
    return "\n".join(
        table(
            "model | change | certified | found | ratio | proved unchanged | unchanged",
            [
                (row["model"], row["change"], shown(row["certified"], ".3g"), shown(row["found"], ".3g", up=False),
                 f"{row['ratio']:.1f}", shown(100 * row["unchanged"], ".1f", up=False) + "%", f"{row['same']:.2%}")
                for row in load("changed-weights.json")["rows"]
            ],
        )
    ).rstrip()  # fmt: skip


def changed() -> Lines:
    """Changes of weights, certified over found."""
    yield from ("## Weights that were changed", "", *origin("changed-weights.json", load("changed-weights.json")))
    yield from ("[Their page](changed-weights.md) says what the columns are.", "", changed_weights(), "")


def _power(log10: float, up: bool) -> str:
    """A number by its decimal logarithm, rounded to three digits or to a power of ten."""
    if log10 > 7:
        return f"10^{shown(log10, '.1f', up=up)}"
    value = shown(10**log10, ".3g", up=up)
    return f"{float(value):,.0f}" if log10 >= 3 else value


def trained() -> Lines:
    """Certificates of models that others trained."""
    yield from ("## Models that others trained", "", *origin("trained-models.json", load("trained-models.json")))
    yield from ("[Their page](trained-models.md) says what the columns are.", "", trained_models(), "")


def _bound(row: Mapping[str, Any], execution: str, what: str = "forward_error") -> str:
    """A bound of rounding errors, or a dash; or an error that was found, rounded down."""
    value = row[what].get(execution)
    form = ".1e" if value is None or not 1e-3 <= value < 1e4 else ".3g"
    return "-" if value is None else shown(value, form, up=what == "forward_error")


def forward_errors() -> str:
    """Bounds of rounding errors of ten models, beside what a search found."""
    content = load("forward-errors.json")
    lines = [
        (row["model"], f"{row['parameters']:,}",
         *(_bound(row, each, what) for each in ("float32", "bfloat16") for what in ("forward_error", "found")),
         _bound(row, "float64"), _bound(row, STATED), f"{row['seconds']:.1f}",
         f"`{row['no_bound_at']['float32']}`" if row["no_bound_at"]["float32"] else "")
        for row in content["rows"]
    ]  # fmt: skip
    columns = (
        "model | parameters | float32: proved | found | bfloat16: proved | found | float64: proved | "
        "float32, partial sums | seconds | none in float32 from"
    )
    return "\n".join(table(columns, lines)).rstrip()


def settled() -> str:
    """Shares of predictions that no machine changes, beside those that were changed."""
    lines = [
        (row["model"], f"{row['validation_loss']:.3f}", *(_bound(row, each) for each in ("float32", "float64")),
         *(f"{shown(100 * row[key]['float32'], '.1f', up=False)}%" for key in ("settled", "real")),
         f"{shown(100 * row['settled']['float64'], '.1f', up=False)}%",
         f"{row['changed']['bfloat16']:.2%}", f"{row['changed'][OTHERWISE]:.2%}", f"{row['forwards'] - 1:.1f}")
        for row in load("settled.json")["rows"]
    ]  # fmt: skip
    shares = "settled in float32 | decided in float32 | settled in float64 | changed in bfloat16 | in float32"
    columns = f"model | loss | E in float32 | in float64 | {shares} | time of float64"
    return "\n".join(table(columns, lines)).rstrip()


def fine_tuning() -> str:
    """The loss at every rate, and of runs within constants."""
    rows, lines = load("fine-tuning.json")["rows"], []
    rows = sorted(rows, key=lambda row: row["job"])  # runs that were added later stand beside the others
    for (job, arm, kept), each in grouped(rows, "job", "arm", "kept").items():
        searched = sorted((row for row in each if row["seed"] == SEARCHED), key=lambda row: row["rate"])
        best = min(searched, key=lambda row: row["loss_after"])
        others = [row["loss_after"] for row in each if row["seed"] != SEARCHED]
        name = arm if kept is None else f"{arm}, lipschitz={shown(best['proved'] * kept, '.3g')}"
        start = " then ".join(
            f"{best[f'loss_{when}']:.3g}" for when in ("before", "projected") if f"loss_{when}" in best
        )
        losses = ", ".join(f"{row['rate']:g}: {row['loss_after']:.3g}" for row in searched)
        shares = f"{best['right_before']:.0%}, {best['right_after']:.0%}"
        lines.append((job, name, start, losses, span(others, ".3g"), shares))
    columns = (
        "network | optimizer | loss before | rate: loss after | another seed at the best rate | right before, after"
    )
    return "\n".join(table(columns, lines)).rstrip()


def rounding() -> Lines:
    """Rounding errors, settled predictions, and fine-tuning."""
    parts = (
        ("Rounding errors of models", "forward-errors.json", forward_errors, "[Rounding](rounding.md)"),
        ("Settled predictions", "settled.json", settled, "[Reproducible predictions](reproducible.md)"),
        ("Fine-tuning", "fine-tuning.json", fine_tuning, "[Learning rates](rates.md#fine-tuning)"),
    )
    for title, name, lines, where in parts:
        yield from (f"## {title}", "", *origin(name, load(name)), f"{where} says what the columns are.", "")
        yield from (lines(), "")


def facts() -> str:
    """The table of README.md, between its two comments: what people want, what they type, and what was measured."""
    ends = {name: fmean(row["curve"][-1][1] for row in rows) for name, rows in curves(load(CURVES)["rows"]).items()}
    ours = ends.pop(SCION)
    averaged = next(end for name, end in ends.items() if name.startswith("wn."))
    peers = ", ".join(f"{name.partition(',')[0]} {end:.2f}" for name, end in ends.items() if name[:3] != "wn.")
    gpt = load("public-models.json")["results"]["GPT-2 small, whole"]["largest_logit"]
    job = means_of_jobs()
    critic = {arm: -row["proved_error"] for (name, arm), row in job.items() if name == "Wasserstein-1"}
    over = {arm: row["proved_overshoot"] for (name, arm), row in job.items() if name == "signed distance"}
    lagging = job["digits", "spectral_norm"]["constant"]
    mnist = [mean(found.results, "certified") for kind, found in best(vision_rows()).items() if kind.data == "mnist"]
    near, far = max(each[0] for each in mnist), max(each[-1] for each in mnist)
    proved = next(row for row in load("settled.json")["rows"] if row["model"] == PROVED)
    same = [shown(100 * share, ".3g", up=False) for share in (proved["real"]["float32"], proved["proved"])]
    slowest = max(row["seconds"] for row in load("trained-models.json")["rows"])
    constant = "`wn.nn.MaxMin()`, `wn.constrain(optimizer, lipschitz=1.0, example_input=x)`"
    lines = [
        ("a faster start than AdamW's", "`wn.Scion(model)`",
         f"[GPT-2](docs/results.md#three-optimizers-on-a-public-model) ends at a validation loss of {ours:.2f} at the "
         f"default rate; at the best of three rates, {peers}"),
        ("no schedule, no end", "`wn.Averaged(wn.Scion(model, momentum=0.5))`",
         "[the average of all weights so far](docs/optimizers.md#without-a-schedule) of that GPT-2, at a constant "
         f"rate, ends [at a loss of {averaged:.2f}](docs/results.md#three-optimizers-on-a-public-model)"),
        ("attention logits below 30", "`wn.constrain(optimizer, largest_logit=30.0, example_input=x)`",
         "[proved](docs/largest-logit.md) for every input, after every step; without it the bound for GPT-2 "
         f"small, with random weights, [is {shown(gpt, '.1f')}](docs/results.md#public-models-with-random-weights)"),
        ("a critic or a distance of constant 1", constant,
         f"[Wasserstein-1](docs/wasserstein.md) is proved to within {critic['wellnormed']:.1%}, spectral_norm within "
         f"{critic['spectral_norm']:.1%}, deel-torchlip within {critic['deel-torchlip']:.1%}; [signed distances]"
         f"(docs/signed-distance.md) overstep by at most {over['wellnormed']:.3f}, deel-torchlip's by "
         f"{over['deel-torchlip']:.3f}"),
        ("a certified classifier", "the same, and `wn.certify(model, x, margins=True).certified_radius(logits)`",
         f"[digits](docs/certified-classifier.md); [MNIST](docs/certified-vision.md): one network has {near:.1%} of "
         f"test images proved within 0.3, another {far:.1%} within 1.58 (the best published that we know: "
         "95.7%, [GloRo](https://arxiv.org/abs/2102.08452), and 63.4%, [CRM](https://arxiv.org/abs/2310.00116))"),
        ("a contraction, an invertible block", "`wn.constrain(optimizer, lipschitz=0.9, example_input=x)`",
         "[at most 0.9](docs/contractions.md) after every step; spectral_norm, which is to keep 1, ended "
         f"[at {lagging:.3f}](docs/certified-classifier.md)"),
        ("a score that rises in some inputs", "the same, and `+ slope * x`",
         "[monotone](docs/monotone.md) for every input"),
        ("ranges for float8", "`wn.certificates.number_formats(wn.certify(model, x), weights=model.state_dict())`",
         "[scales](docs/low-precision.md#scales-for-e4m3-without-a-look-at-the-data) before the first input"),
        ("the same prediction on every machine",
         '`wn.certify(model, x, margins=True).settled(logits, against="real")`',
         f"[reproducible](docs/reproducible.md) in any batch, kernel and order of sums: of a small GPT's "
         f"{load('settled.json')['tokens']:,} predictions float32 decides {same[0]}%, and with float64 for the rest "
         f"{same[1]}% are decided; bfloat16 changes {proved['changed']['bfloat16']:.1%}"),
        ("a bound for a model that you have", "`wn.certify(model, x)`",
         f"[five that others trained](docs/trained-models.md): {slowest:.0f} seconds at most, and bounds of any size"),
    ]  # fmt: skip
    return "\n".join(table("you want | you type | you get", lines)).rstrip()


def vision_rows() -> list[dict[str, Any]]:
    """The rows of `papers.certified_vision` that there are."""
    return Table(VISION).rows_of(vision_cells("cpu"))


def vision() -> str:
    """The tables of docs/certified-vision.md, between its two comments: every network at its best rate."""
    found, lines = best(vision_rows()), []
    for data in dict.fromkeys(kind.data for kind in found):
        distances = " | ".join(map(distance, BUDGETS[data]))
        rows = [_vision_row(kind, each) for kind, each in found.items() if kind.data == data]
        columns = f"network | steps | offset | seeds | accuracy | {distances} | proved constant | minutes"
        lines += [f"{TITLES[data]}:", "", *table(columns, rows)]
    changes = table("change | data | smallest distance | largest | minutes", [_lever(found, *each) for each in LEVERS])
    lines += ["What each change brought, from row to row of these tables:", "", *changes]
    return "\n".join(lines).rstrip()


Training = tuple[int, float, float] | tuple[int, float, float, str]
LEVERS: tuple[tuple[str, Data, Training, Training], ...] = (
    (
        "10,000 steps for 1,200, a deeper head",
        "cifar10",
        (1200, LEAD, 0),
        (10_000, LEAD, 0),
    ),
    ("the annealed loss, at temperature 1 for 1/4", "cifar10", (10_000, LEAD, 0), (10_000, LEAD, 5)),
    (
        "the average of all steps, later ones weighted more, made orthogonal",
        "cifar10",
        (10_000, LEAD, 5),
        (10_000, LEAD, 5, "averaged"),
    ),
    ("40,000 steps for 10,000, and products in bfloat16", "cifar10", (10_000, LEAD, 5), (40_000, LEAD, 5)),
    ("rate 0.025 for 0.1", "cifar10", (40_000, LEAD, 5), (40_000, LEAD, 5, "rate 0.025")),
    ("offset 2.83 for 1.41", "cifar10", (40_000, LEAD, 5), (40_000, 2 * LEAD, 5)),
    ("8,000 steps of 200 for 1,000 of 100, momentum 0.8, bfloat16", "mnist", (1000, 3.2, 0), (8000, 3.2, 0)),
    ("8,000 steps of 200 for 2,000 of 100, momentum 0.8, bfloat16", "mnist", (2000, 1.2, 0), (8000, 1.2, 0)),
    ("12,000 steps for 8,000", "mnist", (8000, 1.2, 0), (12_000, 1.2, 0)),
    ("offset 2.8 for 1.2, one network for both distances", "mnist", (8000, 1.2, 0), (8000, 2.8, 0)),
)
"""Changes of our training; steps, offset, annealing and what else differs, before and after."""


def _lever(found: dict[Kind, Best], change: str, data: Data, before: Training, after: Training) -> list[str]:
    """Certified shares at the least and at the largest distance, and minutes, before and after a change."""
    both = [found[Kind(data, *each[:3], "wellnormed", *each[3:])].results for each in (before, after)]
    shares = zip(*(mean(results, "certified") for results in both), strict=True)
    told = [f"within {distance(d)}: {a:.1%} to {b:.1%}" for d, (a, b) in zip(BUDGETS[data], shares, strict=True)]
    minutes = (f"{fmean(each['seconds_of_training'] for each in results) / 60:.1f}" for results in both)
    return [change, TITLES[data], told[0], told[-1], " to ".join(minutes)]


def certified() -> Lines:
    """Where networks of other libraries had as many steps: ours beside theirs at the smallest distance."""
    rows, lines = vision_rows(), []
    for kind, theirs in (found := best(rows)).items():
        if kind.network in LIBRARIES and (ours := found.get(kind._replace(network="wellnormed"))):
            shares = [[mean(each.results, what)[0] for what in ("certified", "attacked")] for each in (ours, theirs)]
            seeds = f"{len(ours.results)} and {len(theirs.results)}"
            columns = (named(kind), distance(BUDGETS[kind.data][0]), kind.network)
            lines.append((*columns, *(f"{proved:.1%} ({left:.0%})" for proved, left in shares), seeds))
    yield from (
        "## Certified vision",
        "",
        f"[rows](../{VISION.relative_to(ROOT)}): `python -m papers certified-vision`; {len(rows)} cells. "
        "[All distances and trainings](certified-vision.md) have a page.",
        "",
        "Test images certified within a distance and, in brackets, of 300 those that withstood the attacks there. A "
        "difference of one percent or so with one seed is a tie.",
        "",
        *table("data | distance | other | wellnormed | other's | seeds", lines),
    )


def _vision_row(kind: Kind, found: Best) -> list[object]:
    """A network and its training, accuracy, certified and attacked shares, the largest proved constant, and minutes."""
    results = found.results
    pairs = zip(mean(results, "certified"), mean(results, "attacked"), strict=True)
    return [
        kind.network,
        f"{kind.steps:,}",
        ", ".join([f"{kind.offset:.3g}", *["annealed"] * bool(kind.annealing), *[kind.change] * bool(kind.change)]),
        len(results),
        f"{fmean(each['accuracy'] for each in results):.1%}",
        *(f"{proved:.1%} ({left:.0%})" for proved, left in pairs),
        shown(max(each["lipschitz"] for each in results), ".5g"),
        f"{fmean(each['seconds_of_training'] for each in results) / 60:.1f}",
    ]


def between(text: str, table: str) -> str:
    """A page whose table, between its two comments, is as the files give it."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


def page() -> str:
    """The page, but for its closed questions."""
    parts = (
        public_curves(),
        public_defaults(),
        constant_one(),
        trained(),
        rounding(),
        changed(),
        frontier(),
        steps(),
        matrix(),
        gpu(),
        attacks(),
        functions(),
        executions(),
        certified(),
        harnesses(),
    )
    return "\n".join([HEAD, "", *(line for part in parts for line in part)]).rstrip()


DOCS = ROOT / "docs"
WITHIN = {
    PAGE: page,
    ROOT / "README.md": facts,
    DOCS / "certified-vision.md": vision,
    DOCS / "papers.md": claims,
    DOCS / "wasserstein.md": partial(job, "Wasserstein-1"),
    DOCS / "signed-distance.md": partial(job, "signed distance"),
    DOCS / "certified-classifier.md": partial(job, "digits"),
    DOCS / "trained-models.md": trained_models,
    DOCS / "changed-weights.md": changed_weights,
    DOCS / "rounding.md": forward_errors,
    DOCS / "reproducible.md": settled,
    DOCS / "rates.md": fine_tuning,
}
"""Pages with a part that is made from the files, and what makes it."""


if __name__ == "__main__":
    for path, table_of in WITHIN.items():
        path.write_text(between(path.read_text(encoding="utf-8"), table_of()), encoding="utf-8")
