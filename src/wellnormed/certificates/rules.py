"""Rules for modules: what to read from the executed layer, and which primitive bounds it.

A rule is `rule(module, step, *inputs) -> Bound`, registered for one exact type (a subclass may override anything, so it
has no rule until it gets its own), or `rule(step, *arguments) -> Bound` for a function; those stand in `functions`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from wellnormed.certificates.bound import Bound
from wellnormed.certificates.recorder import Recorder
from wellnormed.nn import (
    BallProjection,
    CausalAttention,
    ConvexPotential,
    HeadProjection,
    MergeHeads,
    OrthogonalJoin,
    PositionMix,
    PositionMixing,
    Rotary,
    Scale,
    ScaledGELU,
)
from wellnormed.nn.activation import GELU_MAX_SLOPE

F = TypeVar("F", bound=Callable[..., Bound])

RULES: dict[Any, Callable[..., Bound]] = {}
"""Exact type of a module, function, or name of a tensor method -> its rule."""


def rule(*types: type[nn.Module]) -> Callable[[F], F]:
    """Decorate `f(module, step, *inputs) -> Bound` to register it as the rule for modules of exactly these types.

    It answers for everything that their `forward` does, and gets one input per argument of `forward`: a `Bound` for a
    traced value, anything else as it stands in the call. Constants must be read from the module.

    Example:
        >>> class Halve(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.share = 0.5
        ...     def forward(self, x):
        ...         return x.mul(self.share).clone()
        >>> @rule(Halve)
        ... def halve(layer, step, x):
        ...     return step.derive("scale", x, constants={"factor": layer.share})
        >>> from wellnormed.certificates.walker import certify
        >>> certify(Halve()).lipschitz
        0.5
    """
    return function_rule(*types)


def function_rule(*targets: Any) -> Callable[[F], F]:
    """Decorate `f(step, *arguments, **keywords) -> Bound` to register it for functions, and for methods by name.

    The targets are such as `torch.add`, `operator.add`, `"add"`. The rule gets the call's own arguments, with a `Bound`
    for a traced value and a `Tensor` for a stored one. Keywords that its signature lacks are refused.
    """

    def register(function: F) -> F:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


@rule(nn.Linear)
def linear(layer: nn.Linear, step: Recorder, x: Bound) -> Bound:
    """Whole-matrix RMS -> RMS norm; the bias adds its RMS to the radius only."""
    bias = () if layer.bias is None else (step.prove("row_rms", layer.bias),)
    return step.derive("linear", x, claims=(step.prove("spectral", layer.weight), *bias))


def _require_one_sequence(step: Recorder, x: Bound) -> None:
    if not isinstance(x, Bound):
        raise step.refuse("it is given a stored tensor where a value that depends on the input is meant")
    if x.heads != 1:
        raise step.refuse(f"it is given {x.heads} heads where a plain sequence is meant; merge them first")


@rule(HeadProjection)
def head_projection(layer: HeadProjection, step: Recorder, x: Bound) -> Bound:
    """The norm of each head's own slice (whole-matrix norms are not enough for several heads)."""
    _require_one_sequence(step, x)
    return step.derive("head_projection", x, claims=(step.prove("spectral", layer.weight, parts=layer.heads),))


@rule(PositionMix)
def position_mix(layer: PositionMix, step: Recorder, x: Bound) -> Bound:
    """`token_share x + (1.0 - token_share) position`, with the subtraction as Python rounds it."""
    constants = {"token_share": layer.token_share, "position_share": 1.0 - layer.token_share}
    return step.derive("position_mix", x, constants=constants, claims=(step.prove("row_rms", layer.weight),))


@rule(BallProjection)
def ball_projection(layer: BallProjection, step: Recorder, x: Bound) -> Bound:
    """1-Lipschitz; linear only while provably inactive."""
    if not layer.radius > 0:
        raise step.refuse(f"radius={layer.radius} is not positive")
    return step.derive("ball_projection", x, constants={"radius": layer.radius})


@rule(CausalAttention)
def attention(layer: CausalAttention, step: Recorder, q: Bound, k: Bound, v: Bound) -> Bound:
    """Any additive mask, the causal one and the relative bias among them, is free."""
    if not q.heads == k.heads == v.heads:
        raise step.refuse(f"queries, keys and values have {q.heads}, {k.heads} and {v.heads} heads")
    if layer.scale < 0:
        raise step.refuse(f"scale={layer.scale} is negative")
    claims = ()
    if q.linear_in and k.linear_in and v.linear_in and q.linear_in.source is k.linear_in.source is v.linear_in.source:
        claims = (step.prove("product", q.linear_in.weight, k.linear_in.weight, parts=q.heads),)
    return step.derive("attention", q, k, v, constants={"scale": layer.scale}, claims=claims)


@rule(MergeHeads)
def merge_heads(layer: MergeHeads, step: Recorder, x: Bound) -> Bound:
    """Root mean square over heads, of radii and of Lipschitz constants."""
    return step.derive("merge_heads", x)


@rule(ConvexPotential)
def convex_potential(layer: ConvexPotential, step: Recorder, x: Bound) -> Bound:
    """One weight, used twice; positive biases alone move zero."""
    _require_one_sequence(step, x)
    return step.derive(
        "convex_potential", x, claims=(step.prove("spectral", layer.weight), step.prove("positive_rms", layer.bias))
    )


@rule(OrthogonalJoin)
def orthogonal_join(layer: OrthogonalJoin, step: Recorder, x: Bound, y: Bound) -> Bound:
    """Squares add up, in the proportion of the share."""
    _require_one_sequence(step, x)
    _require_one_sequence(step, y)
    if not 0 <= layer.share <= 1:
        raise step.refuse(f"share={layer.share} does not lie in [0, 1]")
    return step.derive("join", x, y, constants={"share": layer.share}, claims=(step.prove("spectral", layer.weight),))


@rule(PositionMixing)
def position_mixing(layer: PositionMixing, step: Recorder, x: Bound) -> Bound:
    """The averages are convex combinations whatever the logits are, and every head has one gain."""
    _require_one_sequence(step, x)
    if layer.gain_H.ndim != 1 or layer.logits_HT.ndim != 2:
        raise step.refuse("its gains must have the shape (heads,) and its logits (heads, length)")
    return step.derive(
        "position_mixing", x, claims=(step.prove("row_rms", layer.gain_H), step.prove("row_rms", layer.before_1K))
    )


@rule(ScaledGELU)
def scaled_gelu(layer: ScaledGELU, step: Recorder, x: Bound) -> Bound:
    """The true largest slope of GELU times the factors that `forward` applies."""
    factor = 1.0 / (layer.sharpness * GELU_MAX_SLOPE)
    return step.derive("scaled_gelu", x, constants={"sharpness": layer.sharpness, "factor": factor})


rule(Scale)(lambda layer, step, x: step.derive("scale", x, constants={"factor": layer.factor}))
rule(Rotary)(lambda layer, step, x: step.derive("rotary", x))
rule(nn.Identity)(lambda layer, step, x: x)


@rule(nn.LayerNorm, nn.RMSNorm)
def normalization(layer: nn.LayerNorm | nn.RMSNorm, step: Recorder, x: Bound) -> Bound:
    """Global constant `|gain|_inf / sqrt(eps)` (316 at eps = 1e-5), never 1."""
    if len(layer.normalized_shape) != 1:
        raise step.refuse(f"it normalises {layer.normalized_shape}, more than a token's entries")
    if layer.eps is None or not layer.eps > 0:
        raise step.refuse(f"eps={layer.eps} puts no floor under its input's size; set it to a positive number")
    bias = getattr(layer, "bias", None)
    claims: tuple = () if layer.weight is None else (step.prove("max_abs", layer.weight),)
    if bias is not None:
        claims += (step.prove("row_rms", bias),)
    return step.derive("normalization", x, constants={"eps": layer.eps}, claims=claims)


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(layer: nn.Module, step: Recorder, x: Bound) -> Bound:
    """Refused: in training mode one sample moves the others, and tokens are not its axis."""
    raise step.refuse("batch normalisation mixes samples; fold it into the layer before it, or leave it out")
