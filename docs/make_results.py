"""Write docs/results.md, and tables of README.md and docs/certified-vision.md: `python -m docs.make_results`.

No figure there is typed by hand; a test compares all with what this script writes. Below the end of that part
docs/results.md has the tables of closed questions, whose scripts and rows are in the history.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.lipschitz_budget import FOUND as MOVED
from benchmarks.lipschitz_budget import STAYED as KEPT
from benchmarks.lipschitz_budget import best as best_budgets
from benchmarks.public_curves import SCION
from benchmarks.public_curves import best as curves
from benchmarks.public_defaults import ARMS, MODELS, PEERS, means, missing
from docs.harnesses import pass_rates, ranks
from docs.make_claims import claims
from papers._table import Table
from papers.certified_vision import BUDGETS, TITLES, Best, Kind, best, distance, mean
from papers.certified_vision import PEERS as LIBRARIES
from papers.certified_vision import cells as vision_cells
from papers.frontier import best_losses, best_rate
from wellnormed.proof.decimals import shown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
VISION = ROOT / "results" / "reproduce" / "certified-vision-cpu" / "rows.jsonl"
_BEGIN, _END = "<!-- written by docs/make_results.py -->", "<!-- end -->"
MUON = "torch.optim.Muon"
CURVES, DEFAULTS = "public-curves.json", "public-defaults.json"
BUDGET = "lipschitz-budget.json"
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
        f"[{name}](../results/{name}): `{content['command']}`; {commit[:10]}{'+' * bool(changed)}{changed}, "
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


def budget() -> Lines:
    """Caps that are found from a constant, beside those set by hand."""
    content = load(BUDGET)
    yield from ("## Caps from a constant", "", *origin(BUDGET, content))
    yield from ("Loss on new data, at equal constants and best rates.", "")
    lines = []
    for model, found in best_budgets(content["rows"]).items():
        loss = {arm: fmean(row["loss"] for row in rows) for arm, rows in found.items()}
        hand = [value for arm, value in loss.items() if arm not in (MOVED, KEPT)]
        every = [row for row in content["rows"] if row["model"] == model]
        most = shown(max(row["proved"] / row["lipschitz"] for row in every), ".4f")
        least = shown(min(row["proved"] / row["lipschitz"] for row in every), ".4f", up=False)
        lines.append((
            model, f"{every[0]['lipschitz']:g}", f"{loss[MOVED]:.3f}", f"{loss[KEPT]:.3f}", f"{min(hand):.3f}",
            f"{median(hand):.3f}", len(hand), len(found[MOVED]), f"{least} to {most}",
        ))  # fmt: skip
    columns = (
        "model | constant | found, moved | found, kept | by hand: best | median | settings | seeds | proved / asked"
    )
    yield from table(columns, lines)


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
        "model | parameters | rows | log10 of the constant | seconds | of the checker",
        [
            (name, f"{found['parameters']:,}", found["rows"], shown(found["log10_lipschitz"], ".2f"),
             f"{found['seconds']:.1f}", f"{found['seconds_of_the_checker']:.1f}")
            if "refused" not in found else (name, "-", "-", f"refused: {found['refused'].split('` in')[0]}`", "-", "-")
            for name, found in content["results"].items()
        ],
    )  # fmt: skip


HARNESSES: tuple[tuple[str, str, Callable[[dict[str, Any]], tuple[str, list[Any]]], str], ...] = (
    ("EPFL's llm-optimizer-benchmark, characters of Shakespeare", "llm_optimizer_benchmark.json", ranks,
     " | optimizer | loss | rate, decay | cells | mean (seeds) | largest proved norm over cap"),
    ("LightBench", "lightbench.json", pass_rates, "optimizer | matrices: trivial | easy | vectors: trivial | easy"),
)  # fmt: skip


def harnesses() -> Lines:
    """Benchmarks of optimizers that others wrote."""
    for title, name, lines, columns in HARNESSES:
        content = load(name)
        said, rows = lines(content)
        yield from (f"## {title}", "", *origin(name, content), said, "", *table(columns, rows))


def facts() -> str:
    """The table of README.md, between its two comments: what was measured here, beside a peer by its name."""
    ends = {name: fmean(row["curve"][-1][1] for row in rows) for name, rows in curves(load(CURVES)["rows"]).items()}
    ours = ends.pop(SCION)
    epfl = {str(line[1]): float(str(line[2])) for line in ranks(load("llm_optimizer_benchmark.json"))[1]}
    vision = best(vision_rows())
    like = max(kind[:4] for kind in vision if kind.data == "mnist" and kind.network == "deel-torchlip")
    mnist = {kind.network: found for kind, found in vision.items() if kind[:4] == like}
    safe = {name: mean(found.results, "certified")[2] for name, found in mnist.items()}
    lip = "deel-torchlip"
    runs = [load(f"frontier/attention-10-seed-{seed}.json")["results"] for seed in (0, 1, 2)]
    loss = fmean(run["validation_loss"] for run in runs)
    own = [fmean(losses) for losses in best_losses(load("frontier_peers.json")["rows"]).values()]
    step = load("step_time.json")
    lines = [
        (
            "[GPT-2 in the figure](docs/results.md#three-optimizers-on-a-public-model): validation loss at the end",
            f"**{ours:.2f}** at the default rate",
            "; ".join(f"{name}: {end:.2f}" for name, end in ends.items()),
        ),
        (
            "[A harness of EPFL](docs/results.md#epfls-llm-optimizer-benchmark-characters-of-shakespeare) for language "
            "models: loss after 500 steps, each at the best of its settings",
            f"{epfl['wn-scion']:.2f}; with SOAP's basis and caps **{epfl['wn-soap-caps']:.2f}**",
            f"SOAP {epfl['soap']:.2f}, schedule-free AdamW {epfl['sf-adamw']:.2f}, AdamW {epfl['adamw']:.2f}",
        ),
        (
            "[MNIST](docs/certified-vision.md): test images proved to stay classified rightly within a distance of 1",
            f"**{safe['wellnormed']:.1%}**",
            f"{lip}, the network of its examples at {_rates(mnist[lip])}: {safe[lip]:.1%}",
        ),
        (
            f"[A transformer](docs/training.md#what-the-presets-reach) on Shakespeare's characters, {len(runs)} seeds: "
            "validation loss",
            f"{loss:.3f} at a proved constant of {math.ceil(10 ** runs[0]['log10_lipschitz'] - 1e-9)}",
            f"the models of nanoGPT and of its speedrun, with no proof: {max(own):.3f} and {min(own):.3f}",
        ),
        (
            "[Time of a training step](docs/results.md#a-training-step) with caps, over one of AdamW, two CPU cores",
            f"{step['cpu']['ratio']:.2f} at {step['cpu']['tokens_per_step']:,} tokens, {step['paper']['ratio']:.2f} at "
            f"{step['paper']['tokens_per_step']:,}",
            "AdamW: 1",
        ),
    ]
    return "\n".join(table("measured | wellnormed | others", lines)).rstrip()


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
    return "\n".join(lines).rstrip()


def certified() -> Lines:
    """Where networks of other libraries had as many steps: ours beside theirs at the smallest distance."""
    rows, lines = vision_rows(), []
    for kind, theirs in (found := best(rows)).items():
        if kind.network in LIBRARIES and (ours := found.get(kind._replace(network="wellnormed"))):
            shares = [[mean(each.results, what)[0] for what in ("certified", "attacked")] for each in (ours, theirs)]
            seeds = f"{len(ours.results)} and {len(theirs.results)}"
            columns = (f"{TITLES[kind.data]}, {kind.steps:,} steps", distance(BUDGETS[kind.data][0]), kind.network)
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


def _rates(found: Best) -> str:
    """Which rate it is of those that were tried, in words."""
    return f"the best of {found.tried} rates" if found.tried > 1 else f"the rate {found.rate:g}"


def _vision_row(kind: Kind, found: Best) -> list[object]:
    """A network and its training, accuracy, certified and attacked shares, the largest proved constant, and minutes."""
    results = found.results
    pairs = zip(mean(results, "certified"), mean(results, "attacked"), strict=True)
    return [
        kind.network,
        f"{kind.steps:,}",
        f"{kind.offset:.3g}" + ", annealed" * bool(kind.annealing),
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
        frontier(),
        budget(),
        steps(),
        matrix(),
        gpu(),
        attacks(),
        certified(),
        harnesses(),
    )
    return "\n".join([HEAD, "", *(line for part in parts for line in part)]).rstrip()


DOCS = ROOT / "docs"
WITHIN = {
    PAGE: page, ROOT / "README.md": facts, DOCS / "certified-vision.md": vision, DOCS / "papers.md": claims,
}  # fmt: skip
"""Pages with a part that is made from the files, and what makes it."""


if __name__ == "__main__":
    for path, table_of in WITHIN.items():
        path.write_text(between(path.read_text(encoding="utf-8"), table_of()), encoding="utf-8")
