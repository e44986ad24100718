"""How each weight of a module gets its initial values, so that a process can fill one weight without the others.

A module that supports this has a method `starts`. It yields every parameter together with its `Fill`, the function that
sets the initial values, in the order in which random numbers are drawn.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from wellnormed.norms.spectral import LARGE

Fill = Callable[[Tensor, torch.Generator | None], Any]
"""A function that fills one whole weight in place, with numbers of a generator that may be on another device."""
Start = tuple[Tensor, Fill]
"""A parameter and the function that fills it."""


def zeros(weight: Tensor, _: torch.Generator | None = None) -> Tensor:
    """Fill a weight with zeros; this is a `Fill`."""
    return weight.zero_()


def drawn(draw: Callable[[Tensor, torch.Generator | None], Any]) -> Fill:
    """Return a `Fill` that draws on the device of the generator and copies the numbers to the weight.

    Args:
        draw: It fills a tensor in place with numbers of a generator. Methods of torch need both on one device.

    Example:
        >>> fill = drawn(lambda weight, generator: weight.uniform_(2.0, 3.0, generator=generator))
        >>> weight = fill(torch.zeros(4), torch.Generator().manual_seed(0))
        >>> bool((weight >= 2).all())
        True
    """

    def fill(weight: Tensor, generator: torch.Generator | None) -> Tensor:
        device = weight.device if generator is None else generator.device
        draw(values := torch.empty(weight.shape, dtype=weight.dtype, device=device), generator)
        return weight.copy_(values)

    return fill


def own_seed(weight: Tensor, generator: torch.Generator | None) -> int | None:
    """Draw a seed from a generator for a weight of 2^20 entries or more; return None for a smaller weight.

    The large weight is then filled from its own seed. A process that does not fill it draws this one number from the
    generator, and not a number for every entry.
    """
    return int(torch.randint(2**62, (), generator=generator)) if weight.numel() >= LARGE else None


@torch.no_grad()
def start_(starts: Iterable[Start], generator: torch.Generator | None) -> None:
    """Fill whole parameters in the given order; weights of 2^20 entries or more are filled from seeds of their own.

    Args:
        starts: The parameters with the functions that fill them, as the method `starts` of a module yields them.
        generator: The source of random numbers; torch's default generator if None.

    Example:
        >>> weight = torch.ones(2)
        >>> start_([(weight, zeros)], None)
        >>> weight
        tensor([0., 0.])
    """
    for parameter, fill in starts:
        seed = None if parameter.is_meta else own_seed(parameter, generator)
        fill(parameter, generator if seed is None else torch.Generator().manual_seed(seed))
