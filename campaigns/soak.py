"""A long run of tiny steps on several processes, which are killed at random moments: `python -m campaigns.soak`.

Writes `results/soak.json`: how often a rank was killed, whether the run reached its end, the largest proved norm over
its cap at any checkpoint (every checkpoint also compares the ranks' copies of the weights, bit by bit), and the memory
of the first rank early and late in its sessions. 20,000 steps take about half an hour on two cores.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from papers.header import header, write_result

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.json"
OPTIONS = [
    *("--batch", "8", "--model.width", "16", "--model.blocks", "2", "--model.heads", "2", "--model.length", "16"),
    *("--model.residual-strength", "0.25", "--checkpoint-every", "200", "--log-every", "100", "--device", "cpu"),
    *("--validation-tokens", "2000", "--certify", "end", "--attack-steps", "0", "--every", "4", "--caps.query", "2"),
    *("--caps.key", "2", "--caps.value", "2", "--caps.output", "2", "--caps.feed-in", "2", "--caps.feed-out", "2"),
]


def main() -> None:
    """Run, kill, go on, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds-between-kills", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    draws = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        kills, sessions = soak(Path(place), args.steps, args.ranks, args.seconds_between_kills, draws)
        found = report(Path(place) / "runs" / "soak", args.steps)
    command = f"python -m campaigns.soak --steps {args.steps} --ranks {args.ranks} --seed {args.seed}"
    content = {**header(command, args.seed), "ranks": args.ranks, "kills": kills, "starts": sessions, **found}
    write_result(args.output, content)
    print(json.dumps(content, indent=2))


def soak(place: Path, steps: int, ranks: int, between: float, draws: random.Random) -> tuple[int, int]:
    """Start the run, and kill one rank after a random time, until it ends by itself: kills and sessions."""
    kills = sessions = 0
    while True:
        begun = (place / "runs" / "soak" / "config.json").exists()
        own = ["--resume", "runs/soak"] if begun else ["nanogpt", "--name", "soak", "--steps", str(steps), *OPTIONS]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "wellnormed.cli", "train", *own),
            ],
            cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        sessions += 1
        try:
            _, errors = process.communicate(timeout=draws.uniform(0.5, 1.5) * between)
        except subprocess.TimeoutExpired:
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
            if found := children.stdout.split():
                os.kill(int(draws.choice(found)), signal.SIGKILL)
                kills += 1
            _, errors = process.communicate()
            time.sleep(1)  # what is left of the group ends
            continue
        if process.returncode != 0:
            raise SystemExit(errors.decode())
        return kills, sessions


def report(folder: Path, steps: int) -> dict[str, Any]:
    """The summary of the rows of metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = [row for row in rows if "proved_norm_over_cap" in row]
    memory = [row["peak_memory_bytes"] for row in rows]
    return {
        "steps": rows[-1]["step"],
        "finished": rows[-1]["step"] == steps,
        "rows_in_order": [row["step"] for row in rows] == sorted({row["step"] for row in rows}),
        "checkpoints": len(saved),
        "largest_proved_norm_over_cap": max(row["proved_norm_over_cap"] for row in saved),
        "first_and_last_validation_loss": [saved[0]["validation_loss"], saved[-1]["validation_loss"]],
        "peak_memory_mib_first_and_last_row": [round(memory[place] / 2**20, 1) for place in (0, -1)],
        "peak_memory_mib_largest": round(max(memory) / 2**20, 1),
    }


if __name__ == "__main__":
    main()
