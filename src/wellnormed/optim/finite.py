"""Gradients that no step can use are refused before anything has moved."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wellnormed.parallel import Placement
from wellnormed.parallel.layout import local


class NonFiniteGradientError(ValueError):
    """A gradient holds NaN or infinity; nothing was changed."""


def refuse_not_finite(gradients: Mapping[str, Tensor], among: list[str], placement: Placement, step: int) -> None:
    """Refuse, in every process and by name, gradients with NaN or infinity: one look at each device for all of them.

    `among` are the names of all parameters, the same in every process.
    """
    sizes = placement.agree(_sizes(gradients), among)
    if bad := [name for name, size in sizes.items() if not size < math.inf]:
        others = f" and {len(bad) - 5} others" if len(bad) > 5 else ""
        raise NonFiniteGradientError(
            f"the gradient of {', '.join(bad[:5])}{others} holds NaN or infinity at step {step}; nothing was changed. "
            "Lower the learning rate, or find the operation with torch.autograd.set_detect_anomaly(True)"
        )


def _sizes(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """A number for every gradient, not finite where an entry is not."""
    parts = {name: part for name, gradient in gradients.items() if (part := local(gradient)).numel()}
    sizes = dict.fromkeys(gradients, 0.0)
    for device in {part.device for part in parts.values()}:
        here = [name for name, part in parts.items() if part.device == device]
        norms = torch._foreach_norm([parts[name] for name in here])
        for name, length in zip(here, torch.stack([x.double() for x in norms]).tolist(), strict=True):  # one transfer
            # squares above 1e19 leave the range of float32; largest entries do not, but take 30 times as long on a CPU
            sizes[name] = (
                length if length < math.inf else float(parts[name].double().abs().amax().nan_to_num(math.inf, math.inf))
            )
    return sizes
