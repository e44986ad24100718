"""The promises of constraints on weights, in the form in which a proof rests on them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellnormed.lowering.moves import tables_of
from wellnormed.norms import Norm, Sign
from wellnormed.proof import Promise
from wellnormed.proof.promises import Parts


def promise_of(name: str, norm: Norm, cap: float, shape: Sequence[int]) -> Promise:
    """The promise that a parameter's norm is at most a cap, as bounds on the singular values of the norm's parts.

    Example:
        >>> import wellnormed as wn
        >>> promise = promise_of("weight", wn.Spectral(), 2.0, (8, 2))  # a matrix of norm 1 has sqrt(8 / 2) times that
        >>> print(promise)
        no singular value of weight beyond 4
    """
    parts = []
    for positions, unit in norm.blocks(torch.arange(math.prod(shape)).reshape(tuple(shape))):
        tables = tables_of(positions)
        assert tables is not None  # parts are cut along axes
        steps = tuple(tuple(each) if isinstance(each, list) else each for each in tables[1])
        size = math.nextafter(unit * cap, math.inf)
        parts.append(Parts(tuple(positions.shape), size, tables[0], steps))
    return Promise(name, tuple(shape), tuple(parts))


def any_entries(name: str, weight: Tensor) -> Promise:
    """The promise that no entry is beyond any that a weight has: 10^36 or more for n columns of 32 bits, at most 2^500.

    With it all rows of n entries lie in the ball around 0 that the largest number of the dtype is the radius of.
    """
    largest = torch.finfo(weight.dtype).max / math.sqrt(4 * weight.shape[-1]) if weight.ndim else 2.0**500
    return promise_of(name, Sign(ndim=weight.ndim), min(largest, 2.0**500), weight.shape)
