"""Figures of an optimizer's weights for a logger: floats by name."""

from typing import Any

import torch
from torch import Tensor

from wellnormed.matrix import spectral_norm
from wellnormed.norms import Norm
from wellnormed.optim.around import within
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.parallel import Job
from wellnormed.parallel.placement import in_buckets


def _engine_of(optimizer: Any) -> ConditionalGradient | None:
    """The optimizer of this package, also within others, as `Averaged` and accelerate's; None if there is none."""
    while isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, ConditionalGradient):
        optimizer = within(optimizer)
    return optimizer if isinstance(optimizer, ConditionalGradient) else None


@torch.no_grad()
def scalars(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Figures of every weight that has a norm, by names that loggers sort into panels.

    - `norm/NAME`: the weight's norm in its own units, estimated as `Norm.norm` does;
    - `norm_over_cap/NAME`: the same over the bound that a constraint promises, where one does;
    - `update_over_weight/NAME`: the bound on the norm of the next step over the weight's norm, where there is one;
    - `stable_rank/NAME`: the squared Frobenius norm over the squared largest singular value, the mean over the slices,
      for norms that measure singular values.

    Of an `Averaged` they are those of its optimizer, with the weights as they are in its mode. All numbers come from
    the device in one transfer. Where weights lie over processes, every process calls this. An
    optimizer of another library is a `ValueError`.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> _ = torch.nn.init.eye_(layer.weight)
        >>> optimizer = wn.Scion(layer, lr=0.1)
        >>> _ = wn.constrain(optimizer, {"weight": wn.HardCap(2.0)})
        >>> {name: round(value, 3) for name, value in scalars(optimizer).items()}
        {'norm/weight': 1.0, 'stable_rank/weight': 4.0, 'norm_over_cap/weight': 0.5, 'update_over_weight/weight': 0.115}
    """
    engine = _engine_of(optimizer)
    if engine is None:
        raise ValueError(
            f"scalars: {type(optimizer).__name__} has no norms; pass an optimizer of this package. For "
            "constraints on another optimizer, `constraints.norms()` gives the norms"
        )
    normed = [a for a in engine.assignment if a.norm is not None]
    buckets = list(in_buckets(normed, lambda a: a.parameter, lambda a: a.norm))

    def job(norm: Norm, weights: list[Tensor]) -> Job:
        places = [torch.empty(2, dtype=torch.float64, device=weight.device) for weight in weights]
        cubic = norm.measures == "singular values"
        return Job((weights, places), lambda batch, _: (_figures(norm, batch),), read_only=1, cubic=cubic)

    jobs = (job(norm, [a.parameter.detach() for a in members]) for norm, members in buckets if norm is not None)
    results = [figures for (batch,) in engine.placement.run(jobs) for figures in batch]
    numbers = torch.stack([figures.to(results[0].device) for figures in results]).tolist() if results else []
    entries = [a for _, members in buckets for a in members]
    promised = [engine.renamed(follower, follower.promised()) for follower in engine.attached]
    caps = {name: bound for each in promised for name, bound in each.items()}
    steps, values = engine.update_norms(), {}
    for entry, (norm, rank) in zip(entries, numbers, strict=True):
        name, step = entry.name, steps[entry.name]
        values[f"norm/{name}"] = norm
        if rank:
            values[f"stable_rank/{name}"] = rank
        if name in caps:
            values[f"norm_over_cap/{name}"] = norm / caps[name]
        if step is not None and norm:
            values[f"update_over_weight/{name}"] = step / norm
    return values


def _figures(norm: Norm, weights: Tensor) -> Tensor:
    """The norm and the stable rank of every weight of a batch, `(batch, 2)` float64; a rank of 0 if there is none."""
    if norm.measures != "singular values":
        norms = norm.norm(weights).double()
        return torch.stack((norms, torch.zeros_like(norms)), -1)
    sizes, ranks = [], []
    for slices, unit in zip(norm.slices(weights), norm.slice_units(weights), strict=True):
        largest = spectral_norm(slices).double()
        squares = torch.linalg.matrix_norm(slices, dtype=torch.float64).square()
        sizes.append((largest / unit).reshape(len(weights), -1))
        ranks.append((squares / largest.square().clamp(min=torch.finfo(largest.dtype).tiny)).reshape(len(weights), -1))
    return torch.stack((torch.cat(sizes, -1).amax(-1), torch.cat(ranks, -1).mean(-1)), -1)
