"""The interface of norms of weights.

A norm acts on the trailing `ndim` dimensions of a tensor; leading dimensions are a batch. It knows nothing of
optimizers, which take the update `-lr * norm.dualize(momentum)`.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

_LAYOUT = ("input_axis", "output_axis", "spatial", "ndim", "dim")
"""The settings of norms that say how a weight is stored."""


class Norm(ABC):
    """A norm on a weight's space, with its dual norm and its linear minimization oracle.

    The laws, all tested: `<g, dualize(g)> = dual_norm(g)`; `norm(dualize(g)) <= overshoot`;
    `norm(initialize_(w)) = 1`; `upper_bound(w) >= norm(w)`; `dualize(0) = 0`.
    """

    measures: ClassVar[Literal["singular values", "lengths", "entries"] | None] = None
    """The norm is the largest of these, in units: singular values of slices, lengths of columns, rows or vectors, or
    entries. The oracle makes them equal, and a projection clips them. None for a norm that is not such a maximum."""

    @property
    def ndim(self) -> int:
        """Trailing dimensions that one weight occupies."""
        return 2

    def _settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._settings().items())})"

    @property
    def label(self) -> str:
        """The norm as tables show it: its name and its settings, without axes, which the weight's layout decides.

        Example:
            >>> from wellnormed.norms import ColNorm, Spectral, Split
            >>> ColNorm(input_axis=0, max_inflation=16).label, Split(3, Spectral("jordan-5")).label, Spectral().label
            ('ColNorm(16)', 'Split(3, Spectral(jordan-5))', 'Spectral')
        """
        shown = [
            name if value is True else value.label if isinstance(value, Norm) else str(value)
            for name, value in self._settings().items()
            if name not in _LAYOUT
        ]
        return type(self).__name__ + (f"({', '.join(shown)})" if shown else "")

    @abstractmethod
    def norm(self, weight: Tensor) -> Tensor:
        """The norm of each weight of a batch, shape `(*batch,)`."""

    @abstractmethod
    def dual_norm(self, gradient: Tensor) -> Tensor:
        """The largest `<gradient, w>` over `norm(w) <= 1`, shape `(*batch,)`."""

    @abstractmethod
    def dualize(self, gradient: Tensor) -> Tensor:
        """The `w` of norm 1 (up to `overshoot`) that attains the dual norm; the steepest ascent direction."""

    @abstractmethod
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill one weight with a random point of norm 1, in place."""

    @torch.no_grad()
    def start_(self, weight: Tensor, radius: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Fill one weight, in place, with its start of training: by default a random point of the sphere."""
        return self.initialize_(weight, generator).mul_(radius)

    def upper_bound(self, weight: Tensor) -> Tensor:
        """A proved bound from above on `norm(weight)`, float64, shape `(*batch,)`.

        The default is for sums of squares or of absolute values: it adds a proved bound on the rounding of the sum.
        """
        count = math.prod(weight.shape[weight.ndim - self.ndim :])
        return self.norm(weight.detach().double()) * (1 + 2 * (count + 4) * 2.0**-53)

    def bound_on_device(self, weight: Tensor) -> Tensor:
        """A proved bound on `norm(weight)`, computed on the weight's device; at most 1e-4 larger than `upper_bound`."""
        return self.upper_bound(weight)

    def group_norms(self, weight: Tensor) -> Tensor:
        """A bound on the norm of every group of entries, with the dimensions of the weight; by default one group."""
        bound = self.bound_on_device(weight)
        return bound.reshape(bound.shape + (1,) * self.ndim)

    def within(self, weight: Tensor, bound: float | Tensor) -> Tensor:
        """Whether `norm(weight) <= bound` is proved, `(*batch,)`; if possible without computing the norm.

        The bound is a number, or float64 of the batch shape on the weight's device.
        """
        return self.upper_bound(weight) <= bound

    def blocks(self, weight: Tensor) -> list[tuple[Tensor, float]]:
        """The parts of a weight, in batches `(parts, m, n)`, each with the largest singular value of a part of norm 1.

        The largest singular value of a vector is its Euclidean norm.
        """
        raise NotImplementedError(f"{self!r} is not the largest size of a part of the weight")

    def slices(self, weight: Tensor) -> list[Tensor]:
        """The slices that the norm measures: for every size a batch, `(*batch, m, n)` or `(*batch, slices, m, n)`."""
        raise NotImplementedError(f"{self!r} does not measure singular values")

    def from_slices(self, slices: list[Tensor], weight: Tensor) -> Tensor:
        """Undo `slices`, for a weight of this one's shape."""
        raise NotImplementedError(f"{self!r} does not measure singular values")

    def slice_units(self, weight: Tensor) -> list[float]:
        """For every size of slices, the largest singular value of a slice whose norm is 1."""
        raise NotImplementedError(f"{self!r} does not measure singular values")

    def on_slices(self, weight: Tensor, function: Callable[[Tensor, float], Tensor]) -> Tensor:
        """The weight with each batch of slices replaced by `function(slices, unit)`; see `slice_units`."""
        return self.from_slices(list(map(function, self.slices(weight), self.slice_units(weight))), weight)

    def project(self, weight: Tensor, radius: float) -> Tensor:
        """The weights, projected into the ball of a radius: parts that are larger shrink to the radius, others stay.

        Rounding may leave the result slightly above the radius.
        """
        raise NotImplementedError(f"{self!r} has no projection onto its ball; use SpectralConv, or a Sphere")

    @property
    def overshoot(self) -> float:
        """The largest norm that `dualize` returns; 1 unless an iteration approximates the oracle from above."""
        return 1.0

    def with_settings(self, **settings: str) -> Self:
        """This norm with other settings of every `Spectral` that it is made of; itself if it is made of none."""
        return self

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        """Refuse, with a `ValueError`, a weight that this norm is not defined on."""
        if len(shape) != self.ndim:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but {self!r} is a norm on {self.ndim}-dimensional weights; "
                "choose another norm for it in the overrides of `assign_norms`"
            )


def rms(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Root mean square along some dimensions, kept, without under- or overflow for entries from 1e-30 to 1e30."""
    largest = x.abs().amax(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / largest).square().mean(dim, keepdim=True).sqrt() * largest


def widened(x: Tensor) -> Tensor:
    """The tensor, in float32 if it has 16 bits, because squares of small gradients underflow in float16."""
    return x if x.dtype.itemsize > 2 else x.float()


def entries(x: Tensor, ndim: int) -> Tensor:
    """The trailing `ndim` dimensions as one; a number (`ndim` 0) as a vector of one entry."""
    return x.flatten(x.ndim - ndim) if ndim else x.unsqueeze(-1)


def normal_like(weight: Tensor, generator: torch.Generator | None, dtype: torch.dtype | None = None) -> Tensor:
    """Gaussian entries in a weight's shape, drawn on the generator's device, which may not be the weight's."""
    device = weight.device if generator is None else generator.device
    return torch.empty(weight.shape, dtype=dtype or weight.dtype, device=device).normal_(generator=generator)
