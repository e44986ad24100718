"""What two processes prove of a model that `DistributedDataParallel` wraps."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wellnormed as wn


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), wn.nn.FlooredNorm(16, 0.1), nn.ReLU(), nn.Linear(16, 2))


def _data(rank: int) -> Tensor:
    return torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(rank))


def refused() -> str:
    """What `calibrate` says to several processes."""
    with pytest.raises(ValueError, match="calibrate") as error:
        wn.calibrate(_model(), _data(0))
    return str(error.value)


def kept(wraps_optimizer: bool) -> tuple[float, dict[str, float], list[Tensor]]:
    """The constant that is proved after steps with moving caps, the caps, and the weights."""
    model = _model()
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
