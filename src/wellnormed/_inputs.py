"""Refusals of wrong types, by a `ValueError` that names the parameter, the value and the remedy."""

import sys
from collections.abc import Collection, Mapping
from numbers import Integral, Real

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellnormed._ranges import POSITIVE, Range


def require_numbers(
    where: str,
    values: Mapping[str, object],
    within: Range | None = None,
    remedy: str = "",
    *,
    tensor: bool = False,
    whole: bool = False,
) -> None:
    """Refuse a value that is not a real number, an integer beyond every float, or a number out of its range.

    Args:
        where: The words before the name in the message, such as `"SoftCap: "`.
        values: Name -> value.
        within: The range. Without one, the caller must check for NaN and infinity.
        remedy: The words after the message of the range.
        tensor: Whether a tensor of one number is allowed, as for a learning rate.
        whole: Whether only integers are allowed.
    """
    for name, value in values.items():
        if tensor and isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            remedy = "a whole number, such as 1" if whole else "a number, such as 0.1"
            raise ValueError(f"{where}{name}={value!r} is of type {type(value).__name__}; pass {remedy}")
        if isinstance(value, int) and abs(int(value)) > sys.float_info.max:
            raise ValueError(
                f"{where}{name} is an integer of {len(f'{value:x}')} hexadecimal digits; pass a smaller one"
            )
        if within is not None and not within.holds(value):
            raise ValueError(f"{where}{name}={value} must {within.must}{remedy and '; '}{remedy}")


def require_choice(name: str, value: object, choices: Collection[object], remedy: str = "") -> None:
    """Refuse a value that is not one of the choices; the message ends with the words of the remedy."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, choices))}{remedy and '; '}{remedy}")


def require_sizes(layer: nn.Module, **sizes: int) -> None:
    """Refuse a size of a layer that is not a positive whole number."""
    require_numbers(f"{type(layer).__name__}: ", sizes, POSITIVE, "pass 1 or more", whole=True)


def require_flags(where: str, values: Mapping[str, object]) -> None:
    """Refuse a value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{where}{name}={value!r} is of type {type(value).__name__}; pass True or False")


def require_patterns(where: str, values: Mapping[str, object]) -> None:
    """Refuse a value that is not a mapping from names to values."""
    for name, value in values.items():
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{where}{name}={value!r} is of type {type(value).__name__}; pass a dictionary of name patterns, "
                "such as {'layers.0': ...}"
            )


def require_module(where: str, model: object) -> None:
    """Refuse a value that is not a module, such as a module's class, and modules that are not plain ones."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise ValueError(f"{where}: model is {kind}; pass the model itself, a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"{where}: model is TorchScript; pass the torch.nn.Module that it was made from")
    named = () if torch.is_inference_mode_enabled() else (*model.named_parameters(), *model.named_buffers())
    if made := [name for name, each in named if not is_lazy(each) and each.is_inference()]:
        raise ValueError(
            f"{where}: {made[0]} was made under torch.inference_mode(), so nothing may write into it outside; pass "
            "copy.deepcopy(model)"
        )


def require_hashable(where: str, part: object) -> None:
    """Refuse a user's norm, direction or constraint that cannot be hashed, since equal ones share a batch."""
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(
            f"{where}it cannot be hashed, which batches of equal ones need; make it a dataclass with frozen=True, and "
            "its lists tuples"
        ) from error


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor's class stores codes instead of entries, as torchao's classes do, so that it has no norm."""
    if type(tensor) in (Tensor, nn.Parameter) or hasattr(tensor, "placements"):  # the norm of a DTensor is collective
        return False
    try:
        torch.linalg.vector_norm(tensor.detach())
    except NotImplementedError:  # such classes raise it for operations that they do not support
        return True
    return False
