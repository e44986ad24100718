"""Certificates to test the checker with, made from a walk through a model."""

import json
from typing import Any

import numpy as np
import torch
from torch import nn

from wellnormed.certificates import capture
from wellnormed.certificates.certifying import certificate_of, promises_of
from wellnormed.constraints import Constraints
from wellnormed.lowering.networks import Joint
from wellnormed.lowering.walk import walked


def document_of(
    model: nn.Module, example: Any, radius: float = 1.0, within: Constraints | None = None, joint: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a model's certificate, as it is read from JSON, and all tensors that it names."""
    torch.manual_seed(0)
    captured = capture(model.eval(), example, whole_batch=True)
    walk = walked(captured, radius, promises_of(model, within, captured))
    if joint:
        walk = Joint().improved(walk)
        walk.run()
    known = {name: each.tensor for name, each in walk.ledger.used.items() if name not in walk.ledger.promises}
    named = known | {name: each.tensor for name, each in walk.stored.items()}
    tensors = {name: tensor.detach().numpy().copy() for name, tensor in named.items()}
    return json.loads(json.dumps(certificate_of(walk).document())), tensors
