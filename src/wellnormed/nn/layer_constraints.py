"""The constraints that layers need so that their stated bound holds."""

from torch import nn

from wellnormed._inputs import require_module
from wellnormed.constraints import Constraint


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """Name of a parameter -> its constraint, for every layer of a model that states one.

    Layers state theirs in a method `parameter_constraints`, as they state norms in `parameter_norms`. Pass the result
    to `wellnormed.constrain`, with whatever else is constrained.

    Example:
        >>> from wellnormed.nn import ConvexPotential
        >>> constraints_of(nn.Sequential(ConvexPotential(4, 16), nn.Linear(4, 2)))
        {'0.weight': Orthogonal(max_norm=1.0)}
    """
    require_module("constraints_of", model)
    constraints: dict[str, Constraint] = {}
    for prefix, module in model.named_modules():
        stated = getattr(module, "parameter_constraints", dict)()
        constraints |= {f"{prefix}.{name}" if prefix else name: constraint for name, constraint in stated.items()}
    return constraints
