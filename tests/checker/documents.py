"""Certificates to test the checker with, made from a walk through a model."""

import json
from typing import Any

import numpy as np
import torch
from torch import nn

from wellnormed.certificates.certifying import certificate_of
from wellnormed.propagation.capture import capture, decomposed
from wellnormed.propagation.walk import Walk


def document_of(model: nn.Module, example: Any, radius: float = 1.0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a model's certificate, as it is read from JSON, and all tensors that it names."""
    torch.manual_seed(0)
    walk = Walk(decomposed(capture(model.eval(), example)), radius)
    walk.run()
    tensors = {name: each.tensor.detach().numpy().copy() for name, each in (walk.step.used | walk.stored).items()}
    return json.loads(json.dumps(certificate_of(walk).document())), tensors
