"""Collects the constraints on weights that the Lipschitz bounds of layers need."""

from torch import nn

from wellnormed._inputs import require_module
from wellnormed.constraints import Constraint


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """Return the constraints that the layers of a model need, by the names of their parameters.

    A layer states its constraints in a method `parameter_constraints`, as it states norms in `parameter_norms`. Pass
    the result to `wellnormed.constrain`, together with the constraints on other parameters.

    Args:
        model: Any module.

    Returns:
        Name of a parameter, as in `model.named_parameters()` -> its constraint.

    Raises:
        ValueError: `model` is not a module.

    Example:
        >>> from wellnormed.nn import ConvexPotential
        >>> constraints_of(nn.Sequential(ConvexPotential(4, 16), nn.Linear(4, 2)))
        {'0.weight': Orthogonal(cap=1.0)}
    """
    require_module("constraints_of", model)
    constraints: dict[str, Constraint] = {}
    for prefix, module in model.named_modules():
        stated = getattr(module, "parameter_constraints", dict)()
        constraints |= {f"{prefix}.{name}" if prefix else name: constraint for name, constraint in stated.items()}
    return constraints
