"""The present places of a model's parameters, which may have changed since norms were assigned."""

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList


class Weak:
    """A weak reference to a module, which a pickle leaves out.

    A deep copy refers to the module's copy if that was made before, as in `deepcopy((model, optimizer))`, else to none.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> Weak(layer)() is layer, Weak()()
        (True, None)
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        module = self()
        return type(self)(None if module is None else memo.get(id(module)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


def is_original(module: nn.Module, leaf: str) -> bool:
    """Whether a module computes a weight from this parameter, so that the weight's norm is another one.

    The magnitudes of `weight_norm` do not count as originals.
    """
    if isinstance(module, ParametrizationList):
        return leaf != "original0" or not isinstance(module[0], _WeightNorm)
    served, _, kind = leaf.rpartition("_")
    return kind in ("v", "orig") and served in vars(module)  # as the hooks before parametrizations do, and pruning


def standing(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Every parameter at each of its places in a model, and whether it is an original there."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, is_original(module, leaf)


class Places:
    """The modules and parameters of a model, compared to notice a change; it keeps no part of the model alive.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> places = Places(Weak(model))
        >>> model[0] = nn.Linear(2, 2)
        >>> places.look(), places.look()
        (1, 1)
    """

    def __init__(self, model: Weak) -> None:
        self.model = model
        self._walk()
        self.changes = 0
        """How often a look has found other modules, parameters or buffers than the one before."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)

    def look(self) -> int:
        """Look at all modules, and return `changes`."""
        if self._read() != self._parts:
            self._walk()
            self.changes += 1
        return self.changes

    def _walk(self) -> None:
        model = self.model()
        self._modules = [weakref.ref(module) for module in (() if model is None else model.modules())]
        self._parts = self._read()

    def _read(self) -> list[object] | None:
        """Names and identities of the parts of every known module; None if a module is gone.

        Every step asks, so no loop runs over the parts. Torch does not swap tensors that are referred to weakly, as
        `Module.to` may do.
        """
        modules = [module() for module in self._modules]
        if None in modules:
            return None
        held = [each for m in modules for each in (m._modules, m._parameters, m._buffers) if each]  # pyrefly: ignore
        parts = chain.from_iterable(map(dict.values, held))
        return [*map(id, held), *map(len, held), *chain.from_iterable(held), *map(id, parts)]


UNKNOWN = Weak()
"""The reference for parameters without a model."""
