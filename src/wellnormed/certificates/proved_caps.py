"""Caps within which a number of the model is proved: what `constrain(lipschitz=)` and `largest_logit=` share."""

import copy
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from wellnormed._devices import recording
from wellnormed.certificates.within import Caps, Within
from wellnormed.constraints import Constraints
from wellnormed.constraints.caps import Cap
from wellnormed.constraints.matching import UNNAMED
from wellnormed.constraints.weights import Constrained, matching_state
from wellnormed.parallel.layout import Mark, mark, marks
from wellnormed.proof.decimals import shown
from wellnormed.routing.patterns import bare_names
from wellnormed.routing.places import Weak


class ProvedCaps(Constraints):
    """Constraints within whose caps `Within` has proved, by the rows of a certificate, that a number is not exceeded.

    The proof uses the values of frozen parameters and buffers, and is repeated when these were written. A step that
    would move one of them is refused, and so is a step after a module or parameter of the model was replaced, as by a
    parametrization, or after attributes or classes of its modules were, if the model then computes something else. What
    no attribute shows, such as globals and entries of arrays, is looked at by `print` and at every power of two of
    steps, from the 256th on: the model is captured again, which takes less time than `constrain`.

    Args:
        optimizer, constrained, left_out, prove, model: As for `Constraints`.
        within: The number as a function of the caps.
        asked: The number.
        caps: Name of a parameter -> its cap.
        fixed: Name -> stored tensor whose values the proof uses.
        notes: Lines of the print: whether the example is in the domain, and which weights the caps have shrunk at once.
    """

    what: ClassVar[str]
    """The number, in words."""
    apart: ClassVar[str]
    """Why a parameter without a cap has none."""

    @property
    def _number(self) -> str:
        return f"the {self.what} {shown(self._asked)}"

    def __init__(
        self, optimizer: torch.optim.Optimizer, constrained: tuple[Constrained, ...], left_out: Mapping[str, str],
        prove: bool, model: Weak, *, within: Within, asked: float, caps: Caps, fixed: Mapping[str, Tensor],
        notes: Sequence[str],
    ) -> None:  # fmt: skip
        self._within, self._asked, self._noted = within, asked, notes
        self._fixed: dict[str, tuple[Tensor, Mark]] = {name: (tensor, mark(tensor)) for name, tensor in fixed.items()}
        self._see()
        self._caps = {name: torch.tensor(cap, dtype=torch.float64) for name, cap in caps.items()}
        left_out = {name: self.apart if why == UNNAMED else why for name, why in left_out.items()}
        super().__init__(optimizer, constrained, left_out, prove, model)
        self._forms = {name: (each.shape, each.dtype) for name, each in self._stored().items()}
        self._members, self._layers = self._found(), layers_with(self._statistics().values(), self._model())
        self._code, self._idle, self._turn = code_of(self._model()), set[tuple[str, str]](), 0

    def _statistics(self) -> dict[str, Tensor]:
        return {name: self._fixed[name][0] for name in self._within.statistics() & self._fixed.keys()}

    def _stored(self) -> dict[str, Tensor]:
        """Name -> tensor of the model that the proof uses, by its values or by its cap."""
        fixed = {name: tensor for name, (tensor, _) in self._fixed.items()}
        return {c.name: c.parameter for c in self._constrained} | fixed

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
        refuse_training(self._layers)
        self._require_same_code()
        self._require_fixed(optimizer)
        self._require_proved()
        super().before(optimizer, changes)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As for `Constraints`; the constant is proved for the caps of the state before anything is changed."""
        saved, bare = matching_state(state, self._flat_state()), bare_names(c.name for c in self._constrained)
        caps = {name: float(saved[f"{bare[name]}.cap"]) for name in self._caps}
        self._require_same_model()
        self._refresh()
        if not self._keeps(caps):
            raise ValueError(
                f"load_state_dict: the caps of this state do not keep {self._number}; load a state "
                "that was saved with this number or less"
            )
        self._see()
        self._take(caps)
        super().load_state_dict(state)

    def _flat_state(self) -> dict[str, Tensor]:
        bare = bare_names(c.name for c in self._constrained)
        return super()._flat_state() | {f"{bare[name]}.cap": cap for name, cap in self._caps.items()}

    def _refresh(self) -> list[str]:
        """Give the proof the new values of frozen parameters and buffers that were written; return their names."""
        self._require_forms()
        now = marks(*zip(*self._fixed.values(), strict=True)) if self._fixed else []
        known = zip(self._fixed.items(), now, strict=True)
        written = {name for (name, (_, seen)), here in known if here != seen}
        # torch does not count what a batch norm writes, such as between two steps of a model in eval()
        unseen = {name: x for name, x in self._gathered.items() if name not in written and not recording(x.device)}
        if differ := [(self._fixed[name][0] != each).any() for name, each in unseen.items()]:
            differ = torch.stack([each.to(differ[0].device) for each in differ]).tolist()  # one transfer
        written |= {name for name, differs in zip(unseen, differ, strict=True) if differs}
        for name in written:
            self._within.refresh(name, self._fixed[name][0])
        return sorted(written)

    def _require_forms(self) -> None:
        """Refuse tensors of another dtype or shape, on which the model may depend, as on the default eps of RMSNorm."""
        now = {name: (each.shape, each.dtype) for name, each in self._stored().items()}
        if other := [name for name, form in now.items() if form != self._forms[name]]:
            same = [f"the dtype of {name}" if now[name][0] == self._forms[name][0] else name for name in other]
            raise ValueError(_ANOTHER.format(self._number, ", ".join(same[:3])))

    def _require_fixed(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would move a tensor for whose values the constant is proved."""
        graded = {id(tensor) for tensor, _ in self._fixed.values() if tensor.grad is not None}
        moving = graded and graded & {id(p) for group in optimizer.param_groups for p in group["params"]}
        # those that are trained may get their gradient from a closure
        if moved := [name for name, (each, _) in self._fixed.items() if each.requires_grad or id(each) in moving]:
            raise ValueError(
                f"{self._number} is proved for the values of {', '.join(moved)}, frozen when "
                "constrain was called, and now trained or with a gradient; call requires_grad_(False) and set grad to "
                "None, or call remove() and constrain again"
            )

    def _require_same_model(self) -> None:
        """Refuse a model of which a module or parameter was replaced, and find its buffers, which may have been."""
        found, known, self._looked = self._found(), self._members, None
        if other := [name or "the model" for name in {**known, **found} if found.get(name) is not known.get(name)]:
            raise ValueError(_ANOTHER.format(self._number, ", ".join(other[:3])))
        self._model_changed()
        model = self._model()
        buffers = {} if model is None else dict(model.named_buffers())
        self._fixed = {name: (buffers.get(name, tensor), seen) for name, (tensor, seen) in self._fixed.items()}
        self._layers = layers_with(self._statistics().values(), model)

    def _require_same_code(self) -> None:
        """Capture the model again if its code may be another one, and refuse one that computes something else.

        What has changed without a consequence, as a count of calls does, may change again. Steps whose number is a
        power of two look at it, and those from `UNSEEN` on at all that `code_of` does not see, such as globals.
        """
        found, known, turn = code_of(model := self._model()), self._code, self._turn + 1
        changed = {key for key in {**known, **found} if found.get(key) != known.get(key)} if found != known else set()
        rare = turn & (turn - 1) == 0 and (turn >= UNSEEN or bool(changed))
        if model is not None and (rare or changed - self._idle):
            if not self._within.is_of(model):
                what = ", ".join(map(".".join, sorted(changed - self._idle or changed)[:3]))
                raise ValueError(_ANOTHER.format(self._number, what or "something that it reads"))
            self._code, self._idle = found, self._idle | changed
        self._turn = turn

    def _notes(self) -> list[str]:
        """Lines of the print, first that the model computes something else now."""
        model = self._model() if self._turn else None
        same = model is None or self._within.is_of(model)
        other = f"The model computes something else now, and {self._number} is not proved for it: call remove() and "
        return [*[f"{other}constrain again"] * (not same), *self._noted]

    def _require_proved(self) -> None:
        """Refuse a step if the constant is not proved for the values that frozen tensors have now."""
        if not (written := self._refresh()):
            return
        if not self._keeps(self.caps()):
            raise ValueError(
                f"{self._number} is not proved for the new values of {', '.join(written)}, on "
                "which the bound depends; put the old values back, or call remove() and constrain again. Running "
                "statistics stay as they are in eval()"
            )
        self._see()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"constraints of the {self.what} hold the graph of a model, which has no pickle; save state_dict() of the "
            "model, the optimizer and the constraints, and call constrain again before they are loaded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        left = ("_members", "_layers", "_code")
        return {name: value for name, value in super().__getstate__().items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._members, self._layers = self._found(), layers_with(self._statistics().values(), self._model())
        self._code = code_of(self._model())

    def _keeps(self, caps: Caps) -> bool:
        return self._within.constant(caps) <= Decimal(self._asked)

    def _see(self) -> None:
        """Take the fixed tensors as they are for those that the proof has."""
        self._fixed = {name: (tensor, mark(tensor)) for name, (tensor, _) in self._fixed.items()}
        self._gathered = {name: tensor.detach().clone() for name, tensor in self._statistics().items()}

    def _take(self, caps: Caps) -> None:
        """Give the constraints these caps."""
        self._settings = None
        for c in self._constrained:
            if c.name in caps:
                self._caps[c.name].fill_(caps[c.name])
                assert isinstance(c.constraint, Cap)
                c.constraint = replace(c.constraint, cap=caps[c.name])


UNSEEN = 256
"""The first step whose number is a power of two in which a model is captured again though `code_of` is the same."""
_ANOTHER = (
    "{} is proved for the model as it was, and {} is another one now; put the old one back, or call remove() and "
    "constrain again"
)
_PLAIN = frozenset({bool, int, float, str, type(None)})
_EMPTY = frozenset({dict, OrderedDict, set})
"""Classes of which every module has many without entries, such as those of hooks."""
_MEMBERS = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Attributes of a module that others look at, or that training changes."""


def code_of(model: nn.Module | None) -> dict[tuple[str, str], Any]:
    """Module and attribute -> what it holds: all that a result may depend on beside parameters and buffers."""
    found: dict[tuple[str, str], Any] = {}
    known: dict[int, Any] = {}
    for name, module in () if model is None else model.named_modules():
        found[name, "__class__"] = _content(type(module), known)
        for key, value in vars(module).items():
            if (kind := type(value)) in _PLAIN:
                if key != "training":
                    found[name, key] = value
            elif kind not in _EMPTY or (value and key not in _MEMBERS):
                found[name, key] = _content(value, known)
    return found


def _content(value: Any, known: dict[int, Any], depth: int = 4) -> Any:
    """The identity and version of a tensor; entries of a container; identity and plain attributes of an object.

    Other attributes of an object may reach the whole program, as those of a trainer do. Of a class all count, and those
    of its bases beside `Module`.
    """
    if (kind := type(value)) in _PLAIN:
        return value
    if id(value) in known or not depth:
        return known.get(id(value), id(value))
    if issubclass(kind, Tensor):
        found = id(value), None if value.is_inference() else value._version
    elif issubclass(kind, dict | list | tuple | set | deque):
        inside = chain.from_iterable(value.items()) if issubclass(kind, dict) else value
        found = [_content(each, known, depth - 1) for each in inside]
    elif issubclass(kind, type):
        bases = [base for base in value.__mro__ if base not in (nn.Module, object)]
        found = [id(value), *(id(each) for base in bases for each in vars(base).values())]
    else:
        bases = () if issubclass(kind, nn.Module) else kind.__mro__
        slots = [getattr(value, slot, None) for base in bases for slot in vars(base).get("__slots__", ())]
        own = [*getattr(value, "__dict__", {}).values(), *slots] if bases else []
        found = [id(value), *(each for each in own if type(each) in _PLAIN)]
    known[id(value)] = found
    return found


def layers_with(statistics: Iterable[Tensor], model: nn.Module | None) -> list[weakref.ref[nn.Module]]:
    """The modules of a model that have these running statistics."""
    known, modules = {id(each) for each in statistics}, () if model is None else model.modules()
    return [weakref.ref(m) for m in modules if any(id(each) in known for each in m.buffers(recurse=False))]


def refuse_training(layers: Iterable[weakref.ref[nn.Module]]) -> None:
    """Refuse layers that write statistics that the constant depends on, without torch counting the writes."""
    for layer in layers:
        if (module := layer()) is not None and module.training:
            raise ValueError(
                f"constrain: {type(module).__name__} changes its running statistics while it trains, on which the "
                "constant depends; call eval() on it, and keep it there, or take a layer without them"
            )
