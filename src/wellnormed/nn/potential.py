"""Convex-potential layers: residual blocks that are 1-Lipschitz at any depth if their weights are constrained."""

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
    """Computes `x - 2 W^T relu(W x + b)`, a gradient step on a convex potential (Meunier et al., 2022).

    The Jacobian is `I - 2 W^T D W`, where D is a diagonal matrix with entries in [0, 1]. It is symmetric and has its
    eigenvalues in `[1 - 2 |W|_2^2, 1]`, where `|W|_2` is the largest singular value of W. So the Lipschitz constant in
    the Euclidean norm is at most `max(1, 2 |W|_2^2 - 1)`, which is 1 for `|W|_2 <= 1`, and any number of such layers
    has the bound 1. A constraint must keep `|W|_2` at 1; `constraints_of` says which.

    Args:
        width: The number of entries of a vector.
        hidden: The number of rows of W.
        generator: The source of the random start; torch's default generator if None.

    Shape: `(*, width)` -> `(*, width)`.

    Raises:
        ValueError: A size is not a positive integer.

    Example:
        >>> layer = ConvexPotential(4, 16, torch.Generator().manual_seed(0))
        >>> layer(torch.zeros(2, 4)).detach().abs().max()  # no biases start above zero
        tensor(0.)
    """

    def __init__(self, width: int, hidden: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        require_sizes(self, width=width, hidden=hidden)
        self.weight = nn.Parameter(torch.empty(hidden, width))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the start that `starts` describes, with the numbers of a generator."""
        start_(self.starts(), generator)

    def starts(self) -> Iterator[Start]:
        """The parameters with the functions that draw their starts, in order.

        The weight starts orthogonal. The biases start at `-|N(0, 1/4)|` (a variance of 1/4), so that few units of the
        ReLU are active.
        """
        yield self.weight, self.parameter_norms()["weight"].initialize_
        yield self.bias, drawn(lambda bias, own: bias.normal_(0.0, 0.5, generator=own).abs_().neg_())

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of the weight: its largest singular value. The layer keeps the width, so no ratio enters."""
        return {"weight": Spectral(units="l2")}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The constraint that keeps all singular values of W near 1, and none above it."""
        return {"weight": Orthogonal(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return x - 2.0 * (F.relu(F.linear(x, self.weight, self.bias)) @ self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, hidden={self.weight.shape[0]}"


class ConvexPotential2d(nn.Module):
    """Computes `x - 2 A^T relu(A x + b)` for a convolution A: the layer `ConvexPotential` for images.

    A pads the image with zeros so that it keeps its size, and A^T is the transposed convolution. In the Euclidean norm
    of whole images, the Lipschitz constant is at most `max(1, 2 |A|^2 - 1)`, where `|A|` is the operator norm of A. A
    constraint must bound the matrices of the kernel so that `|A| <= 1` on images of any size; `constraints_of` says
    which.

    Args:
        channels: The number C of channels of the image.
        hidden: The number of channels of `A x`.
        kernel_size: The height and width of the kernel in pixels. It must be odd, so that a window has a centre.
        generator: The source of the random start; torch's default generator if None.

    Shape: `(B, C, height, width)` -> `(B, C, height, width)`.

    Raises:
        ValueError: A size is not a positive integer, or `kernel_size` is even.

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
        """Draw a kernel at its cap, and biases `-|N(0, 1/4)|`, so that few units of the ReLU are active."""
        self.parameter_norms()["weight"].initialize_(self.weight, generator).mul_(self._cap())
        self.bias.normal_(0.0, 0.5, generator=generator).abs_().neg_()

    def _cap(self) -> float:
        """The cap on `SpectralConv`'s norm of the kernel, which is at least `sqrt(channels / hidden) |A|`."""
        hidden, channels = self.weight.shape[:2]
        return math.sqrt(channels / hidden)

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of the kernel: a bound on the convolution's operator norm by the matrices of the kernel."""
        return {"weight": SpectralConv()}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The constraint that keeps the operator norm `|A|` at most 1 for images of any size."""
        return {"weight": HardCap(self._cap())}

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.conv2d(x, self.weight, self.bias, padding=self.padding))
        return x - 2.0 * F.conv_transpose2d(hidden, self.weight, padding=self.padding)

    def extra_repr(self) -> str:
        hidden, channels, size, _ = self.weight.shape
        return f"{channels}, hidden={hidden}, kernel_size={size}"
