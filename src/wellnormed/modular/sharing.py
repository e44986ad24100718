"""The shares of one step, from the mass of every weight and the sensitivity of everything that follows it.

Definitions 6 and 7 of Modular Duality (MD) nest; unrolled to the leaves of a tree, every nested ratio of masses
cancels but the outermost. With `factor = (mass / total mass) / (sensitivity of all that follows)` for each weight,

- norm(w) = max over weights of norm_i(w_i) / factor_i;
- dual_norm(g) = sum over weights of factor_i dual_norm_i(g_i);
- dualize(g)_i = factor_i dualize_i(g_i)  (MD section 4.3).

A weight of mass 0 is fixed: it is absent from both norms and its update is 0.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellnormed.norms import Norm


@dataclass(frozen=True)
class Place:
    """One place where a weight acts."""

    name: str
    norm: Norm
    mass: float
    downstream: float
    """Product of the sensitivities of everything from the weight's output to the tree's output."""


class WeightSpace(ABC):
    """The weights of a tree as one normed space: dictionaries from parameter name to tensor.

    A weight that acts in several places (shared, tied) is one vector on the diagonal of their product space. The norm
    of a product restricted to its diagonal is the largest of the terms, so its factor is the smallest over its places
    (0 if one of them has mass 0: a fixed place would move with the others).
    """

    if TYPE_CHECKING:  # a real property would shadow the fields of the frozen classes below it

        @property
        def mass(self) -> float:
            """Share of feature learning among its siblings, not negative; the sum of its atoms' masses."""
            ...

    @abstractmethod
    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        """Yield every place of a weight, in the order in which data flows.

        Args:
            downstream: The sensitivity of everything that follows the whole tree.
        """

    def lr_factors(self) -> dict[str, float]:
        """Parameter name -> factor on the learning rate: the norm of its part in a step of modular norm 1.

        With these factors, an optimizer whose updates have norm 1 in each parameter's norm takes MD's steps (4.3).

        Example:
            >>> from wellnormed.modular import Atom
            >>> from wellnormed.norms import Spectral
            >>> tree = Atom("head", Spectral()) @ (0.5 * Atom("body", Spectral(), mass=3))
            >>> tree.lr_factors()
            {'body': 1.5, 'head': 0.25}
        """
        return {name: factor for name, (_, factor) in self._norms_and_factors().items()}

    def norm(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Modular norm (MD definitions 6 and 7), shape `()`, of one tensor for each name; mass 0 does not count."""
        moving = self._moving(weights)
        terms = [norm.norm(weights[name]) / factor for name, (norm, factor) in moving.items()]
        return reduce(torch.maximum, terms) if terms else torch.zeros(())

    def dual_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The largest `<gradients, w>` over modular norm at most 1, shape `()`; fixed weights (mass 0) stay 0."""
        moving = self._moving(gradients)
        terms = [norm.dual_norm(gradients[name]) * factor for name, (norm, factor) in moving.items()]
        return reduce(torch.add, terms) if terms else torch.zeros(())

    def dualize(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Duality map of the modular norm (MD section 4.3): the step of norm 1 that attains the dual norm.

        The map is as exact as those of the atoms. Weights of mass 0 get zeros.

        Example:
            >>> import torch
            >>> from wellnormed.modular import Atom
            >>> from wellnormed.norms import Sign
            >>> tree = Atom("b", Sign()) @ Atom("a", Sign(), mass=3)
            >>> g = torch.tensor([[2.0, -5.0]])
            >>> {name: update.tolist() for name, update in tree.dualize({"a": g, "b": g}).items()}
            {'a': [[0.75, -0.75]], 'b': [[0.25, -0.25]]}
        """
        moving = self._moving(gradients)
        return {
            name: moving[name][0].dualize(g) * moving[name][1] if name in moving else torch.zeros_like(g)
            for name, g in gradients.items()
        }

    def param_groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        """Make parameter groups for any `torch.optim.Optimizer`: named `params`, and `lr` times their `lr_factors`.

        The trainable parameters of the model must be those of the tree.

        Example:
            >>> import torch
            >>> from wellnormed.modular import modular_tree
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
            >>> optimizer = torch.optim.SGD(modular_tree(model).param_groups(model, lr=0.1))
            >>> optimizer.param_groups[0]["lr"]
            0.05
        """
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr={lr} must be finite and not negative")
        factors = self.lr_factors()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_names(factors, trainable, "the model's trainable parameters")
        groups: dict[float, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in trainable.items():
            groups[factors[name]].append((name, parameter))
        return [{"params": named, "lr": lr * factor} for factor, named in groups.items()]

    def _norms_and_factors(self) -> dict[str, tuple[Norm, float]]:
        """Norm and factor of every weight; the factor of a shared weight is the smallest over its places."""
        factors: dict[str, tuple[Norm, float]] = {}
        for place in self.places():
            norm, smallest = factors.get(place.name, (place.norm, math.inf))
            if norm != place.norm:
                raise ValueError(
                    f"{place.name!r} stands in the tree with two norms, {norm!r} and {place.norm!r}; a shared weight "
                    "needs one: give both places the same norm, or untie them"
                )
            if place.mass and not 0 < place.downstream < math.inf:
                raise ValueError(
                    f"{place.name!r} has mass {place.mass:g}, but the sensitivity of what follows it is "
                    f"{place.downstream:g}, so that no finite step would be its share; give it mass 0 (then it stays "
                    "fixed) or mend the sensitivities and factors that follow it"
                )
            factor = place.mass / self.mass / place.downstream if place.mass else 0.0
            factors[place.name] = norm, min(smallest, factor)
        return factors

    def _moving(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Norm, float]]:
        """Norm and factor of every weight that is not fixed, for tensors that must be those of the tree."""
        factors = self._norms_and_factors()
        _check_names(factors, tensors, "the given tensors")
        for name, (norm, _) in factors.items():
            norm.check_shape(tensors[name].shape, name)
        return {name: (norm, factor) for name, (norm, factor) in factors.items() if factor > 0}


def _check_names(tree: Mapping[str, Any], tensors: Mapping[str, Any], what: str) -> None:
    if missing := [name for name in tree if name not in tensors]:
        raise ValueError(f"{what} lack {', '.join(missing)}, which the modular tree holds")
    if extra := [name for name in tensors if name not in tree]:
        raise ValueError(f"the modular tree lacks {', '.join(extra)}, found among {what}; add them as atoms")
