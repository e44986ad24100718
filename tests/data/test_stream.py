"""The order in which a run reads its tokens: one for any number of ranks, exact after a stop, each once an epoch."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellnormed.data.shards import Tokens
from wellnormed.data.stream import TokenStream, permute

BATCH = 12  # shared equally by 1, 2, 3 and 4 ranks
SEEDS = st.none() | st.integers(0, 2**40)


@st.composite
def token_arrays(draw, least=2):
    """Tokens that are their own places, in shards of any sizes."""
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(lambda found: sum(found) >= least))
    return Tokens(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


@given(tokens=token_arrays(least=8), length=st.integers(1, 7), seed=SEEDS)
def test_all_ranks_together_read_the_same_for_any_number_of_them(tokens, length, seed):
    alone = list(islice(TokenStream(tokens, BATCH, length, seed=seed), 5))
    for world in (2, 3, 4):
        ranks = [TokenStream(tokens, BATCH, length, rank, world, seed=seed) for rank in range(world)]
        for batch in alone:
            assert torch.equal(torch.cat([next(rank) for rank in ranks]), batch)


@given(tokens=token_arrays(least=8), length=st.integers(1, 7), seed=SEEDS, stop=st.integers(0, 5))
def test_a_run_goes_on_at_the_exact_token_with_other_ranks_and_batches(tokens, length, seed, stop):
    windows = torch.cat(list(islice(TokenStream(tokens, BATCH, length, seed=seed), 6)))
    first = TokenStream(tokens, BATCH, length, 1, 2, seed=seed)
    for _ in range(stop):
        next(first)
    state = first.state_dict()
    for batch, world in ((BATCH, 2), (BATCH, 3), (4, 4)):
        ranks = [TokenStream(tokens, batch, length, rank, world, seed=seed) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        read = torch.cat([next(rank) for rank in ranks])
        assert torch.equal(read, windows[stop * BATCH :][:batch])


@given(tokens=token_arrays(), length=st.integers(1, 7), seed=SEEDS)
def test_every_token_is_a_target_once_an_epoch_up_to_the_tail(tokens, length, seed):
    if len(tokens) <= length:
        return
    stream = TokenStream(tokens, 1, length, seed=seed)
    for _ in range(2):
        windows = torch.cat(list(islice(stream, stream.epoch_windows)))
        assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)  # a target is what follows its input
        targets = windows[:, 1:].flatten().sort().values
        assert torch.equal(targets, torch.arange(1, len(targets) + 1))
        assert len(tokens) - 1 - len(targets) < length


def test_without_a_seed_the_order_is_that_of_the_files_and_the_epochs_follow_each_other():
    windows = next(TokenStream(Tokens([np.arange(7), np.arange(7, 12)]), 5, 3))
    assert windows[:, 0].tolist() == [0, 3, 6, 0, 3]


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    tokens = Tokens([np.arange(1001)])
    orders = {seed: next(TokenStream(tokens, 2000, 1, seed=seed))[:, 0].tolist() for seed in (0, 1)}
    parts = [order[half : half + 1000] for order in orders.values() for half in (0, 1000)]
    assert len({tuple(part) for part in parts}) == 4
    for part in parts:
        # the correlation of a random order with the order of the files has standard deviation 1 / sqrt(999)
        assert abs(np.corrcoef(part, np.arange(1000))[0, 1]) < 5 / 999**0.5


def test_the_order_of_a_seed_never_changes():
    """A run that goes on under another release of this library or of NumPy reads the same."""
    assert permute(np.arange(10), 10, [1, 2]).tolist() == [0, 7, 3, 4, 1, 9, 5, 2, 8, 6]


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**32))
def test_a_permutation_reaches_every_number_once(count, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(count), count, [seed, epoch])), np.arange(count))


def test_a_token_that_does_not_fit_stops_every_rank_with_the_same_sentence():
    spoiled = np.arange(100)
    spoiled[61] = 50257
    tokens = Tokens([np.arange(50), spoiled[50:]], ["first.bin", "second.bin"], vocabulary=50257)
    sentences = set()
    for rank in range(4):
        stream = TokenStream(tokens, 4, 9, rank, 4)
        next(stream)
        with pytest.raises(ValueError, match=r"second\.bin has the token 50257 at place 11") as caught:
            next(stream)
        assert stream.position == 4 * 9  # nothing was read
        sentences.add(str(caught.value))
    assert len(sentences) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"), ({"length": 0}, "length=0 must be at least 1"),
        ({"world": 0}, "world=0 must be at least 1"), ({"rank": 2, "world": 2}, "rank=2 must be from 0 to 1"),
        ({"world": 3}, "batch=4 windows cannot be shared equally among 3 ranks"),
        ({"position": 4}, "position=4 must be a multiple of length=5"), ({"position": -5}, "position=-5"),
        ({"length": 100}, "100 tokens are too few for one window of 100"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenStream(Tokens([np.arange(100)]), **{"batch": 4, "length": 5} | options)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"length": 4}, "length=5, but here it is 4"), ({"seed": 1}, "seed=None, but here it is 1"), ({}, "tokens=100")],
)
def test_a_state_of_another_order_is_refused(other, message):
    state = TokenStream(Tokens([np.arange(100)]), 4, 5).state_dict()
    stream = TokenStream(Tokens([np.arange(100 if other else 99)]), **{"batch": 4, "length": 5} | other)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict(state)
