"""The cost of a step and of its constraints on a CUDA device, against the peers, in one command.

    python -m benchmarks.first_on_gpu --output results/first_on_gpu.json

For each of our optimizers and the peers of `benchmarks.optimizer_step`, on the same 72 hidden matrices of GPT-2 small
and then on 24 matrices of a 7B model (4096 x 4096, one row of blocks): the seconds of a step, the memory that a step
takes beside weights, gradients and state, and how often it waits for the device; for caps that wait, over the eight
steps of which one projects. Then whether a CUDA graph can record the step. A measurement that fails is stored with its
error, and the next one runs.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.matrix.gpu import eager_seconds
from benchmarks.optimizer_step import BLOCKS, CONSTRAINED, TIMED, hidden_matrices
from papers.header import header, write_result
from papers.published_matrix import gram

Make = Callable[[nn.Module], torch.optim.Optimizer]
LARGE = [(4096, 4096)]


class BatchedGram(torch.optim.Optimizer):
    """Muon with the published iteration on Gram matrices, in bfloat16, on all matrices of a shape at once."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore
        """One Nesterov step."""
        shapes: dict[torch.Size, list[Tensor]] = {}
        group = self.param_groups[0]
        for parameter in group["params"]:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for (m, n), weights in shapes.items():
            buffers = [self.state[each].setdefault("buffer", torch.zeros_like(each)) for each in weights]
            gradients = [each.grad for each in weights]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            moved = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
            signs = gram(moved.bfloat16(), "jordan-5").to(moved.dtype)
            torch._foreach_add_(weights, list(signs.unbind()), alpha=-group["lr"] * max(1, m / n) ** 0.5)


PEERS: dict[str, Make] = {**TIMED, "published Gram iteration, batched": lambda model: BatchedGram(model.parameters())}
OPTIMIZERS: dict[str, tuple[Make, int]] = {name: (make, 1) for name, make in PEERS.items()} | CONSTRAINED
"""How each is made, and over how many steps its figures are means: those of which one projects, for caps that wait."""


def seconds(step: Callable[[], Any], rounds: int = 10) -> float:
    """The median time of a step, launches and waits included; of fewer rounds where they take longer than 3 seconds."""
    times = [eager_seconds(step) for _ in range(2)]
    while len(times) < 3 or (len(times) < rounds + 2 and sum(times[2:]) < 3):
        times.append(eager_seconds(step))
    return statistics.median(times[2:])


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most memory that a step allocates beyond that in use before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def waits(step: Callable[[], Any]) -> int:
    """How often a step makes the host wait for the device, as far as torch notices."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
        return sum("synchroniz" in str(one.message) for one in found)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def records(step: Callable[[], Any]) -> str:
    """Whether a CUDA graph records a step: "yes", or the error."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
        return "yes"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def measured(make: Make, model: nn.Module, every: int = 1) -> dict[str, Any]:
    """Everything about one optimizer on one model, in the order that leaves the device usable for the next."""
    try:
        step = make(model).step

        def cycle() -> None:
            for _ in range(every):
                step()

        found = {"seconds": seconds(cycle) / every, "peak_bytes": peak_bytes(cycle), "waits": waits(cycle) / every}
        return found | {"graph": records(step)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Measure, print a line each, and write the file after every one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/first_on_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device, which all of it needs")
    models: dict[str, Callable[[], nn.Module]] = {
        "GPT-2 small": lambda: hidden_matrices(BLOCKS),
        "GPT-2 small, bfloat16 weights": lambda: hidden_matrices(BLOCKS, torch.bfloat16),
        "24 matrices of 4096 x 4096": lambda: hidden_matrices(24, shapes=LARGE),
        "24 matrices of 4096 x 4096, bfloat16 weights": lambda: hidden_matrices(24, torch.bfloat16, LARGE),
    }
    rows = []
    for name, model in models.items():
        for optimizer, (make, every) in OPTIMIZERS.items():
            torch.cuda.empty_cache()
            with torch.device("cuda"):
                own = model()
            found = measured(make, own, every)
            rows.append({"model": name, "optimizer": optimizer, **found})
            print(rows[-1], flush=True)
            command = f"python -m benchmarks.first_on_gpu --output {options.output}"
            write_result(options.output, {**header(command, 0, "cuda"), "rows": rows})


if __name__ == "__main__":
    main()
