"""Argument checks and exact rescaling shared by the matrix functions; nothing numerical is decided here."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellnormed._devices import recording
from wellnormed._inputs import require_numbers

if TYPE_CHECKING:
    from jaxtyping import Float

    Matrices = Float[Tensor, "*batch m n"]
else:
    Matrices = Tensor  # jaxtyping is for type checkers alone

OTHER_METHODS = "other published methods are in the repository's papers/published_matrix.py"
"""The remedy for an unknown method."""


def check_matrix(x: Tensor, name: str) -> None:
    """Refuse anything but a dense real floating-point matrix or a batch of them; `name` is the argument's name."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = f"one of layout {x.layout}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} must be a dense tensor, got {kind}; pass torch.as_tensor(x), or x.to_dense()")
    if x.ndim < 2:
        raise ValueError(
            f"{name} must have the shape (*batch, m, n), got shape {tuple(x.shape)}; reshape it, or give vectors and "
            f"scalars another norm"
        )
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(
            f"{name} must be real floating point of 16 bits or more, got dtype {x.dtype}; pass {name}.float()"
        )


_known_to_hold = ContextVar("_known_to_hold", default=False)


@contextmanager
def known_to_hold() -> Iterator[None]:
    """In the block `fails` returns False on an accelerator without reading the condition; the caller vouches for it."""
    if torch.compiler.is_compiling():  # `fails` reads nothing there
        yield
        return
    token = _known_to_hold.set(True)
    try:
        yield
    finally:
        _known_to_hold.reset(token)


def fails(holds: Tensor) -> bool:
    """Whether a condition fails anywhere.

    The answer is False where the values are not read: under `torch.compile`, while a CUDA graph is recorded, and on an
    accelerator within `known_to_hold`.
    """
    return not unread(holds) and not bool(holds.all())


def unread(x: Tensor) -> bool:
    """Whether `fails` would not read a tensor, so that the tensor need not be computed."""
    if torch.compiler.is_compiling():  # first, since the compiler cannot trace what follows
        return True
    return (x.device.type != "cpu" and _known_to_hold.get()) or recording(x.device)


def check_finite(largest: Tensor, name: str) -> None:
    """Refuse NaN and infinity, given all entries or the largest absolute ones."""
    if not unread(largest) and fails(torch.isfinite(largest)):
        raise ValueError(
            f"{name} holds NaN or infinity, which this function would hide or spread; "
            f"find where it comes from (torch.isfinite), or skip this step"
        )


def as_bound(value: float | Tensor, x: Tensor, name: str) -> Tensor:
    """A bound in spectral units as a float64 tensor that broadcasts against the batch of `x`. Reads no value."""
    if isinstance(value, Tensor) and not value.is_complex():
        bound = value.detach().to(x.device, torch.float64)
    else:  # filled on the device, which waits for no transfer
        require_numbers("", {name: value})
        bound = torch.full((), float(value), dtype=torch.float64, device=x.device)
    batch = x.shape[:-2]
    sides = zip(reversed(bound.shape), reversed(batch), strict=False)
    if bound.ndim > len(batch) or any(side not in (1, whole) for side, whole in sides):
        raise ValueError(
            f"{name} has shape {tuple(bound.shape)}, which does not broadcast to the batch shape {tuple(batch)}; "
            f"give one bound per matrix or a number"
        )
    return bound


def to_check(value: float | Tensor, bound: Tensor) -> Tensor:
    """The bound as a tensor to read: a number becomes a tensor on the CPU, so that reading it waits for no device."""
    return bound if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are accurate to some float32 roundings: float64 for float64 and thin matrices.

    With fewer than 16 columns, products on a CPU sum long columns term by term, which loses up to 1e-3 at a million
    rows; float64 costs nothing there.
    """
    thin = min(x.shape[-2:]) < 16 and x.device.type == "cpu"
    return torch.float64 if x.dtype == torch.float64 or thin else torch.float32


def check_positive(bound: Tensor, name: str) -> None:
    """Refuse a bound of zero or less, or NaN."""
    if fails(bound > 0):
        raise ValueError(f"{name}={shown(bound)} must be positive; to keep a weight at zero, freeze it")


def check_share(part: Tensor, name: str, whole: str) -> None:
    """Refuse a part of a whole that does not lie in [0, 1]; `whole` names the whole in words."""
    if fails((part >= 0) & (part <= 1)):
        raise ValueError(f"{name}={shown(part)} must lie in [0, 1]: it is the part of {whole} that is removed")


def shown(value: Tensor) -> str:
    """A bound in the form that error messages show."""
    return f"{value.item():g}" if value.ndim == 0 else str(value.tolist())


def tall_and_scaled(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nonempty matrices with m >= n, divided by `finite_scale`, in a dtype; and that scale, `(*batch,)`."""
    tall = (w if w.shape[-2] >= w.shape[-1] else w.mT).to(dtype)
    scale = finite_scale(tall, "w")
    return tall / scale, scale[..., 0, 0]


def finite_scale(x: Tensor, name: str) -> Tensor:
    """Per matrix, a power of two `p` with `max |x| / p` in [1/2, 1), or 1 for zero: division by it is exact.

    Shape: nonempty float32 or float64 matrices `(*batch, m, n)` -> `(*batch, 1, 1)` in their dtype.
    """
    if x.device.type == "cpu":  # a tenth of the time of `vector_norm`, and no copy as `abs` would make
        largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    else:  # one kernel instead of four, whose launches would take longer than their work
        largest = torch.linalg.vector_norm(x, math.inf, (-2, -1), keepdim=True)
    check_finite(largest, name)
    limit = 1000 if x.dtype == torch.float64 else 125
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(-limit, limit))
