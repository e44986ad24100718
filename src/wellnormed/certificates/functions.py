"""Rules for functions and tensor methods: sums, constant factors, elementwise activations and their modules."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.certificates.bound import Bound
from wellnormed.certificates.recorder import Recorder
from wellnormed.certificates.rules import function_rule, rule

Operand = Bound | Tensor | float


@function_rule(operator.add, torch.add, "add", operator.sub, torch.sub, "sub")
def add(step: Recorder, a: Operand, b: Operand) -> Bound:
    """Radii and Lipschitz constants add up; a stored tensor or a number adds to the radius only.

    The bound of a difference is that of the sum.
    """
    if not isinstance(a, Bound):
        a, b = b, a
    assert isinstance(a, Bound)  # `certify` calls no rule without a value that depends on the input
    if isinstance(b, float | int):
        return step.derive("offset", a, constants={"offset": b})
    if isinstance(b, Tensor):
        b = step.derive("constant", claims=(step.prove("row_rms", b),))
    if a.heads != b.heads and (b.heads > 1 or any(b.lipschitz)):  # one constant serves all heads
        raise step.refuse(f"its operands have {a.heads} and {b.heads} heads")
    return step.derive("add", a, b)


@function_rule(operator.mul, torch.mul, "mul")
def multiply(step: Recorder, a: Operand, b: Operand) -> Bound:
    """A number or a stored tensor times a value; the product of two values has no bound in RMS."""
    if not isinstance(a, Bound):
        a, b = b, a
    assert isinstance(a, Bound)  # `certify` calls no rule without a value that depends on the input
    if isinstance(b, float | int):
        return step.derive("scale", a, constants={"factor": b})
    if isinstance(b, Bound):
        raise step.refuse("both factors depend on the input: the RMS of a product is not bounded by the factors' RMS")
    return step.derive("gain", a, claims=(step.prove("max_abs", b),))


@function_rule(operator.truediv, torch.div, torch.true_divide, "div")
def divide(step: Recorder, a: Operand, b: Operand) -> Bound:
    """A value over a number."""
    if not isinstance(a, Bound) or not isinstance(b, float | int) or not b:
        raise step.refuse("only a value over a number other than zero has a rule")
    return step.derive("divide", a, constants={"divisor": b})


function_rule(operator.neg, torch.neg, "neg")(lambda step, x: multiply(step, x, -1.0))


def _activation(name: str, module: type[nn.Module], *functions: object) -> None:
    """Register an elementwise function of the table of slopes, and its module."""

    @function_rule(*functions)
    def apply(step: Recorder, x: Bound, inplace: bool = False) -> Bound:
        if inplace:  # it would change values already bounded
            raise step.refuse("it overwrites its input; set inplace=False")
        return step.derive(name, x)

    rule(module)(lambda layer, step, x: apply(step, x, getattr(layer, "inplace", False)))


_activation("relu", nn.ReLU, F.relu, torch.relu, "relu")
_activation("silu", nn.SiLU, F.silu)
_activation("tanh", nn.Tanh, F.tanh, torch.tanh, "tanh")


@function_rule(F.gelu)
def gelu(step: Recorder, x: Bound, approximate: str = "none") -> Bound:
    """Exact or by tanh, with a slope of its own each."""
    return step.derive("gelu_tanh" if approximate == "tanh" else "gelu", x)


rule(nn.GELU)(lambda layer, step, x: gelu(step, x, layer.approximate))


@function_rule(F.dropout)
def dropout(step: Recorder, x: Bound, p: float = 0.5, training: bool = True, inplace: bool = False) -> Bound:
    """The identity when training is off."""
    if training and p > 0:
        raise step.refuse(
            "dropout is active in training mode; call `model.eval()` first (and give `F.dropout` `self.training`)"
        )
    return x


rule(nn.Dropout)(lambda layer, step, x: dropout(step, x, layer.p, layer.training))
