"""Write docs/results.md and the table of README.md from the files under results/: `python docs/make_results.py`.

No figure there is typed by hand; a test compares both with what this script writes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from docs import on_gpu
from docs.harnesses import pass_rates, ranks
from papers._table import Table
from papers._transfer import drifts
from papers.frontier import best_losses

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
_BEGIN, _END = "<!-- written by docs/make_results.py -->", "<!-- end -->"
HEAD = """# Measured results

Every figure that this project reports, as it stands in the committed files under `results/`. This page is written by
`python docs/make_results.py`; a test fails when a file changes and the page does not. Each section names its file,
the command that made it, the commit, the machine and the seed (`+changes`: uncommitted changes were present). Losses
are in nats over the whole validation split, per character of Shakespeare, per byte of books for token levers, and per
token in the benchmarks of others. Times are medians; compare ratios within one file, and never times of different
files."""


def load(name: str) -> dict[str, Any]:
    """A file under `results/`."""
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def origin(name: str, content: dict[str, Any]) -> list[str]:
    """The line that says where the numbers of a file come from."""
    commit, _, changed = content["commit"].partition("+")
    seed = content["seed"]
    seeds = (
        f"seeds {', '.join(map(str, seed))}"
        if isinstance(seed, list) and len(seed) > 1
        else f"seed {seed[0] if isinstance(seed, list) else seed}"
    )
    return [
        f"[{name}](../results/{name}): `{content['command']}`; commit {commit[:10]}{'+' * bool(changed)}{changed}, "
        f"{content['machine']}, {seeds}.",
        "",
    ]


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    columns = list(columns)
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        "",
    ]


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits; a dash where there is no number."""
    return "-" if value is None else f"{value:.{digits}g}"


def frontier() -> Iterator[str]:
    """Transformers with a certificate, and nanoGPT's settings."""
    yield from ("## Character transformers: loss and certificate", "")
    yield from ("![Validation loss against the certified Lipschitz constant](../results/frontier/frontier.png)", "")
    paths = sorted(
        (ROOT / "results" / "frontier").glob("*.json"),
        key=lambda path: load(f"frontier/{path.name}")["results"]["log10_lipschitz"],
    )
    rows = []
    seeds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for path in paths:
        point = load(f"frontier/{path.name}")
        found, config, commit = point["results"], point["config"], point["commit"][:10]
        model, caps = config["model"], ", ".join(f"{cap:g}" for cap in config["caps"].values())
        if config.get("lipschitz") is None:
            settings = f"{config['constraint']}; blocks {model['blocks']}, expansion {model['expansion']}; caps {caps}"
        else:
            settings = f"asked for {config['lipschitz']:g}; attention blocks {model['attention_blocks']}"
            reads = "content and position" if model["attention_blocks"] else "position"
            seeds.setdefault((f"{config['lipschitz']:g}", reads, f"{found['training_tokens']:,}"), []).append(found)
        rows.append(
            (
                f"[{path.stem}](../results/frontier/{path.name})",
                point["seed"],
                settings,
                f"{found['training_tokens']:,}",
                f"{found['parameters']:,}",
                f"{found['validation_loss']:.4f}",
                f"{found['log10_lipschitz']:.3f}",
                f"{found['lower_bound']:.3g}",
                f"{10 ** found['log10_lipschitz'] / found['lower_bound']:.2f}",
                commit,
            )
        )
    first = load(f"frontier/{paths[0].name}")
    command = "python -m papers.frontier run --only NAME"
    yield from (
        f"Each file: `{command}`, {first['machine']}; {first['results']['steps']:,} steps on "
        f"{first['results']['source']}. First the runs that were asked for a constant, by seeds, then all.",
        "",
    )
    yield from table(
        (
            "asked for",
            "reads the past by",
            "training tokens",
            "seeds",
            "validation loss, mean",
            "least",
            "largest",
            "largest gain found",
            "proved / found, largest",
        ),
        [
            (
                *key,
                len(runs),
                f"{fmean(run['validation_loss'] for run in runs):.4f}",
                f"{min(run['validation_loss'] for run in runs):.4f}",
                f"{max(run['validation_loss'] for run in runs):.4f}",
                f"{max(run['lower_bound'] for run in runs):.3g}",
                f"{max(10 ** run['log10_lipschitz'] / run['lower_bound'] for run in runs):.2f}",
            )
            for key, runs in sorted(seeds.items(), key=lambda item: (float(item[0][0]), item[0][1:]))
        ],
    )
    yield from table(
        (
            "point",
            "seed",
            "settings (caps: query, key, value, output; feed in, feed out; head)",
            "training tokens",
            "parameters",
            "validation loss",
            "log10 of the certified constant",
            "found by search",
            "proved / found",
            "commit",
        ),
        rows,
    )
    peer = load("nanogpt.json")
    yield from ("The peer without constraints, nanoGPT's settings for a CPU:", "")
    yield from origin("nanogpt.json", peer)
    yield from table(
        ("parameters", "training tokens", "validation loss", "training seconds"),
        [
            (
                f"{peer['parameters']:,}",
                f"{peer['training_tokens']:,}",
                f"{peer['validation_loss']:.4f}",
                f"{peer['training_seconds']:.0f}",
            )
        ],
    )


def levers() -> Iterator[str]:
    """What each choice is worth at a constant of 10, and what reading content is worth at a length of 256."""
    files = {path.stem: load(f"levers/{path.name}") for path in sorted((ROOT / "results" / "levers").glob("*.json"))}
    for title, constant, prefix in (
        ("One change of the default run at a time", "constant 10", ""),
        ("Reading the content of 256 characters", "constant 10 at the start", "long-"),
        ("One change of the published architecture at a time", "the preset `caps`, whose constant is 21.3", "caps-"),
    ):
        names = [name for name in files if (name[:5] if name[:5] in ("long-", "caps-") else "") == prefix]
        if not names:
            continue
        yield from (f"## {title}", "")
        yield from (
            f"Each file: `python -m benchmarks.levers NAME`, {files[names[0]]['machine']}; seed 0, one run each; "
            f"{constant}. The training loss is over the first characters of that split, as many as validation has.",
            "",
        )
        yield from table(
            (
                "run",
                "training tokens",
                "validation loss",
                "training loss",
                "constant before the head",
                "proved constant",
                "found",
                "commit",
            ),
            [
                (
                    f"[{name.removeprefix(prefix)}](../results/levers/{name}.json)",
                    f"{found['training_tokens']:,}",
                    f"{found['validation_loss']:.4f}",
                    f"{found['training_loss']:.4f}",
                    f"{found['body_lipschitz']:.3f}",
                    f"{10 ** found['log10_lipschitz']:.2f}",
                    f"{found['lower_bound']:.3g}",
                    files[name]["commit"][:10],
                )
                for name, found in sorted(
                    ((name, files[name]["results"]) for name in names), key=lambda item: item[1]["validation_loss"]
                )
            ],
        )


def steps() -> Iterator[str]:
    """Times of training steps and optimizer steps."""
    content = load("step_time.json")
    yield from ("## A training step", "")
    yield from origin("step_time.json", content)
    yield from table(
        (
            "preset",
            "tokens a step",
            "AdamW, ms",
            "torch's Muon with AdamW, ms",
            "ours without constraints, ms",
            "ours, ms",
            "norm estimates, ms",
            "ours over AdamW",
            "with caps that project every 8 steps",
        ),
        [
            (
                name,
                f"{row['tokens_per_step']:,}",
                *(
                    f"{1e3 * row[f'{peer}_seconds']:.1f}"
                    for peer in ("adamw", "torch_muon", "without_constraints", "ours")
                ),
                f"{1e3 * row['norm_estimates_seconds']:.1f} every {row['log_every']} steps",
                f"{row['ratio']:.2f}",
                f"{row['amortised_ratio']:.2f}" if "amortised_ratio" in row else "-",
            )
            for name, row in content.items()
            if isinstance(row, dict) and "ratio" in row
        ],
    )
    content = load("optimizer_step.json")
    yield from ("## An optimizer step on the 72 hidden matrices of GPT-2 small", "")
    yield from origin("optimizer_step.json", content)
    seconds = content["seconds"]
    yield from table(
        ("optimizer", "seconds", "ours over it", "ours with a hard cap over it"),
        [
            (name, f"{value:.3f}", f"{seconds['ours'] / value:.2f}", f"{seconds['ours with a hard cap'] / value:.2f}")
            for name, value in seconds.items()
        ],
    )
    yield from (f"Memory beyond weights and gradients, on {content['memory_blocks']} blocks:", "")
    yield from table(
        ("optimizer", "MiB of torch's tensors", "MiB of the process"),
        [
            (name, *(f"{found[key] / 2**20:.1f}" for key in ("tensors", "resident")))
            for name, found in content["memory_bytes"].items()
        ],
    )
    content = load("parallel.json")
    yield from ("## Two processes", "")
    yield from origin("parallel.json", content)
    yield from table(
        ("weights and oracles", "ms a step", "MB sent a step"),
        [(row["name"], f"{1e3 * row['seconds']:.0f}", f"{row['sent_bytes'] / 1e6:.2f}") for row in content["rows"]],
    )
    content = load("soak.json")
    yield from (f"## {content['steps']:,} steps on {content['ranks']} processes that are killed", "")
    yield from origin("soak.json", content)
    losses, memory = (content[key] for key in ("first_and_last_validation_loss", "peak_memory_mib_first_and_last_row"))
    yield from table(
        ("what", "found"),
        [
            ("kills of a random process at a random moment", content["kills"]),
            ("times that it was started", content["starts"]),
            ("whether it reached its end", "yes" if content["finished"] else "no"),
            ("whether the rows of metrics are in order, none twice", "yes" if content["rows_in_order"] else "no"),
            ("checkpoints, at which all ranks have the same bits", content["checkpoints"]),
            ("largest proved norm over its cap", f"{content['largest_proved_norm_over_cap']:.6f}"),
            ("validation loss at the first and the last checkpoint", " and ".join(f"{x:.3f}" for x in losses)),
            ("peak memory of a rank at the first and the last step, MiB", " and ".join(map(str, memory))),
        ],
    )


def matrix() -> Iterator[str]:
    """Speed, accuracy and operations of the matrix functions."""
    content = load("matrix/speed.json")
    yield from ("## Matrix functions: time", "")
    yield from origin("matrix/speed.json", content)
    yield from table(
        ("function", "input", "peer", "ours, ms", "peer, ms", "ours over peer", "our error", "peer's error"),
        [
            (
                row["function"],
                row["input"],
                row["peer"],
                f"{1e3 * row['ours_seconds']:.2f}",
                *((f"{1e3 * row['peer_seconds']:.2f}", f"{row['ratio']:.2f}") if row["ratio"] else ("-", "-")),
                number(row["ours_error"]),
                number(row["peer_error"]),
            )
            for row in content["rows"]
        ],
    )
    content = load("matrix/accuracy.json")
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in content["limits"].items())
    yield from ("## Matrix functions: error against a float64 SVD", "")
    yield from origin("matrix/accuracy.json", content)
    yield from (f"Errors are relative to the largest singular value; the limit is {limits}.", "")
    yield from table(
        ("function", "method", "dtype", "matrices", "miss the limit", "largest error", "on", "norm above the cap by"),
        [
            (
                row["function"],
                row["method"],
                row["dtype"],
                row["cases"],
                row["missed"],
                number(row["worst_error"]),
                row["worst_case"],
                number(row["worst_excess"]),
            )
            for row in content["summary"]
        ],
    )
    content = load("matrix/operations.json")
    yield from ("## Matrix functions: operations", "")
    yield from origin("matrix/operations.json", content)
    yield from (f"Of a training step of NanoGPT-140M at {content['tokens']:,} tokens; SC is the clipping paper.", "")
    yield from table(
        ("function", "row in SC", "share of a step", "as SC prints it", "share of a step of GPT-2 small"),
        [
            (
                row["function"],
                row["paper_row"],
                f"{row['overhead']:.2%}",
                f"{row['paper_printed_percent']:.2f}%",
                f"{row['overhead_gpt2']:.2%}",
            )
            for row in content["rows"]
        ],
    )


def soundness() -> Iterator[str]:
    """Random models, attacked."""
    content = load("soundness.json")
    yield from ("## Attacks on certificates of random models", "")
    yield from origin("soundness.json", content)
    yield from (
        f"{content['models']:,} random models, of them {content['sound']:,} sound, {len(content['violations'])} with a "
        f"violated bound, {len(content['crashes'])} crashed, {content['refused']} refused and {content['not_finite']} "
        f"beyond float64. Of one in {content['config']['verified_one_of']}, {content['verified']} in all, the whole "
        f"certificate was made and proved again; {len(content['not_proved'])} such the checker refused. "
        "For each primitive, and for each layer in models of it alone: the share of the proved gain that a short "
        "search found, at best and in the median. A small share is a loose bound, or too short a search.",
        "",
    )
    for kind in ("primitive", "layer alone", "logits", "model of depth"):
        rows = [row for row in content["rows"] if row["kind"] == kind]
        yield from table(
            (kind, "models", "best share", "median share"),
            [
                (row["name"], row["models"], f"{row['best_share']:.3f}", f"{row['median_share']:.3f}")
                for row in sorted(rows, key=lambda row: (row["best_share"], row["name"]))
            ],
        )


def harnesses() -> Iterator[str]:
    """Benchmarks of optimizers that others wrote."""
    for title, name, lines, columns in (
        (
            "EPFL's llm-optimizer-benchmark, characters of Shakespeare",
            "llm_optimizer_benchmark.json",
            ranks,
            ("", "optimizer", "loss", "rate, decay", "cells", "mean (seeds)", "largest proved norm over cap"),
        ),
        (
            "LightBench",
            "lightbench.json",
            pass_rates,
            ("optimizer", "matrices: trivial", "easy", "vectors: trivial", "easy"),
        ),
    ):
        content = load(name)
        said, rows = lines(content)
        yield from (f"## {title}", "")
        yield from origin(name, content)
        yield from (said, "")
        yield from table(columns, rows)


def gpu() -> Iterator[str]:
    """What was measured on a GPU."""
    yield from ("## On a GPU", "")
    before, now = load("first_on_gpu_before.json"), load("first_on_gpu.json")
    yield from origin("first_on_gpu_before.json", before)
    yield from origin("first_on_gpu.json", now)
    yield from (on_gpu.SAID, "")
    columns = ("ms", "over torch's Muon", "before, over torch's Muon", "MiB at most", "waits", "graph")
    yield from table(("model", "optimizer", *columns), on_gpu.steps(before, now))
    content = load("matrix/gpu.json")
    yield from origin("matrix/gpu.json", content)
    yield from (
        f"The matrix sign by jordan-5 in bfloat16, on {content['gpu']}; "
        "the share of the peak counts the operations that are needed at least.",
        "",
    )
    yield from table(("input", "by", "ms", "over torch's Muon", "of peak"), on_gpu.signs(content))


def others(page: str) -> Iterator[str]:
    """Files that no section above names: the numbers and words of their rows, as they stand."""
    for path in sorted((ROOT / "results").rglob("*.json")):
        name = str(path.relative_to(ROOT / "results"))
        if f"](../results/{name})" in page:
            continue
        content = load(name)
        yield from (f"## {path.stem.replace('-', ' ').replace('_', ' ').capitalize()}", "")
        yield from origin(name, content)
        lists = (value for value in content.values() if isinstance(value, list) and value)
        rows = next((value for value in lists if isinstance(value[0], dict)), [content])
        columns = [key for key, value in rows[0].items() if isinstance(value, int | float | str)]
        shown = [[x if isinstance(x := row.get(key), int | str) else number(x, 5) for key in columns] for row in rows]
        yield from table((column.replace("_", " ") for column in columns), shown)


def facts() -> str:
    """The table of README.md, between its two comments."""
    names = [f"frontier/attention-10-seed-{seed}.json" for seed in (0, 1, 2)]
    runs = [load(name)["results"] for name in names if (ROOT / "results" / name).exists()]
    loss, found = fmean(run["validation_loss"] for run in runs), max(run["lower_bound"] for run in runs)
    (source,) = {run["source"] for run in (*runs, load("nanogpt.json"))}
    peer, own = load("nanogpt.json"), best_losses(load("frontier_peers.json")["rows"])
    seeds, peers = min(map(len, own.values())), [fmean(losses) for losses in own.values()]
    step, folder = load("step_time.json"), "results/reproduce/lr-transfer-mlp-cpu"
    cells = Table(ROOT / folder / "rows.jsonl").read()[0].values()
    moved = [fmean(drifts(list(cells), "width", method=method)) for method in ("dualized", "Adam (SP)", "Adam (muP)")]
    caps = [
        row["ratio"]
        for row in load("matrix/speed.json")["rows"]
        if row["function"] == "spectral_hardcap" and row["peer"].startswith("SC nested, 1.5")
    ]
    rows = [
        (
            f"[transformer, preset `cpu`](docs/results.md): loss on the validation split of {source}, "
            f"{len(runs)} seed{'s' * (len(runs) > 1)}",
            f"**{loss:.3f}** at a proved constant of {10 ** runs[0]['log10_lipschitz']:.2f} (search finds {found:.1f})",
        ),
        (
            "[nanoGPT's CPU settings, AdamW](results/nanogpt.json) on the same text, one seed",
            f"{peer['validation_loss']:.3f}, no certificate",
        ),
        (
            "[nanoGPT's and the speedrun's models](results/frontier_peers.json) on it, our optimizer at its best "
            f"rates, {seeds} seed{'s' * (seeds > 1)}",
            f"{min(peers):.3f} to {max(peers):.3f}, no certificate; the proved 10 is {loss - max(peers):.2f} to "
            f"{loss - min(peers):.2f} above",
        ),
        (
            "[training step](results/step_time.json) over one of AdamW",
            f"{step['cpu']['ratio']:.2f} at {step['cpu']['tokens_per_step']:,} tokens, "
            f"{step['paper']['ratio']:.2f} at {step['paper']['tokens_per_step']:,}",
        ),
        (
            "[hard cap](results/matrix/speed.json) over the published form",
            f"{min(caps):.2f} to {max(caps):.2f} of its time at 1.5 caps",
        ),
        (
            f"[best rate]({folder}/table.md), width 32 to 512, moves by",
            "a factor of {:.1f} dualized, {:.1f} with Adam, {:.1f} in muP".format(
                *(2 ** abs(power) for power in moved)
            ),
        ),
    ]
    return "\n".join(table(("measured on 2 CPU cores", ""), rows)).rstrip()


def readme(text: str) -> str:
    """README.md with its table as the files give it."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{facts()}\n{_END}{after}"


def page() -> str:
    """The whole page."""
    parts = (frontier(), levers(), steps(), matrix(), gpu(), soundness(), harnesses())
    lines = [HEAD, "", *(line for part in parts for line in part)]
    lines += others("\n".join(lines))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
