"""The engine: momentum x direction x norm x step rule, over every parameter of an assignment.

Parameters of equal norm, shape and direction become a `batch`, which composes the `parts` of their step: a `Placement`
computes its directions here or in other processes, and then its weights move entry by entry, group by group.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellnormed._warnings import warn
from wellnormed.norms import Norm
from wellnormed.optim import validation
from wellnormed.optim.batch import Batch, Moved, Numbers, Part
from wellnormed.optim.fallback import AdamWStep
from wellnormed.optim.groups import Params, named, resolve, split
from wellnormed.optim.parts import Direction, Group, StepRule, evaluated, rule_of
from wellnormed.optim.saved_state import admitted, restore_kept
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings, spell_out
from wellnormed.optim.table import notes, table
from wellnormed.parallel import Placement
from wellnormed.parallel.layout import kind
from wellnormed.parallel.placement import in_buckets
from wellnormed.routing import Assignment
from wellnormed.routing.patterns import bare_names
from wellnormed.routing.places import Places, Weak, standing

Value = TypeVar("Value")
_OF_THE_WHOLE = ("norms", "process_group")
"""The settings that no group and no later parameter has."""


class ConditionalGradient(torch.optim.Optimizer):
    """Momentum x direction x norm x step rule, over every parameter of an assignment.

    Parameters of equal norm and shape are treated in one pass, whatever their learning rates. State is one momentum
    buffer per parameter, and what its direction keeps. Parameters without a norm are left to AdamW.

    Args:
        params: The model, whose parameters get their norms by `recipe` and `overrides`; or what `assign_norms`
            returned; or parameters, named parameters or groups as any torch optimizer takes them, together with
            `norms`. Groups may override `lr` and every keyword of `GROUP_DEFAULTS`.
        lr: Step size in units of each parameter's norm; without it, the rate recommended with the recipe.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> before = model.weight.detach().clone()
        >>> optimizer = ConditionalGradient(model, lr=0.1, momentum=0.0)
        >>> model(torch.eye(4)).square().sum().backward()
        >>> optimizer.step()
        >>> (entry,) = optimizer.assignment
        >>> bool(entry.norm.norm(model.weight.detach() - before) <= optimizer.update_norm("weight") * 1.001)
        True
    """

    preset: ClassVar[EngineSettings] = {}
    """Where an optimizer's defaults differ from those of `EngineSettings`."""
    decides: ClassVar[Set[str]] = set()
    """The keywords of `EngineSettings` that an optimizer does not take, since it decides them itself."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        spell_out(cls)

    def __init__(self, params: Params, lr: float | None = None, **settings: Unpack[EngineSettings]) -> None:
        validation.refuse_unknown(type(self), settings)
        settings = {**self.preset, **settings}
        groups, assignment = self._resolve(params, settings)
        self._given = next((each for each in (params, settings.get("norms")) if isinstance(each, nn.Module)), None)
        self._of_model = self._given is not None
        later = {key: value for key, value in settings.items() if key not in _OF_THE_WHOLE}
        self._chosen = cast(EngineSettings, later)  # for parameters that join in the middle of training
        self._process_group = settings.get("process_group")
        self.attached: list[Any] = []
        self._begin()
        defaults: Group = {"lr": assignment.lr if lr is None else lr, "steps": 0}
        defaults |= {key: settings.get(key, value) for key, value in GROUP_DEFAULTS.items()}
        validation.check_settings(defaults)
        if lr is None and (rule := rule_of(defaults)) is not None and not rule.scale_free:
            raise ValueError("step_rule='sharp' takes an inverse sharpness, which depends on the loss; pass lr=")
        self._adopt(assignment)
        self._left_out = set(self._elsewhere())  # of the model's names: those that others move
        self._adamw_rate = 0.0  # the largest rate of AdamW that a group was made with
        super().__init__(split(groups, assignment, defaults["lr"], settings), defaults)

    def _resolve(self, params: Params, settings: EngineSettings) -> tuple[list[Group], Assignment]:
        """Groups of named parameters, and their norms as this optimizer takes them."""
        return resolve(params, settings)

    def _begin(self) -> None:
        """What a new optimizer and a copy begin with."""
        self._warned: set[str] = set()
        self._averaged: dict[Tensor, str | None] = {}
        self._watch: RemovableHandle | None = None

    def _adopt(self, assignment: Assignment) -> None:
        validation.refuse_parameters(assignment)
        self._read: list[tuple[Any, ...]] = []
        self._rates: list[float] = []
        self._admitted: list[tuple[Any, ...]] | None = None
        self.assignment = replace(assignment, weights=())  # which are read once, and are not to be copied
        self.places, self._walk = Places(Weak(self.model)), -1
        self.placement = Placement({a.name: a.parameter for a in assignment}, self._process_group)
        self._norms: dict[Tensor, Norm | None] = {a.parameter: a.norm for a in assignment}
        self._directions = validation.directions_of(assignment, self._chosen.get("directions") or {})

    @property
    def model(self) -> nn.Module | None:
        """The model whose parameters these are: the one that was given, or that of the assignment while it lives."""
        return self.assignment.model() if self._given is None else self._given

    def _elsewhere(self, frozen: bool = False) -> dict[str, Tensor]:
        """The trained parameters of the model, as it is now, that are in no group; with `frozen`, the others too."""
        return validation.others(self.model, self._norms, frozen)

    def __str__(self) -> str:
        """What the next step will use: for every parameter its norm, radius, learning rate and cap, and why."""
        self._index()
        rates = {name: float(group["lr"]) for name, (group, _) in self._owner.items()}
        later = {"norm": None, "reason": "step_rule='adamw'"}  # of groups that were changed since
        now = tuple(replace(a, **later) if a.norm and not self._norms[a.parameter] else a for a in self.assignment)
        shown = table(replace(self.assignment, assigned=now), self._moved, self.defaults, rates, self._caps())
        here = None if self.model is None else set(self.model.parameters())
        gone = [name for name, (_, p) in self._owner.items() if here is not None and p not in here]
        return "\n".join([f"{type(self).__name__}{shown}", *notes(self._moved, gone, list(self._elsewhere()))])

    def _caps(self) -> dict[str, str]:
        """Each constrained parameter's constraint in a few letters."""
        return {name: text for each in self.attached for name, text in self.renamed(each, each.shown()).items()}

    def renamed(self, constraints: Any, values: Mapping[str, Value]) -> dict[str, Value]:
        """What attached constraints say by their names of parameters, which `norms` gave them, by those used here."""
        own = {parameter: name for name, (_, parameter) in self._owner.items()}
        held = zip(constraints.names, constraints.parameters(), strict=True)
        return {own[parameter]: values[name] for name, parameter in held if name in values and parameter in own}

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, also in the middle of training, such as a layer that was frozen until now.

        Their norms come from the group's key `norm` (one for all of them, None for AdamW), else from the model that the
        optimizer was made with, by the same recipe and overrides. AdamW's settings are those of the optimizer; for a
        group of its own, `lr` is relative to the optimizer's `lr`: half of that is half of AdamW's rate.

        Example:
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
            >>> _ = model[0].requires_grad_(False)
            >>> optimizer = ConditionalGradient(model, lr=0.1)
            >>> _ = model[0].requires_grad_(True)
            >>> optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
            >>> optimizer.update_norm("0.weight") < optimizer.update_norm("1.weight")
            True
        """
        members = named([param_group])[0]["params"]
        groups, assignment = [{**param_group, "params": members}], self.assignment
        if any(parameter not in self._norms for _, parameter in members):
            known = self._known_later(members)
            entries = validation.assign_later(members, param_group, {a.parameter: a for a in known}, self._owner)
            frozen = tuple(name for name in assignment.frozen if all(name != a.name for a in entries))
            assignment = replace(
                assignment, assigned=assignment.assigned + entries, frozen=frozen, weights=known.weights
            )
            added = {**param_group, "params": [(a.name, a.parameter) for a in entries]}
            added.pop("norm", None)
            groups = split([added], assignment, self.defaults["lr"], self._chosen)
        elif "norm" in param_group:
            raise ValueError(
                f"norm={param_group['norm']!r} in a group is for parameters that come later; give the norms of the "
                "first ones by overrides= or assign_norms"
            )
        for group in groups:
            validation.check_settings({**self.defaults, **group})
        if assignment is not self.assignment:
            self._adopt(assignment)
        for group in groups:
            super().add_param_group(group)
        made = (float(group["lr"]) for group in self.param_groups[-len(groups) :] if rule_of(group) is None)
        self._adamw_rate = max(self._adamw_rate, *made, 0.0)
        self._index()

    def _known_later(self, members: list[tuple[str, nn.Parameter]]) -> Assignment:
        """The norms that are known for parameters that come later: those of all that the model holds now."""
        if self.model is None or not self._of_model:
            return Assignment(())
        return self._resolve(self.model, self._chosen)[1]

    def _index(self) -> None:
        """Find whose group is whose, and check the settings, where somebody has changed any since the last time.

        A user may have replaced groups, or moved a parameter to another one; a scheduler changes rates.
        """
        groups = self.param_groups
        rates = [float(group["lr"]) for group in groups]
        read = [(id(group), *map(id, group["params"]), *validation.read(group)) for group in groups]
        if read == self._read and rates == self._rates:
            return
        for group in groups:
            validation.check_settings(group)
        if read != self._read:
            self._index_groups()
        by_adamw = [rate for rate, group in zip(rates, groups, strict=True) if rule_of(group) is None]
        if max(by_adamw, default=0.0) > validation.RAISED * self._adamw_rate > 0:
            self._warn_once("rate", validation.RAISED_RATE.format(max(by_adamw), self._adamw_rate))
        self._read, self._rates, self._settings = read, rates, object()

    @property
    def settings(self) -> object:
        """Another object after any change of the groups and their settings."""
        self._index()
        return self._settings

    def _index_groups(self) -> None:
        self._owner: dict[str, tuple[Group, Tensor]] = {}
        self._moved: list[Moved] = []
        self._admitted = None
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self._owner[name] = group, parameter
        for name, (group, parameter) in self._owner.items():
            if parameter not in self._norms:
                raise ValueError(
                    f"parameter {name!r} is not the one that this optimizer was made with, and has no norm; add new "
                    "parameters by add_param_group, or make the optimizer again"
                )
            rule = rule_of(group)
            self._refuse_other_averages(name, parameter, group, rule)
            if rule is None:
                self._norms[parameter] = None
                continue
            norm, own = self._norms[parameter], self._directions.get(parameter)
            assert norm is not None  # `_refuse_other_averages` refuses the others
            validation.refuse_direction(name, own, norm, group)
            radius = group["radius"] * group.get("vector_radii", {}).get(name, 1.0)
            direction = own or rule.direction
            self._moved.append(Moved(name, parameter, group, rule, norm, direction, radius, direction.bound(norm)))

    def _refuse_other_averages(self, name: str, parameter: Tensor, group: Group, rule: StepRule | None) -> None:
        """Refuse a step rule that would take what was averaged under another for its own."""
        norm = self._norms[parameter]
        if (rule is None and "betas" not in group) or (rule is not None and norm is None):
            raise ValueError(
                f"step_rule={group['step_rule']!r} cannot move {name!r}, which its group was not made for; give "
                "overrides={NAME: None} for AdamW, or a norm, when the optimizer is made"
            )
        kind = None if rule is None else rule.averages
        begun = self.state.get(parameter) or (group["memory"] == "gradient" and group["steps"])
        if begun and self._averaged.get(parameter, kind) != kind:
            raise ValueError(
                f"the step rule of {name!r} was changed in the middle of training, and its averages are of something "
                "else; change it back, or make a new optimizer"
            )
        self._averaged[parameter] = kind

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns the closure's value, or None.

        Raises:
            NonFiniteGradientError: Names the parameter and the step; no parameter and no buffer was changed.
        """
        loss, batches, adamw = self._prepared(closure, torch.compiler.is_compiling())
        for work in adamw:
            work(self.state)
        results = self.placement.run(batch.job(self.state) for batch in batches)
        for batch in batches:
            batch.move(self.state, *next(results))  # nobody keeps these when the next ones are computed, as `zip` would
        for group in self.param_groups:
            group["steps"] += 1
        if self.attached:
            self._constrain()
        return loss

    @torch._disable_dynamo
    def _constrain(self) -> None:
        for follower in self.attached:
            follower.after(self)

    def attach(self, constraints: Any) -> None:
        """Have constraints called in every step. `constrain` calls this."""
        self.attached.append(constraints)
        self._watch_steps()

    def _watch_steps(self) -> None:
        """Have constraints look at their weights when `step` returns, whose subclass may write them; as the last hook.

        Torch copies no hooks.
        """
        if self._watch is not None:
            self._watch.remove()
        self._watch = self.register_step_post_hook(lambda own, *_: cast(Self, own)._sweep())

    @torch._disable_dynamo
    def _sweep(self) -> None:
        for follower in self.attached:
            follower.sweep()

    @torch._disable_dynamo  # as torch's optimizers: `torch.compiler.disable` would import the compiler at once
    def _prepared(self, closure: Callable[[], Any] | None, compiled: bool) -> tuple[Any, list[Batch], list[AdamWStep]]:
        """The closure's value, and what will move, all of it admitted and with its state made.

        It looks at values, makes tensors and reads gradients, which are others in every step, so that `torch.compile`
        leaves it out.
        """
        self._index()  # which refuses settings before the closure runs
        loss = evaluated(closure)
        if closure is not None:
            self._index()
        self._admit()
        self._warn_of_lost_decay()
        adamw = [AdamWStep.of(group, compiled) for group in self.param_groups if rule_of(group) is None]
        batches = [
            Batch(norm, direction, [self._part(each, compiled) for each in parts])
            for norm, direction, parts in self._planned
        ]
        for work in (*adamw, *batches):
            work.make_state(self.state)  # all before the first direction, whose memory the next ones take then
        return loss, batches, adamw

    def _admit(self) -> None:
        """Refuse gradients that no step can use, and have constraints look at their weights and at the coming step.

        Processes agree on both in one message. Nothing of the user's runs between this and the numbers of the step.
        """
        here = [(name, p, p.grad) for name, (_, p) in self._owner.items()]
        gradients = {name: gradient for name, _, gradient in here if gradient is not None}
        seen = [(name, kind(p), kind(gradient)) for name, p, gradient in here if gradient is not None]
        if seen != self._admitted:
            self._plan(gradients)
            self._admitted = seen
        sizes = validation.gradient_sizes(gradients)
        if not sizes:
            self._warn_once("gradients", validation.NO_GRADIENTS)
        self._warn_of_unmoved()
        changes = [follower.changes() for follower in self.attached]
        if self.placement.shared:
            told = {f"{i} {name}": number for i, each in enumerate(changes) for name, number in each.items()}
            sizes, told = self.placement.agree(sizes, told, among=self._owner)
            changes = [{name: told[f"{i} {name}"] for name in each} for i, each in enumerate(changes)]
        validation.refuse_not_finite(sizes, self.param_groups[0]["steps"])
        for follower, change in zip(self.attached, changes, strict=True):
            follower.before(self, change)

    def _warn_of_unmoved(self) -> None:
        """Warn by name of parameters that joined the model since, have a gradient, and are in no group."""
        if (changes := self.places.look()) != self._walk:
            self._walk, self._all_here = changes, not self._elsewhere(frozen=True)
        if self._all_here or self.model is None:
            return
        if all(p.grad is None or p in self._norms for p, _ in standing(self.model)):
            return
        validation.warn_of_unmoved(self._elsewhere(), self._left_out)

    def _plan(self, gradients: Mapping[str, Tensor]) -> None:
        """Refuse gradients of another kind than their parameter, and find the batches of parameters that have one.

        Parameters that move along a direction are in batches of equal norm and direction; singly to save memory.
        """
        for name, gradient in gradients.items():
            _, parameter = self._owner[name]
            validation.refuse_gradient(name, parameter, gradient, self.state.get(parameter, {}))
        moving = [one for one in self._moved if one.name in gradients]
        for one in moving:
            if not self.state.get(one.parameter):
                one.norm.check_shape(one.parameter.shape, one.name)
        self._planned: list[tuple[Norm, Direction, list[list[Moved]]]] = []
        for (norm, direction, _), members in in_buckets(moving, lambda one: one.parameter, Moved.alike, share=10):
            parts: dict[Hashable, list[Moved]] = defaultdict(list)
            for one in members:
                parts[one.part].append(one)
            self._planned.append((norm, direction, list(parts.values())))

    def _part(self, members: list[Moved], compiled: bool) -> Part:
        """Parameters of one group, norm, direction and radius, with the numbers of the coming step."""
        first, numbers, parameters = members[0], Numbers.of(members[0]), [one.parameter for one in members]
        numbers = numbers.as_tensors() if compiled else numbers
        gradients = cast(list[Tensor], [p.grad for p in parameters])  # which have one
        return Part(parameters, gradients, first.group, first.rule, first.direction, numbers)

    def _warn_of_lost_decay(self) -> None:
        for group in self.param_groups:
            rule = rule_of(group)
            share = float(group["lr"]) * group["weight_decay"] if rule is None else rule.decay(group)
            if not share:
                continue
            short = [(n, p) for n, p in zip(group["param_names"], group["params"], strict=True) if p.dtype.itemsize < 4]
            lost = [n for n, p in short if p.grad is not None and share < torch.finfo(p.dtype).eps / 2]
            if lost:
                dtype = str(short[0][1].dtype).removeprefix("torch.")
                names = ", ".join(lost[:3]) + ", ..." * (len(lost) > 3)
                self._warn_once(f"decay of {names}", validation.LOST_DECAY.format(share, dtype, names))

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn(message)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; with `memory="gradient"` those that hold the momentum stay."""
        momenta = {parameter: parameter.grad for parameter in self._in_gradients()}
        for parameter in momenta:
            parameter.grad = None
        super().zero_grad(set_to_none)
        for parameter, momentum in momenta.items():
            parameter.grad = momentum

    def update_norm(self, name: str) -> float | None:
        """Bound on the growth of the named parameter's norm in the next step: lr x radius x overshoot.

        None where there is no bound: a parameter without a norm, and a direction that gives none (as that of the step
        rule "sharp", and `NorMuon`).
        """
        bounds = self.update_norms()
        self._require_name(name)
        return bounds[name]

    def _require_name(self, name: str) -> None:
        if name not in self._owner:
            raise ValueError(f"no parameter {name!r} in this optimizer; print it to see the names")

    def update_norms(self) -> dict[str, float | None]:
        """The `update_norm` of every parameter, by name."""
        self._index()
        bounds: dict[str, float | None] = dict.fromkeys(self._owner)
        for one in self._moved:
            bounds[one.name] = one.rule.bound(one.group, one.radius, one.largest)
        return bounds

    def decay(self, name: str) -> float:
        """The share of the named parameter, one with an `update_norm`, that the next step removes."""
        self._require_name(name)
        group, _ = self._owner[name]
        rule = rule_of(group)
        assert rule is not None  # else it has no such norm
        return rule.decay(group)

    def state_dict(self) -> dict[str, Any]:
        """The state of a torch optimizer; with `memory="gradient"` it has the gradients that hold the momentum, too.

        Its groups name the parameters that have a constraint, as `capped`, so that loading them without is noticed.
        """
        state, in_gradients = super().state_dict(), self._in_gradients()
        capped = self._caps()
        for group in state["param_groups"]:
            if held := {name: capped[name] for name in group["param_names"] if name in capped}:
                group["capped"] = held
        numbered = enumerate(parameter for group in self.param_groups for parameter in group["params"])
        momenta = {i: {"momentum_buffer": p.grad} for i, p in numbered if p in in_gradients and p.grad is not None}
        return {**state, "state": {**state["state"], **momenta}}

    def _in_gradients(self) -> set[Tensor]:
        """Parameters whose gradients hold their momentum."""
        groups = [group for group in self.param_groups if group["memory"] == "gradient"]
        return {parameter for group in groups for parameter in group["params"] if self._norms[parameter] is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, also one whose groups or names are in another order.

        Settings of the groups, such as the learning rate, are those of the state.

        Raises:
            ValueError: The state is of another optimizer, step rule, norm, `memory` or size; nothing was changed.
        """
        state = admitted(state_dict, self.param_groups, self._norms, self._directions)
        capped = {name: text for group in state["param_groups"] for name, text in group.pop("capped", {}).items()}
        bare = bare_names(capped)
        here = set(bare_names(self._caps()).values())
        if uncapped := [name for name in capped if bare[name] not in here]:
            warn(validation.UNCAPPED.format(len(uncapped), uncapped[0], capped[uncapped[0]]))
        super().load_state_dict(state)
        self._admitted = None
        restore_kept(state, self.param_groups, self.state, self._norms, self._directions)
        for follower in self.attached:
            follower.doubt()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("assignment", "attached", "_chosen", "_adamw_rate", "_of_model", "_left_out")
        momenta = {p: {"momentum_buffer": p.grad} for p in self._in_gradients() if p.grad is not None}
        own = super().__getstate__()
        state = own["state"].copy()
        state.update(momenta)
        return {**own, "state": state, **{name: vars(self)[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._averaged = {}  # settings and averages come together
        super().__setstate__(state)
        if "_norms" not in vars(self):  # a copy: without the process group, which has no copy
            self._process_group = self._given = None
            self._begin()
            self._adopt(self.assignment)
            if self.attached:
                self._watch_steps()
        self._index()
        for parameter in self._in_gradients() & self.state.keys():
            parameter.grad = self.state.pop(parameter)["momentum_buffer"].clone()


spell_out(ConditionalGradient)
