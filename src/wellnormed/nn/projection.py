"""Projection onto the ball of a root mean square (RMS).

It turns a range of activations that was measured in training into one that holds for every input.
"""

from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import POSITIVE


class BallProjection(nn.Module):
    """Computes `x min(1, radius / RMS(x))` for every vector x along the last axis. The layer is 1-Lipschitz.

    Vectors with an RMS of at most `radius` stay as they are. With a radius slightly above the largest RMS in training
    the layer changes nothing there, and it bounds the activations for all other inputs too. This matters most before
    attention, whose Lipschitz bound grows with the square of the bound on activations. A vector with an entry whose
    square overflows, from 256 on in float16 and from 1.8e19 on in float32, becomes zeros.

    Args:
        radius: The largest RMS of a vector of the result.

    Shape: `(*, width)` -> `(*, width)`.

    Raises:
        ValueError: `radius` is not positive and finite.

    Example:
        >>> import torch
        >>> BallProjection(1.0)(torch.tensor([[3.0, 4.0], [0.1, 0.1]]))
        tensor([[0.8485, 1.1314],
                [0.1000, 0.1000]])
    """

    def __init__(self, radius: float = 1.0) -> None:
        super().__init__()
        require_numbers("BallProjection: ", {"radius": radius}, POSITIVE, "to switch a projection off, leave it out")
        self.radius = radius

    def forward(self, x: Tensor) -> Tensor:
        relative = x.square().mean(-1, keepdim=True) * self.radius**-2
        # clamped before the root, so that the factor inside the ball is exactly 1, and the gradient at 0 is finite
        return x * relative.clamp(min=1).rsqrt()

    def extra_repr(self) -> str:
        return f"radius={self.radius}"
