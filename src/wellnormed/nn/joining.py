"""Joins two inputs, such as a residual stream and the result of a block, so that squared constants are averaged."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_numbers, require_sizes
from wellnormed._ranges import SHARE
from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.nn.starting import Start
from wellnormed.norms import Norm, Spectral


class OrthogonalJoin(nn.Module):
    """Computes `W [sqrt(1 - share) x, sqrt(share) y]`, where the learned matrix W has orthonormal rows.

    The brackets concatenate two vectors. If x and y have the Lipschitz constants `L_x` and `L_y` as functions of
    some input, the constant of the result is at most L with `L^2 = |W|_2^2 ((1 - share) L_x^2 + share L_y^2)`, where
    `|W|_2` is the largest singular value. A convex residual connection averages the constants themselves. For example,
    `L_x = 1`, `L_y = 1.6` and `share=0.1` give the bound 1.08, and x is multiplied by 0.95. A constraint must keep the
    rows of W orthonormal; `constraints_of` says which.

    Args:
        width: The number of entries of a vector of x, of y and of the result.
        share: The weight of the second input in the average of squares, in [0, 1].

    Shape: x and y, each `(*, width)` -> `(*, width)`.

    Raises:
        ValueError: `width` is not a positive integer, `share` is not a number in [0, 1], or x and y differ in shape.

    Example:
        >>> OrthogonalJoin(2, 0.19)(torch.ones(2), torch.zeros(2)).detach()
        tensor([0.9000, 0.9000])
    """

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        require_sizes(self, width=width)
        require_numbers("OrthogonalJoin: ", {"share": share}, SHARE, "0 leaves the second input out")
        self.share = share
        self.weight = nn.Parameter(torch.eye(width, 2 * width))

    def starts(self) -> Iterator[Start]:
        """The weight with its start, the matrix `[I, 0]` with an identity matrix I, which passes on x alone."""
        yield self.weight, lambda weight, _: nn.init.eye_(weight)

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of the weight: its largest singular value."""
        return {"weight": Spectral(units="l2")}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The constraint that keeps the rows of the weight orthonormal."""
        return {"weight": Orthogonal(1.0)}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:  # the bound is for inputs of equal width
            raise ValueError(f"shapes {tuple(x.shape)} and {tuple(y.shape)} must be the same; map one input first")
        return F.linear(torch.cat((math.sqrt(1 - self.share) * x, math.sqrt(self.share) * y), -1), self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, share={self.share}"
