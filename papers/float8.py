"""Chooses the layers of a run that multiply 8-bit floats: their ranges are proved for all weights within the caps."""

from fnmatch import fnmatch
from typing import Any

import torch

import wellnormed as wn
from papers.float8_layers import FORWARD, to_float8_
from wellnormed.constraints import Constraints
from wellnormed.models.gpt import GPT

_ROOM = 1e-6
"""How much the embedding's radius exceeds its cap, which holds up to rounding."""


def use_float8_(model: GPT, config: Any, held: Constraints, ranks: int) -> list[str]:
    """Turn the layers of the blocks that fit into layers with 8-bit products, in place.

    Args:
        model: Whole, not yet spread over ranks.
        config: The run, a `PaperConfig` whose `float8` is not "no".
        held: Constraints on all weights of the model.
        ranks: How many there are.

    Returns:
        The names of the layers.

    Raises:
        ValueError: None fits: names the first, its proved range and the remedy.
    """
    training = model.training
    caps = [bound for parameter, _, bound in held.balls() if parameter is model.embedding.weight]
    certificate = wn.certify(model.eval(), radius=max([1.0, *caps]) * (1 + _ROOM), within=held)
    model.train(training)
    proved = wn.certificates.number_formats(certificate, weights=model.state_dict())
    largest = torch.finfo(FORWARD).max
    weights = {each.name: float(each.proved) for each in proved.ranges}
    ranges = {name: max(size, weights[f"{name}.weight"]) for name, size in proved.inputs.items()}
    ranges = {name: size for name, size in ranges.items() if fnmatch(name, "layers.*")}
    fitting = [name for name, size in ranges.items() if size <= largest]
    if not fitting:
        name, size = next(iter(ranges.items()))
        raise ValueError(
            f"float8={config.float8!r}: under these caps no layer is proved to stay within {largest:g}, where E4M3 "
            f"ends; {name} comes first and reaches {size:.4g}. Choose smaller --caps, or --float8 no"
        )
    tokens = config.batch // ranks * config.model.length
    assert config.float8 != "no"
    return to_float8_(model, proved.inputs, fitting, product=config.float8, gradient_scale=tokens)
