"""Functions that combine trees: residual connections, attention."""

from dataclasses import replace

from wellnormed._inputs import require_numbers
from wellnormed._ranges import SHARE
from wellnormed.modular.tree import Bond, Composition, NormedModule, Scalar, compose, concatenate

IDENTITY = Bond("identity")


def residual(block: NormedModule, strength: float) -> NormedModule:
    """`(1 - strength) x + strength block(x)`: sensitivity 1 if the block's is 1 (LT equation 1).

    `strength` is the share of the branch, in [0, 1]; 1 / (number of residual connections) in LT.

    Example:
        >>> from wellnormed.modular import Atom
        >>> from wellnormed.norms import Spectral
        >>> block = residual(Atom("block", Spectral()), 0.25)
        >>> block.sensitivity, block.lr_factors()
        (1.0, {'block': 4.0})
    """
    require_numbers("residual: ", {"strength": strength}, SHARE, "pass the share of the branch, such as 0.5")
    return Scalar(1 - strength) + strength * block


def attention(
    query: NormedModule, key: NormedModule, value: NormedModule, scale: float = 1.0, bias: NormedModule | None = None
) -> Composition:
    """`softmax(scale <q, k> / d + bias) v`: sensitivity `value + scale (query + key)`.

    With queries, keys and values of RMS at most 1 in every head, a change of the similarities `<q, k> / d` is at most
    `|dq| + |dk|`, the rows of a softmax change by at most as much in the 1-norm as its logits in the largest entry, and
    attention as a whole by `|dv| + |d logits|` (Large et al. 2024, proposition 7; LT theorem D.1). The scale therefore
    counts for queries and keys only. With scale 1 and projections of sensitivity 1 the whole has sensitivity 3,
    whence the published factor 1/3. A learned bias of the logits depends on no input.

    Example:
        >>> from wellnormed.modular import Atom
        >>> from wellnormed.norms import PerHead
        >>> q, k, v = (Atom(name, PerHead(4)) for name in "qkv")
        >>> attention(q, k, v, scale=2.0).sensitivity
        5.0
    """
    similarity = compose(Scalar(scale), Bond("similarity <q, k> / d"), concatenate(query, key))
    logits = similarity if bias is None else similarity + bias
    weights = replace(compose(Bond("softmax"), logits), label="attention weights")
    return compose(Bond("weighted mean of values"), concatenate(value, weights))
