"""What constraints cost a step: processor time on one thread, over that of the same step without one.

On the hidden matrices of one block of GPT-2 small, in turn, eight steps of each at a time; a constraint that waits
projects at one of them. The weights begin above the cap, and every step is of a hundredth of it.

    python -m benchmarks.constraint_time [--blocks 1] [--rounds 3]
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.optimizer_step import CONSTRAINED, EVERY, hidden_matrices, ours
from papers.header import header, write_result

OUTPUT = Path("results/constraint-time.json")


def main() -> None:
    """Measure in turn, and write the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    makes = {"ours": ours} | {name: make for name, (make, _) in CONSTRAINED.items()}
    steps = {name: make(hidden_matrices(options.blocks)).step for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(EVERY):
                step()
            times[name].append(time.process_time() - start)
    ratios = {
        name: statistics.median(own / plain for own, plain in zip(values[1:], times["ours"][1:], strict=True))
        for name, values in times.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:48} {ratio:6.2f}")
    about = header("python -m benchmarks.constraint_time", seed=0)
    write_result(options.output, {**about, "blocks": options.blocks, "rounds": options.rounds, "ratios": ratios})


if __name__ == "__main__":
    main()
