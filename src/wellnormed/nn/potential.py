"""The convex-potential layer: a residual block that is 1-Lipschitz by its form, so that depth costs nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_sizes
from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.norms import Norm, Spectral


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

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """An orthogonal weight, and biases `-|N(0, 1/4)|`, so that few units are active at the start."""
        self.parameter_norms()["weight"].initialize_(self.weight, generator)
        self.bias.normal_(0.0, 0.5, generator=generator).abs_().neg_()

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest singular value: W is used twice, so no ratio of widths enters."""
        return {"weight": Spectral(units="l2")}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """W is kept orthogonal."""
        return {"weight": Orthogonal(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return x - 2.0 * F.relu(F.linear(x, self.weight, self.bias)) @ self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, hidden={self.weight.shape[0]}"
