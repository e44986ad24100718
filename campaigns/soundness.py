"""An attack on the certificates of random small models: nothing that a search finds may exceed a proved bound.

Every model of `campaigns.random_models` is bounded and then searched in float64: for the gain of the whole and of one
operation within it, at points and over distances; the gains, norms and largest entries of all operations are measured
at every point that the search visits. Every twentieth model goes through `wn.certify` and `wn.verify`. What is done
lies in `runs/soundness/`, so that a campaign goes on where it stopped; the summary is `results/soundness.json`.

    python -m campaigns.soundness --models 5000 --minutes 60
    python -m campaigns.soundness --only 17      # one model, in full
"""

import copy
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import wellnormed as wn
from campaigns import outcomes
from campaigns.random_models import Drawn, draw_model
from papers.header import header, write_result
from wellnormed.certificates import capture
from wellnormed.certificates.continuous import Continuous
from wellnormed.certificates.search import _better, _like, _Search, _Tangent, over, rms
from wellnormed.certificates.sizes import largest_rms
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.walk import Walk, walked
from wellnormed.program.domain import default_axes
from wellnormed.program.operation import name_of
from wellnormed.program.program import Program
from wellnormed.proof import Bounds
from wellnormed.proof.decimals import float_up
from wellnormed.proof.gather import gather
from wellnormed.proof.value import Base, Value

ROUNDING = 1e-9
"""Relative share of a measured number that float64 may have added to it: as in `certificates.search`."""
DERIVATIVE = 2.0**-23
"""The same of a derivative: torch's of `celu` has constants in float32. Differences of values know no such error."""
VERIFIED = 20
"""One model of so many is certified and verified as a user does it."""
KINDS = ("radius", "gain", "largest")
RESULTS, PROGRESS = Path("results/soundness.json"), Path("runs/soundness")

Point = dict[str, Tensor]


class Every(Continuous):
    """A captured model that shows all that it computes on the way."""

    def every(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name of a node -> its tensor, for all that depend on the input."""
        found: dict[str, Tensor] = {}

        class Showing(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                result = super().run_node(node)
                if isinstance(result, Tensor) and node.op in ("placeholder", "call_function"):
                    found[node.name] = result
                return result

        with sdpa_kernel(SDPBackend.MATH):
            Showing(self.double.module).run(*(inputs[name] for name in self.shapes))
        return found

    def until(self, name: str, axes: tuple[int, ...]) -> "Every":
        """The function whose result is an inner node's, in groups along these axes, counted from the last."""
        part = copy.copy(self)
        graph = copy.deepcopy(self.double.module.graph)
        graph.erase_node(graph.output_node())
        graph.output(next(node for node in graph.nodes if node.name == name))
        part.double = replace(self.double, module=fx.GraphModule(self.double.module, graph))
        part.output_axes = axes
        return part


class Limit(NamedTuple):
    """Bounds of the groups of a node's tensor."""

    node: str
    operation: str
    """The name of the executed operation."""
    primitive: str
    """The kind of the row that bounds it; `moves` if it is gathered from several rows."""
    shape: tuple[int, ...]
    """The tensor's, or how it is cut into parts first."""
    axes: tuple[int, ...]
    bounds: dict[str, np.ndarray]
    """Each kind, rounded up, with size 1 along the axes of a group."""


def limits_of(walk: Walk) -> list[Limit]:
    """All that a certificate says of the tensors that its model computes."""
    found: list[Limit] = []
    parts: list[tuple[fx.Node, Base]] = []
    for node, value in walk.values.items():
        if not isinstance(value, Value) or not value.shape:
            continue
        base = value.terms[0].base
        if len(value.terms) == 1 and isinstance(base, Base) and value.name == base.name:
            primitive = walk.ledger.proof.rows[base.name].operation
            found.append(_limit(node, primitive, base.shape, base.axes, base.bounds))
            parts.append((node, base))
        axes = {(len(value.shape) - 1,), tuple(default_axes(value.shape)), inner_axes(value)}
        found += [_limit(node, "moves", value.shape, each, gather(value, each)) for each in sorted(axes)]
    for node, base in parts:
        for name, row in walk.ledger.proof.rows.items():
            if name.startswith(f"{base.name}/") and row.bounds is not None:
                found.append(_limit(node, row.operation, row.shape, row.axes, row.bounds))
    return found


class Logits(NamedTuple):
    """For an attention that is executed as one operation: a bound on the logits of every head."""

    queries: str
    keys: str
    scale: float
    largest: list[float]


def logits_of(walk: Walk) -> list[Logits]:
    """The bounds on logits whose queries and keys are tensors of the graph."""
    found: list[Logits] = []
    for node, value in walk.values.items():
        if isinstance(value, Value) and "scaled_dot" in name_of(node.target):
            rows, (q, k) = walk.ledger.proof.inferences, node.args[:2]
            rows = rows[rows.index(value.terms[0].base.inference) :: -1]  # it may be bounded in another way, too
            row = next(row for row in rows if row.logits is not None)
            found.append(Logits(q.name, k.name, float(row.constants["scale"]), list(map(float_up, row.logits))))
    return found


def _limit(node: fx.Node, primitive: str, shape: Sequence[int], axes: Sequence[int], bounds: Bounds) -> Limit:
    floats = {kind: np.vectorize(float_up, otypes=[float])(getattr(bounds, kind)) for kind in KINDS}
    operation = "input" if node.op == "placeholder" else name_of(node.target).removeprefix("aten.")
    operation = "one of several results" if "getitem" in operation else operation
    return Limit(node.name, operation, primitive, tuple(shape), tuple(axes), floats)


@dataclass
class Outcome(outcomes.Outcome):
    """The outcome of one model."""

    status: str = "sound"
    """Or `violated`, `not proved` (of a certificate that the checker refuses), `refused`, `not finite`, `crashed`."""
    share: float | None = None
    """The share of the proved Lipschitz constant that a search found."""
    verified: bool = False
    shares: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Executed operation, primitive, and the largest shares of its bounds on gain and norm that were met."""
    logit_share: float | None = None
    """The share of the proved largest logit that occurred."""


class Measurement:
    """Compares measured values with all bounds of a certificate."""

    def __init__(self, limits: list[Limit], logits: list[Logits]) -> None:
        self.limits, self.logits = limits, logits
        self.logit_share = 0.0
        self.shares = [dict.fromkeys(KINDS, 0.0) for _ in limits]
        self.violations: list[str] = []

    def norms(self, values: Mapping[str, Tensor], where: str) -> None:
        """Norms and largest entries at one input."""
        for number, limit in enumerate(self.limits):
            if (x := self._cut(limit, values)) is not None:
                self._compare(number, "radius", _lengths(x, limit.axes), where)
                largest = x.abs().amax(limit.axes, keepdim=True) if limit.axes else x.abs()
                self._compare(number, "largest", largest, where)
        for each in self.logits:
            q, k = values[each.queries].detach(), values[each.keys].detach()
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.ndim > 3 else k
            found = (each.scale * q @ k.mT).abs().amax((0, -2, -1)).reshape(-1) * (1 - ROUNDING)
            share = float((found / torch.tensor(each.largest, dtype=torch.float64).clamp(min=1e-300)).max())
            self.logit_share = max(self.logit_share, share)
            if share > 1:
                self.violations.append(f"a logit of {each.queries} and {each.keys} is {share} times its bound, {where}")

    def gains(self, changes: Mapping[str, Tensor], distance: float, where: str, error: float) -> None:
        """Changes of all tensors for a change of the input by `distance`.

        Args:
            changes: Name of a node -> its change.
            distance: In the certificate's norm.
            where: For the message.
            error: What rounding may have added to a norm, relative to the largest that the tensor can have; for a
                derivative (a distance of its own size, and no norms in it) relative to the bound on the gain.
        """
        for number, limit in enumerate(self.limits):
            if (x := self._cut(limit, changes)) is not None:
                kind = "gain" if error == DERIVATIVE else "radius"
                slack = error * float(limit.bounds[kind].max(initial=0.0)) * (distance if kind == "gain" else 1.0)
                self._compare(number, "gain", (_lengths(x, limit.axes) - slack).clamp(min=0.0) / distance, where)

    def _cut(self, limit: Limit, values: Mapping[str, Tensor]) -> Tensor | None:
        x = values.get(limit.node)
        return None if x is None or x.numel() != math.prod(limit.shape) else x.detach().reshape(limit.shape)

    def _compare(self, number: int, kind: str, measured: Tensor, where: str) -> None:
        size, limit = measured.numpy() * (1 - ROUNDING), self.limits[number]
        bound = np.broadcast_to(limit.bounds[kind], size.shape)
        if not np.isfinite(bound).all():
            raise FloatingPointError(f"the bound of {limit.node} is beyond float64")
        size = np.where(np.isfinite(size), size, np.inf)
        share = float(np.max(np.divide(size, bound, out=np.where(size > 0, np.inf, 0.0), where=bound > 0), initial=0.0))
        share = min(share, sys.float_info.max)  # which JSON can hold
        self.shares[number][kind] = max(self.shares[number][kind], share)
        if share > 1:
            self.violations.append(
                f"{kind} of {limit.node} ({limit.operation}, {limit.primitive}, shape {limit.shape}, groups along "
                f"{limit.axes}) is {share} times its bound, {where}"
            )


def _lengths(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Norms of groups; no axes are single entries, where torch would take all."""
    return torch.linalg.vector_norm(x, dim=axes, keepdim=True) if axes else x.abs()


class Attack:
    """Searches of one captured model, with its bounds."""

    def __init__(self, captured: Program, walk: Walk, radius: float, seed: int) -> None:
        # it is taken apart already, and doing so takes longer than anything else here
        self.function = Every(captured.double())
        self.radius, self.limits = radius, limits_of(walk)
        self.measurement = Measurement(self.limits, logits_of(walk))
        self.generator = torch.Generator().manual_seed(seed)
        self._choice = np.random.default_rng(seed)
        self._forward = True

    def run(self, bound: float) -> float:
        """Search for the result and for one inner operation; the largest gain found, over `bound`, its proof."""
        search = _Search(self.function, self.radius, 3, self.generator)
        found = self._best(search)
        lower = search.measure(search.wander(found, 4))
        if lower.rms_value * (1 - ROUNDING) > bound:
            self.measurement.violations.append(f"the result's gain {lower.rms_value} exceeds {bound}")
        self.look(found.x, found.direction, "at the largest gain")
        target = self._inner()
        if target is not None:
            axes = tuple(axis - len(target.shape) for axis in target.axes)
            part = self.function.until(target.node, axes)
            inner = _Search(part, self.radius, 3, self.generator)
            found = self._best(inner)
            self.look(found.x, found.direction, f"at the largest gain of {target.node}")
            self.stretch(part, found.x)
        self.stretch(self.function, found.x)
        for start in self._starts():
            self.look(start, self._direction(), "at random")
        return lower.rms_value / bound if bound else 1.0

    def _best(self, search: _Search) -> _Tangent:
        """By ascent from the sphere, and by the power method near zero, where normalisation is steepest."""
        function, best = search.function, search.climb(8)
        x = {name: search._draw(shape) for name, shape in function.shapes.items()}
        sizes = self.radius * torch.tensor([0.3, 1e-2, 1e-4], dtype=torch.float64)
        x = {n: _like(sizes, each) * over(each, rms(each, function.axes[n])) for n, each in x.items()}
        u = search._draw(tuple(function.many(x).shape[1:]))
        for _ in range(5):
            direction, pushed, _ = search._gains(x, u)
            value, u = search._largest(pushed)
            best = _better(best, value, u, x, direction)
        return best

    def look(self, x: Point, direction: Point, where: str) -> None:
        """Measure everything at a point, and everything's change along a direction, near and far."""
        values = self.function.every(x)
        self.measurement.norms(values, where)
        if self._forward:
            try:
                _, changes = torch.func.jvp(self.function.every, (x,), (direction,))
                size = self._size(direction)
                if size > 0:
                    self.measurement.gains(changes, size, f"{where}, derivative", DERIVATIVE)
            except (RuntimeError, NotImplementedError):  # torch has no forward derivative of an operation
                self._forward = False
        for step in (1e-2, -0.3, 2.0):
            other = self._inside({name: each + step * self.radius * direction[name] for name, each in x.items()})
            distance = self._size({name: other[name] - each for name, each in x.items()})
            if distance > 1e-6 * self.radius:
                moved = self.function.every(other)
                self.measurement.norms(moved, where)
                changes = {name: moved[name] - each for name, each in values.items() if each.is_floating_point()}
                self.measurement.gains(changes, distance, f"{where}, over a distance of {distance}", ROUNDING * 1e-3)

    def stretch(self, part: Every, x: Point) -> None:
        """Climb the norm of the longest group of a function's result: to the end of the ball along its gradient."""
        for _ in range(3):
            values = {name: each.detach().requires_grad_() for name, each in x.items()}
            result = part(values)
            longest = torch.linalg.vector_norm(result, dim=part.output_axes).max()
            if not longest.requires_grad:
                return
            try:
                slopes = torch.autograd.grad(longest, list(values.values()), materialize_grads=True)
            except RuntimeError:
                return
            axes = self.function.axes
            slopes = [over(g, g.abs().max()) for g in slopes]  # the square of what is tiny would be 0
            steep = {n: self.radius * over(g, rms(g, axes[n])) for n, g in zip(values, slopes, strict=True)}
            x = self._inside(steep)
            self.measurement.norms(self.function.every(x), "at the largest norm")

    def _inner(self) -> Limit | None:
        """One of the operations that bound something."""
        names = {node.name for node in self.function.double.nodes if node.op == "call_function"}
        own = [limit for limit in self.limits if limit.node in names and limit.primitive != "moves"]
        own = [limit for limit in own if limit.shape == self._shape(limit.node)]
        return own[int(self._choice.integers(len(own)))] if own else None

    def _shape(self, name: str) -> tuple[int, ...]:
        node = next(node for node in self.function.double.nodes if node.name == name)
        example = node.meta["val"]
        return tuple(example.shape) if isinstance(example, Tensor) else ()

    def _starts(self) -> Iterator[Point]:
        """On the sphere: random, signs, all entries alike, one entry; and within."""
        for shape in (
            lambda t: t,
            torch.sign,
            torch.ones_like,
            lambda t: t * (t == t.amax(-1, True)),
            lambda t: t * 1e-2,
        ):
            drawn = {n: shape(self._draw(s)) for n, s in self.function.shapes.items()}
            size = 1e-3 if float(next(iter(drawn.values())).abs().max()) < 0.1 else 1.0
            axes = self.function.axes
            yield {n: size * self.radius * over(each, rms(each, axes[n])) for n, each in drawn.items()}

    def _direction(self) -> Point:
        drawn = {name: self._draw(shape) for name, shape in self.function.shapes.items()}
        return {name: over(each, rms(each, self.function.axes[name])) for name, each in drawn.items()}

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _size(self, x: Point) -> float:
        return max(float(rms(each, self.function.axes[name]).max()) for name, each in x.items())

    def _inside(self, x: Point) -> Point:
        axes = self.function.axes
        return {n: each * (self.radius / rms(each, axes[n]).clamp(min=1e-300)).clamp(max=1.0) for n, each in x.items()}


def examine(drawn: Drawn, full: bool = False) -> Outcome:
    """Bound one model and attack it.

    Args:
        drawn: The model.
        full: Print its layers, rows and the largest share of every bound.
    """
    outcome = Outcome(drawn.number, drawn.layers, drawn.radius)
    with outcome.recorded():
        try:
            _attack(drawn, outcome, full)
        except FloatingPointError as error:  # nothing can be compared
            outcome.status, outcome.reason = "not finite", str(error)
    return outcome


def _attack(drawn: Drawn, outcome: Outcome, full: bool) -> None:
    captured = capture(drawn.model, drawn.example, whole_batch=True)
    walk = walked(captured, drawn.radius)
    row = list(walk.ledger.proof.rows.values())[-1]
    bound = float_up(largest_rms(row, "gain"))
    if full:
        print(drawn.model, drawn.radius, tuple(drawn.example.shape), captured.module.graph, sep="\n")
    attack = Attack(captured, walk, drawn.radius, drawn.number)
    outcome.share = attack.run(bound)
    measured = attack.measurement
    best: dict[tuple[str, str], list[float]] = {}
    for limit, shares in zip(measured.limits, measured.shares, strict=True):
        if full:
            print(limit.node, limit.primitive, limit.axes, {kind: round(share, 4) for kind, share in shares.items()})
        known = best.setdefault((limit.operation, limit.primitive), [0.0, 0.0])
        known[:] = max(known[0], shares["gain"]), max(known[1], shares["radius"])
    outcome.shares = [(*names, round(gain, 4), round(radius, 4)) for names, (gain, radius) in best.items()]
    outcome.logit_share = measured.logit_share if measured.logits else None
    if drawn.number % VERIFIED == 0:
        certificate = wn.certify(drawn.model, drawn.example, drawn.radius)
        try:
            wn.verify(certificate, drawn.model.state_dict())
            outcome.verified = True
        except wn.certificates.CheckError as error:
            outcome.status, outcome.reason = "not proved", str(error)
        if certificate.rms_lipschitz != bound:
            measured.violations.append(f"certify says {certificate.rms_lipschitz}, the walk {bound}")
    if measured.violations:
        outcome.status, outcome.reason = "violated", "\n".join(measured.violations[:20])


def summary(attacked: Sequence[Mapping[str, Any]], seed: int, command: str) -> dict[str, Any]:
    """The content of `results/soundness.json`."""
    status = Counter(each["status"] for each in attacked)
    shares: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in attacked:
        best: dict[tuple[str, str], tuple[float, float]] = {}
        for operation, primitive, gain, radius in each["shares"]:
            for key in (("primitive", primitive), ("operation", operation)):
                known = best.get(key, (0.0, 0.0))
                best[key] = max(gain, known[0]), max(radius, known[1])
        for key, pair in best.items():
            shares[key].append(pair)
        if each["logit_share"] is not None:
            shares["logits", "all heads"].append((each["logit_share"], each["logit_share"]))
        if each["share"] is not None:
            if len(each["layers"]) == 1:
                shares["layer alone", each["layers"][0]].append((each["share"], each["share"]))
            shares["model of depth", str(len(each["layers"]))].append((each["share"], each["share"]))
    rows = [
        {
            "kind": kind,
            "name": name,
            "models": len(found),
            "best_share": max(gain for gain, _ in found),
            "median_share": round(median(gain for gain, _ in found), 4),
            "best_share_of_norm": max(radius for _, radius in found) if kind in ("primitive", "operation") else None,
        }
        for (kind, name), found in sorted(shares.items())
    ]
    layers = Counter(layer for each in attacked for layer in each["layers"])
    return {
        **header(command, seed),
        "config": {"verified_one_of": VERIFIED, "rounding": ROUNDING},
        "commits_of_models": sorted({str(each.get("commit")) for each in attacked}),
        "models": len(attacked),
        "sound": status["sound"],
        "violations": [each for each in attacked if each["status"] == "violated"],
        "not_proved": [each for each in attacked if each["status"] == "not proved"],
        "crashes": [each for each in attacked if each["status"] == "crashed"],
        "not_finite": status["not finite"],
        "refused": status["refused"],
        "refusals": dict(Counter(each["reason"] for each in attacked if each["status"] == "refused").most_common()),
        "verified": sum(each["verified"] for each in attacked),
        "seconds": round(sum(each["seconds"] for each in attacked), 1),
        "layers_drawn": dict(layers.most_common()),
        "rows": rows,
    }


def main() -> None:
    """Examine the models that have no outcome yet, and write the summary."""
    options = outcomes.parser_of(__doc__, 5000).parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        print(json.dumps(asdict(examine(draw_model(options.seed, options.only), full=True)), indent=1))
        return
    path, end = PROGRESS / f"seed-{options.seed}.jsonl", time.monotonic() + 60 * options.minutes
    failures = ("violated", "not proved", "crashed")
    attacked = outcomes.go_on(
        path, options.models, end, lambda number: examine(draw_model(options.seed, number)), failures
    )
    command = f"python -m campaigns.soundness --models {options.models} --seed {options.seed}"
    content = summary(attacked, options.seed, command)
    write_result(RESULTS, content)
    print({key: content[key] for key in ("models", "sound", "refused", "violations", "not_proved", "crashes")})


if __name__ == "__main__":
    main()
