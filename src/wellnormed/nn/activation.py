"""Activations that are 1-Lipschitz: GELU divided by an upper bound on its largest slope, and MaxMin.

LT is "Training Transformers with Enforced Lipschitz Bounds" (Newhouse et al., 2025).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import POSITIVE

GELU_MAX_SLOPE = 1.1289041452
"""The largest slope of exact GELU, `Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.12890414515...`, rounded up.

`Phi` and `phi` are the distribution function and the density of the standard normal distribution. The published value
1.1289 (LT section 4.2) is rounded down, so `gelu(x) / 1.1289` is not 1-Lipschitz.
"""


class ScaledGELU(nn.Module):
    """Computes `y = gelu(sharpness x) / (sharpness GELU_MAX_SLOPE)` for every entry x.

    The function is 1-Lipschitz, and `|y| <= |x| / GELU_MAX_SLOPE`.

    Args:
        sharpness: The factor on the input. The value 1 gives LT's activation (section 4.2); as the factor grows, the
            function approaches `relu(x) / GELU_MAX_SLOPE`. GELU is nearly linear close to 0, so small activations need
            a larger factor to be transformed nonlinearly. The Lipschitz bound does not depend on the factor.

    Shape: any shape -> the same shape.

    Raises:
        ValueError: `sharpness` is not positive and finite.

    Example:
        >>> import torch
        >>> ScaledGELU()(torch.tensor([0.0, 10.0]))
        tensor([0.0000, 8.8581])
    """

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        require_numbers("ScaledGELU: ", {"sharpness": sharpness}, POSITIVE)
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * self.sharpness) * (1.0 / (self.sharpness * GELU_MAX_SLOPE))

    def extra_repr(self) -> str:
        return f"sharpness={self.sharpness}"


class MaxMin(nn.Module):
    """Computes `(max(a, b), min(a, b))` of the two halves a and b of the features.

    This is GroupSort of pairs ("Sorting out Lipschitz function approximation", Anil et al., 2019). It orders the two
    entries of each pair, so its Jacobian is a permutation matrix: it is 1-Lipschitz, as `certify` proves, and keeps the
    length of every gradient, also where both entries are equal. A ReLU sets about half of a gradient to 0. So networks
    that must have a small Lipschitz constant, such as critics, distances and certified classifiers, reach more with
    MaxMin than with ReLU.

    Args:
        dim: The axis of the features: -1 for vectors and tokens, 1 for images `(batch, channels, height, width)`.

    Shape: any shape with an even number of entries along `dim` -> the same shape.

    Raises:
        ValueError: `dim` is no integer, or the input has an odd number of features.

    Example:
        >>> import torch
        >>> MaxMin()(torch.tensor([1.0, 2.0, 3.0, -4.0]))
        tensor([ 3.,  2.,  1., -4.])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        require_numbers("MaxMin: ", {"dim": dim}, whole=True)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if x.size(self.dim) % 2:
            raise ValueError(
                f"MaxMin: {x.size(self.dim)} features along dim={self.dim} make no pairs; use an even number"
            )
        a, b = x.chunk(2, self.dim)
        first = a >= b  # not `torch.maximum`, which halves the gradient where entries are equal
        return torch.cat((torch.where(first, a, b), torch.where(first, b, a)), self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
