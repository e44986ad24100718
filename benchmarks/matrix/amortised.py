"""Operations of caps that project every 8 steps, as overhead of a training step: counted as in `operations`.

What an optimizer step costs with a cap, less what it costs without one, on matrices that every step pushes outwards,
over `6 m n B` for `B = 393,216` tokens: on a 768 x 768 matrix, and over the hidden matrices of GPT-2 small. Caps by
products alone are those of a GPU, which computes all of a symmetric product; a CPU computes 5/8 of large ones, so those
are counted on matrices a twelfth as wide and scaled.

    python -m benchmarks.matrix.amortised
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wellnormed.constraints import Constraint, HardCap, SpectralNormalize, constrain
from wellnormed.optim import Scion

from .inputs import GPT2_LAYER, GPT2_TOKENS
from .operations import DECOMPOSITIONS, SIDE
from .record import write

EVERY = 8
LIMIT = 0.001
"""Demanded of caps that project every 8 steps: share of a 140M model's operations at the paper's configuration."""
FULL = 64
"""Side of the matrices on which products alone are counted."""


@dataclass(frozen=True, repr=False)
class HardCapByProducts(HardCap):
    """As a GPU computes it."""

    _method = "products"


@dataclass(frozen=True, repr=False)
class SpectralNormalizeByProducts(SpectralNormalize):
    """As a GPU computes it."""

    _method = "products"


KINDS = {
    "HardCap": HardCap,
    "SpectralNormalize": SpectralNormalize,
    "HardCap, products": HardCapByProducts,
    "SpectralNormalize, products": SpectralNormalizeByProducts,
}


def count_constrained(constraint: Constraint | None, shape: tuple[int, int], steps: int) -> int:
    """Operations of so many steps of Scion on a matrix at its cap of 2, after one that is not counted."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.orthogonal_(layer.weight, 2.0 * (shape[0] / shape[1]) ** 0.5)
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


def added(kind: type[HardCap | SpectralNormalize], every: int, steps: int, shape: tuple[int, int]) -> float:
    """Operations a step that a cap adds, on average over so many steps."""
    scale = min(shape) / FULL if kind._method == "products" else 1.0
    counted = round(shape[0] / scale), round(shape[1] / scale)
    with_it, without = (count_constrained(cap, counted, steps) for cap in (kind(2.0, every=every), None))
    return (with_it - without) / steps * scale**3


def run(side: int = SIDE, every: int = EVERY, layer: tuple[tuple[int, int], ...] = GPT2_LAYER) -> list[dict]:
    """What caps cost a step, over as many steps as they wait, beside what they cost after every step."""
    rows = []
    for name, kind in KINDS.items():
        each, waiting = ({shape: added(kind, k, every, shape) for shape in {(side, side), *layer}} for k in (1, every))
        square = 6 * side**2 * GPT2_TOKENS
        hidden = 6 * sum(m * n for m, n in layer) * GPT2_TOKENS
        rows.append(
            {
                "constraint": name,
                "every": every,
                "operations_over_n3_every_1": each[side, side] / side**3,
                "operations_over_n3": waiting[side, side] / side**3,
                "share_of_a_step_every_1": each[side, side] / square,
                "share_of_a_step": waiting[side, side] / square,
                "share_gpt2_every_1": sum(each[shape] for shape in layer) / hidden,
                "share_gpt2": sum(waiting[shape] for shape in layer) / hidden,
                "demand": LIMIT,
            }
        )
    return rows


def main() -> None:
    """Count, write and print."""
    torch.manual_seed(0)
    rows = run()
    for row in rows:
        shares = (
            row[key] for key in ("share_of_a_step_every_1", "share_of_a_step", "share_gpt2_every_1", "share_gpt2")
        )
        print(f"{row['constraint']:28} {'  '.join(f'{share:7.3%}' for share in shares)}")
    write(
        "operations-of-amortised-caps",
        "python -m benchmarks.matrix.amortised",
        {"side": SIDE, "tokens": GPT2_TOKENS, "rows": rows},
    )


if __name__ == "__main__":
    main()
