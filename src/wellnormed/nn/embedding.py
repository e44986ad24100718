"""Embeddings whose images are kept at RMS at most 1 (LT section 4.4)."""

import torch.nn.functional as F
from torch import Tensor, empty, nn

from wellnormed.constraints import ColumnCap, Constraint
from wellnormed.norms import ColNorm, Norm


class _Vectors(nn.Module):
    """Learned vectors, the rows of `weight`, and a constraint that keeps every one at RMS at most 1."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(nn.init.normal_(empty(count, width)))

    def parameter_norms(self) -> dict[str, Norm]:
        """Columns of the map from one-hot vectors, this weight's rows; rare ones inflated at most 16 times."""
        return {"weight": ColNorm(input_axis=0, max_inflation=16)}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """Every vector's RMS is at most 1."""
        return {"weight": ColumnCap(1.0)}


class CappedEmbedding(_Vectors):
    """Lookup of `symbols` vectors of `width` entries; a constraint keeps every vector at RMS at most 1.

    The layer itself does not scale: the cap is the constraint's (`ColumnCap`), and the certificate proves what the
    weight has.

    Shape: `(*)` of integers -> `(*, width)`.
    """

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__(symbols, width)
        self.symbols = symbols

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def extra_repr(self) -> str:
        return f"{self.symbols}, {self.width}"


class PositionMix(_Vectors):
    """`token_share x + (1 - token_share) position`, with a learned vector for each of `length` positions.

    Args:
        length: Largest number of tokens; more are refused.
        width: Entries of a vector.
        token_share: Share of the token, in (0, 1]; it is also the layer's Lipschitz constant.

    Shape: `(*, tokens, width)` -> the same.
    """

    def __init__(self, length: int, width: int, token_share: float = 0.5) -> None:
        if not 0 < token_share <= 1:
            raise ValueError(f"token_share={token_share} must lie in (0, 1]")
        super().__init__(length, width)
        self.length = length
        self.token_share = token_share

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[-2]
        if tokens > self.length:
            raise ValueError(f"{tokens} tokens exceed the {self.length} positions that were learned; shorten the input")
        return self.token_share * x + (1.0 - self.token_share) * self.weight[:tokens]

    def extra_repr(self) -> str:
        return f"{self.length}, {self.width}, token_share={self.token_share}"
