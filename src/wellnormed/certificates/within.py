"""The Lipschitz constant, or the largest logits, that is proved for all weights within caps: a function of the caps."""

import contextlib
import copy
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import torch
from torch import Tensor, fx, nn

from wellnormed._devices import default_on_cpu
from wellnormed._modes import evaluating, without_autocast
from wellnormed.certificates.arguments import unwrapped
from wellnormed.certificates.certifying import promised
from wellnormed.certificates.promising import any_entries, promise_of
from wellnormed.certificates.search import short_search
from wellnormed.certificates.sizes import Unit, entries_of, slope
from wellnormed.lowering.walk import Walk, proved_again, walked
from wellnormed.norms import Norm
from wellnormed.program.capturing import capture
from wellnormed.program.domain import Box, Domain
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.operation import record_of
from wellnormed.program.program import Program
from wellnormed.proof import CheckError, Promise, Proof, Row
from wellnormed.proof.decimals import assumed, between

LEAST = 1e-2
"""The smallest factor on caps that is tried: smaller weights hardly pass any signal on."""
TOLERANCE = 5e-4
"""The largest relative distance of the proved constant below the requested one."""
Caps = Mapping[str, float]
"""Name of a parameter -> the largest value of its norm."""
_NEAR = 1e-2
"""The share by which a cap is lowered to measure how the constant depends on it."""


class BudgetError(Exception):
    """No caps give the requested constant. Carries the logarithm of the smallest one, and the rows of its proof."""

    def __init__(self, log: float, rows: Sequence[Row]) -> None:
        super().__init__(log)
        self.log, self.rows = log, list(rows)

    @property
    def least(self) -> Decimal:
        """The smallest constant that can be asked for: little more than what these rows prove."""
        return Decimal(self.log).exp() * (1 + Decimal(TOLERANCE / 50))


@dataclass(frozen=True)
class Capped:
    """A parameter whose cap is varied: its norm, its shape, and its names in the program."""

    norm: Norm
    shape: tuple[int, ...]
    names: tuple[str, ...]


def constant_of(proof: Proof, unit: Unit = "euclidean") -> Decimal:
    """The constant that a proof ends with."""
    rows = list(proof.rows.values())
    return slope(rows[-1], entries_of(rows, unit))


def logits_of(proof: Proof) -> dict[str, Decimal]:
    """Row of an attention -> the largest of its logits."""
    return {each.name: max(each.logits) for each in proof.inferences if each.logits is not None}


class Within:
    """The constant of a program for all weights within caps, as a function of the caps.

    Each value is proved, as by `certify(within=...)`, without capturing the model again.

    Args:
        program: The program; each of its trained parameters has a cap or a promise.
        model: The module that it was captured from.
        domain: The inputs that the constant holds for.
        capped: Name -> parameter whose cap is varied.
        promises: Name of a stored tensor -> the promise of another constraint.

    Attributes:
        measure: The number of a proof that counts as the constant: by default the Euclidean Lipschitz constant; see
            `measured_by`.
    """

    def __init__(
        self, program: Program, model: nn.Module, domain: Domain, capped: Mapping[str, Capped],
        promises: Mapping[str, Promise],
    ) -> None:  # fmt: skip
        self._program, self._domain, self._capped = program, domain, dict(capped)
        owner = {alias: name for name, each in capped.items() for alias in each.names}
        self._promises = promised(model, program, {**promises, **dict.fromkeys(owner)})
        self._units = {
            alias: (name, promise_of(alias, capped[name].norm, 1.0, capped[name].shape))
            for alias, name in owner.items()
            if alias in self._promises
        }

        self._made = _made_by_code(program)
        self.measure: Callable[[Proof], Decimal] = constant_of
        self._last: tuple[dict[str, float], float] | None = None
        self._walk: tuple[Walk, dict[str, float]] | None = None
        """The walk whose rows are proved again for other caps, and its own caps."""

    @property
    def promised(self) -> frozenset[str]:
        """The names of the stored tensors whose entries no proof uses."""
        return frozenset(self._promises)

    def measured_by(self, measure: Callable[[Proof], Decimal]) -> "Within":
        """Change `measure`, and return self."""
        self.measure, self._last = measure, None
        return self

    def rows(self, caps: Caps) -> list[Row]:
        """The rows of `proof`."""
        return list(self.proof(caps).rows.values())

    def proof(self, caps: Caps) -> Proof:
        """A proof for these caps: by the rows of the last walk, or by a new walk if they do not follow.

        Raises:
            UncertifiableError: There is no proof.
        """
        walk, own = self._walk or (None, {})
        if walk is not None and own == caps:
            return walk.ledger.proof
        of_caps = {alias: _times(unit, caps[name]) for alias, (name, unit) in self._units.items()}
        promises = {**self._promises, **of_caps}
        if walk is not None and not walk.ledger.constants_of_promises:
            with contextlib.suppress(CheckError):
                return proved_again(walk, {name: each for name, each in promises.items() if each is not None})
        walk = walked(self._program, self._domain, promises, arithmetic=None)
        self._walk = walk, dict(caps)
        return walk.ledger.proof

    def walked_at(self, caps: Caps) -> float:
        """The logarithm of the constant by a new walk, which chooses among bounds anew."""
        self._walk = self._last = None
        return self.log(caps)

    def constant(self, caps: Caps) -> Decimal:
        """The proved constant; infinity where there is no proof."""
        try:
            return self.measure(self.proof(caps))
        except UncertifiableError:
            return Decimal("inf")

    def log(self, caps: Caps) -> float:
        """The natural logarithm of the constant; the last one is remembered."""
        if self._last is None or self._last[0] != caps:
            constant = self.constant(caps)
            self._last = dict(caps), float(constant.ln()) if constant else -math.inf
        return self._last[1]

    def elasticities(self, caps: Caps, among: Iterable[str]) -> dict[str, float]:
        """Name -> by how many per cent the constant grows for one per cent of that cap."""
        here, near = self.log(caps), math.log1p(-_NEAR)
        down = {name: self.log({**caps, name: caps[name] * (1 - _NEAR)}) for name in among}
        return {name: 0.0 if log == here else (log - here) / near for name, log in down.items()}

    def scaled(self, caps: Caps, most: float, pinned: Caps, degree: float = 1.0) -> dict[str, float]:
        """The caps times one factor, within which the constant is less than `most` by at most `TOLERANCE`.

        It grows with the factor; the logarithms of both are nearly linear, so that a secant finds it.

        Args:
            caps: The caps to be multiplied.
            most: The constant.
            pinned: Caps that stay as they are.
            degree: About the power of the factor that the constant grows by.

        Raises:
            BudgetError: The constant is above `most` at the factor `LEAST` already.
        """
        aim, t, ends = math.log(most) - TOLERANCE / 2, 0.0, {}
        for turn in range(100):
            scaled = {name: cap * math.exp(t) for name, cap in caps.items()} | dict(pinned)
            log = self.log(scaled)
            if abs(log - aim) <= 0.49 * TOLERANCE or (log < aim and t == -math.log(LEAST)):
                return scaled
            if log > aim and t == math.log(LEAST):
                raise BudgetError(log, self.rows(scaled) if log < math.inf else [])
            ends[log < aim] = t, log, scaled
            if len(ends) < 2:
                ahead = math.copysign(max(abs(aim - log) / degree, 2.0 ** (turn - 10)), aim - log)  # a flat end is left
                t += min(1.0, max(-1.0, ahead))
                t = min(-math.log(LEAST), max(math.log(LEAST), t))
            else:
                (low, below, _), (high, above, _) = ends[True], ends[False]
                finite = above < math.inf and below > -math.inf and turn % 3
                t = low + (high - low) * ((aim - below) / (above - below) if finite else 0.5)
        return ends[True][2]  # where the constant jumps

    def freed(self, caps: Caps, most: float, among: Iterable[str]) -> dict[str, float]:
        """The caps, with those named in `among` raised to `most` where that does not change the constant."""
        caps, here = dict(caps), self.log(caps) + 1e-9
        if self.log({**caps, **(freed := dict.fromkeys(among, most))}) <= here:
            return {**caps, **freed}
        for name in freed:
            caps[name] = most if self.log({**caps, name: most}) <= here else caps[name]
        return caps

    def for_all_inputs(self) -> "Within":
        """The same function, with every finite input as the domain."""
        other = copy.copy(self).measured_by(self.measure)
        other._domain, other._walk = math.inf, None
        other._promises, other._units = dict(self._promises), dict(self._units)
        return other

    @property
    def inputs(self) -> str:
        """The domain, in words."""
        if isinstance(self._domain, Box):
            return f"inputs with entries {between(self._domain.low, self._domain.high)}"
        return "every finite input" if self._domain == math.inf else f"inputs of RMS at most {assumed(self._domain)}"

    @property
    def distance(self) -> float:
        """The largest distance of two inputs of the domain, in RMS of a group."""
        return self._domain.high - self._domain.low if isinstance(self._domain, Box) else 2 * self._domain

    def gain(self, weights: Mapping[str, Tensor]) -> float:
        """The largest gain, from RMS to RMS, that a short search finds with these weights in place of the program's."""
        own = self._program
        stored = {name: each._replace(tensor=weights.get(name, each.tensor)) for name, each in own.stored.items()}
        module = fx.GraphModule({name: each.tensor for name, each in stored.items()}, own.module.graph)
        return short_search(replace(own, module=module, stored=stored), self._domain)

    @default_on_cpu()
    def is_of(self, model: nn.Module) -> bool:
        """Whether a model executes the operations of the program, as it is now, but for the conversions of autocast."""
        own = self._program
        with evaluated_on_cpu(unwrapped(model)) as evaluated, without_autocast():
            try:
                now = capture(evaluated, own.call(own.given), own.output, whole_batch=not own.each_sample)
            except UncertifiableError:
                return False
        found, made = _made_by_code(now), self._made
        buffers = dict(unwrapped(model).named_buffers(remove_duplicate=False))
        same = found.keys() == made.keys() and all(torch.equal(found[k], made[k]) for k in made.keys() - buffers.keys())
        return same and str(now.module.graph) == str(own.module.graph) and now.stored.keys() == own.stored.keys()

    def forget(self, names: Container[str]) -> None:
        """Replace the caps of these parameters by the bound of `any_entries`, which is no restriction."""
        for alias in [alias for alias, (name, _) in self._units.items() if name in names]:
            del self._units[alias]
            self._promises[alias] = any_entries(alias, self._program.stored[alias].tensor)
        self._walk = self._last = None

    def refresh(self, name: str, values: Tensor) -> None:
        """Change the values of a stored tensor for the next proof."""
        with torch.no_grad():
            self._program.stored[name].tensor.copy_(values)
        self._walk = self._last = None

    def statistics(self) -> set[str]:
        """The names of the running statistics that operations of the program read."""
        records = [(node, record) for node in self._program.nodes if (record := record_of(node)) is not None]
        read = [node.args[i] for node, record in records for i in record.statistics]
        return {str(each.target) for each in read if isinstance(each, fx.Node) and each.op == "get_attr"}

    def tables(self) -> dict[str, float]:
        """Name of every capped embedding table -> the largest cap at which the domain contains all its rows."""
        looked_up = {str(node.all_input_nodes[0].target) for node in self._program.depends.lookups}
        limits = {}
        for name, unit in (owned for alias, owned in self._units.items() if alias in looked_up):
            if isinstance(self._domain, Box):
                (size,), limit = unit.bound("max_abs", {}), min(-self._domain.low, self._domain.high)
            else:
                (size,), limit = unit.bound("row_norm", {}), self._domain * math.sqrt(unit.shape[-1])
            limits[name] = limit / size * (1 - 1e-9)
        return {name: limit for name, limit in limits.items() if limit < math.inf}


def _made_by_code(program: Program) -> dict[str, Tensor]:
    """Copies of the stored tensors that the state dict of the program's model does not have."""
    return {name: each.tensor.detach().clone() for name, each in program.stored.items() if not each.persistent}


def _times(unit: Promise, cap: float) -> Promise:
    """The promise of a cap, from the promise of the cap 1."""
    parts = (replace(each, size=math.nextafter(each.size * cap, math.inf)) for each in unit.parts)
    return replace(unit, parts=tuple(parts))


@contextlib.contextmanager
def evaluated_on_cpu(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, on the CPU: itself, or a copy where it lies elsewhere."""
    if any(each.device.type != "cpu" for each in (*model.parameters(), *model.buffers())):
        yield copy.deepcopy(model).cpu().eval()
        return
    with evaluating(model):
        yield model
