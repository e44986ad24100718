"""Caps within which no attention logit exceeds a number: `constrain(largest_logit=...)`."""

from collections.abc import Mapping
from decimal import Decimal

import torch
from torch import Tensor

from wellnormed.certificates.proved_caps import ProvedCaps
from wellnormed.certificates.within import LEAST, BudgetError, Caps, Within, logits_of
from wellnormed.constraints import Constraints
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof import Proof
from wellnormed.proof.decimals import shown
from wellnormed.routing.tables import aligned

_ALIKE = Decimal("1.01")
_STEP = 1 - 1e-2
"""The factor on a cap with which logits are computed again, to find those that depend on the cap."""


class Logits(ProvedCaps):
    """Constraints whose caps bound the logits of every attention by one number, for every input of the domain.

    Caps do not move, and only parameters that a logit depends on have one: behind a norm layer, its gain and bias and
    the projections to queries and keys. Caps are in proportion to the norms at the start (at least 1 each, vectors
    1/4), per head where a module says how many heads it has. The attentions are treated in order; one factor scales the
    caps of each that no earlier one has scaled.
    """

    what, apart = "largest logit", "no logit depends on it"

    def logits(self) -> dict[str, float]:
        """Row of an attention -> a proved bound on its logits for all weights within the caps."""
        return {row: float(logit) for row, logit in logits_of(self._within.proof(self.caps())).items()}

    def __str__(self) -> str:
        """The number of every attention, and the caps."""
        rows = [("attention", "largest logit"), *((row, shown(logit, ".4g")) for row, logit in self.logits().items())]
        head = f"No attention logit beyond {shown(self._asked)} after any step, for {self._within.inputs}"
        return "\n".join([head, *self._notes(), aligned(rows), Constraints.__str__(self)])

    __repr__ = __str__


def most_logit(proof: Proof) -> Decimal:
    """The largest logit of all attentions."""
    return max(logits_of(proof).values())


def for_most_inputs(within: Within, caps: Caps) -> Within:
    """`within` for every finite input, if that hardly enlarges logits, as behind norm layers; else `within` itself."""
    wide, here = within.for_all_inputs(), logits_of(within.proof({**caps, **within.tables()}))
    try:
        everywhere = logits_of(wide.proof(caps))
    except UncertifiableError:
        return within
    alike = here.keys() == everywhere.keys() and all(everywhere[row] <= logit * _ALIKE for row, logit in here.items())
    return wide if alike else within


def logit_caps(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], within: Within, start: Caps, most: float
) -> Caps:  # fmt: skip
    """Find caps within which all logits are proved to be at most `most`, for the parameters that they depend on.

    Args:
        optimizer: The optimizer; it must have all of these parameters.
        parameters: Name -> parameter.
        within: The proved function; changed in place. Afterwards other parameters have no caps, and its measure is the
            largest logit.
        start: Name -> the cap to start from.
        most: The largest logit.
    """
    pinned = within.tables()
    caps: Caps = {**start, **pinned}
    if not (first := logits_of(within.proof(caps))):
        raise ValueError(
            "constrain: largest_logit= is of attention, and this model has none whose logits are bounded: neither "
            "scaled_dot_product_attention nor softmax(scale q k^T + mask) v; cap queries and keys by hand"
        )
    depends = _depends(within, caps, _STEP)
    if hidden := [row for row, names in depends.items() if not names and first[row] > most]:  # by a soft cap of logits
        far = _depends(within, caps, LEAST)
        low = {**caps, **{name: caps[name] * LEAST for row in hidden for name in far[row]}}
        depends |= {row: names for row, names in _depends(within, low, _STEP).items() if row in hidden}
    needed = {name for names in depends.values() for name in names} | pinned.keys()  # a table's rows are the inputs
    caps = {name: cap for name, cap in caps.items() if name in needed}
    within.forget({*start, *pinned} - needed)
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    if others := [name for name in caps if parameters[name] not in owned]:
        raise ValueError(
            f"constrain: logits depend on {', '.join(others)}, which another optimizer moves; put them into this one, "
            "as wn.Muon and wn.Scion have all, or freeze them"
        )
    for _ in range(3):  # at other caps the proof may choose among bounds otherwise
        done = set(pinned)
        for row, names in depends.items():
            free = [name for name in names if name not in pinned]
            moving = [name for name in free if name not in done] or free
            done |= {*moving}
            within.measured_by(lambda proof, row=row: logits_of(proof)[row])
            if moving:
                rest = {name: cap for name, cap in caps.items() if name not in moving}
                caps = _scaled(within, row, {name: caps[name] for name in moving}, most, rest)
        within.measured_by(most_logit).walked_at(caps)
        if within.constant(caps) <= Decimal(most):
            return caps
    raise ValueError(
        f"constrain: no caps were proved to keep largest_logit={most}; frozen weights, tables, parameters "
        f"without a norm and the given constraints leave logits of up to {shown(within.constant(caps))}"
    )


def _depends(within: Within, caps: Caps, step: float) -> dict[str, list[str]]:
    """Row of an attention -> the caps by whose change, each times `step`, its logits change."""
    here = logits_of(within.proof(caps))
    moved = {name: logits_of(within.proof({**caps, name: cap * step})) for name, cap in caps.items()}
    return {row: [name for name in caps if moved[name].get(row) != logit] for row, logit in here.items()}


def _scaled(within: Within, row: str, caps: Caps, most: float, rest: Caps) -> Caps:
    try:
        return within.scaled(caps, most, rest, degree=2.0)
    except BudgetError as error:
        raise ValueError(
            f"constrain: largest_logit={most} is less than {row} can have: with caps of {LEAST:g} of the norms at the "
            f"start of {', '.join(caps)} it has {shown(error.least)}. Without a norm layer before queries and keys, "
            "logits grow with all layers before, and with the radius of the input; parameters without a norm may "
            "have any entries"
        ) from None
