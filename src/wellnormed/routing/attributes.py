"""Numbers that the modules around a weight, or their `config`, store as attributes.

No code of the model runs, such as a property or `__getattr__`: it could warn or fail in the name of a library that the
user never called.
"""

import inspect
from collections.abc import Iterator, Sequence
from types import MemberDescriptorType
from typing import NamedTuple

from torch import nn

_HEADS = (
    "num_attention_heads", "num_heads", "n_head", "n_heads", "heads", "num_attn_heads", "attention_heads", "nhead",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "kv_heads", "num_query_groups")
_HEAD_SIZE = (
    "qk_head_dim", "head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "key_value_proj_dim", "d_kv",
)  # fmt: skip


class Heads(NamedTuple):
    """The heads of an attention: their number, the number of heads of keys and values, and the length of one."""

    count: int
    of_keys: int
    size: int | None


_FIELDS = (MemberDescriptorType, type(vars(Heads)["size"]))  # fields of `__slots__` and named tuples, which run no code


def number(names: Sequence[str], around: Sequence[nn.Module]) -> int | None:
    """The first positive integer stored under one of the names in a module, the nearest first, or in its `config`."""
    return next((value for module in around if (value := _in_one(names, module)) is not None), None)


def attention_heads(around: Sequence[nn.Module]) -> Heads | None:
    """The heads, from the nearest module that stores their number; other modules may describe another part.

    Example:
        >>> attention = nn.Module()
        >>> attention.config = {"n_head": 8, "num_key_value_heads": 2}
        >>> attention_heads([nn.Linear(4, 4), attention, nn.Module()])
        Heads(count=8, of_keys=2, size=None)
    """
    for module in around:
        if count := _in_one(_HEADS, module):
            return Heads(count, _in_one(_KV_HEADS, module) or count, _in_one(_HEAD_SIZE, module))
    return None


def norm_width(around: Sequence[nn.Module]) -> int | None:
    """The width of the first norm layer among the children of the nearest module that has one."""
    for child in (child for module in around for child in module.children()):
        if "norm" in type(child).__name__.lower():
            shape = stored(child, "normalized_shape") or getattr(child._parameters.get("weight"), "shape", ())
            if isinstance(shape, tuple) and shape:
                return shape[-1]
    return None


def stored(holder: object, name: str) -> object:
    """The value that an object or its class stores under a name; None if there is none, or it would be computed."""
    if isinstance(holder, dict) and name in holder:
        return dict.get(holder, name)
    other_names = inspect.getattr_static(holder, "attribute_map", None)  # as configs of `transformers` have them
    name = other_names.get(name, name) if isinstance(other_names, dict) else name
    value = inspect.getattr_static(holder, name, None)
    return getattr(holder, name, None) if isinstance(value, _FIELDS) else value


def _in_one(names: Sequence[str], module: nn.Module) -> int | None:
    holders = (module, stored(module, "config"))
    values: Iterator[object] = (stored(holder, name) for holder in holders if holder is not None for name in names)
    return next((x for x in values if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)
