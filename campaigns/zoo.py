"""Models whose certificates the golden record holds: those that the tests use, random ones, and some to refuse."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import wellnormed as wn
from campaigns.random_models import draw_model
from tests.proof.models import NAMES, Function, constraints_of, small
from wellnormed.certificates import UncertifiableError

RANDOM = 40
"""Random models: the first of the campaign."""
MARGINS = ("mlp", "convolutions", "rotary gpt", "encoder")
"""Models that are certified for margins and another radius too, or refused."""
PLACE = re.compile(r" at \S+:\d+( `[^`]*`)?")
"""Where a message says that code stands."""
REFUSED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "rounding": lambda: (Function(lambda self, x: x.round()), torch.randn(2, 3)),
    "an infinite slope": lambda: (Function(lambda self, x: x.abs().sqrt()), torch.randn(2, 3)),
    "a jump": lambda: (Function(lambda self, x: torch.where(x > 0, x + 1, x)), torch.randn(2, 3)),
    "a quotient": lambda: (Function(lambda self, x: x / x.sum(-1, keepdim=True)), torch.randn(2, 3)),
    "code that reads a value": lambda: (Function(lambda self, x: x if x.sum() > 0 else -x), torch.randn(2, 3)),
    "training mode": lambda: (nn.Sequential(nn.BatchNorm1d(3)).train(), torch.randn(2, 3)),
    "weights that are not finite": lambda: (_infinite(), torch.randn(2, 3)),
}


def _infinite() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data[0, 0] = float("inf")
    return model


def _described(model: nn.Module, example: Tensor, **settings: Any) -> dict[str, Any]:
    try:
        certificate = wn.certify(model, example, **settings)
    except UncertifiableError as error:
        return {"refused": PLACE.sub("", str(error))}
    document = json.loads(json.dumps(certificate.document(), default=str))
    rows = document["rows"]
    return {
        "bound": str(certificate.lipschitz.exact),
        "rms": str(certificate.rms_lipschitz.exact),
        "logits": {name: [str(each) for each in heads] for name, heads in certificate.attention_logits.items()},
        "operations": [f"{row.name}: {row.operation}" for row in certificate.rows],
        "rows": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest(),
        "tensors": sorted(certificate.tensors),
    }


def models() -> Iterator[tuple[str, nn.Module, Tensor, dict[str, Any]]]:
    """Name, model, example and settings of `certify`."""
    for name in NAMES:
        model, example = small(name)
        within = constraints_of(name, model)
        settings: dict[str, Any] = {"effort": "high"} if name == "network" else {}
        yield name, model.eval(), example, settings if within is None else {"within": within}
        if name in MARGINS:
            yield f"{name}, margins", model.eval(), 0.3 * example, {"radius": 0.5, "margins": True}
    for number in range(RANDOM):
        drawn = draw_model(0, number)
        yield f"random model {number}", drawn.model, drawn.example, {"radius": drawn.radius}


def certificates() -> Iterator[tuple[str, Any]]:
    """For every model bounds, rows, and the names of the tensors that they rest on; or the refusal."""
    for name, model, example, settings in models():
        yield name, _described(model, example, **settings)


def refusals() -> Iterator[tuple[str, Any]]:
    """The models that cannot be certified, each with the sentence that says so."""
    for name, build in REFUSED.items():
        torch.manual_seed(0)
        model, example = build()
        yield name, _described(model, example)
