"""Find the networks of a program that can be bounded jointly, and add their rows: `certify(effort="high")`.

A network leads from one value to another by linear maps, entrywise functions, sums and products with constants. The
plain walk bounds each operation separately; a second walk adds, at the end of every maximal network, a row with the
joint bound that `proof.lipsdp` proves.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from wellnormed._warnings import warn
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.semidefinite import solve
from wellnormed.lowering.walk import Walk
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof import CheckError, Proof, Row
from wellnormed.proof.lipsdp import DEEPEST, MOST, Network, applies, joins, slopes_of
from wellnormed.proof.value import Base, Value, unmoved

_MARGINS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Relative margins on the solver's bound, which is computed in floats; the first one that can be proved is used."""


class Reach(NamedTuple):
    """The largest network that leads to a value."""

    start: Value
    bases: frozenset[Base]
    """The results of its linear maps and functions."""

    @property
    def gains(self) -> bool:
        """Whether a joint bound can be below the product of the single ones."""
        return sum(base.divisible for base in self.bases) > 1


def reaching(proof: Proof) -> Callable[[Value], Reach]:
    """A function from a value of a proof to the largest network that leads to it.

    The network starts and ends at the value if nothing before can belong to it.
    """

    @cache
    def of(x: Value) -> Reach:
        if not x.shape:
            return Reach(x, frozenset())
        starts, bases, alone = set[Value](), frozenset[Base](), Reach(x, frozenset())
        for term in x.terms:
            base = term.base
            if not isinstance(base, Base):
                continue
            if not applies(term, base):
                return alone
            if joins(base) and (not _function(base) or slopes_of(base.inference)[1] > 0):
                before = of(base.inference.inputs[0])
                starts.add(before.start)
                bases |= before.bases | {base}
            else:
                row = proof.values.get(base.name, x)
                starts.add(row if unmoved(row) is base else x)
        if len(starts) != 1:
            return alone
        (start,), functions = starts, [*filter(_function, bases)]
        entries = start.shape[-1] + sum(base.shape[-1] for base in functions) + x.shape[-1]
        fits = start.shape[:-1] == x.shape[:-1] and entries <= MOST and len(bases) <= DEEPEST
        return Reach(start, bases) if fits else alone

    return of


def _function(base: Base) -> bool:
    return base.inference is not None and base.inference.operation == "elementwise"


def ends_of_networks(walk: Walk) -> dict[fx.Node, str]:
    """Node at which a maximal network of a finished walk ends -> the name of the network's start.

    A network is maximal if an operation that reads its end cannot extend it. It must have several linear maps.
    """
    reach, readers = reaching(walk.ledger.proof), defaultdict[fx.Node, list[fx.Node]](list)
    nodes = [node for node in walk.needed(walk.program.result) if isinstance(walk.values.get(node), Value)]
    found = {node: reach(walk.values[node]) for node in nodes}
    for node in nodes:
        for source in walk.sources(node):
            readers[source].append(node)
    ends = [n for n in nodes if not readers[n] or not all(found[n].bases <= found[r].bases for r in readers[n])]
    return {node: found[node].start.name for node in ends if found[node].gains}


class Joint:
    """Adds the rows of joint bounds, with new multipliers or with those of an existing certificate.

    Args:
        known: The rows of a certificate whose multipliers are used again; by default multipliers are computed.
        computed: The computed tensors of that certificate, which contain the multipliers.
    """

    def __init__(self, known: Sequence[Row] | None = None, computed: Mapping[str, Tensor] | None = None) -> None:
        self._known, self._computed = known, computed or {}

    def improved(self, walk: Walk) -> Walk:
        """A walk that will bound the networks of a finished one jointly."""
        improved = {node: partial(self.bound, start) for node, start in ends_of_networks(walk).items()}
        if not improved:
            warn(
                "certify: effort='high' has no effect here. It bounds two or more linear maps together if only "
                "functions of single entries, sums and factors stand between them, and if they are small enough"
            )
        ledger = walk.ledger
        arithmetic = ledger.proof.arithmetic
        return Walk(walk.program, ledger.radius, ledger.promises, improved, ledger.apart, arithmetic)

    def bound(self, of: str, ledger: Ledger, end: Value) -> Value:
        """The end of the network that starts at the row `of`, with the joint bound; unchanged if that is not lower."""
        start, name, last = ledger.proof.values[of], f"{ledger.name}.lipsdp", len(end.shape) - 1
        axes = sorted({*inner_axes(end), *inner_axes(start), last})
        if self._known is None:
            end_gain, start_gain = (ledger.bounds(x, axes).gain.max() for x in (end, start))
            constants = _solved(ledger, start, end, name, float(end_gain / start_gain)) if start_gain else None
        else:
            constants = next((row.constants for row in self._known if row.name == name), None)
            for each in (constants or {}).get("multipliers", ()):
                ledger.use(Stored(each, self._computed[each], computed=True))
        if constants is None:
            return end
        try:
            reads = [(end, axes), (start, axes)]
            return ledger.derive("lipsdp", reads, shape=end.shape, constants=constants, name=name)
        except UncertifiableError:  # other weights than those of the certificate
            if self._known is None:
                raise
            return end


def _solved(ledger: Ledger, start: Value, end: Value, name: str, known: float) -> dict[str, Any] | None:
    """The constants of a row with a bound below the known one; None if none was found and proved."""
    network = Network(start, ledger.proof.tensor)
    try:
        maps = network.maps(end)
        multipliers, bound = solve(network.functions, maps, start.shape[-1])
    except (CheckError, torch.linalg.LinAlgError):  # its maps are too large, or the program is too badly scaled
        return None
    for margin in _MARGINS:
        stated = bound * (1 + margin)
        if not 0 < stated < known:
            return None
        if network.proves(maps, multipliers, stated):
            tensors = [ledger.computed(f"{name}.{i}", torch.from_numpy(each)) for i, each in enumerate(multipliers)]
            return {"multipliers": [ledger.use(each) for each in tensors], "bound": stated}
    return None
