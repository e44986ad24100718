"""`wellnormed train --preset cpu`, from nothing to the report, against the same job of another commit.

A checkout of the other commit is given by `--peer`. For every seed its job and ours run one after the other, in a
process each, in an environment that has the packages of both. A row holds the seconds of either process and its
validation loss; a seed that has a row is not run again. The processor decides much: where it multiplies bfloat16
natively, as `bfloat16_products` says, `--precision auto` computes the products of the model in it.

    python -m benchmarks.main_job --peer ../bdb1262 --seeds 0 1 2 3 4 --output results/main_job.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from papers.header import header, stored_rows, write_result
from wellnormed.matrix.msign import multiplies_bfloat16

ROOT = Path(__file__).parents[1]
MAIN = "import sys; from wellnormed.cli import main; sys.exit(main())"


def job(checkout: Path, seed: int, folder: str) -> dict:
    """Seconds, validation loss and certified bound of one run of the main job, with the code of a checkout."""
    command = [sys.executable, "-c", MAIN, "train", "--preset", "cpu", "--seed", str(seed), "--name", "run"]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    run = Path(folder, "runs", "run")
    results = json.loads((run / "results.json").read_text())
    return {"seconds": round(seconds, 2)} | {name: results[name] for name in ("validation_loss", "log10_lipschitz")}


def summary(rows: list[dict]) -> dict:
    """Median ratio of the seconds, and the mean difference of the losses with its standard error.

    Example:
        >>> rows = [
        ...     {"ours": {"seconds": 1.0, "validation_loss": 2.0}, "peer": {"seconds": 2.0, "validation_loss": 1.5}},
        ...     {"ours": {"seconds": 3.0, "validation_loss": 2.0}, "peer": {"seconds": 4.0, "validation_loss": 1.0}},
        ... ]
        >>> summary(rows)
        {'seconds_ratio': 0.625, 'loss_difference': 0.75, 'standard_error': 0.25}
    """
    ratios = [row["ours"]["seconds"] / row["peer"]["seconds"] for row in rows]
    differences = [row["ours"]["validation_loss"] - row["peer"]["validation_loss"] for row in rows]
    error = statistics.stdev(differences) / len(rows) ** 0.5 if len(rows) > 1 else None
    return {
        "seconds_ratio": statistics.median(ratios),
        "loss_difference": statistics.mean(differences),
        "standard_error": error,
    }


def main() -> None:
    """Run the seeds that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    of_peer = subprocess.run(
        ["git", "-C", options.peer, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    rows = stored_rows(options.output)
    for seed in options.seeds:
        if any(row["seed"] == seed for row in rows):
            continue
        found = {}
        for name, checkout in (("peer", options.peer), ("ours", ROOT)):
            with tempfile.TemporaryDirectory() as folder:
                found[name] = job(checkout, seed, folder)
        rows.append({"seed": seed, **found})
        print(json.dumps(rows[-1]), flush=True)
        command = f"python -m benchmarks.main_job --peer {of_peer[:10]} --output {options.output}"
        content = header(command, [row["seed"] for row in rows])
        facts = {"peer_commit": of_peer, "bfloat16_products": multiplies_bfloat16("cpu"), **summary(rows)}
        write_result(options.output, {**content, **facts, "rows": rows})


if __name__ == "__main__":
    main()
