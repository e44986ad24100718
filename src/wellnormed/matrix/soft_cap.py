"""The polynomial soft cap of LT, appendix B, and the strength it needs.

LT is Training Transformers with Enforced Lipschitz Bounds. `p = p2(p1)` with `p1(x) = x - a x^3`, `p2(x) = x + a x^3`.
With `t = a x^2` this is `p(x) = x (1 - 3 t^2 + 3 t^3 - t^4)`, whose bracket falls strictly in `t`; `p` has one maximum,
`(62/81) x` at `t = 1/3`, because `p'(x) = (1 - 3 t)(1 + 3 t (1 - t)^2)`.
"""

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._precision import all_digits
from wellnormed._ranges import NOT_NEGATIVE, POSITIVE
from wellnormed.matrix._checks import Matrices, as_bound, check_matrix, fails, to_check, working_dtype
from wellnormed.matrix._symmetric import symmetric_product, times_symmetric

_PUBLISHED_LIMIT = 81 / 62  # beyond it, p exceeds the cap inside (0, k) with the published strength
_CONSTANT_STRENGTH = (62 / 81) ** 2 / 3 * (1 + 2.0**-50)  # (62 / (81 sqrt 3))^2 = 0.1952954..., rounded up
SOFT_CAP_LIMIT = 2.6129  # |p| <= 1 on [0, 2.61290...] with that strength


def soft_cap(w: Matrices, strength: float | Tensor) -> Matrices:
    """Apply `p2(p1(.))` to the singular values, through the Gram matrix of the smaller side (four products).

    The strength is `a >= 0`, in 1 / (spectral units squared), a number or one per matrix: see `soft_cap_strength`.
    Differentiable in `w` by plain autograd; bfloat16 and float16 are computed in float32.

    Example:
        >>> w = torch.diag(torch.tensor([1.1, 0.2]))
        >>> soft_cap(w, soft_cap_strength(1.0, 0.1)).diagonal().round(decimals=4)
        tensor([1.0000, 0.2000])
    """
    check_matrix(w, "w")
    alpha = as_bound(strength, w, "strength")
    known = to_check(strength, alpha)
    if fails((known >= 0) & known.isfinite()):
        raise ValueError(f"strength={strength} must be finite and at least 0; see soft_cap_strength")
    return _polynomial(w, alpha)


@all_digits()
def _polynomial(w: Tensor, alpha: Tensor) -> Tensor:
    """`W (1 - 3 t^2 + 3 t^3 - t^4)` with `t = a W^T W` of the smaller side, as W plus a correction, to keep W exact."""
    if w.shape[-2] < w.shape[-1]:
        return _polynomial(w.mT, alpha).mT
    work = w.to(working_dtype(w))
    # sqrt(a) multiplies W: at |W| = 1e30, a = 1e-60 underflows in float32, but sqrt(a) W is of order 1.
    multiple = work * alpha.sqrt().to(work.dtype)[..., None, None]
    t = symmetric_product(multiple.mT, multiple)
    square = symmetric_product(t, t)
    identity = torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    return (work + times_symmetric(work, square @ (-3 * identity + 3 * t - square))).to(w.dtype)


def soft_cap_strength(cap: float, update_norm: float, decay: float = 0.0) -> float:
    """The smallest strength known to bring every weight of norm `k` back to `cap`, rounded up.

    After a step, `k = cap (1 - decay) + update_norm`. LT, theorem B.1, solves `p(k) = cap`; that bounds `p`
    on `[0, k]` only while `k <= (81/62) cap`. Beyond, the strength that puts the maximum of `p` at `cap`
    holds up to `2.6129 cap`. Where decay alone keeps the cap, the strength is 0.

    Args:
        cap: Cap, in spectral units.
        update_norm: True norm of the step in the same units: learning rate x overshoot of the coefficient set.
        decay: Fraction of the weight removed by the step's weight decay (lambda x learning rate), in [0, 1).

    Example:
        >>> soft_cap_strength(1.0, 0.01, decay=0.02)
        0.0
        >>> round(soft_cap_strength(1.0, 0.5), 6)
        0.195295
    """
    ratio = reached_norm(cap, update_norm, decay) / cap
    if ratio <= 1:
        return 0.0
    ratio *= 1 + 2.0**-51  # the sum, the product and the quotient were rounded
    if ratio > SOFT_CAP_LIMIT:
        raise ValueError(
            f"update_norm={update_norm} with cap={cap} and decay={decay} reaches {ratio:.4g} times the cap; "
            f"a soft cap holds only up to {SOFT_CAP_LIMIT} times: lower the learning rate or use spectral_hardcap"
        )
    strength = min(root_strength(ratio), _CONSTANT_STRENGTH) if ratio <= _PUBLISHED_LIMIT else _CONSTANT_STRENGTH
    return strength / cap / cap * (1 + 2.0**-50)


def reached_norm(cap: float, update_norm: float, decay: float = 0.0) -> float:
    """The norm after one step from the cap; refuses numbers that cannot be a cap, a step or a decay."""
    require_numbers("", {"cap": cap}, POSITIVE, "to keep a weight at zero, freeze it")
    require_numbers("", {"update_norm": update_norm}, NOT_NEGATIVE, "give learning rate x overshoot")
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} must lie in [0, 1); give lambda x learning rate, which a step removes")
    return cap * (1 - decay) + update_norm


def root_strength(ratio: float) -> float:
    """The root `t`, from above, of `ratio (1 - 3 t^2 + 3 t^3 - t^4) = 1`, as the strength `t / ratio^2`."""
    low, high = 0.0, 2.0  # the bracket is 1 at t = 0 and -3 at t = 2
    while (middle := (low + high) / 2) not in (low, high):
        if 1 - middle * middle * (3 - 3 * middle + middle * middle) > 1 / ratio:
            low = middle
        else:
            high = middle
    # Near t = 0 the bracket rounds 1 - 3 t^2 to a multiple of 2^-53: move t up by the error that this can cause.
    return (high + 2.0**-52 / high) / ratio**2
