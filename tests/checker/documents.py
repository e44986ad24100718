"""Certificates to test the checker with."""

import json
from typing import Any

import numpy as np
from torch import nn

from wellnormed.certificates import certify


def document_of(model: nn.Module, example: Any, radius: float = 1.0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a model's certificate, as it is read from JSON, and all tensors that it names."""
    certificate, state = certify(model.eval(), example, radius), model.state_dict()
    tensors = {name: state[name] for name in certificate.tensors} | certificate.computed
    return json.loads(json.dumps(certificate.document())), {n: t.detach().numpy().copy() for n, t in tensors.items()}
