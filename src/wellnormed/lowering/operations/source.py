"""The certified variable, from which a proof begins: the input, or the vectors that an embedding looks up."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import torch

from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.program.domain import DTYPES, Box, Domain, constants_of, default_axes
from wellnormed.proof.decimals import float_up, root_down, rounding_up
from wellnormed.proof.value import Value


def source(
    ledger: Ledger, shape: Sequence[int], name: str, dtype: torch.dtype = torch.float32, axes: Sequence[int] = ()
) -> Value:
    """Add the row of an input, a variable whose values are the domain.

    Args:
        ledger: The ledger, which knows the domain.
        shape: The shape of the input.
        name: The name of the row.
        dtype: The dtype of the input, a float of 16, 32 or 64 bits.
        axes: The axes along which its groups extend; those of `default_axes` by default.

    Raises:
        UncertifiableError: The input is a single number, or of another dtype.
    """
    if not shape:
        raise ledger.refuse("the input is a single number; pass a batch of vectors")
    constants = _constants(ledger, ledger.radius, dtype)
    return ledger.derive("input", [], shape=shape, axes=axes or default_axes(shape), constants=constants, name=name)


def _constants(ledger: Ledger, domain: Domain, dtype: torch.dtype) -> dict[str, Any]:
    if dtype not in DTYPES.values():
        raise ledger.refuse(f"the input is of {dtype}; pass one of {', '.join(DTYPES)}")
    return constants_of(domain, dtype)


def embedding(ledger: Ledger, weight: Stored, tokens: Sequence[int]) -> Value:
    """Add the row of the vectors that an embedding looks up, variables whose values are the domain.

    Their domain is that of the ledger, or the least of its kind that contains all rows of the table.

    Args:
        ledger: The ledger.
        weight: The table, `(vocabulary, width)`.
        tokens: The shape of the integers; the result has one more axis, of `width` entries.

    Raises:
        UncertifiableError: The table is not a matrix.
    """
    if weight.tensor.ndim != 2:
        raise ledger.refuse(f"the table has {weight.tensor.ndim} axes; only rows of a matrix may be looked up")
    domain, width = ledger.radius, weight.tensor.shape[-1]
    inside = ledger.prove("max_abs" if isinstance(domain, Box) or domain == math.inf else "row_norm", weight)
    (size,) = inside.values
    if isinstance(domain, Box):
        domain = Box(min(domain.low, -size), max(domain.high, size))
    else:
        with rounding_up():
            domain = max(domain, float_up(Decimal(size) / root_down(width)))
    constants, claims = _constants(ledger, domain, weight.tensor.dtype), [inside, ledger.prove("diameter", weight)]
    return ledger.derive("input", [], shape=(*tokens, width), axes=(-1,), constants=constants, claims=claims)
