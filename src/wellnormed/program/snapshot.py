"""Snapshots of a model's state, to restore the model after it was run."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from wellnormed.program.errors import DRAWS, OVERWRITES, UncertifiableError


class Snapshot:
    """The attributes of all modules, with lists and dictionaries among them; the bits of tensors; the random states."""

    def __init__(self, model: nn.Module) -> None:
        known: dict[int, dict[Any, Any] | list[Any]] = {}
        for module in model.modules():
            _collect(vars(module), known)
        containers = known.values()
        self._attributes = [(each, dict(each)) for each in containers if isinstance(each, dict)]
        self._lists = [(each, [*each]) for each in containers if isinstance(each, list)]
        for name, tensor in (tensors := _tensors(model)).items():
            require_values(f"the tensor {name} of the model", tensor)
        self._tensors = {name: (each, each.detach().clone(), each.requires_grad) for name, each in tensors.items()}
        self._draws = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (models use it)

    def require(self, model: nn.Module) -> None:
        """Refuse a model that has drawn random numbers or overwritten a tensor."""
        numbers = np.random.get_state()  # noqa: NPY002
        same = all(map(np.array_equal, numbers, self._draws[2]))
        if not same or random.getstate() != self._draws[1] or not torch.equal(torch.get_rng_state(), self._draws[0]):
            raise UncertifiableError(DRAWS)
        now = _tensors(model)
        for name, (_, content, *_) in self._tensors.items():
            if name not in now or not _same_bits(now[name], content):
                raise UncertifiableError(OVERWRITES.format(name))

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self._draws[0])
        random.setstate(self._draws[1])
        np.random.set_state(self._draws[2])  # noqa: NPY002
        for attributes, content in self._attributes:
            if attributes.keys() != content.keys() or any(attributes[key] is not each for key, each in content.items()):
                attributes.clear()  # only if something changed, since a dictionary may be frozen
                attributes.update(content)
        for entries, content in self._lists:
            if [*map(id, entries)] != [*map(id, content)]:
                entries[:] = content
        for tensor, content, requires_grad in self._tensors.values():
            with torch.no_grad():
                if not _same_bits(tensor, content):
                    tensor.copy_(content)
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def _collect(value: Any, known: dict[int, dict[Any, Any] | list[Any]]) -> None:
    """Add to `known` a dictionary or list, and those inside of it, by their ids."""
    if isinstance(value, dict | list) and id(value) not in known:
        known[id(value)] = value
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, known)


def require_values(what: str, tensor: Tensor) -> None:
    """Refuse a tensor without dense entries in memory."""
    if is_lazy(tensor):
        raise UncertifiableError(f"{what} is not initialised; run the model once")
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise UncertifiableError(f"{what} has no values, as on the device meta; load them")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UncertifiableError(
            f"{what} is nested, quantized, or of the layout {tensor.layout}; make it dense, of floats"
        )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (x.detach().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(first, second) or torch.equal(first.view(torch.uint8), second.view(torch.uint8))
