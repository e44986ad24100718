"""The l2 -> l2 operator norm of a convolution on images of a given size: measured, and proved from above.

It has no oracle in closed form: updates belong to `SpectralConv`, which bounds it. The proof is that of the
certificates' kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.norms.base import Norm, normal_like
from wellnormed.proof.matrices import convolution_norm

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_LANCZOS_STEPS = 96  # an operator of no more dimensions is measured to rounding


@dataclass(frozen=True, repr=False)
class ConvOperator(Norm):
    """Largest l2 gain of a convolution with kernel `(d_out, d_in / groups, *k)` on images `(d_in, *input_size)`.

    `norm` is a Lanczos estimate from below; `upper_bound` is a proof, which solves one eigenvalue problem for every
    other pixel and every group. A transposed convolution is the adjoint of a convolution on its outputs, with the same
    norm: `of` does that.

    Args:
        input_size: Pixels of the image along each of 1 to 3 dimensions.
        stride: One number, or one per dimension; as are the next two.
        padding: Pixels added on each side, or "same".
        dilation: Distance of the kernel's taps.
        groups: Groups of channels.
        padding_mode: "zeros" or "circular".

    Example:
        >>> norm = ConvOperator((8, 8), padding=1)
        >>> blur = torch.ones(1, 1, 3, 3) / 9
        >>> bool(0.9 < norm.norm(blur) <= norm.upper_bound(blur) <= 1 + 1e-8)
        True
    """

    has_oracle: ClassVar[bool] = False

    input_size: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] | Literal["same"] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    padding_mode: Literal["zeros", "circular"] = "zeros"

    def __post_init__(self) -> None:
        if len(self.input_size) not in (1, 2, 3) or min(self.input_size) < 1:
            raise ValueError(f"ConvOperator: input_size={self.input_size} must be 1 to 3 positive numbers of pixels")
        if self.padding_mode not in ("zeros", "circular"):
            must = "must be 'zeros' or 'circular'; other paddings have no bound here"
            raise ValueError(f"ConvOperator: padding_mode={self.padding_mode!r} {must}")
        least = {"stride": 1, "dilation": 1, "groups": 1} | ({} if self.padding == "same" else {"padding": 0})
        for name, low in least.items():
            values = self._each(getattr(self, name))
            if len(values) != len(self.input_size) or min(values) < low:
                raise ValueError(
                    f"ConvOperator: {name}={getattr(self, name)} must be {low} or more: one number, or one for each of "
                    f"the {len(self.input_size)} dimensions of input_size"
                )

    @classmethod
    def of(cls, layer: nn.Module, input_size: tuple[int, ...]) -> Self:
        """The norm of an `nn.Conv*d` or `nn.ConvTranspose*d` layer on inputs of this size.

        Example:
            >>> ConvOperator.of(nn.ConvTranspose1d(4, 2, 3, stride=2), (8,))
            ConvOperator(input_size=(17,), stride=(2,), padding=(0,), dilation=(1,))
        """
        if not isinstance(layer, nn.modules.conv._ConvNd):
            raise ValueError(f"ConvOperator.of: {type(layer).__name__} is no convolution of torch.nn; give its weight")
        if layer.transposed:
            axes = (input_size, layer.stride, layer.padding, layer.dilation, layer.kernel_size, layer.output_padding)
            input_size = tuple(
                (n - 1) * s - 2 * int(p) + d * (k - 1) + extra + 1 for n, s, p, d, k, extra in zip(*axes, strict=True)
            )
        padding = 0 if layer.padding == "valid" else layer.padding
        settings = (layer.stride, padding, layer.dilation, layer.groups, layer.padding_mode)
        return cls(input_size, *settings)  # pyrefly: ignore

    @property
    def ndim(self) -> int:
        return 2 + len(self.input_size)

    def norm(self, weight: Tensor) -> Tensor:
        below = 1 - torch.finfo(weight.dtype).eps  # rounding to the dtype must not lift it above the bound
        return (self._each_of(weight, self._lanczos) * below).to(weight)

    @torch.no_grad()
    def upper_bound(self, weight: Tensor) -> Tensor:
        dilation = self._each(self.dilation)

        def bound(w: Tensor) -> float:
            size, stride = zip(*self._torus(w.shape), strict=True)
            return convolution_norm(w.cpu().numpy(), size, stride, dilation, self.groups)

        return self._each_of(weight, bound)

    def _each_of(self, weight: Tensor, measure: Callable[[Tensor], float]) -> Tensor:
        """A number for each weight `(*batch)`, in float64."""
        batch = weight.ndim - self.ndim
        self.check_shape(weight.shape[batch:])
        wide = weight.detach().double()
        if not bool(wide.isfinite().all()):
            raise ValueError("weight holds NaN or infinity, which has no norm; find it with torch.isfinite")
        values = [measure(w) for w in wide.reshape(-1, *weight.shape[batch:])]
        return torch.tensor(values, dtype=torch.float64, device="cpu").reshape(weight.shape[:batch])

    def dualize(self, gradient: Tensor) -> NoReturn:
        raise ValueError(
            f"{self!r} has no dual_norm, and so it has no dualize, since no closed form is known; measure and bound "
            "with it, and optimize with SpectralConv, which bounds it"
        )

    dual_norm = dualize

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with a Gaussian kernel divided by its measured norm."""
        kernel = normal_like(weight, generator, torch.float64)
        return weight.copy_(kernel / self.norm(kernel))

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        super().check_shape(shape, name)
        if shape[0] % self.groups:
            raise ValueError(f"{name} has {shape[0]} outputs, which groups={self.groups} does not divide; correct it")
        for n, (before, after), reach in zip(self.input_size, self._pads(shape), self._reach(shape), strict=True):
            if n + before + after <= reach:
                raise ValueError(f"{name} reaches over {reach + 1} pixels, more than {self!r} has; enlarge the image")
            if self.padding_mode == "circular" and (before + after > reach or max(before, after) > n):
                raise ValueError(
                    f"{name}: circular padding of {before} and {after} pixels repeats outputs of a kernel that reaches "
                    f"over {reach + 1}, which has no bound here; use padding='same'"
                )

    def _each(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        return (value,) * len(self.input_size) if isinstance(value, int) else value

    def _reach(self, shape: torch.Size | tuple[int, ...]) -> list[int]:
        """The last tap's distance from the first, along each dimension."""
        kernel = shape[len(shape) - len(self.input_size) :]
        return [d * (k - 1) for d, k in zip(self._each(self.dilation), kernel, strict=True)]

    def _pads(self, shape: torch.Size | tuple[int, ...]) -> list[tuple[int, int]]:
        if self.padding == "same":
            return [(reach // 2, reach - reach // 2) for reach in self._reach(shape)]
        return [(p, p) for p in self._each(self.padding)]

    def apply(self, weight: Tensor, image: Tensor) -> Tensor:
        """The operator: `(*images, d_in, *input_size) -> (*images, d_out, *output_size)`."""
        pads = [p for pair in reversed(self._pads(weight.shape)) for p in pair]
        padded = F.pad(image, pads, mode="constant" if self.padding_mode == "zeros" else "circular")
        convolve = _CONVOLUTIONS[len(self.input_size) - 1]
        return convolve(padded, weight, None, self._each(self.stride), 0, self._each(self.dilation), self.groups)

    def _lanczos(self, weight: Tensor) -> float:
        """The largest gain on a Krylov space of `A^T A`, from a fixed random start; never above the truth."""
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if largest == 0:
            return 0.0
        weight = weight / largest
        shape = (1, weight.shape[1] * self.groups, *self.input_size)
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(math.prod(shape), generator=generator, dtype=torch.float64, device="cpu")
        direction, least = direction.to(weight.device), 0.0
        basis: list[Tensor] = []
        images: list[Tensor] = []
        while len(basis) < min(_LANCZOS_STEPS, math.prod(shape)) and float(direction.norm()) > least:
            basis.append(direction / direction.norm())
            image, pull, *_ = torch.func.vjp(lambda x: self.apply(weight, x), basis[-1].reshape(shape))
            images.append(image.flatten())
            known, direction = torch.stack(basis), pull(image)[0].flatten()
            for _ in range(2):  # orthogonalised in full
                direction = direction - known.mT @ (known @ direction)
            least = max(least, 1e-13 * float(image.square().sum()))
        return float(torch.linalg.matrix_norm(torch.stack(images), 2)) * largest

    def _torus(self, shape: torch.Size) -> list[tuple[int, int]]:
        """Pixels of the torus, and the stride that folds its frequencies, along each dimension."""

        def along(n: int, s: int, reach: int) -> tuple[int, int]:
            if self.padding_mode == "circular":
                return n, s if n % s == 0 else 1  # another stride still only drops outputs
            if reach == 0:
                return 1, 1  # no neighbours: every pixel alone, some dropped
            return -(-(n + reach) // s) * s, s

        return list(map(along, self.input_size, self._each(self.stride), self._reach(shape)))
