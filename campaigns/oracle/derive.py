"""Every row of a certificate, bounded again by code that shares nothing with the kernel but the rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from campaigns.oracle.networks import is_proved
from campaigns.oracle.primitives import BELOW, FUNCTIONS, PRIMITIVES, Read
from campaigns.oracle.upper import Upper, least, root_up, to_decimals
from campaigns.oracle.value import Base, Bounds, Linear, Term, Value, add, collapse, constant, slack
from wellnormed.certificates import Certificate, Row


def derive(certificate: Certificate, weights: Mapping[str, Tensor]) -> dict[str, Bounds]:
    """Name of every row that computes -> its bounds, in decimals of 40 digits.

    Args:
        certificate: Its rows; what they state is not looked at.
        weights: The certified model's tensors by name.
    """
    oracle = _Oracle(certificate, dict(weights) | certificate.computed)
    for row in certificate.rows:
        oracle.value(row.name)
    return {name: Bounds(*map(to_decimals, bounds)) for name, bounds in oracle.bounds.items()}


class _Oracle:
    def __init__(self, certificate: Certificate, tensors: dict[str, Tensor]) -> None:
        self.rows, self.tensors = {row.name: row for row in certificate.rows}, tensors
        self.promises = certificate.promises
        self.values: dict[str, Value] = {}
        self.bounds: dict[str, Bounds] = {}

    def value(self, name: str) -> Value:
        """The result of a row; parts of a linear map's outputs are derived when something asks for them."""
        if name not in self.values:
            row = self.rows[name]
            inputs = [self.value(each) for each in row.inputs]
            made = self._move(row, inputs) if row.bounds is None else self._primitive(row, inputs)
            assert made.shape == tuple(row.shape), name
            self.values[name] = replace(made, name=name, _gathered={})
        return self.values[name]

    def _primitive(self, row: Row, inputs: list[Value]) -> Value:
        reads = [Read(x.shape, tuple(axes), x.gather(axes)) for x, axes in zip(inputs, row.reads, strict=True)]
        constants = row.constants | {"shape": row.shape, "axes": row.axes}
        if row.operation == "attention" and len(inputs) == 4:
            constants |= _heads(row, inputs)
        if "together" in constants:
            constants["together"] = [x.gather((len(x.shape) - 2, len(x.shape) - 1)) for x in inputs[1:3]]
        if row.operation == "product":
            constants["functions"] = [_function(x) for x in inputs]
        if row.operation == "lipsdp":
            assert is_proved(self.rows, row, self.tensors), row.name
        bounds = PRIMITIVES[row.operation](reads, constants, row.claims)
        if row.operation == "elementwise" and (near := self._around_bias(row, inputs[0])) is not None:
            bounds = Bounds(least(bounds.radius, near.radius), bounds.gain, least(bounds.largest, near.largest))
        bounds = self.bounds[row.name] = collapse(bounds)
        linear, function, cut = None, row.constants.get("function"), None
        if row.operation == "linear":
            weight = row.claims[0]
            linear = Linear(inputs[0], weight.tensors[0], bool(weight.constants.get("transposed")), len(row.claims) > 1)
            cut = self._parts(row)
        return Value(row.name, row.shape, (Term(Base(row.name, row.shape, row.axes, bounds, linear, function, cut)),))

    def _around_bias(self, row: Row, x: Value) -> Bounds | None:
        """`|f(c (W h + b))| <= |f(c b)| + slope |c W h|`, of functions that vanish far below 0, else None."""
        (term, *others), name = x.terms, row.constants["function"]
        base, promised = term.base, {each.name for each in self.promises}
        if others or name not in BELOW or not isinstance(base, Base) or base.axes != tuple(row.axes):
            return None
        source, factor = self.rows[base.name], 1.0 if term.factor is None else float(term.factor.reshape(-1)[0])
        if base.linear is None or not base.linear.bias or term.index is not None or source.constants["parts"] > 1:
            return None
        bias = source.claims[1].tensors[0]
        if bias in promised or (term.factor is not None and term.factor.numel() > 1):
            return None
        at = [max(b, 0.0) or BELOW[name](min(-b, 30.0)) for b in (factor * self.tensors[bias].double()).tolist()]
        norm, vectors = (
            root_up(sum(Upper(a) * a for a in at)),
            math.prod(row.shape[axis] for axis in row.axes) // len(at),
        )
        before = self.value(source.inputs[0]).gather(tuple(source.reads[0])).radius
        moved = FUNCTIONS[name]().slope * (abs(Upper(factor)) * Upper(source.claims[0].values[0]) * before)
        radius = norm * root_up(vectors) + moved
        return Bounds(radius, moved, Upper(max(at)) + moved)

    def _parts(self, row: Row) -> Any:
        def cut(parts: int) -> Base:
            name = f"{row.name}/{parts}" if f"{row.name}/{parts}" in self.rows else row.name
            base = self.value(name).terms[0].base
            assert isinstance(base, Base)
            return base

        return cut

    def _move(self, row: Row, inputs: list[Value]) -> Value:
        c = row.constants
        if row.operation == "constant":
            return constant(row.name, self.tensors[c["tensor"]] if "tensor" in c else torch.tensor(c["number"]))
        if row.operation == "add":
            return add(row.name, inputs)
        if row.operation == "idle_ball":
            entries = math.prod(inputs[0].shape[axis] for axis in c["over"])
            lengths = inputs[0].gather(c["over"]).radius.flat
            assert all(r * r * Upper(c["scale"]) <= Upper(1 + 1e-15) * entries for r in lengths), row.name
            return inputs[0]
        if row.operation == "rounding":
            return inputs[0].apart()
        if row.operation == "times":
            ((key, factor),) = c.items()
            tensor = self.tensors[factor].double() if isinstance(factor, str) else torch.tensor(factor).double()
            return inputs[0].times(row.name, 1 / tensor if key == "divisor" else tensor, 2 if key == "divisor" else 1)
        positions = self._positions(row)
        empty = positions < 0

        def pick(entries: Tensor) -> Tensor:
            flat = entries.reshape(-1)[positions.clamp(min=0)]
            return torch.where(empty, -1 if entries.dtype == torch.int64 else 0.0, flat)

        return inputs[0].move(row.name, pick)

    def _positions(self, row: Row) -> Tensor:
        c = row.constants
        if "positions" in c:
            return self.tensors[c["positions"]]
        total, missing = np.full(row.shape, c["offset"]), np.zeros(row.shape, dtype=bool)
        for axis, (table, size) in enumerate(zip(c["tables"], row.shape, strict=True)):
            line = np.arange(size) * table if isinstance(table, int) else np.array(table)
            view = [size if each == axis else 1 for each in range(len(row.shape))]
            gone = np.zeros(size, dtype=bool) if isinstance(table, int) else line < 0
            total, missing = total + np.where(gone, 0, line).reshape(view), missing | gone.reshape(view)
        return torch.from_numpy(np.where(missing, -1, total))


def _function(x: Value) -> str | None:
    """The function of which every entry of a value is a result, or zero."""
    plain = len(x.terms) == 1 and isinstance(x.terms[0].base, Base) and x.terms[0].factor is None
    return x.terms[0].base.function if plain else None


def _heads(row: Row, inputs: list[Value]) -> dict[str, Any]:
    """Factors and heads of keys and values, and of queries where their products with the keys are claimed."""
    kinds = ("query", "key", "value") if len(row.claims) == 3 else ("key", "value")
    origins = {kind: origin_of(x) for kind, x in zip(("query", "key", "value"), inputs, strict=False) if kind in kinds}
    found = {kind: each for kind, each in origins.items() if each is not None and each.source is inputs[3]}
    assert found.keys() == origins.keys(), row.name
    assert np.array_equal(found["key"].tokens, found["value"].tokens), row.name
    return {kind: [each.factor, *each.heads] for kind, each in found.items()}


@dataclass(frozen=True, eq=False)
class Origin:
    """Says that head h of token t is `factor (W_h x_t + b_h)`."""

    source: Value
    weight: str
    transposed: bool
    parts: int
    heads: list[int]
    """For every matrix of the batch axes but the first, the part of W that it is."""
    tokens: np.ndarray
    """Number of the token of every group."""
    factor: float
    bias: bool


def origin_of(x: Value) -> Origin | None:
    """None unless every group is one part of a linear map of one token, the same part for all tokens of a head."""
    if len(x.terms) != 1 or not isinstance(x.terms[0].base, Base) or len(x.shape) < 3:
        return None
    (term,), base = x.terms, x.terms[0].base
    if base.linear is None or base.axes != (len(base.shape) - 1,):
        return None
    factors = np.ones(1) if term.factor is None else term.factor.reshape(-1).numpy()
    index, width, entries = term.positions(x.shape).numpy(), base.shape[-1], x.shape[-1]
    if (index < 0).any() or width % entries or (factors != factors[0]).any():
        return None
    token, feature = index // width, index % width
    first = feature[..., :1]
    if not (feature == first + np.arange(entries)).all() or (first % entries).any() or (token != token[..., :1]).any():
        return None
    part = (first[..., 0] // entries).reshape(x.shape[0], -1, x.shape[-2])
    if (part != part[:1, :, :1]).any():
        return None
    linear, heads = base.linear, part[0, :, 0].tolist()
    return Origin(
        linear.source,
        linear.weight,
        linear.transposed,
        width // entries,
        heads,
        token[..., 0],
        float(abs(factors[0])) * slack(term.roundings + 1),
        linear.bias is not None,
    )
