"""Rules for the layers of `torch.nn`.

Activations are measured by the largest RMS of a token's, or a pixel's, channels (MD examples 5 to 7). A rule trusts the
assignment: the norm of a weight has to bound what its layer does with it.
"""

import math

from torch import nn

from wellnormed.modular.builder import Builder, modular_rule
from wellnormed.modular.combinators import IDENTITY
from wellnormed.modular.tree import Bond, NormedModule, compose

GELU_SLOPE = (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)
"""Largest slope of exact GELU, at sqrt 2: Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.1289..."""
GELU_TANH_SLOPE = 1.128994
"""Largest slope of GELU's tanh form, at 1.4185: 1.12899307, rounded up."""
SILU_SLOPE = 1.09984
"""Largest slope of x sigmoid(x), at 2.3994: 1.09983932, rounded up."""


@modular_rule(nn.Sequential)
def sequential(module: nn.Sequential, builder: Builder) -> NormedModule:
    """The children, composed; one that stands there twice counts twice."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    return compose(*(builder.child(name) for name in reversed(names)))


def weight_and_bias(builder: Builder, bias: object) -> NormedModule:
    """The weight's atom, plus the bias's if there is one: a bias sees no input."""
    weight = builder.atom("weight")
    return weight if bias is None else weight + builder.atom("bias", sensitivity=0.0)


@modular_rule(nn.Linear)
def linear(module: nn.Linear, builder: Builder) -> NormedModule:
    """MD example 5."""
    return weight_and_bias(builder, module.bias)


@modular_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def convolution(module: nn.Conv2d, builder: Builder) -> NormedModule:
    """MD example 7: at most one existing pixel or zero for each position of the kernel, whatever padding and stride.

    Groups are the norm's concern: blocks that act apart stretch the RMS no more than the largest of them.
    """
    return weight_and_bias(builder, module.bias)


@modular_rule(nn.Embedding)
def embedding(module: nn.Embedding, builder: Builder) -> NormedModule:
    """MD example 6: inputs are one-hot, in the 1-norm."""
    if module.max_norm is not None:
        raise builder.refuse(f"has max_norm={module.max_norm}, which changes the weight in the forward pass")
    return builder.atom("weight")


@modular_rule(nn.Identity)
def identity(module: nn.Identity, builder: Builder) -> NormedModule:
    """Does nothing."""
    return IDENTITY


@modular_rule(nn.Flatten)
def flatten(module: nn.Flatten, builder: Builder) -> NormedModule:
    """The RMS of pixels side by side is at most the largest of theirs."""
    return Bond("flatten")


@modular_rule(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid)
def slope_one(module: nn.Module, builder: Builder) -> NormedModule:
    """Entrywise, of largest slope 1."""
    return Bond(type(module).__name__.lower())


@modular_rule(nn.Sigmoid)
def sigmoid(module: nn.Sigmoid, builder: Builder) -> NormedModule:
    """Steepest at 0."""
    return Bond("sigmoid", 0.25)


@modular_rule(nn.SiLU)
def silu(module: nn.SiLU, builder: Builder) -> NormedModule:
    """Steeper than 1."""
    return Bond("silu", SILU_SLOPE)


@modular_rule(nn.GELU)
def gelu(module: nn.GELU, builder: Builder) -> NormedModule:
    """Steeper than 1, in both forms."""
    return Bond("gelu", GELU_SLOPE if module.approximate == "none" else GELU_TANH_SLOPE)


@modular_rule(nn.LeakyReLU)
def leaky_relu(module: nn.LeakyReLU, builder: Builder) -> NormedModule:
    """Two slopes."""
    return Bond("leakyrelu", max(1.0, abs(module.negative_slope)))


@modular_rule(nn.ELU)
def elu(module: nn.ELU, builder: Builder) -> NormedModule:
    """Slope alpha on the left of 0, 1 on its right."""
    return Bond("elu", max(1.0, abs(module.alpha)))


@modular_rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
def dropout(module: nn.Dropout, builder: Builder) -> NormedModule:
    """The identity, in evaluation mode."""
    if module.training and module.p > 0:
        raise builder.refuse(f"drops entries at random (p={module.p}) in training mode; build from `model.eval()`")
    return IDENTITY


@modular_rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def average_pool(module: nn.Module, builder: Builder) -> NormedModule:
    """A mean of pixels is no larger than the largest."""
    if getattr(module, "divisor_override", None) is not None:
        raise builder.refuse("has a divisor_override, so that it is not a mean")
    return Bond("average pool")


@modular_rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool(module: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d, builder: Builder) -> NormedModule:
    """Channels may find their maxima at different pixels, so a window of n pixels can stretch the RMS by sqrt n."""
    axes = int(type(module).__name__[-2])
    size = module.kernel_size
    window = math.prod(size) if isinstance(size, tuple) else size**axes
    return Bond("max pool", math.sqrt(window))
