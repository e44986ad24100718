"""Run the attack on rounding errors, and write `results/rounding.json`."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import campaigns.rounding as package
from campaigns.outcomes import go_on, parser_of
from campaigns.rounding.attack import examine
from campaigns.rounding.cases import draw_case
from campaigns.rounding.pairs import pairs
from papers.header import header, write_result

RESULTS, PROGRESS = Path("results/rounding.json"), Path("runs/rounding")


def summary(outcomes: Sequence[Mapping[str, Any]], searched: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of `results/rounding.json`, without its header."""
    shares: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    held = [each for each in outcomes if each["error"] is not None]
    for each in held:
        layers = {layer for layer in each["layers"] if layer != "autocast"}
        kinds = [("dtype", each["dtype"] + " under autocast" * ("autocast" in each["layers"]))]
        kinds += [("layer", layer) for layer in layers if len(layers) <= 2]
        for kind in kinds:
            shares[kind].append((each["executed"], each["adverse"]))
    forms: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in searched:
        forms["form", each["form"]].append(each)
        forms["kind", each["kind"]].append(each)
    return {
        "models": len(outcomes),
        "status": dict(Counter(each["status"] for each in outcomes)),
        "beyond": [each for each in outcomes if each["status"] == "beyond"],
        "crashes": [each for each in outcomes if each["status"] == "crashed"],
        "no_bound": dict(Counter(each["reason"] for each in outcomes if each["status"] == "no bound").most_common()),
        "seconds": round(sum(each["seconds"] for each in outcomes), 1),
        "rows": [
            {
                "kind": kind, "name": name, "models": len(found),
                "executed": round(max(a for a, _ in found), 4), "adverse": round(max(b for _, b in found), 4),
                "median_executed": round(median(a for a, _ in found), 4),
                "median_adverse": round(median(b for _, b in found), 4),
            }
            for (kind, name), found in sorted(shares.items())
        ],
        "pairs": {
            "models": len(searched), "inputs": sum(each["inputs"] for each in searched),
            "broken": [each for each in searched if each["broken"]],
            "rows": [
                {"by": by, "name": name, "models": len(found), "inputs": sum(each["inputs"] for each in found),
                 "least_distance": round(min(each["least"] for each in found), 4)}
                for (by, name), found in sorted(forms.items())
            ],
        },
    }  # fmt: skip


def main() -> None:
    """Attack what has no outcome yet, and write the summary."""
    parser = parser_of(package.__doc__, 10_000)
    parser.add_argument("--pairs", type=int, default=480, help="so many classifiers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        print(json.dumps(asdict(examine(draw_case(options.seed, options.only), full=True)), indent=1))
        return
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    searched = go_on(PROGRESS / "pairs.jsonl", options.pairs, end, pairs, ("broken",))
    path, failures = PROGRESS / f"seed-{seed}.jsonl", ("beyond", "crashed")
    outcomes = go_on(path, options.models, end, lambda number: examine(draw_case(seed, number)), failures)
    command = f"python -m campaigns.rounding --models {options.models} --pairs {options.pairs} --seed {seed}"
    content = summary(outcomes, searched)
    write_result(RESULTS, header(command, seed) | content)
    print({key: content[key] for key in ("models", "status", "no_bound")}, content["pairs"]["broken"])


if __name__ == "__main__":
    main()
