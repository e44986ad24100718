"""Find caps that bound a number of the model, and attach them: `constrain(lipschitz=...)` and `largest_logit=...`."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu
from wellnormed._inputs import require_numbers
from wellnormed._modes import without_autocast
from wellnormed._ranges import NOT_NEGATIVE, POSITIVE
from wellnormed.certificates.arguments import example_of, unwrapped
from wellnormed.certificates.budget import Budget, caps_of_constant, in_both
from wellnormed.certificates.cost import cost_of, shrunk
from wellnormed.certificates.logits import Logits, for_most_inputs, logit_caps
from wellnormed.certificates.printing import only_relu, outside
from wellnormed.certificates.promising import any_entries, promise_of
from wellnormed.certificates.proved_caps import layers_with, refuse_training
from wellnormed.certificates.sizes import UNITS, Unit, entries_of, slope
from wellnormed.certificates.within import Capped, Within, constant_of, evaluated_on_cpu
from wellnormed.constraints import ColumnCap, Constraint, Constraints, HardCap
from wellnormed.constraints.caps import EntryCap
from wellnormed.constraints.matching import attach, matched, norms_of, require_finite
from wellnormed.constraints.step_lengths import BoundsItsSteps
from wellnormed.lowering.walk import walked
from wellnormed.norms import BiasRMS, Norm
from wellnormed.norms.base import widened
from wellnormed.parallel.layout import whole
from wellnormed.program.capturing import capture
from wellnormed.program.domain import Domain
from wellnormed.program.program import Program
from wellnormed.proof.decimals import shown
from wellnormed.routing import AssignedParameter, Assignment, assign_norms


@dataclass(frozen=True)
class Asked:
    """What is asked of caps: the number, "lipschitz" or "largest_logit", and the arguments of `constrain` beside it."""

    what: str
    most: float
    example_input: Any
    domain: Domain
    output: str | int | None
    unit: Unit
    every: int
    move_every: int
    accept_small_range: bool

    def __post_init__(self) -> None:
        require_numbers("constrain: ", {"every": self.every}, POSITIVE, "1 is every step", whole=True)
        require_numbers("constrain: ", {"move_every": self.move_every}, NOT_NEGATIVE, whole=True)

    @property
    def of_logits(self) -> bool:
        """Whether attention logits are to be bounded, and not a Lipschitz constant."""
        return self.what == "largest_logit"


@default_on_cpu()
def constrain_to(
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Constraint],
    norms: Assignment | nn.Module | None,
    prove: bool,
    asked: Asked,
) -> Constraints:
    """Find caps that bound the number that is asked for, and attach them; the other arguments are `constrain`'s."""
    known = optimizer.assignment if isinstance(optimizer, BoundsItsSteps) else Assignment(())
    model = norms if isinstance(norms, nn.Module) else (known if norms is None else norms_of(optimizer, norms)).model()
    if model is None:
        raise ValueError(
            f"constrain: {asked.what}= needs the model, which this optimizer does not know; pass norms=model"
        )
    model = unwrapped(model)
    if asked.of_logits and not isinstance(norms, Assignment):
        norms = assign_norms(model, overrides=known.overrides if norms is None else None, per_head=True)
    assignment = norms_of(optimizer, norms)
    by_hand = matched(given, assignment).owner
    named = list(model.named_parameters(remove_duplicate=False))
    names = {a.name: tuple(name for name, p in named if p is a.parameter) for a in assignment}
    bounded: list[Within] = []
    kinds: dict[str, type[HardCap | ColumnCap | EntryCap]] = {}
    norms_now: dict[str, float] = {}
    start: dict[str, float] = {}
    with evaluated_on_cpu(model) as evaluated, without_autocast():

        def bound(program: Program) -> None:
            capped, promises = {}, {}
            for a in (a for a in assignment if not program.stored.keys().isdisjoint(names[a.name])):
                norm, shape, constraint = a.norm, tuple(a.parameter.shape), given.get(by_hand.get(a.name, ""))
                if norm is None and asked.of_logits:  # logits may not depend on it
                    stored = [name for name in names[a.name] if name in program.stored]
                    promises |= {name: any_entries(name, a.parameter) for name in stored}
                elif constraint is None:
                    require_finite(a.name, a.parameter)
                    kinds[a.name], norm = _kind(a)
                    least = 0.25 if asked.of_logits and isinstance(norm, BiasRMS) else 1.0
                    norms_now[a.name] = float(norm.upper_bound(whole(a.parameter.detach())))
                    start[a.name] = max(least, norms_now[a.name])
                    capped[a.name] = Capped(norm, shape, names[a.name])
                elif norm is not None and constraint.bound is not None:
                    promises |= {name: promise_of(name, norm, constraint.bound, shape) for name in names[a.name]}
            if not asked.of_logits:
                _require_all(optimizer, model, program)
            bounded.append(Within(program, evaluated, asked.domain, capped, promises))
            bounded[-1].rows(start | bounded[-1].tables())  # raises for operations without a bound

        example = example_of(evaluated, asked.example_input, "constrain")
        program = capture(evaluated, example, asked.output, domain=asked.domain, accept=bound)
    within, rows = bounded[-1], bounded[-1].rows(start | bounded[-1].tables())
    state = dict(named) | dict(model.named_buffers(remove_duplicate=False))
    fixed = {name: state[name] for name in program.stored if name in state and name not in within.promised}
    refuse_training(layers_with((fixed[name] for name in within.statistics() & fixed.keys()), model))
    within = for_most_inputs(within, start) if asked.of_logits else within
    inputs = [row for row in within.rows(start | within.tables()) if row.operation == "input"]
    notes = [line for text in outside(program, inputs) for line in textwrap.wrap(text, 80)]
    if asked.of_logits:
        caps = logit_caps(optimizer, {a.name: a.parameter for a in assignment}, within, start, asked.most)
        moves = shrunk(norms_now, caps)
        make = partial(Logits, notes=[*notes, moves] if moves else notes)
    else:
        within.measured_by(partial(constant_of, unit=asked.unit))
        caps, costs, free = caps_of_constant(within, start, asked.most)
        numbers = in_both(asked.most, asked.unit, rows)

        def projected() -> dict[str, Tensor]:
            above = [a for a in assignment if a.name in caps and norms_now[a.name] > caps[a.name]]
            shrunk = {a.name: _project(kinds[a.name](caps[a.name]), a) for a in above}
            return {alias: weight for name, weight in shrunk.items() for alias in names[name]}

        cost = cost_of(within, start, caps, free, norms_now, float(numbers["rms"]), projected)
        cost.judge(asked.most, asked.accept_small_range)
        words = " and ".join(f"{shown(number)} {UNITS[each]}" for each, number in numbers.items())
        none = shown(slope(rows[-1], entries_of(rows, asked.unit)), ".3g")  # within caps that are the norms now
        tables = [name for name, cap in within.tables().items() if norms_now[name] > cap]
        but = f" but {', '.join(tables)}, whose rows radius= or box= bounds" if tables else ""
        if cost.moves:
            has = shown(constant_of(walked(program, asked.domain, arithmetic=None).ledger.proof, asked.unit), ".3g")
            notes += [cost.moves, f"(lipschitz={none} would shrink none{but}; by the entries of its weights, of which"]
            notes += [f"caps know norms alone, the model has {has} now)"]
        shown_first = {"words": words, "notes": notes, "rectified": only_relu(rows)}
        make = partial(Budget, costs=costs, every=asked.move_every, **shown_first)
    make = partial(make, within=within, asked=float(asked.most), caps=caps, fixed=fixed)
    constraints = {**given, **{name: kinds[name](cap, every=asked.every) for name, cap in caps.items()}}
    return attach(optimizer, constraints, assignment, prove, make)


def _kind(a: AssignedParameter) -> tuple[type[HardCap | ColumnCap | EntryCap], Norm]:
    """The class of cap that bounds a parameter after any step, and its norm."""
    for kind in (HardCap, ColumnCap, EntryCap):
        if a.norm is not None and kind(1.0).acts_on(a.norm):
            return kind, a.norm
    raise ValueError(
        f"constrain: no cap holds {a.name!r}, whose norm is {a.norm}; pass norms=assign_norms(model, overrides="
        f"{{{a.name!r}: ...}}) with another norm, such as wn.Spectral()"
    )


@torch.no_grad()
def _project(cap: HardCap | ColumnCap | EntryCap, a: AssignedParameter) -> Tensor:
    """A copy of a parameter within its cap."""
    weight, norm = whole(a.parameter.detach()), _kind(a)[1]
    return cap.project(widened(weight)[None], norm)[0].to(weight.dtype).cpu()


def _require_all(optimizer: torch.optim.Optimizer, model: nn.Module, program: Program) -> None:
    """Refuse a model with trained parameters that are not in this optimizer."""
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name in program.stored}
    if others := [name for name, p in trained.items() if p not in owned]:
        raise ValueError(
            "constrain: lipschitz= needs all trained parameters of the model in one optimizer, which lacks "
            f"{', '.join(others)}; "
            + ("it moves those of another model" if len(others) == len(trained) else "add or freeze them")
        )
