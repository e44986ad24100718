"""Time of one optimizer step on matrices so small that Python and the number of calls decide, against torch's Muon.

Muon's norm, Nesterov momentum and Jordan's five steps, in the two optimizers in turn, step by step; the last row has a
soft cap on every matrix of ours. torch's Muon multiplies in bfloat16; ours does so from side 128 where the processor
multiplies it natively, as `bfloat16_products` says.

    python -m benchmarks.small_matrices --output results/small_matrices.json
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import wellnormed as wn
from papers.header import header, write_result
from wellnormed.matrix.msign import multiplies_bfloat16

CASES = [(1, 64, False), (1, 256, False), (200, 64, False), (126, 128, False), (1000, 16, True)]
"""How many matrices, their side, and whether ours have soft caps."""


def matrices(count: int, side: int) -> nn.ModuleList:
    """Square weights with gradients."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(count))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def seconds(count: int, side: int, capped: bool, rounds: int) -> dict[str, float]:
    """The median time of a step of each."""
    own, other = matrices(count, side), matrices(count, side)
    ours = wn.Muon(wn.assign_norms(own, overrides={"*": wn.Spectral()}), lr=0.02)
    if capped:
        wn.constrain(ours, {"*": wn.SoftCap(2.0)})
    steps = {"ours": ours.step, "torch_muon": torch.optim.Muon(other.parameters(), lr=0.02).step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[rounds // 5 :]) for name, found in times.items()}


def main() -> None:
    """Measure every case, with each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for count, side, capped in CASES:
            found = seconds(count, side, capped, options.rounds * (5 if count == 1 else 1))
            ratio = found["ours"] / found["torch_muon"]
            rows.append(
                {"threads": threads, "count": count, "side": side, "soft_caps": capped, **found, "ratio": ratio}
            )
            print(f"{threads} threads, {count:4} of {side} x {side}{', soft caps' * capped}: {ratio:.2f}")
    if options.output:
        content = header("python -m benchmarks.small_matrices --output results/small_matrices.json", seed=0)
        write_result(options.output, {**content, "bfloat16_products": multiplies_bfloat16("cpu"), "rows": rows})


if __name__ == "__main__":
    main()
