"""The constraints of an optimizer: attached, saved, copied and measured. `constrain` makes them.

`enforcing` changes the weights. An optimizer of this library calls `before` and `after` within its step, so that the
bounds are those of the numbers it multiplies with; any other calls them by its hooks.
"""

import functools
import math
import warnings
from collections.abc import Container, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wellnormed._devices import recording
from wellnormed._warnings import warn
from wellnormed.constraints import enforcing
from wellnormed.constraints.step_lengths import (
    Bounds,
    BoundsItsSteps,
    Measured,
    attached_to,
    count_of,
    rates_of,
    step_bounds,
    still,
)
from wellnormed.constraints.weights import (
    DOUBTED,
    WRITTEN,
    Constrained,
    Measure,
    allowed_distance,
    changes,
    distance,
    matching_state,
    measure,
    remember,
    upper_bound,
)
from wellnormed.norms import Norm
from wellnormed.parallel import Placement
from wellnormed.parallel.layout import is_distributed, local
from wellnormed.parallel.placement import in_buckets
from wellnormed.proof.decimals import shown
from wellnormed.routing.patterns import bare_names
from wellnormed.routing.places import UNKNOWN, Places, Weak, standing

ROUNDS = 4
"""How often `project_` projects at most: again only where 16 bits round a weight away from its projection."""


GONE, ORIGINAL = "no longer in the model", "an original, of which the layer makes its weight"
_REMEDY = {
    GONE: "bounds nothing that the model uses; make the optimizer again, and constrain it",
    ORIGINAL: "holds, and says nothing of that weight; remove the parametrization before constrain, as by "
    "torch.nn.utils.parametrize.remove_parametrizations or prune.remove. constrain(lipschitz=...) and "
    "certify(within=...) read what the layer makes of it",
}
"""What became of a parameter, and what that means for a promise."""


def _said(count: int) -> str:
    which, have = ("a parameter", "has") if count == 1 else (f"{count} parameters", "have")
    return (
        f"{which} joined the optimizer after `constrain`, and {have} no constraint. Call `constrain` again for what "
        "joined. `certify(within=...)` takes one object: for that, call `remove()` first, and then `constrain` with "
        "all patterns"
    )


class Constraints:
    """The constraints attached to one optimizer. Before a step they check that they can hold; after it they hold.

    They hold as long as only the optimizer moves the weights; whoever else writes calls `project_`.

    They run where the optimizer's oracles run. With parameters that lie over many processes, making this object, all
    that measures or projects, and `load_state_dict` are collective calls. What is remembered is the same everywhere.

    A copied or unpickled optimizer of this library keeps its constraints. One of another library does not, as torch
    copies no hooks: copy this object, which copies its optimizer, or both together. Constraints that hold the graph of
    a model, for `lipschitz=` or `largest_logit=`, can be copied, and not pickled: save their `state_dict()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constrained: tuple[Constrained, ...],
        left_out: Mapping[str, str] | None = None,
        prove: bool = True,
        model: Weak = UNKNOWN,
    ) -> None:
        self._optimizer, self._constrained = optimizer, constrained
        self._own = isinstance(optimizer, BoundsItsSteps)
        self._left_out = dict(left_out or {})  # other parameters, and why they have no constraint
        self._prove = prove
        self._model = model
        self._warned: set[tuple[str, str]] = set()  # of which parameters a warning told what became of them
        self._known = count_of(optimizer)  # the number of parameters that the optimizer moved, constrained or not
        self._told = 0  # how many a warning said to have joined since
        self._steps: Bounds = step_bounds(optimizer, constrained)  # the bounds that were checked last
        self._seen: Bounds = {}  # what constraints see of them
        self._still: set[str] = set()  # the parameters whose coming step has length 0
        self._resumed: dict[str, float] = {}  # the bounds of a state, for weights that are loaded after it
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._left: dict[str, Tensor] | None = None  # copies of the weights after a step, if a wrapper is swept after
        self._of_averages = False  # whether the weights may be averages of those that steps have left
        self._place()
        enforcing.check(constrained, self._steps)
        enforcing.project(constrained, self._placement, prove)
        self._attach()
        self._tell_displaced()

    def __str__(self) -> str:
        became = {name: f", and this is {text}" for name, text in self._displaced().items()}
        lines = {c.name: repr(c.constraint) + became.get(c.name, "") for c in self._constrained}
        lines |= {name: f"not constrained: {why}" for name, why in self._left_out.items()}
        width = max(map(len, lines), default=0)
        rows = [f"{name:{width}}  {text}" for name, text in lines.items()]
        if (joined := self._joined()) > 0:
            rows.append(_said(joined))
        return "\n".join(rows)

    __repr__ = __str__

    def project_(self) -> None:
        """Bring back what anything but the optimizer has written into constrained weights.

        Weights that are proved to keep what their constraint promises stay as they are, bit for bit; the others are
        brought where `constrain` would bring them. So a second call changes nothing. Constraints that hold a norm at a
        value also bring back weights that lie below it: by more than rounding for `Sphere` and `SpectralInterval`, and
        by more than half of it for `Orthogonal` and `Stiefel`, whose own steps end below. Constraints that promise
        nothing write nothing here, and remember the weights as they are now.

        A write through `weight.data` or a NumPy view is one that torch does not count, so that no step can see it:
        call this after it, and before the next step. A collective call where weights lie over many processes.

        Raises:
            ValueError: A weight holds NaN or infinity; nothing was changed.

        Example:
            >>> import torch, wellnormed as wn
            >>> layer = torch.nn.Linear(8, 8, bias=False)
            >>> constraints = wn.constrain(wn.Scion(layer, lr=0.02), {"weight": wn.SoftCap(1.0)})
            >>> _ = layer.weight.data.fill_(1.0)  # of norm 8
            >>> constraints.project_()
            >>> constraints.proved_ratios()["weight"] <= 1
            True
        """
        self._take_over(self._constrained)
        valued = [c for c in self._constrained if c.constraint.tolerance]
        for _ in range(ROUNDS):
            astray = self._largest(valued, distance)
            if not (valued := [c for c in valued if astray[c.name] > allowed_distance(c)]):
                break
            enforcing.project(valued, self._placement)
        self._remember()

    def _displaced(self) -> dict[str, str]:
        """What became of the parameters that are no longer, or not themselves, a weight of a layer of the model."""
        if (model := self._model()) is None:
            return {}
        as_weights: dict[Tensor, bool] = {}
        for parameter, is_original in standing(model):
            as_weights[parameter] = as_weights.get(parameter, False) or not is_original
        here = {c.name: as_weights.get(c.parameter) for c in self._constrained}
        return {name: GONE if found is None else ORIGINAL for name, found in here.items() if not found}

    def _tell_displaced(self) -> None:
        """Warn, once for each, of promises that say nothing of a weight of the model."""
        told = [pair for pair in self._displaced().items() if pair not in self._warned]
        self._warned.update(told)
        promised = self.promised() if told else {}
        for text in (GONE, ORIGINAL):
            if names := [name for name, became in told if became == text and name in promised]:
                warn(f"constrain: {', '.join(names)} is {text}: its cap {_REMEDY[text]}")

    def remove(self) -> None:
        """Detach from the optimizer; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        attached = attached_to(self._optimizer)
        attached[:] = [other for other in attached if other is not self]

    @property
    def names(self) -> list[str]:
        """The constrained parameters."""
        return [c.name for c in self._constrained]

    def norms(self) -> dict[str, float]:
        """Estimated norm of every constrained parameter, in its own units; cheap enough for every logged step."""
        buckets = in_buckets(self._constrained, lambda c: c.parameter, lambda c: c.norm)
        return measure((members for _, members in buckets), lambda c, weights: c.norm.norm(weights), self._placement)

    def shown(self) -> dict[str, str]:
        """Each constrained parameter's constraint, and its bound where it promises one, in a few letters."""
        promised = self.promised()
        bounds = {c.name: f" {shown(promised[c.name], '.4g')}" if c.name in promised else "" for c in self._constrained}
        return {c.name: f"{type(c.constraint).__name__}{bounds[c.name]}" for c in self._constrained}

    def promised(self) -> dict[str, float]:
        """The bound that holds now for every parameter whose constraint promises one; the others are left out.

        Averages of weights keep bounds for all steps alone, and not one that has sunk since, as with a rate that falls.
        """
        return enforcing.bound([c for c in self._constrained if c.constraint.bound or not self._of_averages])

    def parameters(self) -> list[Tensor]:
        """Every parameter that has a constraint."""
        return [c.parameter for c in self._constrained]

    def balls(self) -> list[tuple[Tensor, Norm, float]]:
        """Every parameter whose constraint promises one bound for all steps; the norm it is measured in; the bound."""
        bounds = [(c, c.constraint.bound) for c in self._constrained]
        return [(c.parameter, c.norm, bound) for c, bound in bounds if bound is not None]

    def norm_ratios(self) -> dict[str, float]:
        """Estimated norm over the promised bound, of every parameter whose constraint promises one."""
        norms = self.norms()
        return {name: norms[name] / bound for name, bound in self.promised().items()}

    def proved_ratios(self) -> dict[str, float]:
        """Proved bound on the norm over the promised one, where there is one: at most 1, or the promise is broken."""
        self._warned = {(name, text) for name, text in self._warned if text == ORIGINAL}
        self._tell_displaced()
        promised = self.promised()
        one_by_one = [[c] for c in self._constrained if c.name in promised]  # float64 copies of a batch would be large
        proved = measure(one_by_one, upper_bound, self._placement)
        return {name: bound / promised[name] for name, bound in proved.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """What constraints remember from step to step, `PARAMETER.KEY` -> a copy; save it with the optimizer's state.

        Empty if none remembers anything. The names are without the prefixes that wrappers add, as in the checkpoints of
        torch, so that they are the same whether or not a model is compiled or recomputes its activations.
        """
        return {key: tensor.clone() for key, tensor in self._flat_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same constraints, after the weights of the same step were loaded.

        Prefixes of wrappers do not count. Weights that are not proved to keep what the state promises, such as those of
        a run with a larger cap, are brought below their caps. After `constrain(..., prove=False)` nothing is proved.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        here = self._flat_state()
        saved = matching_state(state, here)
        for name, tensor in here.items():
            tensor.copy_(saved[name])
        for name, c in self._waiting().items():
            self._resumed[c.name] = c.reach = float(here[name])
        enforcing.restore(self._constrained, self._proved(self._constrained if self._prove else []), self._placement)
        self._remember()

    def _flat_state(self) -> dict[str, Tensor]:
        bare = bare_names(c.name for c in self._constrained)
        flat = {f"{bare[c.name]}.{key}": tensor for c in self._constrained for key, tensor in c.state.items()}
        return flat | {
            name: torch.tensor(c.reach, dtype=torch.float64, device="cpu") for name, c in self._waiting().items()
        }

    def _waiting(self) -> dict[str, Constrained]:
        """The weights whose constraint need not act after every step, by the key of their bound in a state."""
        bare = bare_names(c.name for c in self._constrained)
        return {f"{bare[c.name]}.reach": c for c in self._constrained if c.reach is not None}

    def changes(self) -> dict[str, float]:
        """What happened to each weight since the constraints last saw it, as far as torch counts in this process."""
        return changes(self._constrained)

    def before(self, optimizer: torch.optim.Optimizer, changes: Mapping[str, float]) -> None:
        """Check that the constraints hold after the coming step, and bring back what somebody else has written.

        An optimizer of this library calls it when closures and hooks have run and it reads the numbers of its step.

        Args:
            optimizer: The optimizer that makes the step: the one that was constrained, or a shallow copy of it.
            changes: The largest `changes` of any process.
        """
        devices = {c.parameter.device for c in self._constrained}
        for c in self._constrained if any(map(recording, devices)) else ():
            if c.reach is not None or any(tensor.device.type == "cpu" for tensor in c.state.values()):
                raise RuntimeError(
                    f"a CUDA graph cannot record {c.constraint!r} on {c.name!r}: what it remembers from step to step "
                    "lies on the CPU, and would stand still in a replay; take a cap with every=1"
                )
        if self._model_changed():
            self._tell_displaced()
        settings, written = self._settings_of(optimizer), any(changes.values())
        if settings != self._settings or written:  # a weight that was written may have another dtype
            if (joined := self._joined()) > self._told:
                self._told = joined
                warnings.warn(_said(joined), stacklevel=2)
            self._steps = step_bounds(optimizer, self._constrained)
            self._still = still(optimizer, self._constrained, self._steps)
            self._seen = enforcing.seen_steps(self._constrained, self._steps)
        enforcing.check(self._constrained, self._steps)
        self._settings = settings
        self._stepping = {c.name for c in self._constrained if c.parameter.grad is not None}
        if written:
            for c in self._constrained:
                c.reach = self._resumed.get(c.name, c.reach) if changes[c.name] else c.reach
            self._take_over([c for c in self._constrained if changes[c.name] == WRITTEN])
            doubted = [c for c in self._constrained if changes[c.name] == DOUBTED]
            enforcing.restore(doubted, self._proved(doubted), self._placement)
            self._remember()
        self._resumed = {}
        begun = self._stepping - self._still
        unbounded = [c for c in self._constrained if self._steps[c.name] is None]
        measured = [c for c in unbounded if c.name in begun and c.reach is not None and not is_distributed(c.parameter)]
        self._measured = Measured(measured)
        self._at_rest = self._copied([c for c in unbounded if c.name in self._still])
        if early := [c for c in self._constrained if c.constraint.acts_before and c.name in begun]:
            enforcing.begin_step(early, self._placement)
            self._remember()

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Have constraints act on what has moved: with a gradient before the step or after it, or as torch counts.

        The bounds are those of the step that was made: `before` read them when the step read its numbers. A step of
        length 0, such as torch makes to load an optimizer's state, is followed by no constraint. Whether a step of
        rate 0 had length 0 is seen by the weights: Rprop and ASGD keep the lengths of their steps in their state.
        """
        strayed = self._agree({name: float(differs) for name, differs in self._differ(self._at_rest).items()})
        unmoved, self._at_rest = self._still - {name for name, differs in strayed.items() if differs}, {}
        if self._settings_of(optimizer) != self._settings:  # a closure may have run since
            unmoved = unmoved & still(optimizer, self._constrained, self._steps)
        moved = self._stepping | {c.name for c in self._constrained if c.parameter.grad is not None}
        others = changes([c for c in self._constrained if c.name not in moved])
        moved |= {name for name, change in self._agree(others).items() if change == WRITTEN}
        acting = [c for c in self._constrained if c.name in moved]
        acting = [c for c in acting if c.name not in unmoved or c.constraint.acts_at_rest]
        seen, self._measured = self._seen | self._measured.seen(), Measured([])  # whose copies are of the step alone
        enforcing.apply(acting, seen, self._placement)
        self._remember()
        if self._left is not None:
            self._left = self._copied(self._constrained)

    def sweep_after(self, wrapper: torch.optim.Optimizer) -> None:
        """Bring back what a wrapper without hooks, as a Lookahead is, writes after the steps of this optimizer.

        Values are compared, since many such wrappers write through `parameter.data`, which torch does not count.
        """
        self._left = {}
        own = vars(wrapper).get("step")  # which schedulers of torch set

        @functools.wraps(own or type(wrapper).step)
        def step(wrapper: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
            result = own(*arguments, **keywords) if own else type(wrapper).step(wrapper, *arguments, **keywords)
            if any(each is self for each in attached_to(self._optimizer)):
                self.sweep()
            return result

        wrapper.step = MethodType(step, wrapper)

    def sweep(self) -> None:
        """Bring back what an optimizer's own `step` has written around, or in place of, that of this library."""
        found, left = self.changes(), self._left or {}
        found |= dict.fromkeys([name for name, differs in self._differ(left).items() if differs], WRITTEN)
        found = self._agree(found) if left else found
        if written := [c for c in self._constrained if found[c.name] == WRITTEN]:
            self._take_over(written)
            self._remember()

    def _copied(self, constrained: Sequence[Constrained]) -> dict[str, Tensor]:
        return {c.name: local(c.parameter).detach().clone() for c in constrained}

    def _differ(self, copies: Mapping[str, Tensor]) -> dict[str, bool]:
        """Whether weights differ from their copies."""
        kept = [c for c in self._constrained if c.name in copies]
        return {c.name: not torch.equal(copies[c.name], local(c.parameter)) for c in kept}

    def accept(self, written: Container[Tensor]) -> None:
        """Take these weights, which an average has put back, for those that the last step left."""
        remember([c for c in self._constrained if c.parameter in written])

    def broken(self) -> list[Tensor]:
        """The weights that are not proved to keep what is promised; a collective call."""
        promised, proved = self.promised(), self._proved(self._constrained)
        return [c.parameter for c in self._constrained if proved[c.name] > promised.get(c.name, math.inf)]

    def placed(self) -> list[tuple[Tensor, bool]]:
        """The weights that were projected since the last call, and whether their constraint promises them a bound."""
        found, self._of_averages = [c for c in self._constrained if c.placed], True
        for c in found:
            c.placed = False
        return [(c.parameter, c.promised() is not None) for c in found]

    def said_of_averages(self) -> list[str]:
        """What averages of weights do not keep by themselves: a norm at a value, or a bound that changes with steps."""
        said = "{}: averages keep {!r} from above, and eval() brings them back to it"
        told = [said.format(c.name, c.constraint) for c in self._constrained if c.constraint.tolerance]
        changing = [c for c in self._constrained if c.constraint.bound is None and c.promised() is not None]
        return told + [f"{c.name}: averages keep no bound of {c.constraint!r}, which changes" for c in changing]

    def bring_averages(self) -> None:
        """Bring averages of weights that kept their promises where training may start; nothing is remembered."""
        enforcing.bring(self._constrained, self._placement, self._prove)

    def doubt(self) -> None:
        """Have the next step prove every weight.

        Whoever loads an optimizer's state loads weights as well, which torch does not count where they are cut.
        """
        for c in self._constrained:
            c.doubt = max(c.doubt, DOUBTED)

    def _attach(self) -> None:
        """Attach to the optimizer; one of this library calls what is attached to it, any other by its hooks."""
        optimizer, off = self._optimizer, torch.compiler.disable  # what the hooks call looks at memory
        if self._own:
            cast(BoundsItsSteps, optimizer).attach(self)
        else:
            attached_to(optimizer).append(self)
            self._hooks = (
                optimizer.register_step_pre_hook(off(lambda *_: self.before(optimizer, self._agree(self.changes())))),
                optimizer.register_step_post_hook(off(lambda *_: self.after(optimizer))),
                optimizer.register_load_state_dict_post_hook(lambda *_: self.doubt()),
            )
        self._remember()

    def _place(self) -> None:
        self._own_placement = Placement({c.name: c.parameter for c in self._constrained})
        self._own_places = Places(self._model)
        self._looked: tuple[Places, int] | None = None
        self._settings: object = None  # those that were checked last
        self._measured = Measured([])
        self._at_rest: dict[str, Tensor] = {}  # copies of the weights whose step has the rate 0

    @property
    def _placement(self) -> Placement:
        return cast(BoundsItsSteps, self._optimizer).placement if self._own else self._own_placement

    def _joined(self) -> int:
        """How many parameters joined the optimizer that no `constrain` has seen."""
        known = max((each._known for each in attached_to(self._optimizer)), default=self._known)
        return count_of(self._optimizer) - known

    def _agree(self, numbers: dict[str, float]) -> dict[str, float]:
        """The largest of each number, all known in every process."""
        return self._placement.agree({}, numbers)[1] if numbers else {}

    def _take_over(self, written: Sequence[Constrained]) -> None:
        """Handle externally modified weights: project those with a bound, reset the state of the others.

        A weight that was resized begins as at `constrain`.
        """
        enforcing.project([c for c in written if c.shape != c.parameter.shape], self._placement)
        enforcing.restore(written, self._proved(written), self._placement)
        enforcing.project([c for c in written if c.promised() is None], self._placement)

    def _remember(self) -> None:
        remember(self._constrained)

    def _settings_of(self, optimizer: torch.optim.Optimizer) -> object:
        """Equal as long as steps have the same bounds."""
        return cast(BoundsItsSteps, optimizer).settings if self._own else rates_of(optimizer)

    def _model_changed(self) -> bool:
        """Whether the model has other parts than at the last call; the optimizer may have looked in this step."""
        places = cast(BoundsItsSteps, self._optimizer).places if self._own else self._own_places
        if places.model() is not self._model():
            places = self._own_places
        if places is self._own_places:
            places.look()
        looked, self._looked = self._looked, (places, places.changes)
        return looked != self._looked

    def _proved(self, among: Sequence[Constrained]) -> dict[str, float]:
        return self._largest(among, upper_bound)

    def _largest(self, among: Sequence[Constrained], function: Measure) -> dict[str, float]:
        """The largest number of any process for every weight, each by its own copy; infinity where it is not finite."""
        here = measure([[c] for c in among], function, self._own_placement)
        finite = {name: number if number < math.inf else math.inf for name, number in here.items()}
        return self._agree(finite)

    def __getstate__(self) -> dict[str, Any]:
        left = ("_hooks", "_own_placement", "_own_places", "_looked", "_settings", "_measured", "_at_rest")
        return {name: value for name, value in vars(self).items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hooks = ()
        self._place()
        self._remember()
        if not self._own and not attached_to(self._optimizer):  # whose copy has no hooks
            self._attach()
