"""Time and memory of one optimizer step on the 72 hidden matrices of GPT-2 small, against named peers in one run.

Time: ours (Muon's norm, Nesterov momentum, Jordan's five steps, float32) alone and with a hard cap on every matrix;
`torch.optim.Muon`, which iterates in bfloat16; a plain float32 loop of the same five steps; AdamW. They alternate step
by step, so that the machine's drift hits all.

Memory: each optimizer in another process, on the first `--memory-blocks` blocks, beyond weights and gradients; the
memory-light Scion (momentum in the gradient, bfloat16) among them. "resident" is the process's highest resident size
during three steps: with it come the kernels that the product library makes for every shape, and what the C library does
not give back. "tensors" is what torch itself allocates, to the byte: the optimizer's state, and the most that is held
beside it during a step.

    python -m benchmarks.optimizer_step --output results/optimizer_step.json
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile

import wellnormed as wn
from papers.header import header, write_result

WIDTH, BLOCKS = 768, 12
Shapes = list[tuple[int, int]]
SHAPES: Shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
JORDAN = (3.4445, -4.7750, 2.0315)


class Float32Loop(torch.optim.Optimizer):
    """Muon as its text says, one matrix after the other, in float32."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore
        """One Nesterov step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                x = parameter.grad.lerp(buffer, group["momentum"])
                flip = x.shape[0] > x.shape[1]
                x = x.mT if flip else x
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.mT
                    x = torch.addmm(
                        x, torch.addmm(gram, gram, gram, beta=JORDAN[1], alpha=JORDAN[2]), x, beta=JORDAN[0]
                    )
                x = x.mT if flip else x
                parameter.add_(x, alpha=-group["lr"] * (x.shape[0] / x.shape[1]) ** 0.5)


def hidden_matrices(blocks: int, dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES) -> nn.Module:
    """Linear layers with the shapes of each block, by default the hidden ones of GPT-2 small; gradients are drawn."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(n, m, bias=False, dtype=dtype) for _ in range(blocks) for m, n in shapes)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def ours(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    """Muon by the engine."""
    return wn.Muon(wn.assign_norms(model, overrides={"*": wn.Spectral()}), lr=lr)


def with_cap(cap: wn.constraints.Constraint, model: nn.Module) -> torch.optim.Optimizer:
    """The same, with a constraint on every matrix, at a rate that leaves a cap of 1 room for seven steps."""
    optimizer = ours(model, lr=0.01)
    wn.constrain(optimizer, {"*": cap})
    return optimizer


def ours_light(model: nn.Module) -> torch.optim.Optimizer:
    """LMO's memory-light form."""
    return wn.Scion(wn.assign_norms(model, overrides={"*": wn.Spectral()}), lr=0.02, memory="gradient")


TIMED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "ours": ours,
    "ours with a hard cap": partial(with_cap, wn.HardCap(1.0)),
    "float32 loop": lambda model: Float32Loop(model.parameters()),
    "torch.optim.Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.02),
    "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters()),
}
MEASURED = {
    "ours": (ours, torch.float32),
    "ours, memory-light": (ours_light, torch.float32),
    "ours, memory-light, bfloat16": (ours_light, torch.bfloat16),
    "torch.optim.Muon": (TIMED["torch.optim.Muon"], torch.float32),
    "torch.optim.AdamW": (TIMED["torch.optim.AdamW"], torch.float32),
}


EVERY = 8
CONSTRAINED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], int]] = {
    f"ours with {name}{'' if every == 1 else f', every {every}'}": (partial(with_cap, kind(1.0, every=every)), every)
    for name, kind in {
        "a hard cap": wn.HardCap,
        "a soft cap": wn.SoftCap,
        "a spectral normalization": wn.constraints.SpectralNormalize,
    }.items()
    for every in (1, EVERY)
}
"""Every constraint that may wait, and the steps from one projection to the next."""


def time_steps(rounds: int) -> dict[str, float]:
    """Median seconds of a step; the slow bfloat16 peer takes part in the first rounds only."""
    steps = {name: make(hidden_matrices(BLOCKS)).step for name, make in TIMED.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            if name == "torch.optim.Muon" and index > 2:
                continue
            start = time.perf_counter()
            step()
            if index:  # the first warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def high_water() -> int:
    """Highest resident size of this process so far, in bytes; Linux only (`getrusage` counts the parent's, too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def most_allocated(step: Callable[[], object]) -> int:
    """The most bytes that torch allocated while a function ran, beyond those in use before."""
    with profile(profile_memory=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0))


def peak_bytes(name: str, blocks: int) -> dict[str, int]:
    """Memory of a step beyond weights and gradients; call it in a fresh process."""
    make, dtype = MEASURED[name]
    small = nn.Linear(256, 256, bias=False, dtype=dtype)  # for which each takes the path of the large ones
    small.weight.grad = torch.ones_like(small.weight)
    make(small).step()  # imports, and the product library's own buffers
    model = hidden_matrices(blocks, dtype)
    before = high_water()
    optimizer = make(model)
    for _ in range(3):
        optimizer.step()
    resident = high_water() - before
    state = sum(value.nbytes for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value))
    return {"resident": resident, "tensors": state + most_allocated(optimizer.step)}


def main() -> None:
    """Measure both and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-blocks", type=int, default=2)
    parser.add_argument("--child", choices=list(MEASURED), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(peak_bytes(options.child, options.memory_blocks)))
        return
    seconds = time_steps(options.rounds)
    print(f"{'step of 72 matrices':24} {'seconds':>8} {'ours / it':>10} {'capped / it':>12}")
    for name, value in seconds.items():
        capped = seconds["ours with a hard cap"] / value
        print(f"{name:24} {value:8.3f} {seconds['ours'] / value:10.2f} {capped:12.2f}")
    weights = sum(m * n for m, n in SHAPES) * options.memory_blocks
    memory = {}
    print(f"\n{'memory of a step, MiB':32} {'resident':>8} {'tensors':>8} {'bytes per weight':>18}")
    for name in MEASURED:
        command = [sys.executable, "-m", "benchmarks.optimizer_step", "--child", name]
        command += ["--memory-blocks", str(options.memory_blocks)]
        memory[name] = found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        resident, tensors = (found[key] / 2**20 for key in ("resident", "tensors"))
        print(f"{name:32} {resident:8.1f} {tensors:8.1f} {found['tensors'] / weights:18.2f}")
    if options.output:
        result = {
            **header("python -m benchmarks.optimizer_step --output results/optimizer_step.json", seed=0),
            "rounds": options.rounds,
            "seconds": seconds,
            "memory_blocks": options.memory_blocks,
            "memory_bytes": memory,
        }
        write_result(options.output, result)


if __name__ == "__main__":
    main()
