"""Certificates to test the checker with, made from a walk through a model."""

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import nn

from wellnormed.checker.files import stored
from wellnormed.propagation.capture import capture, decomposed
from wellnormed.propagation.decimals import rounding_up
from wellnormed.propagation.walk import Walk


def document_of(model: nn.Module, example: Any, radius: float = 1.0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a model's certificate, as it is read from JSON, and all tensors that it names."""
    torch.manual_seed(0)
    walk = Walk(decomposed(capture(model.eval(), example)), radius)
    walk.run()
    used = walk.step.used.values()
    tensors = {each.name: each.tensor.detach().numpy().copy() for each in used}
    rows = [_row(row) for row in walk.step.rows.values()]
    *_, output = walk.step.rows.values()
    sources = [row for row in walk.step.rows.values() if row.operation == "input"]
    with rounding_up():
        gain = output.bounds.gain.max()

        def over_root(row: Any) -> str:
            return str(gain / Decimal(math.prod(row.shape[a] for a in row.axes)).sqrt().next_minus())

        sizes = {math.prod(row.shape[a] for a in row.axes) for row in sources}
        document = {
            "format": 3,
            "arithmetic": "real numbers, tensors as stored",
            "input_radius": radius,
            "rows": rows,
            "attention_logits": {name: [str(x) for x in logits] for name, logits in walk.step.logits.items()},
            "lipschitz": over_root(output),
            "l2_lipschitz": over_root(sources[0]) if len(sizes) == 1 else None,
            "tensors": {each.name: stored(tensors[each.name]).digest for each in used if not each.computed},
        }
    return json.loads(json.dumps(document)), tensors


def _row(row: Any) -> dict[str, Any]:
    bounds = row.bounds or (None, None, None)
    return {
        "name": row.name,
        "operation": row.operation,
        "inputs": row.inputs,
        "shape": row.shape,
        "constants": row.constants,
        "claims": [
            {"measure": c.measure, "tensors": c.tensors, "values": c.values, "constants": c.constants}
            for c in row.claims
        ],
        "reads": row.reads,
        "axes": row.axes,
        **{
            key: None if each is None else {"shape": each.shape, "values": [str(x) for x in each.reshape(-1)]}
            for key, each in zip(("radius", "gain", "largest"), bounds, strict=True)
        },
    }
