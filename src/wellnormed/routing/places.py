"""Where the parameters of a model stand now, which may be elsewhere than where they stood when norms were assigned."""

import weakref
from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList


class Weak:
    """A module that this keeps neither alive nor in a pickle.

    A deep copy knows the module's copy if that was made before it, as in `deepcopy((model, optimizer))`, else none.

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
    """Whether a module makes a weight of this parameter of its, and the weight's norm is another one.

    The magnitudes of `weight_norm` are taken for parameters in their own right.
    """
    if isinstance(module, ParametrizationList):
        return leaf != "original0" or not isinstance(module[0], _WeightNorm)
    served, _, kind = leaf.rpartition("_")
    return kind in ("v", "orig") and served in vars(module)  # as the hooks before parametrizations do, and pruning


def standing(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Every parameter of a model, at every place, and whether it is an original there."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, is_original(module, leaf)


UNKNOWN = Weak()
"""The model of parameters alone."""
