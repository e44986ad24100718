"""The convex-potential layer: a residual block that is 1-Lipschitz by its form, so that depth costs nothing."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_sizes
from wellnormed.constraints import Constraint, HardCap, Orthogonal
from wellnormed.nn.starting import Start, drawn, start_
from wellnormed.norms import Norm, Spectral, SpectralConv


class ConvexPotential(nn.Module):
    """`x - 2 W^T relu(W x + b)` with `|W|_2 <= 1`: a gradient step on a convex potential (Meunier et al., 2022).

    Its Jacobian `I - 2 W^T D W`, with a diagonal `D` in [0, 1], is symmetric with eigenvalues in `[1 - 2 |W|_2^2, 1]`,
    so the Lipschitz constant is `max(1, 2 |W|_2^2 - 1)`: exactly 1 for any number of such layers. A constraint must
    keep `|W|_2` at 1; `constraints_of` says which.

    Args:
        width: D, entries of a vector.
        hidden: Rows of W.
        generator: Source of the initial weight; torch's default if None.

    Shape: `(*, width)` -> the same.

    Example:
        >>> layer = ConvexPotential(4, 16, torch.Generator().manual_seed(0))
        >>> layer(torch.zeros(2, 4)).detach().abs().max()  # the biases start below zero
        tensor(0.)
    """

    def __init__(self, width: int, hidden: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        require_sizes(self, width=width, hidden=hidden)
        self.weight = nn.Parameter(torch.empty(hidden, width))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the start that `starts` describes."""
        start_(self.starts(), generator)

    def starts(self) -> Iterator[Start]:
        """An orthogonal weight, and biases `-|N(0, 1/4)|`, so that few units are active at the start."""
        yield self.weight, self.parameter_norms()["weight"].initialize_
        yield self.bias, drawn(lambda bias, own: bias.normal_(0.0, 0.5, generator=own).abs_().neg_())

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest singular value: W is used twice, so no ratio of widths enters."""
        return {"weight": Spectral(units="l2")}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """W is kept orthogonal."""
        return {"weight": Orthogonal(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return x - 2.0 * (F.relu(F.linear(x, self.weight, self.bias)) @ self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, hidden={self.weight.shape[0]}"


class ConvexPotential2d(nn.Module):
    """`x - 2 A^T relu(A x + b)` for a convolution A of norm at most 1: the same for images.

    A pads with zeros, so that an image keeps its size, and A^T is its transposed convolution. The constant is
    `max(1, 2 |A|^2 - 1)` in the Euclidean norm of whole images. The constraint keeps the kernel's matrices so small
    that `|A| <= 1` on images of any size; `constraints_of` says which.

    Args:
        channels: C, of the image.
        hidden: Channels of A x.
        kernel_size: Odd, so that the window has a centre.
        generator: Source of the initial kernel; torch's default if None.

    Shape: `(B, C, height, width)` -> the same.

    Example:
        >>> layer = ConvexPotential2d(4, 16, 3, torch.Generator().manual_seed(0))
        >>> layer(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(
        self, channels: int, hidden: int, kernel_size: int = 3, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        require_sizes(self, channels=channels, hidden=hidden, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"ConvexPotential2d: kernel_size={kernel_size} must be odd, such as 3")
        self.padding = kernel_size // 2
        self.weight = nn.Parameter(torch.empty(hidden, channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A kernel at its cap, and biases `-|N(0, 1/4)|`, so that few units are active at the start."""
        self.parameter_norms()["weight"].initialize_(self.weight, generator).mul_(self._cap())
        self.bias.normal_(0.0, 0.5, generator=generator).abs_().neg_()

    def _cap(self) -> float:
        """The cap in units of the RMS norm, which is at least `sqrt(d_in / d_out)` times the Euclidean norm."""
        hidden, channels = self.weight.shape[:2]
        return math.sqrt(channels / hidden)

    def parameter_norms(self) -> dict[str, Norm]:
        """A bound on the convolution's norm by its kernel's matrices."""
        return {"weight": SpectralConv()}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The convolution has a Euclidean norm of at most 1, whatever the size of the image."""
        return {"weight": HardCap(self._cap())}

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.conv2d(x, self.weight, self.bias, padding=self.padding))
        return x - 2.0 * F.conv_transpose2d(hidden, self.weight, padding=self.padding)

    def extra_repr(self) -> str:
        hidden, channels, size, _ = self.weight.shape
        return f"{channels}, hidden={hidden}, kernel_size={size}"
