"""Where a decay that works against bounded steps holds the norm of a weight: closed forms, no tensors.

A step of norm at most `u` and a decay that maps the norm by `f` give, by the triangle inequality,

    step, then project:   b' = f(b + u)
    project, then step:   b' = f(b) + u

For the clipped decay `f(b) = b` up to `upper` and `(1 - decay) b + decay upper` above (Spectral Clipping, SC, section
3.4), either recursion rises below its fixed point and falls above it. So the fixed point is a bound that is never left
once the norm is below, and the limit from above; steps that always point outward reach it. Where steps do not, the norm
stays smaller: nothing pulls it up.
"""

from typing import Literal, get_args

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE, PART, POSITIVE

Order = Literal["step-then-project", "project-then-step"]


def clipped_weight_decay_equilibrium(
    upper: float, decay: float, lr: float, order: Order = "step-then-project", overshoot: float = 1.0
) -> float:
    """The norm that spectrally clipped weight decay holds against steps of norm `u = lr * overshoot` (SC, claim 4).

    `upper + (1 - decay) / decay * u` when the decay follows the step, and `upper + u / decay` when it precedes it. SC's
    decoupled form is a decay of `lr * lambda`: its second order holds at `upper + overshoot / lambda` however small
    `lr` becomes, while a fixed `decay` sinks to `upper` as the rate falls.

    Above `upper` (0: plain weight decay), in any unit, that of the step, one decay removes the fraction `decay` of the
    excess, in (0, 1]. The largest norm `overshoot` of an update at learning rate 1 is that of the coefficient set.

    Example:
        >>> clipped_weight_decay_equilibrium(1.0, 0.25, 0.5)
        2.5
        >>> clipped_weight_decay_equilibrium(1.0, 0.25, 0.5, "project-then-step")
        3.0
    """
    require_numbers("", {"upper": upper, "lr": lr, "overshoot": overshoot}, NOT_NEGATIVE)
    require_numbers("", {"decay": decay}, PART, "at 0 no norm is held, and beyond 1 the sign flips")
    if order not in get_args(Order):
        raise ValueError(f"order={order!r} is not one of {', '.join(get_args(Order))}")
    kept = 1 - decay if order == "step-then-project" else 1.0
    return upper + kept * (lr * overshoot / decay)


def weight_decay_equilibrium(
    decay: float, lr: float | None = None, order: Order = "project-then-step", overshoot: float = 1.0
) -> float:
    """The norm that decoupled weight decay holds: `overshoot / decay` for `W <- (1 - lr decay) W + lr U`.

    LT (Training Transformers with Enforced Lipschitz Bounds), section 3, has `1 / decay` for an update of norm 1. That
    is "project-then-step", the order of `torch.optim`; when the decay follows the step, the bound is lower by
    `lr * overshoot`, and `lr` is needed. Both need `lr * decay <= 1`: beyond, the factor `1 - lr decay` is negative,
    and at `lr decay = 1.5` steps that turn with the weight's sign reach `3 / decay`.

    Example:
        >>> weight_decay_equilibrium(0.1)
        10.0
        >>> weight_decay_equilibrium(0.1, lr=0.5, order="step-then-project")
        9.5
    """
    values = {"decay": decay, "lr": 1.0 if lr is None else lr, "overshoot": overshoot}
    require_numbers("", values, POSITIVE, "otherwise there is no equilibrium")
    if lr is not None and lr * decay > 1:
        raise ValueError(
            f"lr={lr} times decay={decay} is {lr * decay:.4g}, above 1: the decay flips the weight's sign and the norm "
            "exceeds 1 / decay; lower one of them"
        )
    if order == "project-then-step":
        return overshoot / decay
    if lr is None:
        raise ValueError(f"order={order!r} needs lr: the bound is lower by one step")
    return clipped_weight_decay_equilibrium(0.0, lr * decay, lr, order, overshoot)
