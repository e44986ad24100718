"""Checking ends: small documents of large sizes are refused with a reason, in bounded time and memory."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wellnormed.proof import CheckError, Proof, Row, check
from wellnormed.proof.files import read_safetensors
from wellnormed.proof.lipsdp import Network
from wellnormed.proof.promises import Parts, Promise


def vector(entries: int) -> Proof:
    proof = Proof()
    proof.add(Row("x0", "input", (), (1, entries), {"dtype": "float32", "radius": 1.0}, axes=(1,)))
    return proof


def turned(name: str, source: str, entries: int, by: int) -> Row:
    """The entries in another order, from a place on."""
    table = [(i + by) % entries for i in range(entries)]
    return Row(name, "pick", (source,), (1, entries), {"offset": 0, "tables": [0, table]})


def grown(proof: Proof, entries: int, turns: int, *by: int | None) -> float:
    """The gain of x, where each turn adds to x its entries in other orders, or rounded (None)."""
    for turn in range(turns):
        x, names = f"x{turn}", [f"x{turn}"]
        for number, each in enumerate(by):
            names.append(f"{x}/{number}")
            rounded = Row(names[-1], "rounding", (x,), (1, entries), {"dtype": "bfloat16"})
            proof.add(rounded if each is None else turned(names[-1], x, entries, each * 2**turn))
        proof.add(Row(f"x{turn + 1}", "add", tuple(names), (1, entries), {}))
    proof.add(Row("y", "output", (f"x{turns}",), (1, entries), {}, reads=((1,),), axes=(1,)))
    return float(proof.rows["y"].bounds.gain.max() / proof.rows["x0"].bounds.gain.max())


def test_a_sum_of_equal_terms_is_one_term() -> None:
    proof = vector(4)
    for turn in range(40):
        proof.add(Row(f"x{turn + 1}", "add", (f"x{turn}", f"x{turn}"), (1, 4), {}))
    (term,) = proof.values["x40"].terms
    assert term.factor == 2.0**40
    (both,) = proof.add(Row("y", "add", ("x1", "x2", "x0"), (1, 4), {})).terms
    assert both.factor == 7
    proof.add(Row("-x", "times", ("x0",), (1, 4), {"factor": -1.0}))
    proof.add(Row("0", "add", ("x0", "-x"), (1, 4), {}))
    proof.add(Row("z", "output", ("0",), (1, 4), {}, reads=((1,),), axes=(1,)))
    assert proof.rows["z"].bounds.gain.max() == 0


def test_terms_that_nearly_cancel_stay_apart() -> None:
    """Relative to a small difference, the rounding errors of its factors are large."""
    proof = vector(1)
    proof.add(Row("a", "times", ("x0",), (1, 1), {"divisor": 3.0}))
    proof.add(Row("b", "times", ("x0",), (1, 1), {"factor": -1 / 3}))
    assert len(proof.add(Row("c", "add", ("a", "b"), (1, 1), {})).terms) == 2
    assert len(proof.add(Row("d", "add", ("a", "a", "b"), (1, 1), {})).terms) == 2


def test_sums_of_a_vector_and_its_turns() -> None:
    assert grown(vector(64), 64, 12, 1) == pytest.approx(2**12)  # 4,096 terms, of which 64 differ


@pytest.mark.parametrize(("entries", "turns", "by"), [(4, 30, (None,)), (2**13, 30, (1, 3)), (4096, 12, (1, None))])
def test_sums_that_double_without_end_are_refused(entries: int, turns: int, by: tuple) -> None:
    with pytest.raises(CheckError, match=r"terms, (more than|which are too many)|entries, more|kinds of groups|hold"):
        grown(vector(entries), entries, turns, *by)


@pytest.mark.parametrize(
    "rows",
    [
        [("y", "pick", ("x0",), (2**13, 2**13 + 1), {"offset": 0, "tables": [0, 0]})],
        [("y", "pick", ("x0",), (2**14, 2**13), {"offset": 0, "tables": [0, 0]})],
        [("y", "pick", ("x0",), (2**39, 2**39), {"offset": 0, "tables": [0, 0]})],
        [("c", "constant", (), (), {"number": 1.0}), ("y", "add", ("x0", "c"), (2**30, 4), {})],
        [("y", "input", (), (2**24, 2), {"dtype": "float32", "radius": 1.0})],
        [(f"y{i}", "pick", ("x0",), (2**12, 2**12 + i), {"offset": 0, "tables": [0, 0]}) for i in range(10)],
    ],
    ids=["square", "wide", "huge", "broadcast", "groups", "many"],
)
def test_large_shapes_are_refused(rows: list[tuple]) -> None:
    proof = vector(4)
    *few, last = (Row(*row, axes=(1,) if row[1] == "input" else ()) for row in rows)
    for row in few:
        proof.add(row)
    with pytest.raises(CheckError, match=r"too many|more than|shape must be|are left"):
        proof.add(last)


def peak(run: Callable[[], object]) -> int:
    """The most bytes beyond those before that are held while it runs."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:  # left on, it makes every later test of the process slower
        tracemalloc.stop()


MOVES = {
    "turned": ("pick", ("x0",), {"offset": 2**20 - 1, "tables": [0, -1]}, 12),
    "one entry of many": ("pick", ("x0",), {"offset": 0, "tables": [0, 0]}, 12),
    "by positions": ("pick", ("x0",), {"positions": "places"}, 12),
    "factors": ("times", ("x0",), {"factor": "factors"}, 24),
    "sum": ("add", ("x0", "x0"), {}, 8),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_needs_little_more_memory_than_its_result(name: str) -> None:
    operation, inputs, constants, bytes_of_an_entry = MOVES[name]
    entries = 2**20
    proof = Proof({"places": np.arange(entries)[None, ::-1].copy(), "factors": np.arange(1.0, entries + 1)})
    proof.add(Row("x0", "input", (), (1, entries), {"dtype": "float32", "radius": 1.0}, axes=(1,)))
    for tensor in ("places", "factors"):
        proof.tensor(tensor)
    row = Row("y", operation, inputs, (1, entries), constants)
    assert peak(lambda: proof.add(row)) < bytes_of_an_entry * entries


def test_what_a_move_would_hold_is_counted_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer sum of two short tables of factors, and positions."""
    side = 2**9
    factors = {name: np.linspace(1, 2, side).reshape(shape) for name, shape in (("a", (side, 1)), ("b", (1, side)))}
    proof = Proof(factors)
    proof.add(Row("x", "input", (), (side, side), {"dtype": "float32", "radius": 1.0}, axes=(1,)))
    for name in factors:
        proof.add(Row(name, "times", ("x",), (side, side), {"factor": name}))
    monkeypatch.setattr("wellnormed.proof.proof._HELD", 5 * side**2)
    for row in (
        Row("c", "times", ("a",), (side, side), {"factor": "b"}),
        Row("c", "add", ("a", "b"), (side, side), {}),
        Row("c", "pick", ("x",), (side, side), {"offset": 0, "tables": [side, 1]}),
    ):

        def refused(row: Row = row) -> None:
            with pytest.raises(CheckError, match=r"its result would hold \d+ bytes, and \d+ are left"):
                proof.add(row)

        assert peak(refused) < side**2


def test_a_group_of_too_many_entries_or_of_too_many_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = vector(2**23)
    proof.add(Row("y", "pick", ("x0",), (1, 2**23), {"offset": 2**23 - 1, "tables": [0, -1]}))
    with pytest.raises(CheckError, match=f"the groups of y have {2**23} entries, more than"):
        proof.add(Row("o", "output", ("y",), (1, 2**23), {}, reads=((1,),), axes=(1,)))
    proof = Proof()
    proof.add(Row("x", "input", (), (8, 2), {"dtype": "float32", "radius": 1.0}, axes=(1,)))
    proof.add(Row("y", "pick", ("x",), (1, 16), {"offset": 15, "tables": [0, -1]}))
    monkeypatch.setattr("wellnormed.proof.gather._GROUPS", 7)
    with pytest.raises(CheckError, match="entries of 8 groups, more than 7"):
        proof.add(Row("o", "output", ("y",), (1, 16), {}, reads=((1,),), axes=(1,)))


def test_a_stride_beyond_its_kernel_is_refused_and_frequencies_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof({"kernel": np.ones((1, 1, 1, 1))})
    sizes = {"size": (2**12, 2**12), "dilation": (1, 1)}
    with pytest.raises(CheckError, match=r"stride .* is too large for its kernel"):
        proof.claim("convolution", "kernel", **sizes, stride=(2**20, 2**20), groups=1)
    monkeypatch.setattr("wellnormed.proof.matrices._BLOCK", 2**12)  # all at once, they take 7.5 MiB
    few = {"size": (2**8, 2**8), "dilation": (1, 1)}
    assert peak(lambda: proof.claim("convolution", "kernel", **few, stride=(1, 1), groups=1)) < 2**20


def test_promises_are_counted_before_their_positions_are_made() -> None:
    parts = Parts((1, 2**12, 2**12), 1.0, 0, (0, 2**12, 1))
    with pytest.raises(CheckError, match="do not have each of its entries once"):
        peak(lambda: Promise("w", (2**12, 2**12), (parts,) * 1000).blocks)
    proof = Proof()
    proof.promises["a"] = Promise("a", (2**14, 2**15), ())
    with pytest.raises(CheckError, match=f"promises are of {2**29 + 2**26} entries, more than"):
        proof.promise(Promise("b", (2**13, 2**13), ()))


def test_the_start_of_a_network_is_not_made_a_matrix_if_it_is_too_wide() -> None:
    proof = vector(2**16)
    network = Network(proof.values["x0"], proof.tensor)
    with pytest.raises(CheckError, match="65536 entries, more than"):
        network.maps(proof.values["x0"])


def logits(tokens: int, vocabulary: int, **moved: Any) -> Proof:
    """Logits that are moved by a row, which has no other bounds than its input."""
    proof = Proof({"weight": np.eye(vocabulary, 8), "scale": np.full(vocabulary, 0.5)})
    proof.add(Row("x", "input", (), (1, tokens, 8), {"dtype": "float32", "radius": 1.0}, axes=(2,)))
    claim, shape = proof.claim("spectral", "weight"), (1, tokens, vocabulary)
    proof.add(Row("y", "linear", ("x",), shape, {"parts": 1}, (claim,), reads=((2,),), axes=(2,)))
    (operation,) = moved
    shape = (1, tokens, vocabulary - 257) if operation == "pick" else shape
    proof.add(Row("z", operation, ("y",), shape, moved[operation]))
    proof.add(Row("o", "output", ("z",), shape, {}, reads=((2,),), axes=(2,)))
    return proof


MOVED = {"times": {"factor": "scale"}, "pick": {"offset": 0, "tables": [0, 50257, 1]}}


def test_logits_with_a_scale_of_each_are_bounded() -> None:
    """They have more entries than are looked at at once."""
    rows = logits(64, 50257, times=MOVED["times"]).rows
    assert float(rows["o"].bounds.gain.max() / rows["y"].bounds.gain.max()) == pytest.approx(0.5, rel=1e-12)


def test_one_large_group_is_bounded() -> None:
    """A group is looked at as a whole, however many entries it has."""
    proof, shape = Proof(), (1, 2**20 + 2)
    proof.add(Row("x", "input", (), shape, {"dtype": "float32", "radius": 1.0}, axes=(0, 1)))
    proof.add(Row("y", "pick", ("x",), shape, {"offset": 0, "tables": [0, 1]}))
    proof.add(Row("z", "add", ("y", "y"), shape, {}))
    proof.add(Row("o", "output", ("z",), shape, {}, reads=((0, 1),), axes=(0, 1)))
    assert float(proof.rows["o"].bounds.gain.max() / proof.rows["x"].bounds.gain.max()) == pytest.approx(2, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("operation", MOVED)
def test_logits_of_a_public_model_fit_a_gigabyte(operation: str) -> None:
    assert peak(lambda: logits(1024, 50257, **{operation: MOVED[operation]})) < 2**30


FOLDERS = {
    "a pipe of tensors": lambda folder: os.mkfifo(folder / "x.safetensors"),
    "a pipe of JSON": lambda folder: os.mkfifo(folder / "certificate.json"),
    "a device": lambda folder: (folder / "x.safetensors").symlink_to("/dev/zero"),
    "a folder": lambda folder: (folder / "x.safetensors").mkdir(),
    "a large file": lambda folder: os.truncate(folder / "certificate.json", 2**40),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_that_are_none_are_refused(tmp_path: Path, kind: str) -> None:
    if "JSON" not in kind:
        (tmp_path / "certificate.json").write_text("{}")
    FOLDERS[kind](tmp_path)
    with pytest.raises(CheckError, match=r"no regular file|more than|cannot be read"):
        check(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        with pytest.raises(CheckError, match=r"no regular file|cannot be read"):
            read_safetensors(path)
