"""Projection onto the RMS ball: turns a measured range of activations into a global fact."""

from torch import Tensor, nn


class BallProjection(nn.Module):
    """`x min(1, radius / RMS(x))` over the last dimension: 1-Lipschitz, the identity inside the ball.

    With a radius slightly above the largest RMS met in training it changes nothing there, yet bounds what any input
    can do (the activation bound enters that of attention as its square).

    Args:
        radius: Largest RMS that leaves the layer.

    Attributes:
        count_hits: Count while it runs (off by default: counting costs a reduction and a copy to the host).
        hits, seen: Vectors projected and vectors seen since counting began; see `count_hits`.

    Example:
        >>> import torch
        >>> BallProjection(1.0)(torch.tensor([[3.0, 4.0], [0.1, 0.1]]))
        tensor([[0.8485, 1.1314],
                [0.1000, 0.1000]])
    """

    def __init__(self, radius: float = 1.0) -> None:
        super().__init__()
        if not 0 < radius < float("inf"):
            raise ValueError(f"radius={radius} must be positive and finite; to switch a projection off, leave it out")
        self.radius = radius
        self.count_hits, self.hits, self.seen = False, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        relative = x.square().mean(-1, keepdim=True) * self.radius**-2
        if self.count_hits:
            self.hits += int((relative > 1).sum())
            self.seen += relative.numel()
        # clamp before the root: inside the ball the factor is exactly 1, and the gradient is finite at 0
        return x * relative.clamp(min=1).rsqrt()

    @property
    def hit_rate(self) -> float:
        """Share of vectors outside the ball since counting began; 0 if none was seen."""
        return self.hits / self.seen if self.seen else 0.0

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


def hit_rates(model: nn.Module) -> dict[str, float]:
    """Name of each ball projection of a model -> its hit rate."""
    return {name: m.hit_rate for name, m in model.named_modules() if isinstance(m, BallProjection)}


def count_hits(model: nn.Module, enabled: bool = True) -> None:
    """Switch the counting of hits on (from zero) or off in all ball projections of a model."""
    for module in model.modules():
        if isinstance(module, BallProjection):
            module.count_hits = enabled
            if enabled:
                module.hits = module.seen = 0
