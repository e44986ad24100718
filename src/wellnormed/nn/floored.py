"""LayerNorm and RMSNorm with a floor under the number that they divide by, which bounds how much they stretch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_flags, require_numbers
from wellnormed._ranges import POSITIVE


class FlooredNorm(nn.LayerNorm):
    """Computes `weight (x - mean) / max(RMS(x - mean), floor) + bias` over the last axes of x.

    It is `1 / floor`-Lipschitz before the weight, where LayerNorm is `1 / sqrt(eps)`-Lipschitz: a projection onto the
    ball of radius `floor`, divided by that radius. Vectors whose RMS is at least the floor are normalized as LayerNorm
    does with an eps of 0; smaller ones are divided by the floor, and keep a smaller RMS than 1.

    Args:
        normalized_shape: The sizes of the last axes, as for `nn.LayerNorm`.
        floor: The least number to divide by.
        centred: Whether the mean is subtracted, as in LayerNorm; False is RMSNorm.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is a bias, beside a weight.

    Shape: `(*, normalized_shape)` -> the same shape.

    Raises:
        ValueError: `floor` is not positive and finite, or a flag is neither True nor False.

    Example:
        >>> FlooredNorm(2, floor=0.5)(torch.tensor([[-2.0, 2.0], [-0.1, 0.1]])).detach()
        tensor([[-1.0000,  1.0000],
                [-0.2000,  0.2000]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        floor: float,
        centred: bool = True,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        require_numbers("FlooredNorm: ", {"floor": floor}, POSITIVE)
        require_flags("FlooredNorm: ", {"centred": centred})
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        # torch's fused encoder layer reads eps and does not call its norm layers, unless the eps of two are different
        super().__init__(sizes, math.nan, elementwise_affine, bias)
        self.floor, self.centred = floor, centred

    @property
    def axes(self) -> tuple[int, ...]:
        """The numbers of the axes that it normalizes, from the end."""
        return tuple(range(-len(self.normalized_shape), 0))

    def forward(self, input: Tensor) -> Tensor:
        if input.is_nested:  # as torch's encoder packs padded sequences where no gradients are recorded
            return torch.nested.as_nested_tensor([self(each) for each in input.unbind()], layout=input.layout)
        y = input.to(torch.promote_types(input.dtype, torch.float32))  # 16 bits would not hold all squares
        y = y - y.mean(self.axes, keepdim=True) if self.centred else y
        scale = y.square().mean(self.axes, keepdim=True) * self.floor**-2
        y = (y * scale.clamp(min=1).rsqrt() * (1 / self.floor)).to(input.dtype)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, floor={self.floor:.4g}, centred={self.centred}"
