"""Constant factors, the convex residual (LT section 4.1, equation 1) and the plain one."""

from torch import Tensor, nn


class Scale(nn.Module):
    """`factor * x`: a logit scale, or the output factor of attention."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not abs(factor) < float("inf"):
            raise ValueError(f"factor={factor} must be finite")
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class ConvexResidual(nn.Module):
    """`(1 - strength) x + strength block(x)`: 1-Lipschitz if the block is.

    Args:
        block: What stands on the branch.
        strength: Share of the branch, in [0, 1]; LT uses 1 / (number of residual connections).

    Example:
        >>> import torch
        >>> ConvexResidual(Scale(3.0), 0.5)(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, block: nn.Module, strength: float) -> None:
        super().__init__()
        if not 0 <= strength <= 1:
            raise ValueError(f"strength={strength} must lie in [0, 1] for a convex combination")
        self.block = block
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return (1.0 - self.strength) * x + self.strength * self.block(x)

    def extra_repr(self) -> str:
        return f"strength={self.strength}"


class Residual(nn.Module):
    """`x + block(x)`: its Lipschitz constant is at most 1 plus the block's, so that it grows with every such layer.

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
