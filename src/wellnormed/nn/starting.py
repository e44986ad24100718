"""Where the weights of a module start: how each is filled, so that a process can fill one without having the others.

A module that says so has a method `starts`, which names every parameter in it with its `Fill`, in the order in which
random numbers are drawn.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from wellnormed.norms.spectral import LARGE

Fill = Callable[[Tensor, torch.Generator | None], Any]
"""It fills one whole weight in place, with random numbers of the generator, which may live on another device."""
Start = tuple[Tensor, Fill]


def zeros(weight: Tensor, _: torch.Generator | None = None) -> Tensor:
    """Fill with zeros."""
    return weight.zero_()


def drawn(draw: Callable[[Tensor, torch.Generator | None], Any]) -> Fill:
    """Fill by a method of torch that draws in place, which wants the generator on the device of the tensor."""

    def fill(weight: Tensor, generator: torch.Generator | None) -> Tensor:
        device = weight.device if generator is None else generator.device
        draw(values := torch.empty(weight.shape, dtype=weight.dtype, device=device), generator)
        return weight.copy_(values)

    return fill


def own_seed(weight: Tensor, generator: torch.Generator | None) -> int | None:
    """The seed, which the generator gives, from which a large weight is drawn; None for one that is not large.

    So no process draws the numbers of large weights that others fill.
    """
    return int(torch.randint(2**62, (), generator=generator)) if weight.numel() >= LARGE else None


@torch.no_grad()
def start_(starts: Iterable[Start], generator: torch.Generator | None) -> None:
    """Fill the parameters of plain modules, in this order."""
    for parameter, fill in starts:
        seed = None if parameter.is_meta else own_seed(parameter, generator)
        fill(parameter, generator if seed is None else torch.Generator().manual_seed(seed))
