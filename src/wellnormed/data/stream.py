"""The order in which a training run reads tokens, the same for any number of ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellnormed.data.shards import Tokens

_ROUNDS = 8


class TokenStream(Iterator[Tensor]):
    """Batches of windows without end, of which every rank gets its consecutive part.

    Window n holds the tokens from `n * length` to `(n + 1) * length`, both included, also across shards: its first
    `length` tokens are inputs, its last `length` are targets, and every token but the first is a target once per epoch.
    A rest of fewer than `length` targets at the end is not read. A batch is the next `batch` windows, in the order of
    the files, or with a `seed` in a random order, which differs between epochs. A batch may extend into the next epoch.

    The order depends only on the tokens, `length` and `seed`. So a run that continues from a `state_dict` reads the
    same tokens as one that never stopped, also with another number of ranks or another batch.

    Args:
        tokens: The tokens to read. Every rank checks the whole batch, which takes some milliseconds for 512 windows of
            1,024 tokens, so that a token outside the vocabulary stops all ranks in the same step with the same message.
        batch: The number of windows of all ranks together.
        length: The number of inputs in a window.
        rank: The number of this rank, which gets that part of a batch.
        world: The number of ranks, which share a batch equally.
        position: The number of targets that all ranks together have read before; a multiple of `length`.
        seed: The seed of the random order. By default windows come in the order of the files.

    Raises:
        ValueError: If the batch cannot be shared equally, if there are too few tokens for one window, and if the
            position lies within a window.

    Example:
        >>> tokens = Tokens([np.arange(10), np.arange(10, 20)])
        >>> stream = TokenStream(tokens, batch=2, length=4)
        >>> next(stream)
        tensor([[0, 1, 2, 3, 4],
                [4, 5, 6, 7, 8]])
        >>> second = TokenStream(tokens, batch=2, length=4, rank=1, world=2, position=stream.position)
        >>> next(second)
        tensor([[12, 13, 14, 15, 16]])
    """

    def __init__(
        self,
        tokens: Tokens,
        batch: int,
        length: int,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
        seed: int | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("length", length), ("world", world)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must be from 0 to {world - 1}, since there are {world} ranks")
        if seed is not None and seed < 0:
            raise ValueError(f"seed={seed} must not be negative; choose another, or None for the order of the files")
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed
        self.epoch_windows = (len(tokens) - 1) // length
        self._part = _part_of(tokens, batch, length, rank, world)
        if position < 0 or position % length:
            raise ValueError(f"position={position} must be a multiple of length={length}; go on with the run's length")
        self.position = position
        """Targets that all ranks together have read."""

    def __next__(self) -> Tensor:
        """The next windows of this rank, `(batch / world, length + 1)` int64: inputs `[:, :-1]`, targets `[:, 1:]`."""
        numbers = self.position // self.length + np.arange(self.batch)
        windows = self.tokens.windows(torch.from_numpy(self._order(numbers) * self.length), self.length + 1)
        self.position += self.batch * self.length
        return windows[self._part]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the facts on which the order depends."""
        return {"position": self.position, **self._order_depends_on()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another stream over the same tokens, with any number of ranks and any batch.

        Other tokens, another length or another seed are a `ValueError`, because they change the order.
        """
        for name, here in self._order_depends_on().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the run to continue read its tokens with {name}={state.get(name)}, but here it is {here}; "
                    f"pass the run's {name}"
                )
        self.position = state["position"]

    def _order_depends_on(self) -> dict[str, Any]:
        return {"tokens": len(self.tokens), "length": self.length, "seed": self.seed}

    def _order(self, numbers: np.ndarray) -> np.ndarray:
        """The places in the files of the windows with these numbers, which count over all epochs; `(N,)` int64."""
        epochs, places = np.divmod(numbers, self.epoch_windows)
        if self.seed is None:
            return places
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permute(places[here], self.epoch_windows, (self.seed, epoch))
        return places


class RandomWindows(Iterator[Tensor]):
    """Batches of windows that begin at random places of a text, of which every rank gets its consecutive part.

    Args:
        tokens, batch, length, rank, world: As of a `TokenStream`.
        generator: The source of the places. Its state must be the same on all ranks; the next batch depends on it
        alone.

    Example:
        >>> next(RandomWindows(Tokens([np.arange(9)]), 2, 3, generator=torch.Generator().manual_seed(0))).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, tokens: Tokens, batch: int, length: int, rank: int = 0, world: int = 1, *, generator: torch.Generator
    ) -> None:
        self.tokens, self.batch, self.length, self.generator = tokens, batch, length, generator
        self._part = _part_of(tokens, batch, length, rank, world)

    def __next__(self) -> Tensor:
        """The next windows of this rank, `(batch / world, length + 1)` int64: inputs `[:, :-1]`, targets `[:, 1:]`."""
        starts = torch.randint(len(self.tokens) - self.length, (self.batch,), generator=self.generator)
        return self.tokens.windows(starts[self._part], self.length + 1)

    def state_dict(self) -> dict[str, Any]:
        """An empty state; the caller keeps the generator's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""


def _part_of(tokens: Tokens, batch: int, length: int, rank: int, world: int) -> slice:
    """The slice of a batch that belongs to a rank; refuses a batch or length that does not fit."""
    if batch % world:
        raise ValueError(f"batch={batch} windows cannot be shared equally among {world} ranks; take a multiple")
    if len(tokens) <= length:
        raise ValueError(
            f"{len(tokens)} tokens are too few for one window of {length} and its targets; take shorter windows or a "
            "longer text"
        )
    share = batch // world
    return slice(rank * share, (rank + 1) * share)


def permute(numbers: np.ndarray, count: int, seed: Sequence[int]) -> np.ndarray:
    """The images of these numbers under a random permutation of 0, ..., `count - 1`, which is never stored.

    A Feistel network (Luby and Rackoff, 1988) permutes the numbers below a power of 4, which is at least `count` and
    less than 4 times that. It is applied again to numbers that become `count` or more (Black and Rogaway, 2002). Its
    keys come from NumPy's `SeedSequence`, which gives the same numbers in every release.

    Example:
        >>> sorted(permute(np.arange(6), 6, [0]).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    values = numbers.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        values[outside] = left << half | right
        outside = values >= count
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
