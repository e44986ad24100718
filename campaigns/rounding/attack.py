"""The attack on one model: by executions, and by errors that the arithmetic allows."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

import wellnormed as wn
from campaigns import outcomes
from campaigns.random_models import Drawn
from campaigns.rounding.adverse import FIRST_ORDER, MOST, Kept, adverse, lengths
from campaigns.rounding.executions import OFTEN, WAYS, compiled, execute
from wellnormed.certificates.certificate import Certificate
from wellnormed.proof.decimals import float_up

NOISE = 1e-12
"""Relative share of an exact result that float64 may have added to it."""


@dataclass
class Outcome(outcomes.Outcome):
    """The outcome of one model."""

    status: str = "within"
    """Or `beyond`, `no bound`, `refused`, `crashed`."""
    dtype: str = ""
    error: float | None = None
    """The certified one."""
    executed: float = 0.0
    """The largest share of the certified error of a group that was executed; of float64, half the difference of two."""
    way: str = ""
    adverse: float = 0.0
    """The largest share that allowed errors make."""


class Attack:
    """Executions of a certified model."""

    def __init__(self, case: Drawn, certificate: Certificate) -> None:
        assert certificate.program is not None
        assert certificate.rows[-1].bounds is not None
        self.case, self.certificate, self.program = case, certificate, certificate.program
        self.written, self.axes = Kept(self.program), certificate.rows[-1].axes
        self.written.finish()
        self.double = fx.GraphModule(self.written.constants, self.written.graph)
        error = certificate.rows[-1].bounds.error
        self.bound = torch.from_numpy(np.vectorize(float_up, otypes=[float])(error))
        self.alone, self.floats = certificate.each_sample, case.example.is_floating_point()
        self.generator = torch.Generator().manual_seed(case.number)
        stored = [each.tensor for each in self.program.stored.values() if each.tensor.is_floating_point()]
        subnormal = any(bool(((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).any()) for t in stored)
        short = case.example.dtype in (torch.float32, torch.float16)  # ONNX runtime lacks much in float64
        rare = {"compiled": case.number % 50, "onnx": case.number % 10 or not short, OFTEN[1]: subnormal}
        self.ways = [way for way in WAYS if not rare.get(way)]

    def draw(self, kind: int) -> Tensor:
        """Inputs of the domain: random, far from 0 or with equal signs, nearly one entry, nearly alike, small."""
        x = self.case.example
        if not self.floats:
            return x[:1] if self.alone else x
        shape = (3, *x.shape[1:]) if self.alone else tuple(x.shape)
        noise, far = torch.randn(2, *shape, generator=self.generator, dtype=torch.float64)
        kinds = noise, noise + 5 * far.flatten()[0], noise.sign(), noise.abs() ** 8 * noise.sign(), 1 + 1e-3 * noise
        return self.fitted(kinds[kind]) if kind < 5 else self.fitted(noise) * 10.0 ** float(-far.flatten()[0].abs())

    def fitted(self, noise: Tensor) -> Tensor:
        """Inputs on the boundary of the domain."""
        size = noise.square().mean(self.certificate.inputs[0].axes, keepdim=True).sqrt().clamp(min=1e-300)
        return (noise / size * float(self.certificate.input_domain) * (1 - 2.0**-7)).to(self.case.example.dtype)  # type: ignore[arg-type]

    def variables(self, x: Tensor) -> list[Tensor]:
        """The variables of the float64 program."""
        return [x.double()] if self.floats else [each for _, each in self.written.inputs.values()]

    def exact(self, x: Tensor) -> Tensor:
        """The result in float64."""
        samples = [one[None] for one in x] if self.floats and self.alone else [x]
        return torch.cat([self.double(*self.variables(each)) for each in samples])

    def shares(self, x: Tensor, ways: Sequence[str]) -> Iterator[tuple[float, str]]:
        """The executed share of the certified error, and the way of execution."""
        known = self.case.example.dtype == torch.float64 and self.floats  # two results in float64 are compared
        for way in ways:
            with torch.no_grad(), WAYS[way](), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model = self.program if way == "captured" else self.case.model
                    model = compiled(self.program) if way == "compiled" else model
                    executed = execute(model, x, way, self.alone and self.floats)
                except Exception as error:
                    if way == "onnx" or "not implemented" in str(error) or "No available kernel" in str(error):
                        continue
                    raise
            real = self.exact(x)
            difference = lengths(executed.double().reshape(real.shape) - real, self.axes)
            difference = difference.nan_to_num(math.inf) - (0.0 if known else NOISE * real.abs().amax())
            share = torch.where(difference > 0, difference / (self.bound * (1 + known)), 0.0)
            yield min(float(share.max()), MOST), way

    def run(self, outcome: Outcome) -> None:
        """Attack: random inputs, ascent from the worst, allowed errors."""
        found: list[tuple[float, str, Tensor]] = [(0.0, "", self.draw(0))]
        for kind in range(6):
            x = self.draw(kind)
            ways = self.ways if kind == 0 else [way for way in self.ways if way in OFTEN]
            found += [(share, f"{way}, {kind}", x) for share, way in self.shares(x, ways)]
            if kind in (0, 1, 2, 4):
                one = x[:1] if self.alone else x
                share = adverse(self.written, self.variables(one), self.axes, self.bound)
                outcome.adverse = max(outcome.adverse, share)
        best = max(found, key=lambda each: each[0])
        for step in range(8 if best[0] and self.floats else 0):
            noise = torch.randn(best[2].shape, generator=self.generator, dtype=torch.float64)
            x = self.fitted(best[2].double() + 0.3 * 0.5**step * best[2].abs().max() * noise)
            way = best[1].split(", ")[0]
            way = way if way not in ("compiled", "onnx") else OFTEN[0]
            best = max(
                [best, *((share, f"{way}, ascent", x) for share, _ in self.shares(x, [way]))], key=lambda t: t[0]
            )
        outcome.executed, outcome.way = best[:2]


def examine(case: Drawn, full: bool = False) -> Outcome:
    """Certify one model and attack it; `full` prints it, too."""
    dtype = str(case.example.dtype if case.example.is_floating_point() else next(case.model.parameters()).dtype)
    outcome = Outcome(case.number, case.layers, case.radius, dtype=dtype.removeprefix("torch."))
    with outcome.recorded():
        certificate = wn.certify(case.model, case.example, case.radius)
        if full:
            print(case, certificate, certificate.program.module.graph, sep="\n")  # type: ignore[union-attr]
        if certificate.forward_error is None:
            row = next(row for row in certificate.rows if row.name == certificate.unbounded_at)
            outcome.status = "no bound"
            outcome.reason = f"{row.operation} {row.constants.get('function', '')}".strip()
        else:
            outcome.error = float(certificate.forward_error)
            Attack(case, certificate).run(outcome)
    if outcome.executed > 1 or outcome.adverse > 1 + FIRST_ORDER:
        outcome.status, outcome.reason = "beyond", outcome.way if outcome.executed > 1 else "allowed errors"
    return outcome
