"""Arguments of `certify` that its siblings take as well: the model, its example, keywords and the domain."""

import inspect
from difflib import get_close_matches
from typing import Any

from torch import nn

from wellnormed._inputs import require_module, require_numbers
from wellnormed.program.domain import Box, Domain
from wellnormed.program.program import Example, Program, arguments_of, tensors_of


def unwrapped(model: Any) -> Any:
    """The module inside `DistributedDataParallel` or `torch.compile`; the wrappers' own code cannot be captured."""
    from torch._dynamo.eval_frame import OptimizedModule  # takes a second, which a capture needs anyway

    while isinstance(model, nn.parallel.DistributedDataParallel | OptimizedModule):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def domain_from(caller: str, radius: float, box: tuple[float, float] | None) -> Domain:
    """The domain that the arguments `radius` and `box` describe."""
    require_numbers(f"{caller}: ", {"radius": radius})
    if box is not None:
        if radius != 1.0:
            raise ValueError(f"{caller}: radius={radius} and box={box} are two domains; pass one")
        if not isinstance(box, tuple | list) or len(box) != 2:
            raise ValueError(f"{caller}: box={box!r} must be two numbers, such as (0, 1)")
        return Box(*box)
    if not radius > 0:
        raise ValueError(f"{caller}: radius={radius} must be positive; math.inf is every finite input")
    return float(radius)


def settings_of(domain: Domain) -> dict[str, Any]:
    """The keywords of `certify` for a domain."""
    return {"box": (domain.low, domain.high)} if isinstance(domain, Box) else {"radius": domain}


def with_keywords(
    caller: str, model: nn.Module, example_input: Any, settings: dict[str, Any], inputs: dict[str, Any]
) -> Any:
    """Add the inputs given by keyword to the example; refuse a keyword that may be a misspelt setting."""
    for name, value in settings.items():
        if tensors_of(value):
            raise ValueError(
                f"{caller}: got a tensor in the place of the setting {name}; pass a tuple of several inputs, {caller}"
                f"(model, (x, mask)), or by keyword, and an input of that name by example_input={{{name!r}: ...}}"
            )
    if not inputs:
        return example_input
    name_of_model, accepted = type(model).__name__, inspect.signature(model.forward).parameters
    for name, value in inputs.items():
        if name in accepted:
            continue
        meant = get_close_matches(name, ["example_input", *settings, *accepted], n=1, cutoff=_ALIKE)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
            raise ValueError(f"{caller}: {name} is neither a setting nor an input of {name_of_model}.forward{hint}")
        if meant and meant[0] in settings and not tensors_of(value):
            raise ValueError(
                f"{caller}: {name}={value!r} is not a setting{hint} If it is an input of {name_of_model}, pass it by "
                f"example_input={{{name!r}: ...}}"
            )
    arguments, keywords = arguments_of(() if example_input is None else example_input)
    if twice := keywords.keys() & inputs.keys():
        raise ValueError(f"{caller}: {', '.join(sorted(twice))} is given twice, in example_input and by keyword")
    return Example(arguments, keywords | inputs)


_ALIKE = 0.7
"""The ratio of `difflib` from which names count as alike: `raduis` and `radius` have 0.83, `boxes` and `box` 0.75."""


def require_cpu(model: nn.Module, within: object) -> None:
    """Refuse a model on an accelerator, where products may round more coarsely than the proof assumes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):  # `require_values` refuses meta tensors with another remedy
            remedy = "copy.deepcopy(model).cpu()"
            if within is not None:
                remedy = (
                    "model.cpu() and within=constraints of model, constraints = copy.deepcopy((model, constraints))"
                )
            raise ValueError(
                f"certify: {name!r} lies on {tensor.device}, and a certificate is computed on the CPU; pass {remedy}, "
                "which leaves the model where it is, and an example on the CPU"
            )


def require_model_or_program(caller: str, model: Any, /, **settings: Any) -> None:
    """Refuse anything but a module or a program; with a program, also refuse the settings of a new capture."""
    if not isinstance(model, Program):
        require_module(caller, model)
    elif given := [f"{name}=" for name, value in settings.items() if value is not None]:
        raise ValueError(
            f"{caller}: a program has its example and its output, got a program and {', '.join(given)}; pass it alone, "
            "or pass the model"
        )


def example_of(model: nn.Module, example_input: Any, caller: str) -> Any:
    """The given example, or by default the result of the model's method `example_input`."""
    if example_input is not None:
        return example_input
    method = getattr(model, "example_input", None)
    if not inspect.ismethod(method):
        raise ValueError(
            f"{caller}: {type(model).__name__} has no method `example_input`; pass example_input=, what the model is "
            "called with: a tensor, a tuple, or a dictionary"
        )
    return method()
