"""The convex-potential layer: a residual block that is 1-Lipschitz at any depth if its weight is constrained."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_sizes
from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.nn.starting import Start, drawn, start_
from wellnormed.norms import Norm, Spectral


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
