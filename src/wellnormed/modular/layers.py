"""The rules for the layers of `torch.nn`; the rules for this package's layers are in `nn` and `models`.

The norm of an activation is the largest RMS of the channels of a token or pixel (MD examples 5 to 7). The assignment is
trusted: the norm of a weight must bound the layer's operator. Constants are read from the layers.
"""

import math
from typing import Any

from torch import nn

from wellnormed.modular.builder import Builder, modular_rule
from wellnormed.modular.combinators import IDENTITY
from wellnormed.modular.tree import Bond, NormedModule, compose
from wellnormed.proof.decimals import float_up
from wellnormed.proof.functions import shape_of


def activation(function: str, *numbers: float) -> Bond:
    """The bond of an elementwise function that the kernel knows; its sensitivity is the function's largest slope."""
    return Bond(function.replace("_", " "), float_up(shape_of(function, *numbers).slope))


_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Tanh: "tanh", nn.Softsign: "softsign", nn.LogSigmoid: "log_sigmoid",
    nn.Sigmoid: "sigmoid", nn.SiLU: "silu", nn.Mish: "mish", nn.Hardsigmoid: "hardsigmoid", nn.Hardswish: "hardswish",
    nn.Tanhshrink: "tanhshrink", nn.Softshrink: "softshrink",
}  # fmt: skip
_BONDS: dict[type[nn.Module], Bond] = {
    **{kind: activation(function) for kind, function in _FUNCTIONS.items()},
    nn.Softplus: Bond("softplus"),  # 1, apart from its jump of 2e-9
    nn.Identity: IDENTITY,
    nn.Flatten: Bond("flatten"),  # the RMS of pixels side by side is at most the largest of theirs
}
for _layer, _bond in _BONDS.items():
    modular_rule(_layer)(lambda module, builder, bond=_bond: bond)
modular_rule(nn.GELU)(lambda m, _: activation("gelu_tanh" if m.approximate == "tanh" else "gelu"))
modular_rule(nn.LeakyReLU)(lambda m, _: activation("leaky_relu", m.negative_slope))
modular_rule(nn.ELU)(lambda m, _: activation("elu", m.alpha, 1.0, 1.0))
modular_rule(nn.Hardtanh)(lambda m, _: activation("clamp", m.min_val, m.max_val))


@modular_rule(nn.Sequential)
def sequential(module: nn.Sequential, builder: Builder) -> NormedModule:
    """The composition of the children; a module that occurs twice counts twice."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    return compose(*(builder.child(name) for name in reversed(names)))


@modular_rule(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def weight_and_bias(module: Any, builder: Builder) -> NormedModule:
    """The weight's atom, plus the bias's if there is one: a bias sees no input (MD examples 5 and 7).

    Each position of a kernel adds one existing pixel or zero, whatever the padding and stride. Groups need no factor:
    blocks on separate channels stretch the RMS by no more than the largest of their norms.
    """
    weight = builder.atom("weight")
    return weight if getattr(module, "bias", None) is None else weight + builder.atom("bias", sensitivity=0.0)


@modular_rule(nn.Embedding)
def embedding(module: nn.Embedding, builder: Builder) -> NormedModule:
    """MD example 6: inputs are one-hot, in the 1-norm."""
    if module.max_norm is not None:
        builder.refuse(f"has max_norm={module.max_norm}, which changes the weight in the forward pass")
    return builder.atom("weight")


@modular_rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
def dropout(module: nn.Dropout, builder: Builder) -> NormedModule:
    """The identity, in evaluation mode."""
    if module.training and module.p > 0:
        builder.refuse(f"drops entries at random (p={module.p}) in training mode; build from `model.eval()`")
    return IDENTITY


@modular_rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def average_pool(module: nn.Module, builder: Builder) -> NormedModule:
    """The tree of a mean of pixels, whose RMS is at most that of the largest pixel."""
    if getattr(module, "divisor_override", None) is not None:
        builder.refuse("has a divisor_override, so that it is not a mean")
    return Bond("average pool")


@modular_rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool(module: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d, builder: Builder) -> NormedModule:
    """The tree of a maximum: channels may take it from different pixels, so n pixels stretch the RMS by sqrt n."""
    size, axes = module.kernel_size, int(type(module).__name__[-2])
    return Bond("max pool", math.sqrt(math.prod(size) if isinstance(size, tuple) else size**axes))
