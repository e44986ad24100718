"""What two processes prove and calibrate of a model that `DistributedDataParallel` wraps."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import wellnormed as wn


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def _data(rank: int) -> Tensor:
    return torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(rank))


def calibrated(wrapped: bool) -> tuple[dict[str, float], dict[str, float], tuple[float, float]]:
    """Floors, hit rates and losses, from data that differs between processes."""
    model = _model()
    model = nn.parallel.DistributedDataParallel(model) if wrapped else model
    pairs = [(x, None) for x in _data(dist.get_rank())]
    found = wn.calibrate(model, pairs, 0.8, loss=lambda y, _: y.square().mean())
    assert found.losses is not None
    bare = {name.removeprefix("module."): floor for name, floor in found.floors.items()}
    return bare, {name.removeprefix("module."): rate for name, rate in found.hit_rates.items()}, found.losses


def calibrated_alone(world: int) -> tuple[dict[str, float], dict[str, float], tuple[float, float]]:
    """The same of one process that has the data of all."""
    pairs = [(x, None) for rank in range(world) for x in _data(rank)]
    found = wn.calibrate(_model(), pairs, 0.8, loss=lambda y, _: y.square().mean())
    assert found.losses is not None
    return found.floors, found.hit_rates, found.losses


def kept(wraps_optimizer: bool) -> tuple[float, dict[str, float], list[Tensor]]:
    """The constant that is proved after steps with moving caps, the caps, and the weights."""
    model = _model()
    wn.calibrate(model, _data(0))
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = _data(dist.get_rank())[0]
    optimizer = wn.Scion(wrapped if wraps_optimizer else model, lr=0.05)
    constraints = wn.constrain(optimizer, lipschitz=3.0, example_input=x[:2], move_every=3)
    for _ in range(10):
        optimizer.zero_grad()
        wrapped(x).square().sum().neg().backward()
        optimizer.step()
    constant = wn.certify(wrapped, x[:2], within=constraints).lipschitz
    caps = {name.removeprefix("module."): cap for name, cap in constraints.promised().items()}
    return constant, caps, [parameter.detach() for parameter in model.parameters()]
