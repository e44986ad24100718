"""The functions that ours are compared with: plain loops, those of torch, and those of packages of the extra `bench`.

geotorch and orthogonium (and torch's `orthogonal`) parametrise a weight; they hold no function that clips given
singular values. They are compared where they do the same job: a weight with orthonormal rows or columns, and a weight
of spectral norm 1. Each is used as its documentation shows, without gradients.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim._muon import _zeropower_via_newtonschulz

from wellnormed.matrix import REGISTRY

Function = Callable[[Tensor], Tensor]
Call = Callable[[], object]

MISSING = "not installed: in a clone type pip install '.[bench]'"
"""Row of a package that is absent."""


def package(name: str) -> ModuleType | None:
    """The package, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def plain_newton_schulz(x: Tensor, coefficients: str = "jordan-5") -> Tensor:
    """The loop of Muon (Jordan, 2024), in the dtype of `x` and on its small side, with no further check or care."""
    if x.shape[-2] > x.shape[-1]:
        return plain_newton_schulz(x.mT, coefficients).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in REGISTRY[coefficients].steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def torch_muon(x: Tensor) -> Tensor:
    """`torch.optim.Muon`'s iteration with its defaults, bfloat16 inside; takes one matrix at a time."""
    if x.ndim == 2:
        return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    return torch.stack([torch_muon(matrix) for matrix in x])


def svd_sign(x: Tensor) -> Tensor:
    """The polar factor by `torch.linalg.svd`, in the dtype of `x`."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def svd_cap(x: Tensor, upper: float) -> Tensor:
    """Every singular value at most `upper`, by `torch.linalg.svd`, in the dtype of `x`."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * s.clamp_max(upper)[..., None, :]) @ vh


def gram_newton_schulz() -> Function | str:
    """The package of that name without its CUDA kernels and compilation; float16 inside. Or why it cannot run."""
    found = package("gram_newton_schulz")
    if found is None:
        return "not installed: pip install --no-deps gram-newton-schulz"
    try:
        function = found.GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
        function(torch.eye(2, 3))
    except Exception as error:  # whatever a package for CUDA raises elsewhere becomes its row
        return f"cannot run here: {type(error).__name__}: {error}"
    return function


def _linear(x: Tensor) -> nn.Linear:
    layer = nn.Linear(x.shape[-1], x.shape[-2], bias=False)
    layer.weight.data.copy_(x)
    return layer


def orthonormal_weights(x: Tensor) -> dict[str, Call | str]:
    """Weights of the shape of `x` with orthonormal rows or columns: one evaluation of each parametrisation."""
    plain = _linear(x)
    nn.init.orthogonal_(plain.weight)  # torch's `orthogonal` starts from an orthogonal weight
    by_torch = parametrizations.orthogonal(plain)
    found: dict[str, Call | str] = {"torch orthogonal": lambda: by_torch.weight}
    geotorch, orthogonium = package("geotorch"), package("orthogonium.reparametrizers")
    if geotorch is None:
        found["geotorch orthogonal"] = MISSING
    else:
        by_geotorch = _linear(x)
        geotorch.orthogonal(by_geotorch, "weight")
        found["geotorch orthogonal"] = lambda: by_geotorch.weight
    if orthogonium is None:
        found["orthogonium Björck 12"] = MISSING
    else:
        defaults = orthogonium.OrthoParams()  # three power iterations, then twelve of Björck
        normalise, orthogonalise = (make(weight_shape=tuple(x.shape)) for make in (
            defaults.spectral_normalizer, defaults.orthogonalizer))  # fmt: skip
        found["orthogonium Björck 12"] = lambda: orthogonalise(normalise(x))
    return found


def unit_norm_weights(x: Tensor) -> dict[str, Call | str]:
    """`x` over its spectral norm, by power iterations: one evaluation in training mode."""
    by_torch = parametrizations.spectral_norm(_linear(x))  # 15 iterations when it is made, one per evaluation
    found: dict[str, Call | str] = {"torch spectral_norm": lambda: by_torch.weight}
    orthogonium = package("orthogonium.reparametrizers")
    if orthogonium is None:
        found["orthogonium power iteration"] = MISSING
    else:
        normalise = orthogonium.BatchedPowerIteration(tuple(x.shape))
        found["orthogonium power iteration"] = lambda: normalise(x)
    return found
