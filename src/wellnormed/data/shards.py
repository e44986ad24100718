"""Tokens in the shards of nanoGPT's speedruns: a header of 256 int32, then the tokens as uint16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from wellnormed.data._download import places

MAGIC, VERSION, HEADER = 20240520, 1, 256
_BYTES = 4 * HEADER


class Tokens:
    """A sequence of tokens in one or several arrays, which may be mapped from files larger than the memory.

    Example:
        >>> tokens = Tokens([np.arange(5), np.arange(10, 15)])
        >>> tokens.windows(torch.tensor([0, 6]), 3)
        tensor([[ 0,  1,  2],
                [11, 12, 13]])
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """The `length` tokens from every start on, `(N, length)` int64; none runs from one array into the next.

        A start that is closer to the end of its array is moved to the last one that fits.
        """
        rows = []
        for start in starts.tolist():
            number = int(np.searchsorted(self._ends, start, side="right"))
            array = self.arrays[number]
            place = min(start - int(self._ends[number]) + len(array), len(array) - length)
            rows.append(array[place : place + length].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def load_shards(split: Literal["train", "val"], name: str = "fineweb10B") -> Tokens:
    """The shards `*_train_*.bin` or `*_val_*.bin` of a folder in `$WELLNORMED_DATA` or in the user's cache, in order.

    That there are none, and a file that is no such shard, are a `ValueError`. Nothing is downloaded.
    """
    for folder in places(name):
        if files := sorted(folder.glob(f"*_{split}_*.bin")):
            return Tokens([_shard(path) for path in files])
    where = " or ".join(map(str, places(name)))
    raise ValueError(
        f"there are no {split} shards of {name} in {where}; FineWeb as GPT-2 tokens is published on Hugging "
        "Face as kjj0/fineweb10B-gpt2: put its files fineweb_train_*.bin and fineweb_val_*.bin there"
    )


def _shard(path: Path) -> np.ndarray:
    header = np.fromfile(path, np.int32, HEADER)
    if len(header) < HEADER or (header[0], header[1]) != (MAGIC, VERSION):
        raise ValueError(f"{path} is no shard of tokens of version {VERSION}; restore it")
    tokens = np.memmap(path, np.uint16, "r", offset=_BYTES) if path.stat().st_size > _BYTES else np.empty(0, np.uint16)
    if len(tokens) != header[2]:
        raise ValueError(f"{path} holds {len(tokens)} tokens where its header says {header[2]}; restore it")
    return tokens
