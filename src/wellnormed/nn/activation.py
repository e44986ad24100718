"""GELU, scaled so that its slope really is at most 1."""

import torch.nn.functional as F
from torch import Tensor, nn

GELU_MAX_SLOPE = 1.1289041452
"""Largest slope of exact GELU, `Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.12890414515...`, rounded up.

The published 1.1289 (LT 4.2) is rounded down, so GELU/1.1289 is not 1-Lipschitz.
"""


class ScaledGELU(nn.Module):
    """`gelu(sharpness x) / (sharpness GELU_MAX_SLOPE)`: 1-Lipschitz, and `|y| <= |x| / GELU_MAX_SLOPE`.

    Args:
        sharpness: The factor on the input; 1 is LT's activation, infinity would be ReLU / 1.1289. Small activations
            need a sharper bend to be bent at all; the Lipschitz bound does not depend on it.

    Shape: any; the same comes out.

    Example:
        >>> import torch
        >>> ScaledGELU()(torch.tensor([0.0, 10.0]))
        tensor([0.0000, 8.8581])
    """

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        if not 0 < sharpness < float("inf"):
            raise ValueError(f"sharpness={sharpness} must be positive and finite")
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * self.sharpness) * (1.0 / (self.sharpness * GELU_MAX_SLOPE))

    def extra_repr(self) -> str:
        return f"sharpness={self.sharpness}"
