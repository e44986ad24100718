"""`certify`: capture what a model executes, and bound every operation."""

import inspect
import math
import platform
from typing import Any

import numpy
import torch
from torch import nn

import wellnormed
from wellnormed._inputs import require_module, require_numbers
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.safetensors_file import raw_tensor
from wellnormed.propagation.capture import Captured, capture, confirm, decomposed
from wellnormed.propagation.ledger import Stored
from wellnormed.propagation.value import same_bounds
from wellnormed.propagation.walk import Walk


def certify(
    model: nn.Module,
    example_input: Any = None,
    radius: float = 1.0,
    *,
    output: str | int | None = None,
    margins: bool = False,
) -> Certificate:
    """A proved Lipschitz bound of what a model executes.

    The certified variable is the input: its vectors `(B, D)`, its tokens `(B, T, D)`, or its samples where it has more
    axes, each of root mean square at most `radius`. Where the input is integers, it is the vectors that embeddings look
    up. The bound holds in real arithmetic, for the tensors as they are stored.

    Args:
        model: Any module, in evaluation mode.
        example_input: What the model is called with: a tensor, a tuple of arguments, or a dictionary of keywords. May
            be left out for a model with a method `example_input()`, such as those of `wellnormed.models`.
        radius: Largest RMS of an input vector, token or sample.
        output: Which tensor, if the model returns several: a key, an attribute's name, or a position.
        margins: Whether to bound the difference of any two logits too, `Certificate.margin`. The result must be a
            linear map; time grows with the square of its outputs.

    Raises:
        UncertifiableError: An operation has no bound or none for these arguments, or the model does something that its
            captured operations do not show; names the operation, the module, the line of the model, and a remedy.
        ValueError: `radius` is not positive, or smaller than an embedding's largest row.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 0.5)
        >>> certificate = certify(model, torch.zeros(1, 2))
        >>> 1 <= certificate.lipschitz < 1 + 1e-6
        True
    """
    require_module("certify", model)
    require_numbers("certify: ", {"radius": radius})
    if not 0 < radius < math.inf:
        raise ValueError(f"radius={radius} must be positive and finite")
    captured = capture(model, example_of(model, example_input, "certify"), output)
    walk = Walk(decomposed(captured), float(radius))
    walk.run(margins)
    others = confirm(model, captured, output)
    any_batch = bool(others) and all(_same_bounds(walk, decomposed(o), float(radius), margins) for o in others)
    used = sorted(walk.step.used.items())
    return Certificate(
        rows=tuple(walk.step.rows.values()),
        input_radius=float(radius),
        tensors={name: raw_tensor(stored.tensor).digest for name, stored in sorted(walk.stored.items())},
        computed={name: stored.tensor.detach().cpu().clone() for name, stored in used if stored.computed},
        attention_logits={name: tuple(heads) for name, heads in walk.step.logits.items()},
        any_batch=any_batch,
        versions={"wellnormed": wellnormed.__version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
        | {"python": platform.python_version()},
    )


def _same_bounds(walk: Walk, larger: Captured, radius: float, margins: bool) -> bool:
    """Whether another batch has the same bounds, from the same tensors."""
    other = Walk(larger, radius, walk.step)
    other.run(margins)
    rows = list(zip(walk.step.rows.values(), other.step.rows.values(), strict=False))
    return (
        len(walk.step.rows) == len(other.step.rows)
        and all(a.operation == b.operation and same_bounds(a.bounds, b.bounds) for a, b in rows)
        and all(_same_tensor(stored, other.step.used.get(name)) for name, stored in walk.step.used.items())
    )


def _same_tensor(a: Stored, b: Stored | None) -> bool:
    """Equal, but for copies along the batch."""
    if b is None or a.tensor.ndim != b.tensor.ndim:
        return False
    first = []
    for tensor, other in ((a.tensor, b.tensor), (b.tensor, a.tensor)):
        for axis, size in enumerate(other.shape):
            if tensor.shape[axis] != size:
                if not bool((tensor == tensor.narrow(axis, 0, 1)).all()):
                    return False
                tensor = tensor.narrow(axis, 0, 1)
        first.append(tensor)
    return torch.equal(*first)


def example_of(model: nn.Module, example_input: Any, caller: str) -> Any:
    """The example, or the model's own."""
    if example_input is not None:
        return example_input
    own = getattr(model, "example_input", None)
    if not inspect.ismethod(own):
        raise ValueError(
            f"{caller}: {type(model).__name__} has no method `example_input`; pass example_input=, what the model is "
            "called with: a tensor, a tuple, or a dictionary"
        )
    return own()
