"""The state of a model at a moment: whether running the model changes it, and how it is put back."""

import contextlib
import random
from collections.abc import Iterator
from itertools import zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from wellnormed.program.errors import DRAWS, UncertifiableError, refusing
from wellnormed.program.places import first_line


class ModelState:
    """A copy of the attributes of all modules, their contents, the bits of their tensors, and the random states."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name or "model" for name, module in model.named_modules()}
        self.contents: dict[nn.Module, list[Any]] = {}
        for module, name in self.names.items():
            with refusing(lambda error, n=name: f"what module `{n}` holds cannot be compared ({first_line(error)})"):
                self.contents[module] = _contents(vars(module))
            for each in self.contents[module]:
                if isinstance(each, Tensor):
                    require_values(f"a tensor of module `{name}`", each)
        everything = [each for contents in self.contents.values() for each in contents]
        self.tensors = {
            id(t): (t, t.detach().clone(), t.requires_grad, t.grad) for t in everything if isinstance(t, Tensor)
        }
        kinds = (dict, list, set)
        self.containers = {id(c): (c, kind(c)) for c in everything for kind in kinds if isinstance(c, kind)}
        self.draws = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (models draw from it)

    def require(self, after: "ModelState") -> None:
        """Refuse a model that is in another state after a run."""
        for module, name in self.names.items():
            before, now = self.contents[module], after.contents.get(module, [])
            if len(before) != len(now) or not all(map(_same, before, now)):
                raise UncertifiableError(
                    f"module `{name}` changes its attributes while it runs; a certificate is of one function, so keep "
                    "what `forward` uses constant; where weight_norm, spectral_norm or prune of torch.nn.utils does "
                    "it, use the remove_ function beside it, or torch.nn.utils.parametrizations"
                )
            for tensor in before:
                if isinstance(tensor, Tensor) and not _same_bits(tensor, self.tensors[id(tensor)][1]):
                    raise UncertifiableError(
                        f"module `{name}` overwrites a tensor while it runs; write its result elsewhere"
                    )
        same_draws = torch.equal(self.draws[0], after.draws[0]) and self.draws[1] == after.draws[1]
        if not same_draws or str(self.draws[2]) != str(after.draws[2]):
            raise UncertifiableError(DRAWS)

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self.draws[0])
        random.setstate(self.draws[1])
        np.random.set_state(self.draws[2])  # noqa: NPY002
        for container, content in self.containers.values():  # what is as it was may be frozen
            pairs = zip_longest(_entries(container), _entries(content))
            if len(container) != len(content) or any(a is not b for a, b in pairs):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        for tensor, content, requires_grad, grad in self.tensors.values():
            with torch.no_grad():
                if not _same_bits(tensor, content):
                    tensor.copy_(content)
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad


def require_values(what: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no entries of its own in memory, which nothing can be compared with."""
    if is_lazy(tensor):
        raise UncertifiableError(f"{what} is not initialised; run the model once")
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise UncertifiableError(f"{what} has no values, as on the device meta; load them")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UncertifiableError(
            f"{what} is nested, quantized, or of the layout {tensor.layout}; make it dense, of floats"
        )


@contextlib.contextmanager
def restoring(state: ModelState) -> Iterator[None]:
    """Put everything back at the end, whatever happens."""
    try:
        yield
    finally:
        state.restore()


def _contents(x: Any, seen: set[int] | None = None) -> list[Any]:
    """An object and all that it holds, but for other modules: containers, objects, tensors, numbers."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return []
    if isinstance(x, dict | list | tuple | set | frozenset):
        held = _entries(x)
    elif isinstance(x, Tensor | nn.Module | type | ModuleType | FunctionType | MethodType) or not hasattr(
        x, "__dict__"
    ):
        # what has no attributes may still count, as iterators do, and show it
        return [x if isinstance(x, Tensor | nn.Module | int | float) else (x, repr(x))]
    else:
        held = [vars(x)]
    seen.add(id(x))
    return [x, *(each for part in held for each in _contents(part, seen))]


def _entries(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _same(a: Any, b: Any) -> bool:
    plain = int | float | str | bytes | bool | complex | tuple | frozenset
    return a is b or (isinstance(a, plain) and type(a) is type(b) and (a == b or a != a))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (x.detach().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(first, second) or torch.equal(first.view(torch.uint8), second.view(torch.uint8))
