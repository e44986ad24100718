"""Joining a stream and what a block made of it, with their squares in a fixed proportion."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_numbers, require_sizes
from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.nn.starting import Start
from wellnormed.norms import Norm, Spectral


class OrthogonalJoin(nn.Module):
    """`W [sqrt(1 - share) x, sqrt(share) y]` with a `W` of orthonormal rows, which starts as `[1, 0]`.

    Where a convex residual adds constants, this adds their squares: `L^2 = |W|_2^2 ((1 - share) L_x^2 + share L_y^2)`.
    A branch of constant 1.6 that gets a tenth of the squares costs a factor of 1.08, and leaves the stream 0.95 of its
    size.

    Args:
        width: D, entries of a vector of each input and of the output.
        share: Part of the squares that the second input gets, in [0, 1].

    Shape: two of `(*, width)` -> the same.

    Example:
        >>> OrthogonalJoin(2, 0.19)(torch.ones(2), torch.zeros(2)).detach()
        tensor([0.9000, 0.9000])
    """

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        require_sizes(self, width=width)
        require_numbers("OrthogonalJoin: ", {"share": share})
        if not 0 <= share <= 1:
            raise ValueError(f"OrthogonalJoin: share={share} must lie in [0, 1]; 0 leaves the second input out")
        self.share = share
        self.weight = nn.Parameter(torch.eye(width, 2 * width))

    def starts(self) -> Iterator[Start]:
        """`[1, 0]`."""
        yield self.weight, lambda weight, _: nn.init.eye_(weight)

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest singular value."""
        return {"weight": Spectral(units="l2")}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The rows are kept orthonormal."""
        return {"weight": Orthogonal(1.0)}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:  # the bound takes both to be equally wide
            raise ValueError(f"shapes {tuple(x.shape)} and {tuple(y.shape)} must be the same; map one input first")
        return F.linear(torch.cat((math.sqrt(1 - self.share) * x, math.sqrt(self.share) * y), -1), self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, share={self.share}"
