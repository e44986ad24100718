"""Initialise every weight of a model by its norm."""

from collections.abc import Mapping

import torch
from torch import nn

from wellnormed._inputs import require_numbers, require_patterns
from wellnormed._ranges import POSITIVE
from wellnormed.norms.base import Norm
from wellnormed.routing.assignment import Assignment, assign_norms
from wellnormed.routing.recipes import DEFAULT_RECIPE, RecipeName


@torch.no_grad()
def initialize_(
    model: nn.Module | Assignment,
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Mapping[str, Norm | None] | None = None,
    *,
    radii: Mapping[str, float] | None = None,
    generator: torch.Generator | None = None,
) -> Assignment:
    """Fill every trainable parameter that has a norm with a random point on the sphere of its radius, in place.

    Matrices become semi-orthogonal (each part of a fused one, each position of a kernel, each expert), embedding
    vectors Gaussian of RMS 1, heads under `Sign` random signs. Biases and other vectors become 0, the centre of their
    ball, as in LMO's released code; so does the row of a table for padding. Gains become 1 whatever their radius,
    except gains that are all zeros, which stay: their layer multiplies by `1 + weight`, or starts without its branch.
    (Memory from `to_empty` may be zeros too, so let the model fill its gains first.) Frozen parameters and those of
    AdamW keep their values. The returned assignment can be passed to an optimizer.

    Args:
        model: The model, or what `assign_norms` returned for it.
        recipe: See `assign_norms`; its published radii apply, as in LMO's released code.
        overrides: See `assign_norms`.
        radii: Name pattern -> radius, as the optimizers take it.
        generator: The source of random numbers, drawn in the model's order; torch's default generator if None.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8))
        >>> norms = initialize_(model, generator=torch.Generator().manual_seed(0))
        >>> [round(float(a.norm.norm(a.parameter.detach())), 3) for a in norms]
        [1.0, 1.0, 0.0]
    """
    if not isinstance(generator, torch.Generator | None):
        kind = type(generator).__name__
        raise ValueError(f"generator must be a torch.Generator, got {kind}; pass torch.Generator().manual_seed(0)")
    radii = {} if radii is None else radii
    require_patterns("initialize_: ", {"radii": radii})
    require_numbers("initialize_: ", {f"radii[{pattern!r}]": value for pattern, value in radii.items()}, POSITIVE)
    assignment = model if isinstance(model, Assignment) else assign_norms(model, recipe, overrides)
    radius_of = assignment.match(radii, "radii of initialize_").owner
    for a in assignment:
        if a.parameter.is_meta:
            raise ValueError(f"parameter {a.name!r} is on the meta device; call model.to_empty(device=...) first")
    for a in assignment:
        if a.norm is not None:
            published = 1.0 if a.by_start else a.radius
            a.norm.start_(a.parameter, radii[radius_of[a.name]] if a.name in radius_of else published, generator)
            if a.padding is not None:
                a.parameter[a.padding].zero_()
    return assignment
