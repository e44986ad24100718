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

    Attributes:
        count_hits: Whether the layer counts vectors while it runs. It is off by default, since counting costs a
            reduction and a copy to the host.
        hits, seen: The number of vectors outside the ball, and of all vectors, since counting began. The function
            `count_hits` begins it for all projections of a model.

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
        self.count_hits, self.hits, self.seen = False, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        relative = x.square().mean(-1, keepdim=True) * self.radius**-2
        if self.count_hits:
            self.hits += int((relative > 1).sum())
            self.seen += relative.numel()
        # clamped before the root, so that the factor inside the ball is exactly 1, and the gradient at 0 is finite
        return x * relative.clamp(min=1).rsqrt()

    @property
    def hit_rate(self) -> float:
        """The share of vectors that were outside the ball since counting began; 0 if there were no vectors."""
        return self.hits / self.seen if self.seen else 0.0

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


def hit_rates(model: nn.Module) -> dict[str, float]:
    """Return the hit rates of all ball projections of a model, by the names of these layers.

    Example:
        >>> import torch
        >>> model = nn.Sequential(BallProjection(1.0))
        >>> count_hits(model)
        >>> _ = model(torch.tensor([[3.0, 4.0], [0.1, 0.1]]))
        >>> hit_rates(model)
        {'0': 0.5}
    """
    return {name: m.hit_rate for name, m in model.named_modules() if isinstance(m, BallProjection)}


def count_hits(model: nn.Module) -> None:
    """Begin counting from zero in all ball projections of a model; see `hit_rates` for an example."""
    for module in model.modules():
        if isinstance(module, BallProjection):
            module.count_hits, module.hits, module.seen = True, 0, 0
