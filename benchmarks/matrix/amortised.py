"""Operations of caps that project every 8 steps, as overhead of a training step: counted as in `operations`.

What an optimizer step costs with a cap, less what it costs without one, on a 768 x 768 matrix that every step pushes
outwards, over `6 * 768 * 768 * B` for `B = 393,216` tokens.

    python -m benchmarks.matrix.amortised
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wellnormed.constraints import Constraint, HardCap, SpectralNormalize, constrain
from wellnormed.optim import Scion

from .inputs import GPT2_TOKENS
from .operations import DECOMPOSITIONS, SIDE
from .record import write

EVERY = 8
LIMIT = 0.001
"""Demanded of caps that project every 8 steps: share of the training step at the paper's configuration."""


def count_constrained(constraint: Constraint | None, side: int, steps: int) -> int:
    """Operations of so many steps of Scion on a square matrix at its cap of 2, after one that is not counted."""
    layer = nn.Linear(side, side, bias=False)
    nn.init.orthogonal_(layer.weight, 2.0)
    optimizer = Scion(layer, lr=0.02, momentum=0.0)
    if constraint is not None:
        constrain(optimizer, {"weight": constraint})
    found = 0
    for i in range(1 + steps):
        layer.weight.grad = -layer.weight.detach().clone()
        with FlopCounterMode(display=False, custom_mapping=DECOMPOSITIONS) as counter:
            optimizer.step()
        found += counter.get_total_flops() if i else 0
    return found


def run(side: int = SIDE, every: int = EVERY) -> list[dict]:
    """What caps cost a step, over as many steps as they wait, beside what they cost after every step."""
    plain = count_constrained(None, side, every)
    step = 6 * side**2 * GPT2_TOKENS * every
    rows = []
    for kind in (HardCap, SpectralNormalize):
        each, waiting = (count_constrained(kind(2.0, every=k), side, every) - plain for k in (1, every))
        rows.append(
            {
                "constraint": kind.__name__,
                "every": every,
                "share_of_a_step_every_1": each / step,
                "share_of_a_step": waiting / step,
                "demand": LIMIT,
            }
        )
    return rows


def main() -> None:
    """Count, write and print."""
    torch.manual_seed(0)
    rows = run()
    for row in rows:
        print(f"{row['constraint']:18} {row['share_of_a_step_every_1']:7.3%} {row['share_of_a_step']:7.3%}")
    write(
        "operations-of-amortised-caps",
        "python -m benchmarks.matrix.amortised",
        {"side": SIDE, "tokens": GPT2_TOKENS, "rows": rows},
    )


if __name__ == "__main__":
    main()
