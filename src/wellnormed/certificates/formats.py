"""Number formats that hold the largest entry of every result, input and weight, as a certificate proves it.

Every bounded row of a certificate bounds the largest absolute value of an entry. A format whose largest number is no
smaller holds these entries without any scale (LT sections 4.4 and 5). This concerns the range alone: entries that are
too small for a format become 0, which costs accuracy and not soundness.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.observing import INPUT, LOGITS
from wellnormed.certificates.sizes import short
from wellnormed.lowering.stored import raw_tensor
from wellnormed.proof import Row
from wellnormed.proof.arithmetic import UNBOUNDED
from wellnormed.proof.decimals import float_up, rounding_up
from wellnormed.proof.gather import gather
from wellnormed.proof.moves import moved
from wellnormed.proof.reading import word
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import Base, Term, Value

FORMATS = {"E5M2": 57344.0, "E4M3": 448.0, "E2M1": 6.0}
"""Binary floating-point formats -> their largest finite numbers.

E5M2 and E4M3 are `torch.float8_e5m2` and `torch.float8_e4m3fn`, E2M1 is the FP4 of the OCP microscaling formats."""


@dataclass(frozen=True)
class EntryRange:
    """How large the entries of one tensor can be."""

    name: str
    """A row of the certificate, `input of` a layer, `logits of` a row, or a weight's name."""
    proved: Decimal
    """No entry exceeds it in absolute value, for any input of the certificate's domain."""
    observed: float | None
    """The largest absolute value that a run had, if one was observed."""
    formats: tuple[str, ...]
    """Names of the formats whose largest value is at least `proved`."""

    @property
    def shown(self) -> str:
        """The name as tables print it."""
        kind = next((each for each in (INPUT, LOGITS) if self.name.startswith(each)), "")
        return kind + word(self.name.removeprefix(kind))


@dataclass(frozen=True)
class NumberFormats:
    """The result of `number_formats`; printed, it is a table."""

    ranges: tuple[EntryRange, ...]
    unbounded_at: str = ""
    """The first row whose rounding errors have no bound: from there on, ranges hold in real arithmetic."""

    @property
    def inputs(self) -> dict[str, float]:
        """Name of a layer with a linear map -> largest entry of its input, rounded up.

        If a layer is called several times, it has the largest entry of all calls.
        """
        largest: dict[str, float] = {}
        for each in self.ranges:
            if each.name.startswith(INPUT):
                layer = each.name.removeprefix(INPUT)
                largest[layer] = max(largest.get(layer, 0.0), float_up(each.proved))
        return largest

    @property
    def holding_all(self) -> tuple[str, ...]:
        """Names of the formats that hold all entries of the table."""
        return tuple(name for name in FORMATS if all(name in each.formats for each in self.ranges))

    def __str__(self) -> str:
        width = max(len(each.shown) for each in self.ranges)
        lines = [f"{'largest entry of':{width}}  {'proved':>10}  {'observed':>10}  held by"]
        for each in self.ranges:
            observed = "-" if each.observed is None else f"{each.observed:.5g}"
            formats = " ".join(each.formats) or "none"
            lines.append(f"{each.shown:{width}}  {short(each.proved):>10}  {observed:>10}  {formats}")
        if self.unbounded_at:
            lines.append(f"without rounding errors from {word(self.unbounded_at)} on")
        return "\n".join([*lines, f"all of them: {' '.join(self.holding_all) or 'none'}"])


def number_formats(
    certificate: Certificate,
    observed: Mapping[str, float] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> NumberFormats:
    """The largest entry of every bounded operation, of the inputs and weights of linear maps, and of attention logits.

    The bounds are those of the certificate, with its weights, and hold for the executed program: the largest real
    entry and the rounding errors. From a row whose rounding errors have no bound, and for attention logits, they hold
    in real arithmetic. They do not include what the format itself would round; leave room for it. The entries of a
    matrix are at most its spectral norm, which its claim bounds, so a cap on that norm bounds them during training.
    Operations that only move entries, scale and add have no line; the input of a linear map includes them.

    Args:
        certificate: The proof.
        observed: The result of `largest_entries`. It is shown beside the result of a layer's last operation that is no
            move, beside the inputs and weights of the same names, and beside the attention logits of a layer.
        weights: The model's `state_dict`. It is needed only if the input of a linear map has an added or multiplied
            tensor of the model, such as a table of positions, whose entries then matter.

    Raises:
        ValueError: `weights` is needed; or one of them is not the certificate's.

    Example:
        >>> import wellnormed as wn
        >>> from torch import nn
        >>> from wellnormed.certificates import largest_entries
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 3.0)
        >>> print(number_formats(wn.certify(model, torch.zeros(1, 2)), largest_entries(model, torch.ones(1, 2))))
        largest entry of      proved    observed  held by
        input.input           1.4143           -  E5M2 E4M3 E2M1
        input of 0            1.4143           1  E5M2 E4M3 E2M1
        0.weight              6.0001           3  E5M2 E4M3
        0.linear              8.4853           6  E5M2 E4M3
        1.relu                8.4853           6  E5M2 E4M3
        output                8.4853           -  E5M2 E4M3
        all of them: E5M2 E4M3
    """
    seen = dict(observed or {})
    proved = _proved(certificate, dict(weights or {}))
    rows = [row for row in certificate.rows if row.operation not in ("pick", "rounding") and "/" not in row.name]
    last = {_layer(row.name): (_operation(row.name), row.operation) for row in rows}
    primitive = {row.name: row.operation for row in rows}
    ranges = []
    for name, size in proved:
        layer = _layer(name)
        of_layer = seen.get(layer) if last.get(layer) == (_operation(name), primitive.get(name)) else None
        sufficient = tuple(name for name, largest in FORMATS.items() if size <= Decimal(largest))
        if name.startswith(LOGITS):
            of_layer = seen.get(layer)
        ranges.append(EntryRange(name, size, seen.get(name, of_layer), sufficient))
    return NumberFormats(tuple(ranges), certificate.unbounded_at)


def _proved(certificate: Certificate, weights: dict[str, Tensor]) -> list[tuple[str, Decimal]]:
    """Names with their largest entries, in the order of the rows; every weight once."""
    inputs = _Inputs(certificate, weights)
    entries: list[tuple[str, Decimal]] = []
    known: set[str] = set()
    for row in certificate.rows:
        if row.bounds is None or "/" in row.name:
            continue  # moves, and parts of another row's outputs
        if row.operation == "linear":
            entries.append((f"{INPUT}{_layer(row.name)}", inputs.largest(row)))
        for claim in row.claims:
            if claim.measure == "spectral" and claim.tensors[0] not in known:
                known.add(claim.tensors[0])
                entries.append((claim.tensors[0], Decimal(max(claim.values))))
        if row.name in certificate.attention_logits:
            entries.append((f"{LOGITS}{row.name}", max(certificate.attention_logits[row.name])))
        entries.append((row.name, _executed(row.bounds)))
    return entries


def _executed(bounds: Bounds) -> Decimal:
    """The largest executed entry, or the largest real one where rounding errors have no bound."""
    with rounding_up():
        return max((bounds.largest + bounds.error * (bounds.error < UNBOUNDED)).flat)


class _Inputs:
    """The inputs of linear rows, as values that are made again from the rows before them."""

    def __init__(self, certificate: Certificate, weights: dict[str, Tensor]) -> None:
        self._certificate, self._weights = certificate, weights
        self._rows = {row.name: row for row in certificate.rows}
        self._values: dict[str, Value] = {}

    def largest(self, row: Row) -> Decimal:
        """Bound the entries of a linear row's input, in the groups whose bounds the row uses."""
        for each in self._before(row.inputs[0]):
            self._values[each.name] = self._value(each)
        return _executed(gather(self._values[row.inputs[0]], row.reads[0]))

    def _before(self, name: str) -> Iterator[Row]:
        """The rows that a value is made of, back to rows with bounds, in order."""
        needed, names = set[str](), [name]
        while names:
            current = names.pop()
            if current not in needed and current not in self._values:
                needed.add(current)
                names += self._rows[current].inputs if self._rows[current].bounds is None else ()
        return (row for row in self._certificate.rows if row.name in needed)

    def _value(self, row: Row) -> Value:
        if row.bounds is None:
            inputs = [self._values[name] for name in row.inputs]
            return moved(row, inputs, self._tensor, _ROOM)
        base = Base(row.name, row.shape, row.axes, row.bounds, None)
        return Value(row.name, row.shape, (Term(base, base.order),))

    def _tensor(self, name: str) -> np.ndarray:
        """The entries of a tensor of the certificate or of `weights`, which must be the certified one."""
        stored = self._certificate.computed.get(name, self._weights.get(name))
        if stored is None:
            raise ValueError(
                f"number_formats: the entries of {name} matter for the input of a linear map, and the certificate does "
                "not hold them; pass weights=model.state_dict()"
            )
        if name in self._certificate.tensors and raw_tensor(stored).digest != self._certificate.tensors[name]:
            raise ValueError(f"number_formats: {name} is not the certified tensor; pass the certified weights")
        dtype = stored.dtype if stored.dtype == torch.int64 else torch.float64
        return stored.detach().to("cpu", dtype).numpy()


_ROOM = 2**30
"""The most bytes that a move's result may need."""


def _operation(row: str) -> str:
    """The operation of a row without its number: `relu` of `blocks.0.relu#2`."""
    return row.rpartition(".")[2].partition("#")[0]


def _layer(row: str) -> str:
    """The module that executed a row: `blocks.0` of `blocks.0.relu#2`."""
    return row.partition("#")[0].rpartition(".")[0]
