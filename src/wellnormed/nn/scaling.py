"""Constant factors, convex residual connections and plain residual connections.

Convex residual connections are those of LT (Newhouse et al., 2025, section 4.1, equation 1).
"""

from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import FINITE, SHARE


class Scale(nn.Module):
    """Computes `factor x`, such as the scale of logits or the factor on the output of attention.

    Args:
        factor: A finite number. The Lipschitz constant is its absolute value.

    Shape: any shape -> the same shape.

    Raises:
        ValueError: `factor` is not finite.

    Example:
        >>> import torch
        >>> Scale(0.5)(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        require_numbers("Scale: ", {"factor": factor}, FINITE)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class ConvexResidual(nn.Module):
    """Computes `(1 - strength) x + strength block(x)` (LT equation 1), which is 1-Lipschitz if the block is.

    Args:
        block: A module whose result has the shape of its input.
        strength: The weight of the block, in [0, 1]. LT uses 1 / (number of residual connections).

    Shape: the shape of an input of the block -> the same shape.

    Raises:
        ValueError: `strength` is not in [0, 1].

    Example:
        >>> import torch
        >>> ConvexResidual(Scale(3.0), 0.5)(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, block: nn.Module, strength: float) -> None:
        super().__init__()
        require_numbers("ConvexResidual: ", {"strength": strength}, SHARE)
        self.block = block
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return (1.0 - self.strength) * x + self.strength * self.block(x)

    def extra_repr(self) -> str:
        return f"strength={self.strength}"


class Residual(nn.Module):
    """Computes `x + block(x)`, whose Lipschitz constant is at most 1 plus that of the block.

    So a bound on a stack of such layers grows with every layer.

    Args:
        block: A module whose result has the shape of its input.

    Shape: the shape of an input of the block -> the same shape.

    Example:
        >>> import torch
        >>> Residual(Scale(3.0))(torch.ones(2))
        tensor([4., 4.])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)
