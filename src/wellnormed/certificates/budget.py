"""Caps that keep a Lipschitz constant, and move to where they cost the loss least: `constrain(lipschitz=...)`."""

import contextlib
import copy
import math
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu, recording
from wellnormed._inputs import require_numbers
from wellnormed._modes import evaluating
from wellnormed._ranges import NOT_NEGATIVE, POSITIVE
from wellnormed.certificates.certifying import example_of, unwrapped
from wellnormed.certificates.cost import cost_of
from wellnormed.certificates.printing import RECTIFIED, factors, only_relu
from wellnormed.certificates.promising import promise_of
from wellnormed.certificates.sizes import UNITS, Unit, entries_of
from wellnormed.certificates.within import LEAST, TOLERANCE, BudgetError, Capped, Caps, Within, constant_of
from wellnormed.constraints import ColumnCap, Constraint, Constraints, HardCap, enforcing
from wellnormed.constraints.caps import Cap, EntryCap
from wellnormed.constraints.matching import attach, matched, norms_of
from wellnormed.constraints.weights import Constrained, matching_state
from wellnormed.norms import BiasRMS, Norm
from wellnormed.parallel.layout import Mark, mark, whole
from wellnormed.program.capturing import capture
from wellnormed.program.domain import Domain
from wellnormed.program.program import Program
from wellnormed.proof import Row
from wellnormed.proof.decimals import root, rounding_up, shown
from wellnormed.routing import AssignedParameter, Assignment, assign_norms
from wellnormed.routing.patterns import bare_names
from wellnormed.routing.places import Weak
from wellnormed.routing.tables import aligned

SAMPLES = 10
"""How many gradients are measured between two moves of the caps."""
LONGEST, SHORTEST, KEPT = 0.2, 0.01, 0.5
"""The largest change of a cap's logarithm in one move; caps stay if all changes are below the second number; the third
is the share of the measured savings that is carried over to the next move."""
FREE = 1e3
"""The cap of parameters that the constant does not depend on, such as the biases of an MLP: too large to matter."""


class Budget(Constraints):
    """Constraints whose caps keep the model's Lipschitz constant, and are moved every few steps.

    **What holds.** After every step each weight is within its cap, and `Within` has proved, by the rows of a
    certificate, that all weights within these caps give at most the requested constant. The constant is proved again
    whenever caps have moved, before weights are projected onto lower caps; all of this happens within one call of
    `step`, and without a proof the caps stay. The proof uses the values of frozen parameters and buffers, and is
    repeated when these were written. A step that would move one of them is refused, and so is a step after a module or
    parameter of the model was replaced, as by a parametrization.

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

    def __init__(
        self, optimizer: torch.optim.Optimizer, constrained: tuple[Constrained, ...], left_out: Mapping[str, str],
        prove: bool, model: Weak, *, within: Within, asked: float, words: str, caps: Caps, costs: Caps,
        fixed: Mapping[str, Tensor], every: int, rectified: bool,
    ) -> None:  # fmt: skip
        self._within, self._asked, self._words = within, asked, words
        self._every, self._rectified = every, rectified
        self._fixed: dict[str, tuple[Tensor, Mark]] = {name: (tensor, mark(tensor)) for name, tensor in fixed.items()}
        self._moving = [c for c in constrained if c.name in costs]
        self._caps = {name: torch.tensor(cap, dtype=torch.float64) for name, cap in caps.items()}
        self._saved = {c.name: torch.zeros((), device=c.parameter.device) for c in self._moving}
        self._count = torch.zeros((), dtype=torch.int64)
        self._costs = {c.name: torch.tensor(costs[c.name], dtype=torch.float64) for c in self._moving}
        super().__init__(optimizer, constrained, left_out, prove, model)
        self._members, self._statistics = self._found(), _statistics(self._model())

    def __str__(self) -> str:
        """The caps, and the shares of the constant and of the loss that each has: at the best caps these agree."""
        costs, saved = ({name: float(x) for name, x in each.items()} for each in (self._costs, self._saved))
        total, most = (sum(map(abs, each.values())) or 1.0 for each in (costs, saved))
        rows = [("parameter", "constraint", "of log L", "of the loss")]
        for name, text in self.shown().items():
            pays = costs.get(name, 0.0) > 0
            rows.append(
                (name, text, f"{costs[name] / total:.0%}", f"{saved[name] / most:.0%}")
                if pays
                else (name, text, "", "")
            )
        rows += [(name, "none", "", why) for name, why in self._left_out.items()]
        moves = f"move every {self._every} steps" if self._every else "stay"
        head = f"Lipschitz constant at most {self._words}\nafter every step; caps {moves}"
        return "\n".join([head, aligned(rows), *[RECTIFIED] * self._rectified])

    __repr__ = __str__

    def _displaced(self) -> dict[str, str]:
        return {}  # the captured program contains the parametrizations; `_require_same_model` refuses later changes

    def _found(self) -> dict[str, weakref.ref[Any]]:
        """Name -> module or parameter that the model has now; empty if the model has been deleted."""
        model = self._model()
        named = () if model is None else (*model.named_modules(), *model.named_parameters())
        return {name: weakref.ref(member) for name, member in named}

    def caps(self) -> dict[str, float]:
        """The caps that were found, by the name of the parameter."""
        return {name: float(cap) for name, cap in self._caps.items()}

    def before(self, optimizer: torch.optim.Optimizer, changes: Mapping[str, float]) -> None:
        if self._model_changed():
            self._require_same_model()
        _refuse_training(module for each in self._statistics if (module := each()) is not None)
        self._require_fixed(optimizer)
        self._require_proved()
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
        if self._every and int(self._count) and int(self._count) % self._every == 0 and not self._recording():
            self._move()

    def accept(self, written: Container[Tensor]) -> None:
        self._every = 0  # an average of weights is within caps that stand still
        super().accept(written)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As for `Constraints`; the constant is proved for the caps of the state before anything is changed."""
        saved, bare = matching_state(state, self._flat_state()), bare_names(c.name for c in self._constrained)
        caps = {name: float(saved[f"{bare[name]}.cap"]) for name in self._caps}
        self._require_same_model()
        self._refresh()
        if not self._keeps(caps):
            raise ValueError(
                f"load_state_dict: the caps of this state do not keep the constant {shown(self._asked)}; load a state "
                "that was saved with lipschitz= this or less"
            )
        self._see()
        self._take(caps)
        super().load_state_dict(state)

    def _flat_state(self) -> dict[str, Tensor]:
        bare = bare_names(c.name for c in self._constrained)
        own = {f"{bare[name]}.cap": cap for name, cap in self._caps.items()}
        for key, tensors in {"cost": self._costs, "saved": self._saved}.items():
            own |= {f"{bare[name]}.{key}": tensor for name, tensor in tensors.items()}
        own |= {f"{bare[c.name]}.steps": self._count for c in self._moving[:1]}
        return super()._flat_state() | own

    def _recording(self) -> bool:
        return any(recording(c.parameter.device) for c in self._moving)

    def _refresh(self) -> list[str]:
        """Give the proof the new values of frozen parameters and buffers that were written; return their names."""
        written = [name for name, (tensor, seen) in self._fixed.items() if mark(tensor, seen) != seen]
        for name in written:
            self._within.refresh(name, self._fixed[name][0])
        return written

    def _require_fixed(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would move a tensor for whose values the constant is proved."""
        graded = {name: tensor for name, (tensor, _) in self._fixed.items() if tensor.grad is not None}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} if graded else set()
        if moved := [name for name, tensor in graded.items() if tensor.requires_grad or id(tensor) in held]:
            raise ValueError(
                f"the constant {shown(self._asked)} is proved for the values of {', '.join(moved)}, frozen when "
                "constrain was called, and now with a gradient; call requires_grad_(False) and set grad to None, or "
                "call remove() and constrain again"
            )

    def _require_same_model(self) -> None:
        """Refuse a model of which a module or parameter was replaced, and find its buffers, which may have been."""
        found, known, self._looked = self._found(), self._members, None
        if other := [name or "the model" for name in {**known, **found} if found.get(name) is not known.get(name)]:
            raise ValueError(
                f"the constant {shown(self._asked)} is proved for the model as it was, and {', '.join(other[:3])} is "
                "another one now; put the old one back, or call remove() and constrain again"
            )
        self._model_changed()
        model = self._model()
        buffers = {} if model is None else dict(model.named_buffers())
        self._fixed = {name: (buffers.get(name, tensor), seen) for name, (tensor, seen) in self._fixed.items()}
        self._statistics = _statistics(model)

    def _require_proved(self) -> None:
        """Refuse a step if the constant is not proved for the values that frozen tensors have now."""
        if not (written := self._refresh()):
            return
        if not self._keeps(self.caps()):
            raise ValueError(
                f"the constant {shown(self._asked)} is not proved for the new values of {', '.join(written)}, on "
                "which the bound depends; put the old values back, or call remove() and constrain again. Running "
                "statistics stay as they are in eval()"
            )
        self._see()

    def __getstate__(self) -> dict[str, Any]:
        left = ("_members", "_statistics")
        return {name: value for name, value in super().__getstate__().items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._members, self._statistics = self._found(), _statistics(self._model())

    def _keeps(self, caps: Caps) -> bool:
        return self._within.constant(caps) <= Decimal(self._asked)

    def _see(self) -> None:
        self._fixed = {name: (tensor, mark(tensor)) for name, (tensor, _) in self._fixed.items()}

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

    def _take(self, caps: Caps) -> None:
        """Give the constraints these caps."""
        self._settings = None
        for c in self._constrained:
            if c.name in caps:
                self._caps[c.name].fill_(caps[c.name])
                assert isinstance(c.constraint, Cap)
                c.constraint = replace(c.constraint, cap=caps[c.name])


@default_on_cpu()
def constrain_to(
    optimizer: torch.optim.Optimizer, given: Mapping[str, Constraint], norms: Assignment | nn.Module | None,
    prove: bool, what: str, most: float, example_input: Any, domain: Domain,
    output: str | int | None, unit: Unit, every: int, move_every: int, accept_small_range: bool,
) -> Constraints:  # fmt: skip
    """Find caps that bound the number `what` ("lipschitz" or "largest_logit") by `most`, and attach them.

    The other arguments are those of `constrain`, where `unit` is `norm`.
    """
    require_numbers("constrain: ", {what: most}, POSITIVE)
    require_numbers("constrain: ", {"move_every": move_every}, NOT_NEGATIVE, whole=True)
    require_numbers("constrain: ", {"every": every}, POSITIVE, whole=True)
    model = norms if isinstance(norms, nn.Module) else getattr(optimizer, "model", None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"constrain: {what}= needs the model, which this optimizer does not know; pass norms=model")
    model = unwrapped(model)
    of_logits = what == "largest_logit"
    if of_logits and not isinstance(norms, Assignment):
        norms = assign_norms(model, per_head=True)
    assignment = norms_of(optimizer, norms)
    by_hand = matched(given, assignment).owner
    named = list(model.named_parameters(remove_duplicate=False))
    names = {a.name: tuple(name for name, p in named if p is a.parameter) for a in assignment}
    bounded: list[Within] = []
    kinds: dict[str, type[HardCap | ColumnCap | EntryCap]] = {}
    start: dict[str, float] = {}
    with _evaluating(model) as evaluated:

        def bound(program: Program) -> None:
            capped, promises = {}, {}
            for a in (a for a in assignment if not program.stored.keys().isdisjoint(names[a.name])):
                norm, shape, constraint = a.norm, tuple(a.parameter.shape), given.get(by_hand.get(a.name, ""))
                if constraint is None:
                    kinds[a.name], norm = _kind(a)
                    least = 0.25 if of_logits and isinstance(norm, BiasRMS) else 1.0
                    start[a.name] = max(least, float(norm.upper_bound(whole(a.parameter.detach()))))
                    capped[a.name] = Capped(norm, shape, names[a.name])
                elif norm is not None and constraint.bound is not None:
                    promises |= {name: promise_of(name, norm, constraint.bound, shape) for name in names[a.name]}
            if not of_logits:
                _require_all(optimizer, model, program)
            bounded.append(Within(program, evaluated, domain, capped, promises))
            bounded[-1].rows(start | bounded[-1].tables())  # raises for operations without a bound

        example = example_of(evaluated, example_input, "constrain")
        program = capture(evaluated, example, output, domain=domain, accept=bound)
    within, rows, words = bounded[-1], bounded[-1].rows(start | bounded[-1].tables()), shown(most)
    state = dict(named) | dict(model.named_buffers(remove_duplicate=False))
    fixed = {name: state[name] for name in program.stored if name in state and name not in within.promised}
    if of_logits:
        from wellnormed.certificates.logits import Logits, for_most_inputs, logit_caps

        within = for_most_inputs(within, start)
        parameters = {a.name: a.parameter for a in assignment}
        caps = logit_caps(optimizer, parameters, within, start, most)
        kind, costs, move_every = Logits, {}, 0
    else:
        within.measured_by(partial(constant_of, unit=unit))
        kind, (caps, costs, free) = Budget, _caps_of_constant(within, start, most)
        with_caps = [a for a in assignment if a.name in caps]
        norms_now = {a.name: float(_kind(a)[1].upper_bound(whole(a.parameter.detach()))) for a in with_caps}
        numbers = _in_both(most, unit, rows)
        words = " and ".join(f"{shown(number)} {UNITS[each]}" for each, number in numbers.items())
        cost = cost_of(within, start, caps, free, norms_now, float(numbers["rms"]))
        cost.judge(most, accept_small_range)
    make = partial(
        kind, within=within, asked=float(most), words=words, caps=caps, costs=costs, fixed=fixed, every=move_every,
        rectified=only_relu(rows),
    )  # fmt: skip
    constraints = {**given, **{name: kinds[name](cap, every=every) for name, cap in caps.items()}}
    return attach(optimizer, constraints, assignment, prove, make)


def _caps_of_constant(within: Within, start: Caps, lipschitz: float) -> tuple[Caps, Caps, list[str]]:
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
        raise ValueError(_too_small(lipschitz, error)) from None
    costs = within.elasticities(caps, [name for name in caps if name not in pinned])
    caps = within.freed(caps, FREE, free := [name for name, cost in costs.items() if not cost])
    if not within.constant(caps) <= Decimal(lipschitz):
        raise ValueError(f"constrain: no caps were proved to keep lipschitz={lipschitz}; please report it")
    return caps, costs, free


def _in_both(most: float, unit: Unit, rows: Sequence[Row]) -> dict[Unit, Decimal]:
    """A constant in the unit that was asked for, and in the other one."""
    (other,) = UNITS.keys() - {unit}
    with rounding_up():
        ratio = root(Decimal(entries_of(rows, unit)) / entries_of(rows, other))
        return {unit: Decimal(most), other: Decimal(most) * ratio}


def _kind(a: AssignedParameter) -> tuple[type[HardCap | ColumnCap | EntryCap], Norm]:
    """The class of cap that bounds a parameter after any step, and its norm."""
    for kind in (HardCap, ColumnCap, EntryCap):
        if a.norm is not None and kind(1.0).acts_on(a.norm):
            return kind, a.norm
    raise ValueError(
        f"constrain: no cap holds {a.name!r}, whose norm is {a.norm}; pass norms=model for the default norms, or a "
        "constraint of your own for it"
    )


def _require_all(optimizer: torch.optim.Optimizer, model: nn.Module, program: Program) -> None:
    """Refuse a model with trained parameters that are not in this optimizer."""
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name in program.stored}
    if others := [name for name, p in trained.items() if p not in owned]:
        raise ValueError(
            "constrain: lipschitz= needs all trained parameters of the model in one optimizer, which lacks "
            f"{', '.join(others)}; add or freeze them"
        )


def _statistics(model: nn.Module | None) -> list[weakref.ref[nn.Module]]:
    """The modules that may have running statistics."""
    return [] if model is None else [weakref.ref(m) for m in model.modules() if "running_mean" in m._buffers]


def _refuse_training(modules: Iterable[nn.Module]) -> None:
    """Refuse layers that write statistics that the constant depends on, without torch counting the writes."""
    for module in modules:
        if module.training and module.running_mean is not None:
            raise ValueError(
                f"constrain: {type(module).__name__} changes its running statistics while it trains, on which the "
                "constant depends; call eval() on it, and keep it there, or take a layer without them"
            )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, on the CPU: itself, or a copy where it lies elsewhere."""
    _refuse_training(module for each in _statistics(model) if (module := each()) is not None)
    if any(each.device.type != "cpu" for each in (*model.parameters(), *model.buffers())):
        yield copy.deepcopy(model).cpu().eval()
        return
    with evaluating(model):
        yield model


def _too_small(lipschitz: float, error: BudgetError) -> str:
    """The message for a constant that is too small: the smallest possible one, and which operations prevent less."""
    largest = sorted(factors(error.rows), key=lambda each: -each[1])[:3] if error.rows else []
    least = shown(Decimal(error.log).exp() * (1 + Decimal("1e-6"))) if error.rows else "not proved"
    words = ", ".join(f"{row.name} ({row.operation}) by {shown(10**factor, '.3g')}" for row, factor in largest)
    return (
        f"constrain: lipschitz={lipschitz} is less than this model can have: with caps of {LEAST:g} of the norms at "
        f"the start its constant is {least}. What multiplies it most: {words}. A norm layer multiplies by up to "
        "1 / sqrt(eps): wn.calibrate(model, data) puts a floor under it; frozen weights and tables keep their size"
    )
