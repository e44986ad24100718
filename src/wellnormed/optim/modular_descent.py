"""Descent in the modular norm: one step, shared among the layers by mass and sensitivity."""

from typing import ClassVar, Unpack

from torch import nn

from wellnormed.modular import NormedModule, modular_tree
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.settings import EngineSettings
from wellnormed.routing import AssignedParameter, Assignment
from wellnormed.routing.places import Weak


class ModularDescent(ConditionalGradient):
    """Modular dualization (MD section 4.3) of the momentum: `w <- w - lr dualize(m)` in the modular norm of the model.

    A step has modular norm `lr`: each weight's share is its part of the mass divided by the sensitivity of what
    follows it, so that the output moves by at most `lr` for weights and activations in the unit ball. Momentum 0 is
    MD's learning-rate transfer experiment. `step_rule="sharp"` is refused: steepest descent (MD proposition 1) has one
    length for all weights, `tree.dual_norm` of their gradients.

    Args:
        model: The model.
        lr: Length of a step in the modular norm; 0.1 unless given.
        tree: The model's modules with mass and sensitivity; `modular_tree(model)` without it. Parameters of mass 0
            stay where they are.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
        >>> optimizer = ModularDescent(model, lr=0.1)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.05]
    """

    decides: ClassVar = {"norms", "recipe", "overrides", "per_head", "lr_factors"}

    def __init__(
        self, model: nn.Module, lr: float = 0.1, *, tree: NormedModule | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        if unused := settings.keys() & self.decides:
            raise ValueError(
                f"ModularDescent: the tree decides {', '.join(sorted(unused))}; pass tree=modular_tree(model, norms)"
            )
        if settings.get("step_rule") == "sharp":
            raise ValueError(
                "ModularDescent: step_rule='sharp' takes each weight's own dual norm for a length, and the modular "
                "norm has one for all, their weighted sum; leave it out, and scale lr by "
                "optimizer.tree.dual_norm(gradients)"
            )
        self.tree = modular_tree(model) if tree is None else tree
        norms = {place.name: place.norm for place in self.tree.places()}
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if outside := [name for name in trainable if name not in norms]:
            raise ValueError(f"the modular tree lacks {', '.join(outside)}; add them as atoms, or freeze them")
        if unknown := [name for name in norms if name not in trainable]:
            raise ValueError(f"the model has no trainable {', '.join(unknown)}, which the modular tree holds")
        settings["lr_factors"] = factors = self.tree.lr_factors()
        reasons = {name: f"{factor:.4g} of the modular step" for name, factor in factors.items()}
        assigned = tuple(AssignedParameter(name, p, norms[name], reasons[name]) for name, p in trainable.items())
        frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
        super().__init__(Assignment(assigned, frozen, model=Weak(model)), lr, **settings)
