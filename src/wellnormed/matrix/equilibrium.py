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

from wellnormed._inputs import require_choice, require_numbers
from wellnormed._ranges import NOT_NEGATIVE, PART

Order = Literal["step-then-project", "project-then-step"]


def clipped_weight_decay_equilibrium(
    upper: float, decay: float, lr: float, order: Order = "step-then-project", overshoot: float = 1.0
) -> float:
    """The norm that spectrally clipped weight decay holds against steps of norm `u = lr * overshoot` (SC, claim 4).

    `upper + (1 - decay) / decay * u` when the decay follows the step, and `upper + u / decay` when it precedes it. SC's
    decoupled form is a decay of `lr * lambda`: its second order holds at `upper + overshoot / lambda` however small
    `lr` becomes, while a fixed `decay` sinks to `upper` as the rate falls.

    With `upper=0` it is that of plain decay: `W <- (1 - lr lambda) W + lr U` has `decay = lr * lambda`, precedes the
    step as in `torch.optim`, and holds at `overshoot / lambda` (Training Transformers with Enforced Lipschitz Bounds,
    section 3) while `lr lambda <= 1`; beyond, the factor is negative, and steps that turn with the weight's sign lead
    further.

    Above `upper`, in any unit, that of the step, one decay removes the fraction `decay` of the
    excess, in (0, 1]. The largest norm `overshoot` of an update at learning rate 1 is that of the coefficient set.

    Example:
        >>> clipped_weight_decay_equilibrium(1.0, 0.25, 0.5)
        2.5
        >>> clipped_weight_decay_equilibrium(1.0, 0.25, 0.5, "project-then-step")
        3.0
    """
    require_numbers("", {"upper": upper, "lr": lr, "overshoot": overshoot}, NOT_NEGATIVE)
    require_numbers("", {"decay": decay}, PART, "at 0 no norm is held, and beyond 1 the sign flips")
    require_choice("order", order, get_args(Order))
    kept = 1 - decay if order == "step-then-project" else 1.0
    return upper + kept * (lr * overshoot / decay)
