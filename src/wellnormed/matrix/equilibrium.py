"""The norm at which a decay balances steps of bounded norm: closed forms, no tensors.

If a step has norm at most `u` and a decay maps the norm by `f`, then, by the triangle inequality,

    step, then project:   b' = f(b + u)
    project, then step:   b' = f(b) + u

For the clipped decay `f(b) = b` up to `upper` and `(1 - decay) b + decay upper` above (Spectral Clipping, SC, section
3.4), either recursion rises below its fixed point and falls above it. So a norm below the fixed point stays below it,
and a norm above it converges to it. Steps that always point outward reach the fixed point; with other steps the norm
may stay smaller.
"""

from typing import Literal, get_args

from wellnormed._inputs import require_choice, require_numbers
from wellnormed._ranges import NOT_NEGATIVE, PART

Order = Literal["step-then-project", "project-then-step"]


def clipped_weight_decay_equilibrium(
    upper: float, decay: float, lr: float, order: Order = "step-then-project", overshoot: float = 1.0
) -> float:
    """The norm that spectrally clipped weight decay holds against steps of norm `u = lr * overshoot` (SC, claim 4).

    It is `upper + (1 - decay) / decay * u` if the decay follows the step, and `upper + u / decay` if it precedes it.
    SC's decoupled form has a decay of `lr * lambda`. If it precedes the step, the equilibrium is
    `upper + overshoot / lambda` for every `lr`; with a fixed `decay` it falls to `upper` together with `lr`.

    With `upper=0` this is plain weight decay: `W <- (1 - lr lambda) W + lr U` has `decay = lr * lambda`, precedes the
    step as in `torch.optim`, and has the equilibrium `overshoot / lambda` (Training Transformers with Enforced
    Lipschitz Bounds, section 3) while `lr lambda <= 1`. Beyond, the factor is negative, and steps that turn with the
    weight's sign lead further.

    Args:
        upper: The norm above which the decay acts, in the unit of the step.
        decay: The fraction of the excess that one decay removes, in (0, 1].
        lr: The learning rate.
        order: Which of the two comes first.
        overshoot: The largest norm of an update at learning rate 1, which the coefficient set states.

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
