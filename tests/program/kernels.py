"""An operation whose kernel is for float32 alone, so that a model with it cannot be computed in float64."""

from typing import Any

import torch
from torch import Tensor

from wellnormed.certificates import inner_axes, operation


@torch.library.custom_op("test_program::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """Half of a tensor of float32."""
    if x.dtype != torch.float32:
        raise NotImplementedError("float32 alone")
    return x / 2


half.register_fake(torch.empty_like)


@operation("test_program.half.default")
def _bound_half(ledger: Any, x: Any) -> Any:
    return ledger.derive("contraction", [(x, inner_axes(x))], shape=x.shape)
