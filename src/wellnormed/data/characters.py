"""A text as integers, one per character, split for training and validation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def encode(prompt: str, symbols: str) -> Tensor:
    """The position of every character of `prompt` in `symbols`, int64; other characters are refused.

    Example:
        >>> encode("bad", "abcd")
        tensor([1, 0, 3])
    """
    unknown = sorted(set(prompt) - set(symbols))
    if unknown:
        raise ValueError(
            f"the prompt has {'characters' if len(unknown) > 1 else 'a character'} that the model never saw: "
            f"{' '.join(map(repr, unknown))}; use only these: {symbols!r}"
        )
    position = {symbol: i for i, symbol in enumerate(symbols)}
    return torch.tensor([position[character] for character in prompt], dtype=torch.long)


@dataclass(frozen=True)
class CharacterText:
    """A text, its symbols in sorted order, and its first 90 % (`train`) and last 10 % (`validation`), int64.

    `source` names the text; results on one source are never compared with results on another. `note` gives the reason
    for this text if it may surprise.
    """

    text: str = field(repr=False)
    source: str
    note: str = ""
    symbols: str = field(init=False)
    train: Tensor = field(init=False, repr=False)
    validation: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        symbols = "".join(sorted(set(self.text)))
        tokens = encode(self.text, symbols)
        train, validation = tokens.tensor_split([int(0.9 * len(tokens))])
        # a frozen dataclass refuses assignments
        vars(self).update(symbols=symbols, train=train, validation=validation)
