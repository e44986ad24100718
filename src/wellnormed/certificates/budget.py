"""Caps that keep a Lipschitz constant, and move to where they cost the loss least: `constrain(lipschitz=...)`."""

import math
from collections.abc import Container, Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from wellnormed._devices import recording
from wellnormed.certificates.printing import NORMALIZATIONS, RECTIFIED, factors
from wellnormed.certificates.proved_caps import ProvedCaps
from wellnormed.certificates.sizes import UNITS, Unit, entries_of
from wellnormed.certificates.within import LEAST, TOLERANCE, BudgetError, Caps, Within
from wellnormed.constraints import enforcing
from wellnormed.constraints.weights import Constrained
from wellnormed.parallel.layout import whole
from wellnormed.proof import Row
from wellnormed.proof.decimals import root, rounding_up, shown
from wellnormed.routing.patterns import bare_names
from wellnormed.routing.tables import aligned

SAMPLES = 10
"""How many gradients are measured between two moves of the caps."""
LONGEST, SHORTEST, KEPT = 0.2, 0.01, 0.5
"""The largest change of a cap's logarithm in one move; caps stay if all changes are below the second number; the third
is the share of the measured savings that is carried over to the next move."""
FREE = 1e3
"""The cap of parameters that the constant does not depend on, such as the biases of an MLP: too large to matter."""


class Budget(ProvedCaps):
    """Constraints whose caps keep the model's Lipschitz constant, and are moved every few steps.

    **What holds.** After every step each weight is within its cap, and all weights within these caps are proved to
    give at most the requested constant (`ProvedCaps`). It is proved again whenever caps have moved, before weights are
    projected onto lower caps; all of this happens within one call of `step`, and without a proof the caps stay.

    **Where caps start.** In proportion to the norms of the weights, at least 1 each, times the one factor that gives
    the constant. Parameters that it does not depend on get the cap `FREE`; a token table gets the domain's radius.

    **Where caps move.** With `e_i = -<gradient_i, W_i>`, the loss that a larger cap would save, and
    `a_i = d log L / d log c_i`, a small change `t_i` of the logarithms of the caps saves `sum e_i t_i` and costs
    `sum a_i t_i`. Where the loss is minimal at a constant L, all `e_i / a_i` agree (Lagrange), and log L is convex in
    the logarithms of caps unless the proof takes the smaller of two bounds. So caps move along
    `t_i ~ e_i / a_i - sum e / sum a`, by at most `LONGEST`: the steepest ascent of the savings along the surface of
    constant L, in the metric `sum a_i t_i^2`. One factor on all caps then restores the constant. Multipliers are not
    negative: a weight that the loss wants smaller does not need its cap, so its e counts as 0; while most of the
    measured loss lies there, as at the start, nothing moves. The a are difference quotients of proofs. After each move
    one of them, in turn, is computed anew; the others are corrected by Broyden's rule (1965).

    Averages of weights keep caps that stand still, and not those that move: under `wn.Averaged` caps stay.
    """

    what, apart = "constant", "the constant does not depend on it"

    def __init__(self, *given: Any, words: str, costs: Caps, every: int, rectified: bool, **proved: Any) -> None:
        self._words, self._every, self._rectified = words, every, rectified
        self._count = torch.zeros((), dtype=torch.int64)
        self._costs = {name: torch.tensor(cost, dtype=torch.float64) for name, cost in costs.items()}
        constrained: tuple[Constrained, ...] = given[1]
        self._moving = [c for c in constrained if c.name in costs]
        self._saved = {c.name: torch.zeros((), device=c.parameter.device) for c in self._moving}
        super().__init__(*given, **proved)

    def __str__(self) -> str:
        """The caps, and the shares of the constant and of the loss that each has: at the best caps these agree."""
        costs, saved = ({name: float(x) for name, x in each.items()} for each in (self._costs, self._saved))
        total, most = (sum(map(abs, each.values())) or 1.0 for each in (costs, saved))
        rows, caps = [("parameter", "constraint", "of log L", "of the loss")], self.caps()
        for name, text in self.shown().items():
            if costs.get(name, 0.0) > 0:
                rows.append((name, text, f"{costs[name] / total:.0%}", f"{saved[name] / most:.0%}"))
            else:
                rows.append((name, f"free up to {FREE:g}" if caps.get(name) == FREE else text, "", ""))
        rows += [(name, "none", "", why) for name, why in self._left_out.items()]
        moves = f"move every {self._every} steps" if self._every else "stay"
        head = f"Lipschitz constant at most {self._words}\nafter every step, for {self._within.inputs}; caps {moves}"
        return "\n".join([head, *self._notes(), aligned(rows), *[RECTIFIED] * self._rectified])

    __repr__ = __str__

    def before(self, optimizer: torch.optim.Optimizer, changes: Mapping[str, float]) -> None:
        super().before(optimizer, changes)
        if not self._every or len(self._still) == len(self._constrained) or self._recording():
            return
        self._count += 1
        if int(self._count) % max(1, self._every // SAMPLES) == 0:
            for c in self._moving:
                if (gradient := c.parameter.grad) is not None and self._costs[c.name] > 0:
                    product = gradient.detach().float() * c.parameter.detach().float()
                    self._saved[c.name] -= whole(product.sum())

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        super().after(optimizer)
        if self._every and (count := int(self._count)) and count % self._every == 0 and not self._recording():
            self._move()

    def accept(self, written: Container[Tensor]) -> None:
        self._every = 0  # an average of weights is within caps that stand still
        super().accept(written)

    def _flat_state(self) -> dict[str, Tensor]:
        bare = bare_names(c.name for c in self._constrained)
        own: dict[str, Tensor] = {}
        for key, tensors in {"cost": self._costs, "saved": self._saved}.items():
            own |= {f"{bare[name]}.{key}": tensor for name, tensor in tensors.items()}
        own |= {f"{bare[c.name]}.steps": self._count for c in self._moving[:1]}
        return super()._flat_state() | own

    def _recording(self) -> bool:
        return any(map(recording, {c.parameter.device for c in self._moving}))

    def _move(self) -> None:
        """Move the caps to where they save more of the loss at the same constant, and bring weights below them."""
        for tensor in self._saved.values():
            tensor.nan_to_num_(0.0, 0.0, 0.0)
        signed = {f"{sign}{name}": max(0.0, sign * float(x)) for name, x in self._saved.items() for sign in (1, -1)}
        agreed = self._agree(signed)
        for tensor in self._saved.values():
            tensor *= KEPT
        before = self.caps()
        costs = {name: float(cost) for name, cost in self._costs.items() if float(cost) > 0}
        saved, total = {name: agreed[f"1{name}"] for name in costs}, sum(costs.values())
        if not sum(saved.values()) > sum(agreed[f"-1{name}"] for name in costs):
            return  # smaller weights would help more than larger ones, as before they have found their directions
        level = sum(saved.values()) / total
        ahead = {name: LONGEST * (saved[name] / cost / level - 1) for name, cost in costs.items()}
        if max(map(abs, ahead.values())) < SHORTEST:
            return
        moved = {name: before[name] * math.exp(min(LONGEST, by)) for name, by in ahead.items()}
        moved = {name: min(FREE, max(1 / FREE, cap)) for name, cap in moved.items()}
        still = {name: cap for name, cap in before.items() if name not in moved}
        try:
            caps = self._within.scaled(moved, self._asked, still, total)
        except BudgetError:
            return
        self._take(caps)
        enforcing.project([c for c in self._moving if caps[c.name] < before[c.name]], self._placement)
        self._remember()
        steps = {name: math.log(caps[name] / before[name]) for name in costs}
        wrong = sum(costs[name] * step for name, step in steps.items()) / sum(step**2 for step in steps.values())
        for name, step in steps.items():  # the change that was foreseen was not there: Broyden's least correction
            self._costs[name].fill_(max(costs[name] - wrong * step, costs[name] / 2))
        one = list(costs)[int(self._count) // self._every % len(costs)]
        self._costs[one].fill_(self._within.elasticities(caps, [one])[one])


def caps_of_constant(within: Within, start: Caps, lipschitz: float) -> tuple[Caps, Caps, list[str]]:
    """Caps that give a Lipschitz constant: those at the start, times one factor.

    Returns:
        The caps; for each, by how many per cent the constant grows if it grows by one per cent; and the names of the
        parameters that the constant does not depend on.
    """
    caps, pinned = start, within.tables()
    try:
        for _ in range(3):  # at other caps the proof may choose among bounds otherwise
            caps = within.scaled({name: cap for name, cap in caps.items() if name not in pinned}, lipschitz, pinned)
            if abs(within.log(caps) - within.walked_at(caps)) <= TOLERANCE:
                break
    except BudgetError as error:
        around = within.constant({name: cap if name in pinned else cap * 1e-9 for name, cap in caps.items()})
        raise ValueError(_too_small(lipschitz, error, around)) from None
    costs = within.elasticities(caps, [name for name in caps if name not in pinned])
    caps = within.freed(caps, FREE, free := [name for name, cost in costs.items() if not cost])
    if not within.constant(caps) <= Decimal(lipschitz):
        raise ValueError(f"constrain: no caps were proved to keep lipschitz={lipschitz}; please report it")
    return caps, costs, free


def in_both(most: float, unit: Unit, rows: Sequence[Row]) -> dict[Unit, Decimal]:
    """A constant in the unit that was asked for, and in the other one."""
    (other,) = UNITS.keys() - {unit}
    with rounding_up():
        ratio = root(Decimal(entries_of(rows, unit)) / entries_of(rows, other))
        return {unit: Decimal(most), other: Decimal(most) * ratio}


def _too_small(lipschitz: float, error: BudgetError, around: Decimal) -> str:
    """The message for a constant that is too small: the smallest possible one, and which operations prevent less.

    Without the weights it would be `around`.
    """
    steep = [each for each in factors(error.rows) if each[1] > 0.05] if error.rows else []
    largest = sorted(steep, key=lambda each: -each[1])[:3]
    least = shown(error.least) if error.rows else "not proved"
    words = ", ".join(f"{row.name} ({row.operation}) by {shown(10**factor, '.3g')}" for row, factor in largest)
    what = f"What multiplies it most: {words}"
    remedy = "wn.initialize_(model) begins again with weights of norm 1, before wn.calibrate"
    if any(row.operation == "normalization" for row, _ in largest):
        remedy = NORMALIZATIONS
    elif error.rows and lipschitz < around:
        what = "What has no cap keeps it, as residual connections and frozen weights do" + f": {words}" * bool(words)
        remedy = "Ask for at least that"
    return (
        f"constrain: lipschitz={lipschitz} is less than these weights can be shrunk to: with {LEAST:g} of their norms "
        f"as caps the constant is {least}. {what}. {remedy}; frozen weights and tables keep their size"
    )
