"""Embeddings of tokens and positions whose vectors are kept at a root mean square (RMS) of at most 1.

They are those of LT (Newhouse et al., 2025, section 4.4).
"""

import torch.nn.functional as F
from torch import Tensor, empty, nn

from wellnormed._inputs import require_numbers, require_sizes
from wellnormed._ranges import PART
from wellnormed.constraints import ColumnCap, Constraint
from wellnormed.norms import ColNorm, Norm


class _Vectors(nn.Module):
    """Learned vectors, which are the rows of `weight`, with a constraint that keeps the RMS of each at most 1."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(nn.init.normal_(empty(count, width)))

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of the weight: the largest RMS of its rows, with `max_inflation=16` for rows of rare tokens."""
        return {"weight": ColNorm(input_axis=0, max_inflation=16)}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The constraint that keeps the RMS of every row of the weight at most 1."""
        return {"weight": ColumnCap(1.0)}


class CappedEmbedding(_Vectors):
    """Looks up learned vectors, whose RMS a constraint keeps at most 1 (LT section 4.4).

    The layer itself scales nothing. The constraint `ColumnCap` scales the vectors after every step, if it is attached
    (see `constraints_of`), and a certificate is about the vectors that the weight holds.

    Args:
        symbols: The number of vectors.
        width: The number of entries of a vector.

    Shape: integers of any shape `(*)` -> `(*, width)`.

    Raises:
        ValueError: A size is not a positive integer.

    Example:
        >>> import torch
        >>> CappedEmbedding(symbols=5, width=4)(torch.tensor([0, 2, 2])).shape
        torch.Size([3, 4])
    """

    def __init__(self, symbols: int, width: int) -> None:
        require_sizes(self, symbols=symbols, width=width)
        super().__init__(symbols, width)
        self.symbols = symbols

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def extra_repr(self) -> str:
        return f"{self.symbols}, {self.width}"


class PositionEmbedding(_Vectors):
    """Computes `token_share x_t + (1 - token_share) p_t` for every token t, with a learned vector p_t for its position.

    A constraint keeps the RMS of every p_t at most 1 (LT section 4.4), as in `CappedEmbedding`.

    Args:
        length: The largest number of tokens.
        width: The number of entries of a token.
        token_share: The weight of the token in the sum, in (0, 1]. It is also the layer's Lipschitz constant.

    Shape: `(*, tokens, width)` -> `(*, tokens, width)`.

    Raises:
        ValueError: A size is not a positive integer, `token_share` is not in (0, 1], or an input has more than `length`
            tokens.

    Example:
        >>> import torch
        >>> mix = PositionEmbedding(length=3, width=2, token_share=0.75)
        >>> (mix(torch.ones(1, 2)) - mix(torch.zeros(1, 2))).detach()
        tensor([[0.7500, 0.7500]])
    """

    def __init__(self, length: int, width: int, token_share: float = 0.5) -> None:
        require_sizes(self, length=length, width=width)
        super().__init__(length, width)
        require_numbers("PositionEmbedding: ", {"token_share": token_share}, PART)
        self.length = length
        self.token_share = token_share

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[-2]
        if tokens > self.length:
            raise ValueError(f"{tokens} tokens exceed the {self.length} positions that were learned; shorten the input")
        return self.token_share * x + (1.0 - self.token_share) * self.weight[:tokens]

    def extra_repr(self) -> str:
        return f"{self.length}, {self.width}, token_share={self.token_share}"
