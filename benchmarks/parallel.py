"""Step time and bytes sent, with oracles computed in every process, dealt over copies, and dealt over cut weights.

Run with `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/parallel.py`; needs no GPU. Writes
`results/parallel.json`.
"""

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import wellnormed as wn
from papers.header import header, write_result

STEPS = 20
OUTPUT = Path(__file__).parents[1] / "results" / "parallel.json"


def matrices() -> nn.ModuleList:
    torch.manual_seed(0)
    square = [nn.Linear(256, 256, bias=False) for _ in range(16)]
    return nn.ModuleList(square + [nn.Linear(256, 1024, bias=False) for _ in range(8)])


def cut() -> nn.ModuleList:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = matrices()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def measure(name: str, model: nn.Module, **settings: dist.ProcessGroup) -> dict:
    """Median seconds of a step, and the bytes that this process sends in one."""
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.01, **settings)
    seconds = []
    for _ in range(STEPS):
        for weight in model.parameters():
            gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            mesh = getattr(weight, "device_mesh", None)
            weight.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, weight.placements)
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    row = {"name": name, "seconds": statistics.median(seconds), "sent_bytes": optimizer.placement.sent_bytes / STEPS}
    if dist.get_rank() == 0:
        print(f"{name:22} {1e3 * row['seconds']:6.0f} ms, {row['sent_bytes'] / 1e6:5.2f} MB sent by rank 0, a step")
    return row


def main() -> None:
    """Measure the three and write what rank 0 saw."""
    dist.init_process_group("gloo")
    rows = [
        measure("copied, all everywhere", matrices()),
        measure("copied, dealt", matrices(), process_group=dist.group.WORLD),
        measure("cut, dealt", cut()),
    ]
    if dist.get_rank() == 0:
        command = "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/parallel.py"
        processes = dist.get_world_size()
        write_result(OUTPUT, {**header(command, seed=0), "processes": processes, "steps": STEPS, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
