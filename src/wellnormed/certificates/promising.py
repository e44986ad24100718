"""The promises of constraints on weights, in the form in which a proof rests on them."""

import math
from collections.abc import Sequence

import torch

from wellnormed.lowering.moves import tables_of
from wellnormed.norms import Norm
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
