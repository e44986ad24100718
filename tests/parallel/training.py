"""One small training, in one process or many: what the tests of this folder run in every process."""

from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import wellnormed as wn
from wellnormed.optim import AdamWSettings
from wellnormed.parallel import placement
from wellnormed.routing import Assignment

CONSTRAINTS = {
    "1": wn.HardCap(1.1), "3": wn.SoftCap(1.2), "5": wn.constraints.ClippedWeightDecay(0.8, 0.25),
    "7": wn.constraints.Hammer(1.0), "9": wn.HardCap(0.9, every=3), "0": wn.ColumnCap(1.05),
}  # fmt: skip


def muon(assignment, **settings):
    """Muon for matrices, AdamW for the embedding and the vectors."""
    entries = [a if isinstance(a.norm, wn.Spectral) else replace(a, norm=None) for a in assignment]
    return wn.Muon(
        Assignment(tuple(entries)), lr=0.05, weight_decay=0.1, adamw=AdamWSettings(lr=0.01, weight_decay=0.1),
        **settings,
    )  # fmt: skip


class OfOnesOwn(wn.optim.Direction):
    """Sees all that there is to see, and keeps an average in the weight's shape."""

    sees = ("gradient", "weight")
    keeps = ("squares",)

    def __call__(self, seen):
        seen.state["squares"] = 0.9 * seen.state["squares"] + 0.1 * seen.gradient.square()
        return seen.norm.dualize(seen.momentum / (1 + seen.state["squares"].sqrt())) + seen.step * 0.01 * seen.weight


OPTIMIZERS = {
    "Scion": lambda a, **s: wn.Scion(a, lr=0.05, nesterov=True, **s),
    "Scion, constrained": lambda a, **s: wn.Scion(a, lr=0.05, unconstrained=False, lr_factors={"*.bias": 0.5}, **s),
    "Scion, light": lambda a, **s: wn.Scion(a, lr=0.05, memory="gradient", **s),
    "Muon and AdamW": muon,
    "Almond": lambda a, **s: wn.optim.ConditionalGradient(a, lr=0.05, step_rule="averaged", **s),
    "of one's own": lambda a, **s: wn.Muon(a, lr=0.05, directions={"*": OfOnesOwn()}, **s),
    "NorMuon": lambda a, **s: wn.Scion(a, lr=0.05, directions={"*": wn.optim.directions.NorMuon(0.9)}, **s),
    "Averaged": lambda a, **s: wn.Averaged(wn.Scion(a, lr=0.05, momentum=0.5, **s)),
    "sharp": lambda a, **s: wn.optim.ConditionalGradient(a, lr=0.05, step_rule="sharp", **s),
}


def network():
    """Rows 7, 8, 8, 8, 5 and 3: over four processes 5 leaves one with nothing, and 3 as well."""
    torch.manual_seed(0)
    layers = [nn.Embedding(7, 6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)).double()


PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel(), "5": ColwiseParallel(), "7": RowwiseParallel()}
"""Weights cut along rows and along columns, biases cut and copied. Torch needs an even number of features; the rows of
7.weight, the biases of 7 and what tensor parallelism leaves out are cut unevenly by fully_shard."""


class Training:
    """A model on "one" process, or copied by "ddp" or cut by "fsdp" over the default group, with its optimizer.

    "fsdp x tp" is tensor parallel over pairs of processes as well.

    The default group is always small enough for every matrix to be dealt, whatever its size.
    """

    def __init__(self, layout, optimizer, constraints=None, **settings):
        placement.SMALL = 0
        self.model = self.runner = network()
        if layout == "ddp":
            self.runner = DistributedDataParallel(self.model)
            settings["process_group"] = dist.group.WORLD
        elif layout != "one":
            mesh = mesh_of(layout)
            if layout == "fsdp x tp":
                parallelize_module(self.model, mesh["tp"], PLAN)
                mesh = mesh["dp"]
            for layer in self.model:
                if not isinstance(layer, nn.GELU):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = OPTIMIZERS[optimizer](wn.assign_norms(self.model), **settings)
        self.constraints = wn.constrain(self.optimizer, constraints) if constraints else None
        self.rank, self.world = (0, 1) if layout == "one" else (dist.get_rank(), dist.get_world_size())
        if layout == "fsdp x tp":  # the processes of a pair see the same examples
            self.rank, self.world = mesh.get_local_rank(), mesh.size()
        self.count = 0

    def run(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
        return self

    def backward(self):
        """The gradient of a mean over 16 examples, of which every process sees its share."""
        generator = torch.Generator().manual_seed(self.count)
        tokens = torch.randint(7, (16,), generator=generator).chunk(self.world)[self.rank]
        target = torch.randn(16, 3, generator=generator, dtype=torch.float64).chunk(self.world)[self.rank]
        (self.runner(tokens) - target).square().mean().backward()
        self.count += 1

    def sent_bytes(self):
        return getattr(self.optimizer, "inner", self.optimizer).placement.sent_bytes

    def weights(self):
        return {name: assembled(p) for name, p in self.model.named_parameters()}

    def state(self):
        """Every tensor of the optimizer and of the constraints, assembled."""
        names = {p: name for name, p in self.model.named_parameters()}
        own = {
            f"{names[p]}.{key}": assembled(value)
            for p, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return own | (self.constraints.state_dict() if self.constraints else {})


@cache
def mesh_of(layout):
    """A mesh for the life of the process, as every group of it keeps threads that poll."""
    world = dist.get_world_size()
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
    if layout == "fsdp x tp":
        return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (world,))


def assembled(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def measured(layout, optimizer, constraints, steps):
    """What one training leaves: weights and state, norms of the constrained, bytes sent."""
    training = Training(layout, optimizer, constraints).run(steps)
    report = {"weights": training.weights(), "state": training.state(), "sent": training.sent_bytes()}
    if constraints:
        report |= {"norms": training.constraints.norms(), "proved": training.constraints.proved_ratios()}
    return report
