"""Rules for functions and tensor methods: sums, constant factors, elementwise activations."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from wellnormed.certificates.bound import Bound
from wellnormed.certificates.recorder import Recorder
from wellnormed.certificates.rules import activation, as_bound, function_rule

Operand = Bound | Tensor | float


@function_rule(operator.add, torch.add, "add")
def add(step: Recorder, a: Operand, b: Operand) -> Bound:
    """Radii and Lipschitz constants add up; a stored tensor or a number adds to the radius only."""
    if not isinstance(a, Bound):
        a, b = b, a
    if not isinstance(a, Bound):
        raise step.refuse("none of its operands comes from the input")
    if isinstance(b, float | int):
        return step.derive("offset", a, constants={"offset": b})
    b = as_bound(step, b)
    if a.heads != b.heads and not (b.is_constant and b.heads == 1):
        raise step.refuse(f"its operands have {a.heads} and {b.heads} heads")
    return step.derive("add", a, b)


@function_rule(operator.sub, torch.sub, "sub")
def subtract(step: Recorder, a: Operand, b: Operand) -> Bound:
    """The same bound as the sum's."""
    return add(step, a, b)


@function_rule(operator.mul, torch.mul, "mul")
def multiply(step: Recorder, a: Operand, b: Operand) -> Bound:
    """A number or a stored tensor times a value; the product of two values has no bound in RMS."""
    if not isinstance(a, Bound):
        a, b = b, a
    if not isinstance(a, Bound):
        raise step.refuse("none of its factors comes from the input")
    if isinstance(b, float | int):
        return step.derive("scale", a, constants={"factor": b})
    if isinstance(b, Bound):
        raise step.refuse("both factors depend on the input: the RMS of a product is not bounded by the factors' RMS")
    return step.derive("gain", a, claims=(step.max_abs(b),))


@function_rule(operator.truediv, torch.div, torch.true_divide, "div")
def divide(step: Recorder, a: Operand, b: Operand) -> Bound:
    """A value over a number."""
    if not isinstance(a, Bound) or not isinstance(b, float | int) or not b:
        raise step.refuse("only a value over a number other than zero has a rule")
    return step.derive("divide", a, constants={"divisor": b})


@function_rule(operator.neg, torch.neg, "neg")
def negate(step: Recorder, x: Bound) -> Bound:
    """The same bound."""
    return step.derive("scale", x, constants={"factor": -1.0})


@function_rule(F.relu, torch.relu, "relu")
def relu(step: Recorder, x: Bound, inplace: bool = False) -> Bound:
    """Slope at most 1."""
    return activation(step, "relu", x, inplace)


@function_rule(F.silu)
def silu(step: Recorder, x: Bound, inplace: bool = False) -> Bound:
    """Slope at most 1.0998."""
    return activation(step, "silu", x, inplace)


@function_rule(F.gelu)
def gelu(step: Recorder, x: Bound, approximate: str = "none") -> Bound:
    """Slope at most 1.12890415 (exact) or 1.12899307 (tanh)."""
    return activation(step, "gelu_tanh" if approximate == "tanh" else "gelu", x)


@function_rule(F.tanh, torch.tanh, "tanh")
def tanh(step: Recorder, x: Bound) -> Bound:
    """Slope at most 1."""
    return activation(step, "tanh", x)


@function_rule(F.dropout)
def dropout(step: Recorder, x: Bound, p: float = 0.5, training: bool = True, inplace: bool = False) -> Bound:
    """The identity when training is off."""
    if training and p > 0:
        raise step.refuse("dropout is active in training mode; call `model.eval()` first, and pass `self.training`")
    return x
