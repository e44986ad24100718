"""Small valid documents, and forgeries of them: each differs in one place, and one check alone refuses it.

`HONEST` has rows and tensors; `bounds.json` has what follows from them. A forgery is the name of a document and what
stands elsewhere in it: a path such as `y.claims.0.measure` with the new content. With the one check dropped, it passes.
"""

import copy
import decimal
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from wellnormed.proof import Bounds, Proof, Report, check
from wellnormed.proof.arithmetic import FORMATS, LARGEST, Arithmetic
from wellnormed.proof.check import change_of, conclude
from wellnormed.proof.claims import complete, prove
from wellnormed.proof.decimals import decimals, float_up, root_down, rounding_up, shown
from wellnormed.proof.files import _KINDS, Stored
from wellnormed.proof.functions import FUNCTIONS, sizes_at
from wellnormed.proof.lipsdp import Network
from wellnormed.proof.matrices import _symbols, absolute_kernel, absolute_norm
from wellnormed.proof.moves import Move
from wellnormed.proof.promises import Parts, Promise
from wellnormed.proof.reading import CheckError, Offset, Positive, Size, printable, read
from wellnormed.proof.rows import Claim, Document, read_row

Fields = dict[str, Any]
BOUNDS_FILE = Path(__file__).with_name("bounds.json")
"""Name of a result -> its digits; `python -m tests.proof.forged` writes it."""
MOVES = ("pick", "times", "add", "constant", "idle_ball", "rounding")


def row(name: str, operation: str, inputs: str, shape: Sequence[int], *claims: Fields, **constants: Any) -> Fields:
    """A row as JSON; groups extend along the last axis of a primitive and its inputs, or along `axes` and `reads`."""
    names, move = inputs.split(), operation in MOVES
    axes = constants.pop("axes", [] if move else [len(shape) - 1])
    reads = constants.pop("reads", [] if move else [axes] * len(names))
    fields = {"name": name, "operation": operation, "inputs": names, "shape": list(shape), "constants": constants}
    executed = constants.pop("executed", {"dtype": "float32"})
    stated = {"executed": executed} | dict.fromkeys(Bounds._fields)
    return {**fields, "claims": list(claims), "reads": reads, "axes": axes, **stated}


def start(name: str, *shape: int, **constants: Any) -> Fields:
    claims, constants = constants.pop("claims", ()), {"dtype": "float32", "radius": 1.0} | constants
    return row(name, "input", "", shape, *claims, **{k: each for k, each in constants.items() if each is not None})


def end(of: str, *shape: int, **constants: Any) -> Fields:
    return row("out", "output", of, shape, **constants)


def claim(measure: str, tensors: str, *values: float, **settings: Any) -> Fields:
    """A claim of an eighth more than the true values, which are given."""
    return {
        "measure": measure,
        "tensors": tensors.split(),
        "values": [1.125 * v for v in values],
        "constants": settings,
    }


def linear(name: str, of: str, weight: str, size: float, *shape: int, **constants: Any) -> Fields:
    return row(name, "linear", of, shape, claim("spectral", weight, size), **{"parts": 1} | constants)


def stated(*values: Any, shape: Sequence[int] = (1, 1)) -> Fields:
    """Bounds of a row, in digits."""
    return {"shape": list(shape), "values": list(map(str, values))}


def stating(name: str, *values: Any, shape: Sequence[int] = (1, 1), **others: Fields) -> Fields:
    """Changes with which a row states all bounds: the same digits for each, or others."""
    return {f"{name}.{what}": others.get(what) or stated(*values, shape=shape) for what in Bounds._fields}


def promised(shape: tuple[int, ...], *parts: Any, tensor: np.ndarray | None = None) -> Proof:
    """A proof with a promise for `w`; its parts have a shape, a size, an offset and tables. A tensor is used before."""
    proof = Proof({} if tensor is None else {"w": tensor})
    if tensor is not None:
        proof.tensor("w")
    parts = parts or (((1, shape[0], int(np.prod(shape[1:]))), 2.0, 0, (0, int(np.prod(shape[1:])), 1)),)
    proof.promise(Promise("w", shape, tuple(Parts(*each) for each in parts)))
    return proof


def packed(tensors: dict[str, Any], content: bytes) -> bytes:
    """A safetensors file: name -> dtype, shape and ends, or text."""
    keys = ("dtype", "shape", "data_offsets")
    header = {name: x if isinstance(x, str) else dict(zip(keys, x, strict=True)) for name, x in tensors.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def original(*stating: tuple[str, int], **tensors: Any) -> Fields:
    """Changes with which a document has an original, of these tensors; inputs of so many axes are 1/4 from it."""
    others = {f"tensors.other {name}": np.asarray(each) for name, each in tensors.items()}
    apart = {f"{name}.change": stated(0.25, shape=[1] * axes) for name, axes in stating}
    return {**others, **apart, "document.original": {name: f"other {name}" for name in tensors}}


TURNED = [[[3, 2], [1, 0]]]
I2, I4, W = np.eye(2), np.eye(4), np.array([[1.0, 1.0], [-1.0, 1.0]])
ORDER = [0, 2, 4, 1]
"""The tables that take heads of width 2 from tokens of 4 entries."""
QKV = [linear(each, "x", f"w{each}", 2, 1, 3, 4) for each in "qkv"]
HEADS = [row(f"{each}h", "pick", each, (1, 2, 3, 2), offset=0, tables=[0, 2, 4, 1]) for each in "qkv"]
ATTENTION = row(
    "a", "attention", "qh kh vh x", (1, 2, 3, 2), claim("spectral", "wk", 2, 2, parts=2),
    claim("spectral", "wv", 2, 2, parts=2), claim("product", "wq wk", 4, 4, pairs=[[0, 0], [1, 1]], parts=[2, 2],
    transposed=[False, False]), reads=[[3], [3], [3], [2]], axes=[3], scale=0.5,
)  # fmt: skip
TABLE = [claim("row_norm", "table", 2.0), claim("diameter", "table", 4.0)]

HONEST: dict[str, tuple[list[Fields], dict[str, np.ndarray]]] = {
    "mlp": (
        [
            start("x", 1, 4),
            row("y", "linear", "x", (1, 2), claim("spectral", "w", 1.5), claim("group_norm", "b", 5), parts=1),
            row("z", "elementwise", "y", (1, 2), function="relu"),
            end("z", 1, 2),
        ],
        {"w": I4[:2], "b": np.array([3.0, 4.0])},
    ),
    "margin": (
        [
            start("x", 1, 4),
            row("y", "linear", "x", (1, 2), claim("spectral", "w", 1), claim("group_norm", "b", 5), parts=1),
            row("m", "margin", "x", (1, 1), claim("row_difference", "w", 1.5), claim("max_abs", "b", 4), factor=0.5),
            row("t", "times", "y", (1, 2), factor=0.5, executed=None),
            end("t", 1, 2),
        ],
        {"w": I4[:2], "b": np.array([3.0, 4.0]), "v": 9 * I4[:2], "c": np.array([0.5, 0.1]), "u": I4[:1]},
    ),
    "heads": (
        [
            start("x", 1, 3, 4),
            row("y", "linear", "x", (1, 3, 4), claim("spectral", "w", 3), claim("group_norm", "b", 4), parts=1),
            row("y/2", "linear", "x", (1, 3, 2, 2), claim("spectral", "w", 1, 3, parts=2),
                claim("group_norm", "b", 1, 3, parts=2), reads=[[2]], axes=[3], parts=2),
            end("y/2", 1, 3, 2, 2),
        ],
        {"w": np.diag([1.0, 1, 3, 3]), "b": np.array([1.0, 0, 0, 3]), "tall": np.eye(6, 4), "c": np.zeros(6)},
    ),
    "cut": (
        [
            start("x", 1, 4),
            linear("y", "x", "w", 3, 1, 4),
            row("y/2", "linear", "x", (1, 2, 2), claim("spectral", "w", 1, 3, parts=2), reads=[[1]], axes=[2], parts=2),
            row("p", "pick", "y", (1, 2), offset=0, tables=[0, 1]),
            end("p", 1, 2),
        ],
        {"w": np.diag([1.0, 1, 3, 3]), "tiny": 1e-6 * I4},
    ),
    "attention": (
        [start("x", 1, 3, 4), *QKV, *HEADS, ATTENTION, end("a", 1, 2, 3, 2)],
        {"wq": 2 * I4, "wk": 2 * I4, "wv": 2 * I4, "tiny": 1e-6 * I4, "b": np.full(4, 5.0)},
    ),
    "embedding": (
        [start("x", 1, 3, 2, claims=TABLE, radius=2.0), end("x", 1, 3, 2)],
        {"table": np.array([[2.0, 0], [0, 1], [0, -2]]), "far": np.array([[9.0, 0], [0, 9]]), "wide": np.eye(3)},
    ),
    "embedding in a box": (
        [
            start("x", 1, 3, 2, claims=[claim("max_abs", "table", 2.0), TABLE[1]], radius=None, low=-2.5, high=2.5),
            end("x", 1, 3, 2),
        ],
        {"table": np.array([[2.0, 0], [0, 1], [0, -2]])},
    ),
    "convolution": (
        [
            start("x", 1, 2, 6, axes=[1, 2]),
            row("y", "convolution", "x", (1, 2, 3), claim("convolution", "w", 2, size=[6], stride=[2], dilation=[1],
                groups=1), claim("group_norm", "b", 5), axes=[1, 2], stride=[2], dilation=[1], groups=1),
            end("y", 1, 2, 3, axes=[1, 2]),
        ],
        {"w": np.ones((2, 2, 1)) / 2 * [[[1.0, 0]]], "b": np.array([3.0, 4.0])},
    ),
    "circular": (
        [
            start("x", 1, 1, 4, axes=[1, 2]),
            row("y", "convolution", "x", (1, 1, 2), claim("convolution", "w", 2, size=[4], stride=[2], dilation=[1],
                groups=1), axes=[1, 2], stride=[2], dilation=[1], groups=1, circular=[0]),
            end("y", 1, 1, 2, axes=[1, 2]),
        ],
        {"w": np.ones((1, 1, 3))},
    ),
    "adjoint": (
        [
            start("x", 1, 2, 3, axes=[1, 2]),
            row("y", "convolution", "x", (1, 2, 6), claim("convolution", "w", 2, size=[6], stride=[2], dilation=[1],
                groups=1), axes=[1, 2], stride=[2], dilation=[1], groups=1, adjoint=True),
            end("y", 1, 2, 6, axes=[1, 2]),
        ],
        {"w": np.ones((2, 2, 2)) / 2, "b": np.array([3.0, 4.0]), "zero": np.zeros(2)},
    ),
    "pixels": (
        [
            start("x", 1, 2, 4, axes=[1]),
            row("y", "convolution", "x", (1, 2, 3), claim("taps", "w", 3, groups=2), axes=[1], stride=[1],
                dilation=[1], groups=2),
            end("y", 1, 2, 3, axes=[1]),
        ],
        {"w": np.ones((2, 1, 2))},
    ),
    "average of tokens": (
        [
            start("x", 1, 3, 2),
            row("y", "average", "x", (1, 4, 2), claim("row_sum", "p", 3.5, parts=1), axes=[2], parts=[1]),
            end("y", 1, 4, 2),
        ],
        {"p": np.ones((4, 3)), "heads": np.ones((2, 4, 3)), "small": np.ones((2, 2, 3)) / 100},
    ),
    "average of sequences": (
        [
            start("x", 2, 3, 2, axes=[1, 2]),
            row("y", "average", "x", (2, 4, 2), claim("spectral", "p", 3.5, 4, parts=2), axes=[1, 2], parts=[2]),
            end("y", 2, 4, 2, axes=[1, 2]),
        ],
        {"p": np.ones((8, 3))},
    ),
    "matrix product": (
        [
            start("x", 1, 3, 2),
            row("t", "pick", "x", (1, 2, 3), offset=0, tables=[0, 1, 2]),
            row("y", "matrix_product", "x t", (1, 3, 3), reads=[[2], [1, 2]], axes=[2]),
            end("y", 1, 3, 3),
        ],
        {},
    ),
    "coupled": (
        [
            start("x", 1, 2),
            row("s", "elementwise", "x", (1, 2), function="tanh"),
            row("t", "elementwise", "x", (1, 2), function="tanh"),
            row("p", "product", "s t", (1, 2)),
            end("p", 1, 2),
        ],
        {},
    ),
    "potential": (
        [
            start("x", 1, 4),
            row("y", "convex_potential", "x", (1, 4), claim("spectral", "w", 2), claim("positive_norm", "b", 3),
                factor=1.0),
            end("y", 1, 4),
        ],
        {"w": 2 * I4[:2], "b": np.array([3.0, -4.0])},
    ),
    "rules": (
        [
            start("x", 2, 3, 4),
            row("r", "normalization", "x", (2, 3, 4), eps=0.25, over=[2]),
            row("b", "ball", "r", (2, 3, 4), scale=9.0, over=[2]),
            row("u", "unit", "b", (2, 3, 4), eps=2.0, over=[2]),
            row("s", "shift", "u", (2, 3, 4), claim("row_norm", "v", 5), over=[2]),
            row("e", "shift", "s", (2, 3, 4), claim("max_abs", "v", 4)),
            row("c", "scaling", "e", (2, 3, 4), claim("max_abs", "v", 4)),
            row("l", "log_softmax", "c", (2, 3, 4), over=2),
            row("q", "softmax", "l", (2, 3, 4), over=2),
            row("m", "mixture", "l q b", (2, 3, 4)),
            row("k", "contraction", "m", (2, 3, 1), axes=[2], growth=2.0),
            end("k", 2, 3, 1),
        ],
        {"v": np.array([3.0, 4.0, 0, 0]), "w": np.array([3.0, 4.0])},
    ),
    "moves": (
        [
            start("x", 1, 2, 2),
            row("c", "constant", "", (2, 2), tensor="c"),
            row("d", "times", "x", (1, 2, 2), divisor=3.0),
            row("p", "pick", "d", (1, 2, 2), positions="turn"),
            row("r", "rounding", "p", (1, 2, 2), dtype="bfloat16"),
            row("s", "add", "r c x d", (1, 2, 2)),
            row("i", "idle_ball", "x", (1, 2, 2), scale=0.5, over=[2]),
            row("j", "add", "i s", (1, 2, 2)),
            end("j", 1, 2, 2),
        ],
        {"c": np.array([[3.0, 4], [0, 12]]), "turn": np.array([[[3, 2], [1, -1]]]),
        "int32": np.array([[[0, 2], [1, 3]]],
            np.int32), "f": np.array([0.5, 2.0]), "zero": np.array([0.0, 1.0]), "flat": np.arange(4)},
    ),
    "slope": (
        [
            start("x", 1, 2),
            linear("h", "x", "w", 2, 1, 2),
            row("z", "elementwise", "h", (1, 2), claim("max_abs", "s", 0.25), function="leaky_relu", numbers=[0.3]),
            linear("y", "z", "w", 2, 1, 2),
            row("j", "lipsdp", "y x", (1, 2), multipliers=["d"], bound=2.9),
            end("j", 1, 2),
        ],
        {"w": W, "s": np.array([-0.25, 0.25]), "steep": np.array([9.0]), "d": np.full(2, 2.0), "one": np.ones(1)},
    ),
    "maps": (
        [
            start("x", 1, 2),
            linear("h", "x", "w", 2, 1, 2),
            row("t", "times", "h", (1, 2), divisor=-3.0),
            linear("u", "t", "w", 2, 1, 2),
            row("s", "times", "u", (1, 2), factor=-0.5),
            row("z", "elementwise", "s", (1, 2), function="leaky_relu", numbers=[0.1]),
            linear("y", "z", "w", 2, 1, 2),
            row("a", "add", "y s x", (1, 2)),
            row("j", "lipsdp", "a x", (1, 2), multipliers=["d"], bound=9.0),
            end("j", 1, 2),
        ],
        {"w": W, "d": np.full(2, 2.0)},
    ),
    "residual": (
        [start("x", 1, 4), linear("y", "x", "w", 1, 1, 4), row("s", "add", "x y", (1, 4)), end("s", 1, 4)],
        {"w": I4, "v": np.ones(4)},
    ),
    "two inputs": (
        [start("x", 1, 2), start("u", 2, 2, axes=[0, 1]), row("s", "add", "x u", (2, 2)), end("s", 2, 2)], {},
    ),
    "clamp": (
        [start("x", 1, 4), row("y", "elementwise", "x", (1, 4), function="clamp", numbers=[-1.0, 1.0]), end("y", 1, 4)],
        {},
    ),
    "promised kernel": (
        [
            start("x", 1, 2, 4, axes=[1, 2]),
            row("y", "convolution", "x", (1, 2, 3), claim("convolution", "w", 5, size=[4], stride=[1], dilation=[1],
                groups=1), axes=[1, 2], stride=[1], dilation=[1], groups=1),
            end("y", 1, 2, 3, axes=[1, 2]),
        ],
        {"promises": [{"name": "w", "shape": [2, 2, 2], "parts": [{"shape": [2, 2, 2], "size": 2.0, "offset": 0,
            "tables": [1, 4, 2]}]}]},
    ),
    "promised": (
        [start("x", 1, 3), linear("y", "x", "w", 2.1, 1, 4), end("y", 1, 4)],
        {"promises": [{"name": "w", "shape": [4, 3], "parts": [{"shape": [1, 4, 3], "size": 2.0, "offset": 0,
            "tables": [0, 3, 1]}]}]},
    ),
}  # fmt: skip


ROUNDED = {"dtype": "float32", "roundings": 1000}
BOUNDS = [("3", "5", "2", "1E-3"), ("7", "11", "6", "1E-4"), ("13", "19", "12", "1E-5")]
"""Radius, gain, largest entry and error of the inputs of the next rows, which state more than follows."""


def alone(operation: str, shapes: Sequence[Sequence[int]], *claims: Fields, **constants: Any) -> list[Fields]:
    """A row between inputs of the first shapes and the output of the last one."""
    *inputs, shape = shapes
    axes, rows = constants.get("axes", [len(shape) - 1]), []
    reads = constants.setdefault("reads", [constants.setdefault("axes", axes)] * len(inputs))
    for i, (each, along) in enumerate(zip(inputs, reads, strict=True)):
        ones = [1] * len(each)
        bounds = {what: stated(x, shape=ones) for what, x in zip(Bounds._fields, BOUNDS[i], strict=True)}
        rows.append({**start(f"x{i}", *each, axes=along, radius=0.5), **bounds})
    names = " ".join(row["name"] for row in rows)
    return [*rows, row("y", operation, names, shape, *claims, **constants), end("y", *shape, axes=axes)]


def far(rows: list[Fields], *bounds: Any) -> list[Fields]:
    """The rows, the first with radius, gain and largest entry, and perhaps an error, of that size."""
    first, shape = rows[0], rows[0]["radius"]["shape"]
    size, *error = bounds
    large = {what: stated(size, shape=shape) for what in ("radius", "gain", "largest")}
    return [{**first, **large, "error": stated(*error or ["1E-3"], shape=shape)}, *rows[1:]]


V = [[1, 4], [1, 4]]
AS = np.array([3.0, 4.0, 0, 0])
T3, T4 = {"p": np.ones((4, 3)), "q": np.ones((8, 3))}, {"v": AS, "w": 2 * I4, "b": np.array([-1.0, 2, -2, 4])}
SCALED = {"w": np.ones((3, 1, 2)), "s": np.array([0.5, -2, 1]), "b": np.ones(3), "t": np.array([1.5, 1, 2])}
ROWS: dict[str, tuple[list[Fields], dict[str, np.ndarray]]] = {
    "contraction": (alone("contraction", V), {}),
    "contraction of tokens": (alone("contraction", [[1, 3, 2]] * 2, executed=ROUNDED), {}),
    "contraction that grows": (alone("contraction", V, growth=1.25), {}),
    "scaling": (alone("scaling", V, claim("max_abs", "v", 4)), T4),
    "shift": (alone("shift", V, claim("max_abs", "v", 4)), T4),
    "shift of tokens": (alone("shift", [[1, 3, 2]] * 2, claim("max_abs", "v", 4)), T4),
    "shift of vectors": (alone("shift", [[1, 2, 4]] * 2, claim("row_norm", "v", 5), over=[2], axes=[1, 2]), T4),
    "normalization": (alone("normalization", V, eps=0.25, over=[1]), {}),
    "normalization of large vectors": (alone("normalization", [[1, 2, 3]] * 2, eps=7.0, over=[2], axes=[1, 2]), {}),
    "flat normalization": (alone("normalization", [[1, 2, 3]] * 2, eps=7e-2, over=[2], axes=[1, 2]), {}),
    "ball": (alone("ball", [[1, 2, 3]] * 2, scale=7.0, over=[2], axes=[1, 2]), {}),
    "large ball": (alone("ball", [[1, 2, 3]] * 2, scale=0.07, over=[2], axes=[1, 2]), {}),
    "unit": (alone("unit", [[1, 2, 3]] * 2, eps=8.0, over=[2], axes=[1, 2]), {}),
    "unit of large vectors": (alone("unit", [[1, 2, 3]] * 2, eps=0.125, over=[2], axes=[1, 2]), {}),
    "softmax": (alone("softmax", [[1, 2, 3]] * 2, over=2, axes=[1, 2]), {}),
    "log_softmax": (alone("log_softmax", [[1, 2, 3]] * 2, over=2, axes=[1, 2]), {}),
    "log_softmax of one": (alone("log_softmax", [[1, 3, 1]] * 2, over=2, axes=[1, 2]), {}),
    **{f"{each} of tokens": (alone(each, [[1, 3, 2]] * 2, over=2), {}) for each in ("softmax", "log_softmax")},
    "logsumexp of tokens": (alone("logsumexp", [[1, 3, 2], [1, 3, 1]]), {}),
    "logsumexp": (alone("logsumexp", [[1, 2, 3], [1, 2, 1]], axes=[1, 2]), {}),
    "logsumexp of one in 16 bits": (alone("logsumexp", [[1, 3, 1]] * 2, axes=[1, 2], executed={"dtype": "bfloat16"}),
        {}),
    "softmax of any weights": (far(alone("softmax", [[1, 2, 3]] * 2, over=2, axes=[1, 2]), "1E+9"), {}),
    "tanh of far errors": (far(alone("elementwise", V, function="tanh"), 9, "1E+3"), {}),
    "ball of far errors": (far(alone("ball", [[1, 2, 3]] * 2, scale=7.0, over=[2], axes=[1, 2]), 9, "1E+3"), {}),
    "unit of far errors": (far(alone("unit", [[1, 2, 3]] * 2, eps=8.0, over=[2], axes=[1, 2]), 9, "1E+3"), {}),
    "unit of a norm with far errors": (far(alone("unit", [[1, 2, 3]] * 2, eps=8.0, over=[2], axes=[1, 2],
        executed={"dtype": "float32", "roundings": 1}), 9, "1E+3"), {}),
    "normalization of far errors": (far(alone("normalization", [[1, 2, 3]] * 2, eps=7.0, over=[2], axes=[1, 2]), 9,
        "1E+3"), {}),
    "squares": (far(alone("normalization", [[1, 2, 3]] * 2, eps=7.0, over=[2], axes=[1, 2], squares=True), 9), {}),
    "squares that cancel": (far(alone("normalization", [[1, 2, 3]] * 2, eps=7e-9, over=[2], axes=[1, 2], squares=True),
        9), {}),
    "attention of far errors": (far(alone("attention", [[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 3, 6]],
        scale=-0.5), 9, "1E+3"), {}),
    "attention of any weights": (far(alone("attention", [[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 3, 6]],
        scale=-0.5), "1E+9"), {}),
    "attention together": (
        [
            start("x", 1, 3, 2, axes=[1, 2], radius=2.0),
            *(row(each, "times", "x", (1, 3, 2), factor=size) for each, size in (("q", 0.5), ("k", 3.0), ("v", 7.0))),
            row("y", "attention", "q k v", (1, 3, 2), scale=-0.5, together=True),
            end("y", 1, 3, 2),
        ],
        {},
    ),
    "mixture": (alone("mixture", [[1, 3]] * 4), {}),
    "mixture of one entry": (alone("mixture", [[1, 1]] * 4), {}),
    "product": (alone("product", [[1, 3]] * 3), {}),
    "adjoint of three taps": (alone("convolution", [[1, 2, 3], [1, 2, 9]], claim("convolution", "w", 3.5, size=[9],
        stride=[2], dilation=[2], groups=1), axes=[1, 2], stride=[2], dilation=[2], groups=1, adjoint=True),
        {"w": np.ones((2, 2, 3)) / 2}),
    **{each: (alone("elementwise", V, function=each), {}) for each in FUNCTIONS},
    "silu in 16 bits": (alone("elementwise", V, function="silu", executed={"dtype": "bfloat16"}), {}),
    "silu stored in 16 bits": (
        alone("elementwise", V, function="silu", executed={"dtype": "bfloat16", "roundings": 1}), {},
    ),
    "sigmoid of many": (alone("elementwise", [[1, 8]] * 2, function="sigmoid"), {}),
    "elu": (alone("elementwise", V, function="elu", numbers=[3.0, 2.0, 1.5]), {}),
    "elu of a negative alpha": (alone("elementwise", V, function="elu", numbers=[-3.1, 0.1, 1.1]), {}),
    "elu of a negative scale": (alone("elementwise", V, function="elu", numbers=[3.1, -0.1, 1.1]), {}),
    "leaky_relu": (alone("elementwise", V, function="leaky_relu", numbers=[-3.0]), {}),
    "exp": (alone("elementwise", [[1, 3, 2]] * 2, function="exp"), {}),
    "exp in 16 bits": (alone("elementwise", V, function="exp", executed={"dtype": "float16"}), {}),
    "exp of far errors": (far(alone("elementwise", V, function="exp"), 5, "696"), {}),
    "exp beyond its dtype": (far(alone("elementwise", V, function="exp"), 89), {}),
    "clamp to a box": (alone("elementwise", V, function="clamp", numbers=[-3.0, 1.0]), {}),
    "clamp below zero": (alone("elementwise", V, function="clamp", numbers=[-3.0, -1.0]), {}),
    "clamp to one number": (alone("elementwise", V, function="clamp", numbers=[2.0, 2.0]), {}),
    "clamp_min": (alone("elementwise", V, function="clamp_min", numbers=[3.0]), {}),
    "clamp_max": (alone("elementwise", V, function="clamp_max", numbers=[-3.0]), {}),
    "linear of tokens": (
        [*alone("linear", [[1, 3, 4]] * 2, claim("spectral", "w", 2), claim("group_norm", "v", 5), axes=[1, 2],
            parts=1)],
        T4,
    ),
    "transposed": (
        alone("linear", [[1, 2], [1, 3]], claim("spectral", "w", 2, transposed=True), parts=1), {"w": 2 * np.eye(2, 3)},
    ),
    "kernel as a matrix": (alone("linear", [[1, 4], [1, 2]], claim("spectral", "w", 2), parts=1),
        {"w": 2 * np.eye(2, 4).reshape(2, 2, 2)}),
    "convolution of three taps": (alone("convolution", [[1, 1, 7], [1, 1, 3]], claim("convolution", "w", 3, size=[7],
    stride=[2],
        dilation=[1], groups=1), axes=[1, 2], stride=[2], dilation=[1], groups=1), {"w": np.ones((1, 1, 3))}),
    "two axes": (alone("convolution", [[1, 1, 2, 3], [1, 1, 2, 3]], claim("convolution", "w", 2, size=[2, 3],
    stride=[1, 1],
        dilation=[1, 1], groups=1), axes=[1, 2, 3], stride=[1, 1], dilation=[1, 1], groups=1),
            {"w": np.full((1, 1, 1, 1), 2.0)}),
    "joint tokens": ([start("x", 1, 2, 2), row("y", "linear", "x", (1, 2, 2), claim("spectral", "w", 2), parts=1),
    row("t",
        "times", "y", (1, 2, 2), factor="f"), row("j", "lipsdp", "t x", (1, 2, 2), multipliers=[], bound=2.5),
        end("j", 1, 2, 2)], {"w": 2 * I2, "f": np.array([0.5, 1.0]), "g": np.array([[1.0], [9.0]]) / 9}),
    "average of tokens alone": (alone("average", [[1, 3, 2], [1, 4, 2]], claim("row_sum", "p", 3), parts=[1],
    axes=[2]), T3),
    "average of two": (alone("average", [[2, 3, 2], [2, 4, 2]], claim("row_sum", "q", 3, 4, parts=2), parts=[2],
    axes=[2]),
        T3),
    "average of groups": (alone("average", [[1, 3, 2], [1, 4, 2]], claim("spectral", "p", 3.5), parts=[1],
    axes=[1, 2]), T3),
    "average of channels": (alone("average", [[1, 3, 2], [1, 4, 2]], claim("row_sum", "p", 3), parts=[1], axes=[0]),
    T3),
    "matrix_product": (alone("matrix_product", [[1, 3, 2], [1, 2, 5], [1, 3, 5]], reads=[[2], [1, 2]], axes=[2]), {}),
    "potential of positive sign": (alone("convex_potential", [[1, 2, 4]] * 2, claim("spectral", "w", 2), claim(
        "positive_norm", "b", 5), factor=3.0, axes=[1, 2]), T4),
    "small potential": (alone("convex_potential", V, claim("spectral", "w", 2), factor=0.1), T4),
    "potential of negative sign": (alone("convex_potential", V, claim("spectral", "w", 2), factor=-3.0), T4),
    "attention alone": (alone("attention", [[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 3, 6]], scale=-0.5), {}),
    "attention of many keys": (alone("attention", [[1, 1, 1, 2], [1, 1, 16, 2], [1, 1, 16, 2], [1, 1, 1, 2]],
        scale=0.5), {}),
    "attention of two samples": (alone("attention", [[2, 1, 1, 2]] * 4, scale=0.5), {}),
    "attention of a matrix": (alone("attention", [[3, 4], [5, 4], [5, 6], [3, 6]], scale=0.5), {}),
    "convolution of pixels": (alone("convolution", [[1, 2, 7, 6], [1, 2, 3, 2]], claim("taps", "w", 3, groups=2), claim(
        "group_norm", "b", 3), axes=[1], stride=[2, 3], dilation=[2, 1], groups=2),
            {"w": np.ones((2, 1, 2, 1)), "b": np.ones(2)}),
    "convolution of images": (alone("convolution", [[1, 1, 7], [1, 3, 3]], claim("convolution", "w", 3.5, size=[7],
    stride=[2],
        dilation=[2], groups=1), claim("group_norm", "b", 3), axes=[1, 2], stride=[2], dilation=[2], groups=1),
        {"w": np.ones((3, 1, 2)), "b": np.ones(3)}),
    **{f"scaled convolution in {dtype}": (alone("convolution", [[1, 1, 7], [1, 3, 3]], claim("convolution", "w s", 4.6,
        size=[7], stride=[2], dilation=[2], groups=1), claim("group_norm", "b s t", 3.75), axes=[1, 2], stride=[2],
        dilation=[2], groups=1, executed={"dtype": dtype, "roundings": 12, "beside": -8.0}), SCALED)
        for dtype in ("float32", "float16")},
    "scaled convolution of pixels": (alone("convolution", [[1, 2, 7, 6], [1, 2, 3, 2]], claim("taps", "w s", 6,
        groups=2), claim("group_norm", "t", 2.25), axes=[1], stride=[2, 3], dilation=[2, 1], groups=2,
        executed={"dtype": "float32", "beside": 3.0}),
        {"w": np.ones((2, 1, 2, 1)), "s": np.array([3.0, 0.5]), "t": np.array([1.0, -2])}),
}  # fmt: skip


def tokens(name: str, *bounds: Sequence[Any], axes: Sequence[int] = (2,), size: int = 2) -> Fields:
    """Three tokens as an input, each with bounds of its own."""
    shape = [1, len(bounds[0]), 1]
    whole = {what: stated(*each, shape=shape) for what, each in zip(Bounds._fields, bounds, strict=True)}
    return {**start(name, 1, 3, size, axes=list(axes), radius=0.5), **whole}


X = tokens("x", (3, 5, 7), (11, 13, 17), (2, 4, 6), ("1E-3", "1E-4", "1E-5"))
Y = tokens("y", [19], [23], [8], ["1E-2"], axes=(1, 2))
OUT, ONE = end("z", 1, 3, 2), end("z", 1, 6)
CUT = [
    start("x", 1, 4), linear("y", "x", "w", 3, 1, 6),
    row("y/2", "linear", "x", (1, 2, 3), claim("spectral", "w", 1, 3, parts=2), reads=[[1]], axes=[2], parts=2),
    row("y/3", "linear", "x", (1, 3, 2), claim("spectral", "w", 1, 2, 3, parts=3), reads=[[1]], axes=[2], parts=3),
]  # fmt: skip
CUT_WEIGHT = {"w": np.diag([1.0, 1, 1, 2, 3, 3])[:, [0, 3, 4, 5]]}
"""A map whose outputs are cut into two parts and into three."""
SHARES = [
    X, row("t", "times", "x", (1, 3, 2), factor=-3.0), row("s", "softmax", "t", (1, 3, 2), over=2),
    row("u", "softmax", "x", (1, 3, 2), over=2), row("a", "add", "s u", (1, 3, 2)),
    row("v", "pick", "x", (1, 2, 2), offset=0, tables=[0, 2, 1]),
    row("z", "matrix_product", "a v", (1, 3, 2), reads=[[2], [1, 2]]), OUT,
]  # fmt: skip
THIRD = [X, row("t", "times", "x", (1, 3, 2), divisor=3.0)]
CANCELLED = [X, row("f", "times", "x", (1, 3, 2), factor="f"), row("p", "add", "x f", (1, 3, 2))]
CANCELS = {"f": np.array([[-1.0, -1], [-1, 1], [1, 1]]), "g": np.array([[0.0, 0], [0, 1], [1, 1]])}
MOVED: dict[str, tuple[list[Fields], dict[str, np.ndarray]]] = {
    "sum": ([X, row("z", "add", "x x", (1, 3, 2)), OUT], {}),
    "sum of two": ([X, Y, row("z", "add", "x y", (1, 3, 2)), OUT], {}),
    "sum of two in one group": ([X, Y, row("z", "add", "x y", (1, 3, 2)), end("z", 1, 3, 2, axes=[1, 2])], {}),
    "all of two": ([X, {**X, "name": "y"}, row("s", "add", "x y", (1, 3, 2)), row("z", "pick", "s", (1, 6), offset=0,
        tables=[0, 1]), ONE], {}),
    "attention in steps": (SHARES, {}),
    "sum of alike": ([X, {**X, "name": "y"}, row("z", "add", "x y", (1, 3, 2)), OUT], {}),
    "third": ([X, row("z", "times", "x", (1, 3, 2), divisor=-3.0), OUT], {}),
    "half": ([X, row("z", "times", "x", (1, 3, 2), divisor=2.0), OUT], {}),
    "third of a third": ([X, row("t", "times", "x", (1, 3, 2), divisor=3.0), row("z", "times", "t", (1, 3, 2),
        factor=0.1), OUT], {}),
    "a third and a tenth": ([X, row("t", "times", "x", (1, 3, 2), divisor=3.0), row("s", "times", "x", (1, 3, 2),
        divisor=10.0), row("z", "add", "t s", (1, 3, 2)), OUT], {}),
    "a third less a tenth": ([X, row("t", "times", "x", (1, 3, 2), divisor=3.0), row("s", "times", "x", (1, 3, 2),
        divisor=-10.0), row("z", "add", "t s", (1, 3, 2)), OUT], {}),
    "partly a difference": ([X, row("t", "times", "x", (1, 3, 2), divisor="f"), row("s", "times", "x", (1, 3, 2),
        divisor=3.0), row("z", "add", "t s", (1, 3, 2)), OUT], {"f": np.array([3.0, -3.0])}),
    "difference": ([X, row("t", "times", "x", (1, 3, 2), factor=-0.25), row("z", "add", "x t", (1, 3, 2)), OUT], {}),
    "factors": ([X, row("z", "times", "x", (1, 3, 2), factor="f"), OUT], {"f": np.array([0.5, -2.0])}),
    "factors of tokens": ([X, row("z", "times", "x", (1, 3, 2), divisor="f"), OUT],
        {"f": np.array([[3.0], [0.5], [7]])}),
    "zero factor": ([X, row("z", "times", "x", (1, 3, 2), factor="f"), OUT], {"f": np.array([[0.0], [0.0], [7]])}),
    "all in one group": ([X, row("z", "pick", "x", (1, 6), offset=0, tables=[0, 1]), ONE], {}),
    "backwards": ([X, row("z", "pick", "x", (1, 3, 2), offset=5, tables=[0, -2, -1]), OUT], {}),
    "gaps": ([X, row("z", "pick", "x", (1, 3, 2), offset=1, tables=[0, [2, -1, 0], 0]), OUT], {}),
    "gaps in both": ([X, row("z", "pick", "x", (1, 3, 2), offset=0, tables=[0, [2, -1, 4], [1, -1]]), OUT], {}),
    "gaps only": ([X, row("z", "pick", "x", (1, 3, 2), offset=0, tables=[0, [-1, -1, -1], 1]), OUT], {}),
    "first entries": ([X, row("z", "pick", "x", (1, 3), offset=0, tables=[0, 2]), end("z", 1, 3)], {}),
    "repeated": ([X, row("z", "pick", "x", (1, 3, 2), offset=1, tables=[0, 2, 0]), OUT], {}),
    "turned and added": ([X, row("t", "pick", "x", (1, 3, 2), offset=1, tables=[0, 2, -1]), row("z", "add", "t x",
        (1, 3, 2)), OUT], {}),
    "rotated": ([X, row("c", "times", "x", (1, 3, 2), factor=0.6), row("t", "pick", "x", (1, 3, 2), offset=1,
        tables=[0, 2, -1]),
        row("s", "times", "t", (1, 3, 2), factor="f"), row("z", "add", "c s", (1, 3, 2)), OUT],
        {"f": np.array([-0.8, 0.8])}),
    "rotated by thirds": ([X, row("c", "times", "x", (1, 3, 2), divisor="g"), row("t", "pick", "x", (1, 3, 2), offset=1,
        tables=[0, 2, -1]), row("s", "times", "t", (1, 3, 2), divisor="f"), row("z", "add", "c s", (1, 3, 2)), OUT],
        {"f": np.array([-3.0, 3.0]), "g": np.array([7.0, 7.0])}),
    "neighbours": ([X, row("t", "pick", "x", (1, 3, 2), offset=0, tables=[0, [4, 0, 2], 1]), row("z", "add", "t x",
        (1, 3, 2)), OUT], {}),
    "tokens that share no entry": ([X, Y, row("p", "pick", "x", (1, 6), offset=0, tables=[0, [0, 1, 2, 3, -1, -1]]),
        row("q", "pick", "y", (1, 6), offset=0, tables=[0, [-1, -1, -1, -1, 4, 5]]), row("z", "add", "p q", (1, 6)),
            ONE], {}),
    "image and tokens": ([X, Y, row("p", "pick", "x", (1, 6), offset=0, tables=[0, 1]), row("q", "pick", "y", (1, 6),
        offset=5, tables=[0, -1]), row("z", "add", "p q", (1, 6)), ONE], {}),
    "rounded difference": ([X, row("r", "rounding", "x", (1, 3, 2), dtype="float16"), row("t", "times", "r", (1, 3, 2),
        factor=-1.0), row("z", "add", "x t", (1, 3, 2)), OUT], {}),
    "constant": ([X, row("c", "constant", "", (3, 2), tensor="c"), row("z", "add", "x c", (1, 3, 2)), OUT],
        {"c": np.array([[3.0, -4], [0, 0], [-5, 12]])}),
    "scaled constant": ([X, row("c", "constant", "", (3, 2), tensor="c"), row("d", "times", "c", (3, 2), divisor=-3.0),
        row("e", "pick", "d", (1, 3, 2), offset=1, tables=[0, 2, -1]), row("z", "add", "x e", (1, 3, 2)), OUT],
        {"c": np.array([[3.0, -4], [0, 0], [-5, 12]])}),
    "number": ([X, row("c", "constant", "", (), number=-3.0), row("z", "add", "x c", (1, 3, 2)), OUT], {}),
    "constant alone": ([X, row("z", "constant", "", (3, 2), tensor="c"), end("z", 3, 2)],
        {"c": np.array([[3.0, -4], [0, 0],
        [-5, 12]])}),
    "idle ball": ([start("x", 1, 2), row("z", "idle_ball", "x", (1, 2), scale=0.5, over=[1]), end("z", 1, 2)], {}),
    "unequal neighbours": ([X, row("t", "pick", "x", (1, 3, 2), offset=0, tables=[0, 2, 0]),
        row("s", "times", "t", (1, 3, 2),
        factor="f"), row("z", "add", "s x", (1, 3, 2)), OUT], {"f": np.array([0.5, 3.0])}),
    "across a cut": (
        [
            *CUT,
            row("z", "pick", "y", (1, 5, 2), offset=0, tables=[0, [0, 1, 2, 3, -1], [0, 1]]), end("z", 1, 5, 2),
        ],
        CUT_WEIGHT,
    ),
    "parts of a cut and gaps": (
        [
            *CUT,
            row("z", "pick", "y", (1, 4, 2), offset=0, tables=[0, [4, 0, -1, 2], [-1, 1]]), end("z", 1, 4, 2),
        ],
        CUT_WEIGHT,
    ),
    "parts of a cut": (
        [
            *CUT,
            row("z", "pick", "y", (1, 3, 2), offset=0, tables=[0, 2, 1]), end("z", 1, 3, 2),
        ],
        CUT_WEIGHT,
    ),
    "ends of a cut": ([*CUT, row("z", "pick", "y", (1, 2), offset=0, tables=[0, 5]), end("z", 1, 2)], CUT_WEIGHT),
    "a number": ([X, row("n", "pick", "x", (), offset=1, tables=[]), row("r", "elementwise", "n", (), function="relu",
        axes=[], reads=[[]]), row("z", "pick", "r", (2,), offset=0, tables=[0]), end("z", 2)], {}),
    "thirds partly repeated": ([tokens("x", (3, 5, 7), (11, 13, 17), (2, 4, 6), (0, 0, 0)), *THIRD[1:], row("z", "pick",
        "t", (1, 3), offset=0, tables=[0, [0, 0, 1]]), end("z", 1, 3)], {}),
    "idle ball of thirds": ([*THIRD, row("z", "idle_ball", "t", (1, 3, 2), scale=0.25, over=[2]), OUT], {}),
    "factors turned": ([X, row("t", "times", "x", (1, 3, 2), factor="f"), row("z", "pick", "t", (1, 3, 2), offset=1,
        tables=[0, 2, -1]), OUT], {"f": np.array([0.5, -2.0])}),
    "factors of thirds": ([*THIRD, row("z", "times", "t", (1, 3, 2), factor="f"), OUT], {"f": np.array([0.5, -2.0])}),
    "zeros and thirds": ([*THIRD, row("a", "times", "t", (1, 3, 2), factor="f"), row("b", "times", "t", (1, 3, 2),
        factor="g"), row("z", "add", "a b", (1, 3, 2)), OUT], {"f": np.array([[0.0, 0], [1, -1], [1, 1]]),
        "g": np.array([[1.0, -1], [0, 0], [1, 1]])}),
    "partly cancelled": ([*CANCELLED, row("z", "times", "p", (1, 3, 2), factor=3.0), OUT], CANCELS),
    **{f"cancelled {when}": ([*CANCELLED, row("g", "times", "x", (1, 3, 2), factor="g"), row("z", "add", both,
        (1, 3, 2)), OUT], CANCELS) for when, both in (("before", "p g"), ("after", "g p"))},
    "alike": ([start("x", 1, 4, 2), row("p", "pick", "x", (1, 4, 2), positions="p"), row("q", "pick", "x", (1, 4, 2),
        offset=0, tables=[0, [-1] * 4, 1]), row("z", "add", "x p q", (1, 4, 2)), end("z", 1, 4, 2)],
        {"p": np.array([[[1, 0], [3, 2], [5, 4], [6, 6]]])}),
    "alike with gaps": ([start("x", 1, 4, 2), row("z", "pick", "x", (1, 4, 2), offset=0, tables=[0, 2, [0, -1]]),
        end("z", 1, 4, 2)], {}),
    "halves of a cut": (
        [
            start("x", 1, 4), linear("y", "x", "w", 3, 1, 6),
            row("y/2", "linear", "x", (1, 2, 3), claim("spectral", "w", 1, 3, parts=2), reads=[[1]], axes=[2], parts=2),
            row("z", "pick", "y", (1, 2, 3), offset=5, tables=[0, -3, -1]), end("z", 1, 2, 3),
        ],
        CUT_WEIGHT,
    ),
}  # fmt: skip
HONEST |= ROWS | MOVED
FORGED: list[tuple[Any, ...]] = [
    ("attention", "not made of heads of a linear map of x", {"k": [start("x2", 1, 3, 4),
        {**QKV[1], "inputs": ["x2"]}]}),
    ("mlp", "if and only if there is an original", {"y.change": stated(1)}),
    ("mlp", "differ in dtype or shape", original(b=[[3.0, 4.5]])), ("moves", "other positions", original(turn=TURNED)),
    ("margin", "rounded after the map", original(f=[0.5, 0.25]) | {"t.constants.factor": "f",
        "tensors.f": np.array([0.5, 0.5])}),
    ("attention", "queries, keys or values misfit", {"kh.shape.3": 1, "a.inputs": ["qh", "kh", "vh"], "a.claims": [],
    "a.reads": [[3]] * 3}),
    ("attention", "queries, keys or values misfit", {"kh.shape.2": 2, "a.inputs": ["qh", "kh", "vh"], "a.claims": [],
        "a.reads": [[3]] * 3, "kh.constants.tables.2": [0, 4]}),
    ("attention", "queries, keys or values misfit", {"a.shape.3": 1, "out.shape.3": 1}),
    ("attention", "other groups", {"a.axes": [2, 3]}),
    ("attention", "other groups", {"a.reads.0": []}),
    ("attention", "other groups", {"a.reads.2": []}),
    ("attention", "other groups of its tokens", {"a.reads.3": []}),
    ("attention", "the same tokens", {"vh.constants.offset": 8, "vh.constants.tables.2": -4}),
    ("attention", "claim 0 is not of wk", {"a.claims.0": claim("spectral", "tiny", 1e-6, 1e-6, parts=2)}),
    ("attention", "claim 1 is not of wv", {"a.claims.1": claim("spectral", "tiny", 1e-6, 1e-6, parts=2)}),
    ("attention", "queries have a bias", {"q.claims": [*QKV[0]["claims"], claim("group_norm", "b", 10)]}),
    ("attention", "product is not of wq and wk", {"a.claims.2.tensors": ["tiny", "tiny"],
        "a.claims.2.values": [1e-6] * 2}),
    ("mlp", "its SHA-256 differs", {"document.tensors": {"w": "0" * 64}}),
    ("mlp", "original/b is not the certified tensor", original(w=I4[:2]) | {"tensors.original/b": np.ones(2),
        "document.tensors": {"b": Proof({"b": HONEST["mlp"][1]["b"]}).stored["b"].digest}}),
    ("mlp", "there is no input", {"x": [row("x", "constant", "", (1, 4), tensor="c")], "tensors.c": np.ones((1, 4))}),
    ("mlp", "not stored", {"document.fixed": ["mask"]}),
    ("mlp", "last row is not the output", {"out": ...}),
    ("mlp", "^lipschitz=", {"document.lipschitz": "0.99"}),
    ("mlp", "^lipschitz=", {"document.lipschitz": "2.5"}),
    ("mlp", "rms_lipschitz=", {"document.rms_lipschitz": "1.41"}, 2**0.5),
    ("attention", "must name the rows", {"document.attention_logits": {"a": ["9", "9"], "b": ["9"]}}),
    ("attention", "are less than what follows", {"document.attention_logits": {"a": ["9", "1"]}}),
    ("attention", "are less than what follows", {"document.attention_logits": {"a": ["9"]}}),
    ("residual", "are not 1 norms", {"y.claims.0.values": [-1.125], "s.inputs": ["x", "x", "y"]}, 3.0),
    ("mlp", "could not be proved", {"y.claims.0.values": [0.9]}, 2**0.5),
    ("clamp", "nothing is known", {"y.constants": {"function": "relu", "numbers": [0.0]}}),
    ("clamp", "wrong order", {"y.constants.numbers": [1.0, -1.0]}),
    ("clamp", "without bound", {"y.constants": {"function": "elu", "numbers": [1.0, 1.0, -1.0]}}),
    ("moves", "exceed", {"s.inputs.1": "e", "p": [row("e", "times", "c", (2, 2), factor="large"),
        HONEST["moves"][0][3]], "tensors.large": np.array([[1.0], [2.0**999]])}),
    ("mlp", "bias has not 2 entries", {"y.claims.1.tensors": ["d"], "tensors.d": np.ones(1)}),
    ("embedding", "must be row_norm", {"x.claims.0": claim("max_abs", "table", 2),
        "tensors.table": np.full((3, 2), 2.0), "x.constants.radius": 1.6}),
    ("attention", "must be spectral with", {"tensors.wk": np.ones((4, 4)), "k.claims.0.values": [4.5],
        "a.claims.2": ..., "a.claims.0": claim("spectral", "wk", 2, 2, 2, 2, parts=4)}),
    ("attention", "must be product with", {"a.claims.2.constants.pairs": [[1, 1], [0, 0]]}),
    ("attention", "must be product with", {"kh.constants.tables.1": 0}),
    ("attention", "queries, keys or values misfit", {"kh.shape.1": 1, "vh.shape.1": 1, "a.inputs": ["qh", "kh", "vh"],
        "a.claims": [], "a.reads": [[3]] * 3}),
    ("matrix product", "matrices misfit", {"t.shape.0": 2}),
    ("heads", "could not be proved", {"y/2.claims.0.values": [1.125, 2.0]}),
    ("circular", "could not be proved", {"y.claims.0.values": [0.0]}),
    ("circular", "could not be proved", {"y.claims.0.values": [1.1]}),
    ("mlp", "could not be proved", {"y.claims.0.values": [0.0]}),
    ("residual", "could not be proved", {"tensors.w": np.full((4, 4), 0.99), "y.claims.0.values": [2.5]}),
    ("moves", "product of its factors", {"d.constants": {"factor": "far"}, "tensors.far": np.array([1e-305, 1])}),
    ("margin", "factor that is too small", {"t.constants": {"divisor": 3.0}, "m.constants.factor": 1 / 3}),
    ("margin", "factor that is too small", {"t.constants.factor": -0.6}),
    ("promised", "does not follow from what", {"y": [linear("y", "x", "w", 2, 1, 4),
        row("y/2", "linear", "x", (1, 2, 2),
        claim("spectral", "w", 2, 1.6, parts=2), reads=[[1]], axes=[2], parts=2)]}),
    ("heads", "not the map of y", {"y/2.reads": [[1, 2]], "y/2.axes": [1, 3], "out.axes": [1, 3],
    "out.reads": [[1, 3]]}),
    ("cut", "not the map of y", {"y": [row("y", "convex_potential", "x", (1, 4), claim("spectral", "w", 3),
        factor=1.0)]}),
    ("two axes", "read and leave groups", {**{f"{x}.axes": [1, 2] for x in ("x0", "y", "out")}, "y.reads": [[1, 2]],
        "out.reads": [[1, 2]]}),
    ("joint tokens", "entries are moved", {"t.constants.factor": "g"}),
    ("slope", "do not prove", {"tensors.d": np.array([2.0, 2.0**201]), "j.constants.bound": 99.0}),
    ("heads", "could not be proved", {"y/2.claims.1.values": [0.5, 3.375]}),
    ("average of tokens", "its matrix misfits", {"tensors.p": np.ones((3, 4)), "y.claims.0.values": [4.5]}),
    ("mlp", "not hold", {"tensors.b": np.array([-(2**53), 1]), "y.claims.1.values": [2.0**54]}),
    ("attention", "are less than what follows", {"document.attention_logits": {"a": ["9", "9", "9"]}}),
    ("coupled", "another shape than", {"x": [start("x", 1, 2), start("u", 1, 1)], "p.inputs": ["s", "u"]}),
    ("embedding in a box", "neither a ball nor a box", {"x.constants.radius": 3.0}),
    ("moves", "not shown to leave", {"i.constants.scale": 0.02, "x.constants.radius": 0.1, **stating("x", 2, 20,
        shape=(1, 2, 1)), "j.inputs": ["i"]}),
    ("margin", "another map's input", {"y": [linear("y0", "x", "w", 1, 1, 2), row("y", "elementwise", "y0", (1, 2),
    function=
        "relu")]}),
    ("residual", "2 inputs instead", {"out.inputs": ["x", "s"], "out.reads": [[1], [1]]}),
    ("attention", "it needs queries", {"a.inputs": ["qh", "kh", "vh", "x", "x"], "a.claims": [],
        "a.reads": [[3], [3], [3], [2], [2]]}),
    ("mlp", "is no matrix", {"tensors.w": np.ones(2), "x.shape.1": 1}),
    ("mlp", "claims instead", {"out.claims": [claim("spectral", "w", 1)]}),
    ("moves", "read and leave groups", {"out.reads": [[]]}),
    ("rules", "read and leave groups", {"r.constants.over": [1], "x.axes": [1], "x.shape": [2, 3, 4]}),
    ("coupled", "another shape than", {"p.shape": [1, 1], "out.shape": [1, 1]}),
    ("rules", "axes, each once", {"r.constants.over": [2, 2]}),
    ("rules", "axes, each once", {"r.constants.over": []}),
    ("slope", "not the end", {"j.shape": [1, 1], "out.shape": [1, 1]}),
    ("slope", "entries are moved", {"z.inputs": ["t"], "h": [linear("h", "x", "w", 2, 1, 2),
        row("t", "pick", "h", (1, 2), offset=1, tables=[0, -1])]}),
    ("slope", "another operation", {"h": [row("t", "softmax", "x", (1, 2), over=1), linear("h", "t", "w", 2, 1, 2)]}),
    ("slope", "do not prove", {"j.constants.bound": 1.9}, 2.0),
    ("moves", "takes entries beyond", {"tensors.turn": np.array([[[3, 2], [1, -2]]])}),
    ("moves", "either a factor", {"d.constants": {"divisor": 3.0, "factor": 0.1}}),
    ("moves", "product of its factors", {"d.constants": {"divisor": 1e308}}),
    ("moves", "tensor or a number", {"c.constants": {"tensor": "c", "number": 0.0}}),
    ("moves", "tensor or a number", {"c.inputs": ["x"]}),
    ("moves", "axes in rising order", {"i.constants.over": [2, 2]}),
    ("moves", "not shown to leave", {"i.constants.scale": 1.01}),
    ("moves", "its shape must be", {"r.shape": [2, 2]}),
    ("moves", "has 2 inputs instead", {"r.inputs": ["p", "c"]}),
    ("mlp", "has 4 columns for 5", {"x.shape.1": 5}),
    ("mlp", "cannot have shape", {"y.shape.1": 3, "z.shape.1": 3, "out.shape.1": 3}),
    ("cut", "lead beyond", {"p.constants.offset": -1}),
    ("cut", "lead beyond", {"p.constants.tables.1": [0, 2**32 + 1]}),
    ("heads", "along its last axis", {"y/2.axes": [1, 3]}),
    ("residual", "along its last axis", {"y.reads": [[]], "y.axes": []}),
    ("average of tokens", "two axes, and a number", {"y.constants.parts": []}),
    ("average of tokens", "not that of rows one below", {"x.axes": [1, 2], "y.axes": [1, 2], "y.reads": [[1, 2]],
        "out.axes": [1, 2], "out.reads": [[1, 2]], "y.claims.0": claim("spectral", "k", 1),
            "tensors.k": np.array([[[1.0, 0, 0], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]])}, 2**0.5 * (6 / 8) ** 0.5),
    ("average of tokens", "its matrix misfits", {"y.shape.1": 5, "out.shape.1": 5}),
    ("average of tokens", "matrices are too many", {"y.constants.parts": [2], "y.claims.0": claim("row_sum", "heads",
        3, 3, parts=2)}),
    ("average of tokens", "cannot have shape", {"y.shape.2": 3, "out.shape.2": 3}),
    ("average of sequences", "several matrices", {"y.axes": [0, 1, 2], "y.reads": [[0, 1, 2]], "x.axes": [0, 1, 2],
        "out.axes": [0, 1, 2], "out.reads": [[0, 1, 2]]}),
    ("matrix product", "matrices misfit", {"t.shape": [1, 1, 3], "t.constants.tables": [0, 0, 2]}),
    ("matrix product", "matrices misfit", {"y.shape": [1, 3, 2], "out.shape": [1, 3, 2]}),
    ("matrix product", "other groups", {"y.reads": [[2], [2]]}),
    ("matrix product", "other groups", {"y.axes": [1, 2], "out.axes": [1, 2], "out.reads": [[1, 2]]}),
    ("convolution", "another number of samples", {"y.shape.0": 2, "out.shape.0": 2}),
    ("pixels", "channels are not those", {"y.shape.1": 1, "out.shape.1": 1}),
    ("convolution", "channels are not those", {"x.shape.1": 4}),
    ("circular", "its stride does not divide", {"x.shape.2": 5, "y.claims.0.constants.size": [5]}),
    ("circular", "wraps around an axis", {"y.constants.circular": [0, 1]}),
    ("adjoint", "wraps around", {"y.constants.circular": [0]}),
    ("pixels", "wraps around", {"y.constants.circular": [0], "y.shape.2": 4, "out.shape.2": 4}),
    ("convolution", "its pixels must be", {"y.shape.2": 2, "out.shape.2": 2}),
    ("convolution", "several samples", {"x.axes": [0, 1, 2], "y.axes": [0, 1, 2], "y.reads": [[0, 1, 2]]}),
    ("adjoint", "no bias", {"y.claims": [HONEST["adjoint"][0][1]["claims"][0], claim("group_norm", "b", 5)]}),
    ("mlp", "claimed of 2 tensors", {"y.claims.0": claim("spectral", "w o", 1e-3), "tensors.o": np.zeros(2)}),
    ("mlp", "its bias is scaled", {"y.claims.1": claim("group_norm", "b o o", 1e-3), "tensors.o": np.zeros(2)}),
    ("scaled convolution in float32", "its bias is scaled otherwise", {"y.claims.1.tensors": ["b", "o", "t"],
        "tensors.o": np.full(3, 1e-3)}),
    ("scaled convolution in float32", "only a cap is known", {"promises": [{"name": "w", "shape": [3, 1, 2], "parts": [
        {"shape": [1, 3, 2], "size": 2.5, "offset": 0, "tables": [0, 2, 1]}]}], "tensors.s": np.full(3, 9.0),
        "y.claims.1.values": [99]}),
    ("scaled convolution in float32", "not of the outputs", {"tensors.s": np.full(1, 1e-3), "y.claims.0.values": [1]}),
    ("scaled convolution in float32", "is rounded by more", {"tensors.w": np.full((3, 1, 2), 1e-200), "tensors.s":
        np.full(3, 1e-200), "y.claims.0.values": [0]}),
    ("potential", "no matrix of 4 columns", {"tensors.w": np.eye(2, 3)}),
    ("margin", "weight or its result misfits", {"m.shape.1": 2}),
    ("margin", "rounded after the map", {"t.executed": {"dtype": "float32"}}),
    ("margin", "rounded after the map", {"t.constants.factor": -1.0, "m.constants.factor": 1.0,
        "t.executed": {"dtype": "float32", "beside": 9.0}}),
    ("margin", "executed otherwise", {"m.executed": {"dtype": "float64"}}),
    ("cut", "not the map of y", {"y/2.executed": {"dtype": "float64"}}),
    ("margin", "other groups", {"m.reads": [[]]}),
    ("margin", "other groups", {"m.axes": []}),
    ("margin", "result that is a sum", {"out.inputs": ["s"], "t": [HONEST["margin"][0][3],
        row("s", "add", "t x2", (1, 2))], "x": [start("x", 1, 4), start("x2", 1, 2)]}),
    ("margin", "several vectors side by side", {"x.shape.0": 2, "y.shape.0": 2, "m.shape.0": 2, "t.shape.0": 2,
    "out.shape": [1, 4], "out.inputs": ["f"], "t": [row("t", "times", "y", (2, 2), factor=0.5, executed=None),
        row("f", "pick", "t", (1, 4), offset=0, tables=[0, 1])]}),
    ("margin", "another map's input", {"m.inputs": ["x2"], "x": [start("x", 1, 4), start("x2", 1, 4, radius=0.1)]}),
    ("margin", "another weight or bias", {"y.claims.0": claim("spectral", "v", 9)}),
    ("margin", "another weight or bias", {"m.claims.1": claim("max_abs", "c", 0.5)}),
    ("margin", "factors of their own", {"t.constants.factor": "c"}),
    ("margin", "factor that is too small", {"t.constants.factor": 0.6}),
    ("margin", "factor that is too small", {"t": [row("f", "pick", "y", (1, 2), offset=1, tables=[0, -1]),
        row("t", "times", "f", (1, 2), factor=0.5, executed=None)]}),
    ("mlp", "of its constants is unknown", {"z.constants.slope": 0.0}),
    ("mlp", "of the row is unknown", {"z.note": ""}),
    ("mlp", "must be 7", {"document.format": 6}),
    ("mlp", "or cannot be printed", {"y": [{**HONEST["mlp"][0][1], "name": "y\n"}], "z.inputs": ["y\n"]}),
    ("mlp", "is empty or cannot", {"z": [row("", "elementwise", "y", (1, 2), function="softshrink")],
        "out.inputs": [""]}),
    ("mlp", "have no bound at", {"document.unbounded_at": "y"}),
    ("contraction", "have no bound at", {"document.unbounded_at": ""}),
    ("mlp", "another row is called z", {"z": [HONEST["mlp"][0][2], HONEST["mlp"][0][2]]}),
    ("mlp", "no row follows the output", {"out": [end("z", 1, 2), {**end("z", 1, 2), "name": "again"}]}),
    ("mlp", "are no axes", {"out.axes": [1, 1], "out.reads": [[1, 1]]}),
    ("moves", "a move has no bounds", {"r.claims": [claim("max_abs", "c", 12)]}),
    ("moves", "a move has no bounds", {"r.axes": [2]}),
    ("moves", "a move has no bounds", {"r.reads": [[2]]}),
    ("moves", "a move has no bounds", stating("r", 1, shape=(1, 1, 1))),
    ("cut", "must be that of a row", {"y/2": [{**HONEST["cut"][0][2], "name": "y/3"}]}),
    ("cut", "not the map of y", {"y/2.inputs": ["x2"], "x": [start("x", 1, 4), start("x2", 1, 4, radius=0.1)]}),
    ("cut", "not the map of y", {"y/2.claims.0": claim("spectral", "tiny", 1e-6, 1e-6, parts=2)}, 2**0.5),
    ("cut", "no row that computes", {"p": [HONEST["cut"][0][3], {**HONEST["cut"][0][2], "name": "p/2"}]}),
    ("mlp", "finite, or beyond", {"tensors.w": np.full((2, 4), 2.0**1001), "y.claims.0.values": [2.0**1003]}),
    ("mlp", "not hold", {"tensors.b": np.full(2, 2**53), "y.claims.1.values": [2.0**54]}),
    ("mlp", "does not fit its groups", stating("y", 9, radius=stated(9, 9, shape=(1, 2)))),
    ("mlp", "does not fit its groups", stating("y", 9, radius=stated(9, 9, shape=(2, 1)))),
    ("mlp", "radius .* less than what follows", stating("y", 9, radius=stated(7))),
    ("mlp", "gain .* less than what follows", stating("y", 9, gain=stated(1.9)), 2**0.5),
    ("mlp", "largest .* less than what follows", stating("y", 9, largest=stated(7))),
    ("mlp", "error .* less than what follows", stating("y", 9, error=stated("1E-6"))),
    *(("mlp", "error .* less than what follows", {**stating("y", 9, error=stated("1E-4")), "y.executed": each}) for each
        in (None, {"dtype": "bfloat16"}, {"dtype": "float32", "roundings": 1000})),
    ("moves", "groups have no axes", {"x.axes": []}),
    ("embedding", "are its vectors", {"x.axes": [1, 2]}),
    ("embedding", "not 2 columns", {"x.claims": [claim("row_norm", "wide", 1), claim("diameter", "wide", 2)]}),
    ("embedding", "of another table", {"x.claims.0": claim("row_norm", "small", 1),
        "x.claims.1": claim("diameter", "far", 18), "tensors.small": np.ones((1, 2)) / 2}),
    ("embedding in a box", "outside the box", {"x.constants.high": 1.0}),
    ("embedding in a box", "outside the box", {"x.constants.low": -1.0}),
    ("embedding", "beyond the radius", {"x.constants.radius": 1.5}),
    ("mlp", "neither a ball nor a box", {"x.constants.low": -0.1, "x.constants.high": 0.1}),
    ("embedding in a box", "in the wrong order", {"x.constants.high": -2.5, "x.constants.low": 2.5, "x.claims": []}),
    ("rules", "groups are not kept", {"k.shape": [2, 3, 2], "out.shape": [2, 3, 2]}),
    ("rules", "groups are not kept", {"k.shape": [1, 3, 4], "out.shape": [1, 3, 4]}),
    ("rules", "its growth is less than 1", {"k.constants.growth": 0.5}),
    ("rules", "vectors have not 4 entries", {"s.claims.0": claim("row_norm", "w", 5)}),
    ("mlp", "slope is less than its claim", {"z": [row("z", "elementwise", "y", (1, 2), claim("max_abs", "b", 4),
        function="leaky_relu", numbers=[0.25])]}),
    ("exp", "may exceed 700", stating("x0", 3, 4, 701, shape=(1, 3, 1))),
    ("residual", "slope is less than its claim", {"y": [row("y", "elementwise", "x", (1, 4), claim("max_abs", "v", 1),
    function="clamp_min", numbers=[2.0])]}),
    ("residual", "its shape must be", {"s.shape.0": 2, "out.shape.0": 2}),
    ("promised", "does not follow from what is promised", {"y.claims.0.values": [1.9]}, 3**0.5),
    ("promised", "only a cap is known", {"tensors.w": np.zeros((4, 3)), "out": [row("c", "constant", "", (4, 3),
        tensor="w"), end("y", 1, 4)]}),
    ("promised", "to keep its promise", {"tensors.w": 3 * np.eye(4, 3)}),
    ("promised", "w has shape", {"tensors.w": np.eye(5, 3)}),
    ("promised", "do not have each", {"promises.0.parts.0.tables": [0, 3, [0, 1, 1]]}),
    ("promised", "parts of w misfit", {"promises.0.parts.0.size": -2.0}),
    ("mlp", "do not have each", {"promises": [{"name": "u", "shape": [2], "parts": []}]}),
]  # fmt: skip
"""Forgeries: a document, words of its refusal, what is changed, and a true constant above the forged one."""
F16, BF16, NO_ERROR = {"dtype": "float16"}, {"dtype": "bfloat16", "roundings": 200}, {"error": stated(0)}
FLAT, FLAT_HEADS = (
    {"shape": [1] * n, "gain": stated(9, shape=[1] * n), "error": stated(0, shape=[1] * n)} for n in (3, 4)
)
SMALL = {"x0.constants.radius": 1e-9, **stating("x0", "0.01", **FLAT)}
FAULTS: list[tuple[str, Fields]] = [
    ("contraction of tokens", stating("x0", 3, 4, 300, shape=(1, 3, 1), error=stated(0, shape=(1, 1, 1))) | {
        "y.executed": F16 | {"roundings": 1}}),
    ("average of tokens alone", {**stating("x0", "1E+36", error=stated("5E+37", shape=(1, 1, 1)), shape=(1, 1, 1)),
        "y.executed": {"dtype": "float32", "roundings": 9}}), ("small potential", {"y.executed": None}),
    ("attention alone", stating("x0", *[3] * 5, 1000, shape=(1, 2, 3, 1), error=stated(0, shape=[1] * 4)) | stating(
        "x1", 100, **FLAT_HEADS) | {"y.executed": F16, "y.constants.scale": 1.0}),
    ("third", stating("x", 3, 4, 65000, shape=(1, 3, 1), error=stated(0, 0, 1000, shape=(1, 3, 1))) | {"z.constants": {
        "factor": 1.0}, "z.executed": F16 | {"roundings": 1}}),
    ("shift of tokens", stating("x0", 3, 4, 65000, shape=(1, 3, 1), error=stated(0, 0, 2000, shape=(1, 3, 1))) | {
        "y.executed": F16}),
    ("heads", stating("y/2", 99, shape=[1] * 4, radius=stated(99, shape=[1] * 4), error=stated(1, "1E+9999",
        shape=(1, 1, 2, 1)))),
    ("unit", stating("x0", 300, **FLAT) | {"y.executed": F16}),
    *((each, stating("x0", 3, error=stated(9000)) | {"y.executed": F16}) for each in ("tanh", "mixture")),
    ("normalization", stating("x0", 300, **NO_ERROR) | {"y.executed": F16}),
    ("small potential", {"y.executed": {"dtype": "float32", "roundings": int(0.4 * 2**24)}}),
    ("small potential", stating("x0", "3E+38", **NO_ERROR) | {"tensors.w": I4 / 2, "y.claims.0.values": [0.5625]}),
    ("third", stating("x", 65000, **FLAT) | {"z.constants": {"factor": 1.0}, "z.executed": F16 | {"roundings": 100}}),
    ("mlp", {"y.executed": None}), ("mlp", {"z.executed": None}), ("mlp", {"document.execution": None}),
    ("mlp", {"y.executed": {"dtype": "float32", "roundings": 2**23 + 1}}),
    ("mlp", stating("y", 9, error=stated("1E+9999"))),
    ("margin", {f"{each}.executed": {"dtype": "float32", "roundings": 2**23 + 1} for each in "my"}),
    ("margin", {"x.constants.radius": 25e3, "m.executed": F16, "y.executed": F16, "tensors.w": 3 * I4[[0, 0]],
        "y.claims.0.values": [4.5]}),
    ("normalization", {"x0.constants.radius": 1.0, "y.constants.eps": 1e5, "y.executed": F16}),
    ("unit", {"y.constants.eps": 7e4, "y.executed": F16}),
    ("contraction that grows", {"y.constants.growth": 1e39, "y.executed": F16 | {"roundings": 1}}),
    *(("third", {"z.constants.divisor": each}) for each in (1e-39, 1e38)),
    *(("factors", {"tensors.f": np.array([each, 1.0]), "z.executed": F16}) for each in (1e-6, 7e4)),
    ("scaling", {"y.executed": BF16}), ("scaling", {**stating("x0", 65000, **NO_ERROR), "y.executed": F16}),
    ("normalization", {"y.executed": BF16}),
    ("attention alone", {**stating("x0", 300, **FLAT_HEADS), **stating("x1", 300, **FLAT_HEADS),
        "y.constants.scale": 1e-9, "y.executed": F16}),
    ("contraction", {}), ("contraction", {**stating("x0", 300, **NO_ERROR), "y.executed": F16 | {"roundings": 1}}),
    *(("mixture", {**stating(x, size, **NO_ERROR), "y.executed": F16}) for x, size in (("x0", 9000), ("x1", 33000))),
    ("small potential", {"y.executed": {"dtype": "bfloat16"}}),
    ("small potential", stating("x0", "6E+35", **NO_ERROR) | {
        "y.constants.factor": 100.0, "y.executed": {"dtype": "float32"}, "tensors.w": 2 * I4 - 1}),
    ("softmax", SMALL | {"y.executed": {"dtype": "float32", "roundings": int(0.12 * 2**24)}}),
    *(("attention alone", stating("x0", q, **FLAT_HEADS) | stating("x1", k, **FLAT_HEADS) | {"y.executed": F16,
        "y.constants.scale": scale, "y.constants.added": added, "x0.constants.radius": 1e-9, "x1.constants.radius":
        1e-9}) for q, k, scale, added in ((100, 100, 10.0, 0.0),
        (1000, "1E-6", 100.0, 0.0), ("1E-6", 1000, 100.0, 0.0), (1, 1, 1.0, 7e4))),
    ("softmax", stating("x0", "1E+9", **FLAT) | {"y.executed": {"dtype": "float32", "roundings": 2**22}}),
    ("log_softmax", stating("x0", "1E+9", **FLAT)),
    ("logsumexp", {**stating("x0", 20000, **FLAT), "y.executed": F16}),
    ("tanh", {**stating("x0", 9000, **NO_ERROR), "y.executed": F16}),
    ("ball", {**stating("x0", 100, **FLAT), "y.executed": F16}),
    ("average of tokens alone", {**stating("x0", 6e4, largest=stated(6, shape=(1, 1, 1)), **FLAT), "y.executed": F16}),
    ("contraction", {"y.executed": F16 | {"roundings": 1, "beside": -7e4}}),
    ("average of tokens alone", {**stating("x0", "6E+36", largest=stated("5E+37", shape=(1, 1, 1)), **FLAT),
        "y.executed": {"dtype": "float32", "roundings": 9}}),
    ("third", {"z.executed": None}), ("third", {"z.executed": {"dtype": "bfloat16", "roundings": 128}}),
    ("factors", {"tensors.f": np.array([6e4, 1.0]), "z.executed": F16}),
    ("idle ball", {"z.executed": None}), ("idle ball", {"z.executed": BF16}),
    ("idle ball", {"x.constants.radius": 300.0, "z.constants.scale": 1e-6, "z.executed": F16}),
    *(("third of a third", {"t.executed": None, "z.executed": each}) for each in (None, F16)),
    *(("idle ball", {"x": [start("x", 1, 2), row("t", "times", "x", (1, 2), divisor=3.0, executed=None)],
        "z.inputs": ["t"], "z.executed": each}) for each in (None, F16)),
    ("third", stating("x", 65400, **FLAT) | {"z.constants": {"factor": 1.0}, "z.executed": F16 | {"roundings": 1,
        "beside": 6e5}}),
    ("factors", stating("x", "0.01", **FLAT) | {"x.constants.radius": 1e-9, "tensors.f": np.array([-7e4, 1.0]),
        "z.executed": F16}),
    ("idle ball", stating("x", 150, shape=(1, 1)) | {"x.constants.radius": 100.0, "z.constants.scale": 1e-6,
        "z.executed": F16}),
    ("idle ball", stating("x", 9, radius=stated("1E-3"), error=stated(1)) | {"x.constants.radius": 1e-9,
        "z.constants.scale": 1e6, "z.executed": F16}),
    ("idle ball of thirds", stating("x", 3, 4, 900, shape=(1, 3, 1), error=stated(0, shape=(1, 1, 1))) | {
        "z.constants.scale": 1e-6, "z.executed": F16}),
    *(("scaled convolution in float32", {f"tensors.{x}": each, "tensors.s": np.full(3, 1e-38), "y.claims.1.values":
        [99.0], "y.claims.0.values": [99.0]}) for x, each in (("w", np.full((3, 1, 2), 4e37)), ("b", [15e37] * 3))),
    ("scaled convolution in float16", {"tensors.w": np.full((3, 1, 2), 1e-5), "tensors.s": np.full(3, 7e4),
        "y.claims.1.values": [2e5], "tensors.b": np.full(3, 1e-5)}),
    ("constant", original(("x", 3), c=[[8e4, -4], [0, 0], [-5, 12]]) | {"z.executed": F16,
        "tensors.c": np.array([[4e4, -4], [0, 0], [-5, 12]])}),
    ("scaled convolution of pixels", {"tensors.w": np.full((2, 1, 2, 1), 3e37), "tensors.s": np.full(2, 1e-38),
        "tensors.t": np.full(2, 14e37), "y.claims.0.values": [99.0], "y.claims.1.values": [2e38]}),
]  # fmt: skip
"""Documents with a row whose rounding errors have no bound."""


REAL: Fields = {"document.execution": None}
GATE = row("s", "elementwise", "x0", (1, 3), function="sigmoid")
MARGIN = {"j": [row("m", "margin", "z", (1, 1), claim("row_difference", "w", 2), factor=1.0), HONEST["slope"][0][-2]]}
LANES, TF32 = {"document.execution": {"lanes": 64}}, {"document.execution": {"products": "tf32"}}
X3, X03, X02 = ("x", 3), ("x0", 3), ("x0", 2)
KEYS: Fields = {
    "a.claims": ATTENTION["claims"][:2],
    "kh": [HEADS[1], row("ks", "times", "kh", (1, 2, 3, 2), divisor=0.3)],
    "a.inputs.1": "ks",
}
ONE_HEAD: Fields = {f"{x}h": ... for x in "qkv"} | {"a": [row("a", "attention", "q k v x", (1, 3, 4), claim("spectral",
    "wk", 2), claim("spectral", "wv", 2), scale=0.5)], "out.shape": [1, 3, 4], "out.axes": [2],
    "out.reads": [[2]]}  # fmt: skip
UNLIKE = {x: [[i * unit for i in range(first, first + 2 * n)] for unit in (1, 1e-4)]
    for x, first, n in (("x0", 3, 3), ("x1", 5, 5), ("x2", 9, 5))}  # fmt: skip


def scaled_before(function: str, *before: Fields) -> Fields:
    """The function of "mlp" behind other rows, with low biases."""
    last = before[-1]["name"] if before else "y"
    return {
        "z": [*before, row("z", "elementwise", last, (1, 2), function=function)],
        "tensors.b": np.array([-4.0, 3.0]),
    }


CHANGED: list[tuple[str, Fields]] = [
    *(("mlp", scaled_before(each)) for each in ("relu", "gelu", "gelu_tanh", "silu", "mish", "asinh")),
    *(("mlp", scaled_before("gelu", *some) | {"tensors.f": np.array([0.5, 2.0]), "tensors.w": 1e-3 * I4[:2]})
        for some in (
        [row("t", "times", "y", (1, 2), factor=-0.3)], [row("t", "times", "y", (1, 2), factor="f")],
        [row("c", "constant", "", (2,), tensor="f"), row("t", "pick", "c", (1, 2), offset=0, tables=[0, 1])],
        [row("t", "pick", "y", (1, 2), offset=1, tables=[0, 0])], [row("t", "rounding", "y", (1, 2), dtype="bfloat16")],
        [row("q", "pick", "x", (1, 2), offset=0, tables=[0, 1]), row("t", "add", "y q", (1, 2))])),
    *(("heads", {"tensors.b": np.array([-9.0, 0, 3, 0]), "y.claims.1.values": [9.5], "y/2.claims.1.values": [9.1, 3.1],
        "out": [row("z", "elementwise", of, shape, function="relu", axes=axes), end("z", *shape, axes=axes)]})
        for of, shape, axes in (("y", (1, 3, 4), [2]), ("y", (1, 3, 4), [1, 2]), ("y/2", (1, 3, 2, 2), [3]))),
    *((name, {"tensors.v": np.array([-3.0, 4, 0, 0]), "out": [row("z", "elementwise", "y", shape, function="relu",
        axes=[1, 2]), end("z", *shape, axes=[1, 2])]})
        for name, shape in (("linear of tokens", (1, 3, 4)), ("convolution of images", (1, 3, 3)))),
    ("linear of tokens", {"tensors.v": np.array([-3.0, 4, 0, 0]), "out": [row("t", "times", "y", (1, 3, 4),
        divisor=-3.0), row("z", "elementwise", "t", (1, 3, 4), function="relu", axes=[1, 2]),
        end("z", 1, 3, 4, axes=[1, 2])]}),
    ("mlp", {"promises": [{"name": "b", "shape": [2], "parts": [{"shape": [1, 1, 2], "size": 5.5, "offset": 0,
        "tables": [0, 0, 1]}]}]}),
    ("mlp", REAL), ("mlp", LANES | {"y.executed": ROUNDED}), ("transposed", LANES),
    *(("mlp", some | {"tensors.w": np.ones((2, 4)), "y.claims.0.values": [3.0]}) for some in (LANES, {
        "y.executed": ROUNDED})),
    *(("product", {"y": [*some, row("y", "product", f"{x} x1", (1, 3))], "tensors.c": np.ones((1, 3))})
        for x, *some in (("s", GATE),
        ("t", GATE, row("t", "times", "s", (1, 3), factor=3.0)), ("t", GATE, row("t", "add", "s x1", (1, 3))),
        ("c", row("c", "constant", "", (1, 3), tensor="c")))), ("product", {"y.inputs": ["x1", "x0"]}),
    ("product", stating("x0", 3, largest=stated("0.1")) | {"x0.constants.radius": 1e-9, "y": [GATE | {"constants": {
        "function": "tanh"}}, row("y", "product", "s x1", (1, 3))]}),
    ("average of tokens alone", {"tensors.p": np.ones((1, 4, 3))}),
    ("margin", stating("x", 3, 4, shape=(2, 1)) | {f"{each}.shape.0": 2 for each in ("x", "y", "m", "t", "out")} | {
        "tensors.w": np.diag([1.0, 3, 0, 0])[:2], "y.claims.0.values": [3.5], "m.claims.0.values": [3.5],
        "m.constants.factor": -0.5, "t.constants.factor": -0.5}), ("slope", MARGIN),
    ("clamp to a box", {"y.executed.beside": -9.0}), ("relu6", stating("x0", 9, error=stated("1E+3"))),
    *((each, {"y.executed.dtype": "float64"}) for each in ("hardswish", "hardsigmoid", "silu")),
    ("large ball", stating("x0", 3, shape=(1, 1, 1), largest=stated(9, shape=(1, 1, 1)))),
    ("softmax", stating("x0", 9, shape=(1, 1, 1), error=stated("1E+3", shape=(1, 1, 1)))),
    ("mlp", TF32), ("mlp", {"document.execution": {"products": "bfloat16"}}), ("normalization", TF32),
    ("mlp", TF32 | {"y.executed.dtype": "float64"}), ("attention together", {"x.axes": [2], "y.constants.scale": 1e-3}),
    ("clamp to a box", {"y.constants.numbers": [-float(FORMATS["float32"].largest), 2.0**-126]}),
    ("contraction", {**stating("x0", 65504, **NO_ERROR), "y.executed": F16 | {"roundings": 0}}),
    ("slope", {"z.constants.numbers": [-3.0], "z.claims": [], "j.constants.bound": 7.0}),
    *(("third", {"z.constants": {"factor": each}}) for each in (2.0**-1000, 2.0**1000)),
    ("third", {"z.executed.beside": -9.0}), ("half", {"z.constants.divisor": -2.0}),
    ("a third and a tenth", {f"{each}.constants": {"factor": -(2.0**1000)} for each in "ts"}),
    *(("constant", {"tensors.c": np.full((3, 2), 0.1), "z.executed.roundings": each}) for each in (None, 0)),
    *(("mlp", {"y.executed.dtype": each, "z.executed.dtype": each}) for each in FORMATS if each != "real"),
    ("mlp", {"tensors.b": np.full(2, 2.0**60), "y.claims.1.values": [2.0**63]}),
    ("attention", KEYS), ("attention alone", {"y.constants.scale": 1.5}),
    ("attention", KEYS | {"a.claims": [ATTENTION["claims"][0], claim("spectral", "wv", 99, 99, parts=2)]}),
    ("attention", KEYS | {"a.claims": ATTENTION["claims"], "q": [row("q0", "linear", "x", (1, 3, 4),
        claim("spectral", "wq", 2), parts=1), row("q", "times", "q0", (1, 3, 4), factor=3.0)]}),
    ("attention alone", {"y.constants.added": -3.0, "y.constants.moved": -0.5}),
    ("attention alone", dict(x for name, (sizes, errors) in UNLIKE.items() for x in stating(name, *sizes,
        shape=(1, 2, len(sizes) // 2, 1), error=stated(*errors, shape=(1, 2, len(sizes) // 2, 1))).items())),
    ("softmax", SMALL | {"y.executed": ROUNDED | {"roundings": int(0.1 * 2**24)}}),
    ("mlp", {"y.claims.0.values": [1e300]}), ("cut", {"p.constants.tables.0": 2**39}),
    ("rotated", {"c.constants.factor": 1.0, "tensors.f": -np.ones(2)}), ("rotated by thirds", {"s.constants": {
        "factor": "f"}}), ("unequal neighbours", {"tensors.f": np.array([-2.0**600, 1])}),
    ("scaling", {"y.claims.0.values": [4.0]}), ("margin", {"m": [HONEST["margin"][0][2], {**HONEST["margin"][0][2],
        "name": "n", "constants": {"factor": 0.75}}]}),
    ("mlp", {"tensors.b": np.full(2, 2**53 - 1), "y.claims.1.values": [2.0**54]}),
    *(("residual", {"x.constants": {"dtype": "float32", "low": low, "high": high}}) for low, high in ((-1, 3), (-3, 1))
    ), ("convolution", {"tensors.w": 2.0**700 * HONEST["convolution"][1]["w"], "y.claims.0.values": [2.0**702]}),
    ("partly a difference", {"t.constants": {"factor": "f"}, "s.constants": {"factor": -3.0}, "tensors.f": np.full(2,
        3.0)}),
    ("constant", {"tensors.c": np.full((3, 2), 1 + 2.0**-7), "z.executed.dtype": "bfloat16"}),
    ("slope", {"z.constants.numbers": [-1.0], "z.claims": [], "j.constants.bound": 3.5}), ("attention", ONE_HEAD),
    ("elu", {"y.constants.numbers": [3.0, 2.0, 0.0]}),
    ("attention", stating("x", 3, 4, 5, shape=(1, 3, 1))),
    ("attention", KEYS | {f"{x}.claims": [HONEST["attention"][0][1 + i]["claims"][0], claim("group_norm", "b", 10)]
        for i, x in enumerate("qkv") if i}), ("attention", KEYS | {"a.constants.scale": 0.1, "a.claims": [claim(
        "spectral", x, 2.2, 2.2, parts=2) for x in ("wk", "wv")]}), ("attention", {"a.claims.2.values": [400.0] * 2}),
    ("softmax", stating("x0", "1E+9", shape=[1] * 3) | {"y.executed": {"dtype": "bfloat16"}, **{f"{x}.shape": [
        1, 1, 2936000] for x in ("x0", "y", "out")}}),
]  # fmt: skip
"""Valid documents that differ from one of the others."""


ORIGINALS: list[tuple[str, Fields]] = [
    ("mlp", original(w=I4[:2] * 1.5, b=[3.0, 4.5])), ("mlp", original(w=I4[:2] * 1.5, b=[3.0, 4.5]) | REAL),
    ("mlp", original(b=[3.0, 4.0])), ("mlp", original(w=I4[:2] * 1.5) | {"y.executed": None}),
    ("mlp", original() | {"z.constants.function": "softshrink"} | REAL),
    ("margin", original(w=I4[:2] * 1.5, b=[3.0, 4.5])), ("margin", original(b=[3.0, 4.5]) | REAL),
    ("heads", original(w=np.diag([1.0, 1.5, 3, 3]), b=[1.0, 0, 0.5, 3])), ("adjoint", original(w=np.ones((2, 2, 2)))),
    ("embedding", original(table=[[2, 0], [0, 1.5], [0.5, -2]])), ("attention", original(wk=I4, wv=I4)),
    ("linear of tokens", original(X03, w=3 * I4, v=[3.0, 4, 1, 0])), ("pixels", original(w=np.ones((2, 1, 2)) / 2)),
    ("transposed", original(X02, w=np.eye(2, 3))), ("average of tokens", original(p=np.ones((4, 3)) / 2)),
    ("average of sequences", original(p=np.ones((8, 3)) / 2)), ("potential", original(w=I4[:2], b=[2.0, -3.0])),
    ("convolution of images", original(X03, w=np.ones((3, 1, 2)) / 2, b=np.zeros(3))),
    ("slope", original(w=W / 2, s=[-0.25, 0.125])), ("slope", original(s=[-0.25, 0.125]) | REAL),
    ("moves", original(c=[[3.0, 4], [0.5, 12]])), ("moves", original(c=[[3.0, 4], [0.5, 12]]) | REAL),
    ("factors", original(X3, f=[0.5, -1.0])), ("factors of tokens", original(X3, f=[[3.0], [1], [7]]) | REAL),
    ("factors of tokens", original(X3, f=[[3.0], [0.5], [6]])), ("rounded difference", original(X3) | REAL),
    ("factors", original(X3, f=[0.5, -1.0]) | {"tensors.f": np.array([0.0, -2.0])}), ("third", original(X3)),
    ("third", original(X3) | REAL), ("scaling", original(X02, v=[3.0, 2, 0, 0])), ("rules", original() | REAL),
    ("tanh", original(X02) | REAL), ("tanh", original(X02)),
    ("attention alone", original(("x0", 4), ("x1", 4), ("x2", 4)) | {"y.constants.moved": -0.5} | REAL),
    ("embedding in a box", original(table=[[2, 0], [0, 1.5], [0.5, -2]])), ("hardswish", original(X02) | REAL),
    ("average of tokens alone", original(X03, p=np.ones((4, 3)) / 2)),
    ("potential of positive sign", original(X03, w=I4, b=[-1.0, 1, -2, 4])),
    ("zero factor", original(X3, f=[[1.0], [0], [7]])), ("factors of thirds", original(X3, f=[0.5, -1.0])),
    ("mixture", original(X02, ("x1", 2), ("x2", 2)) | REAL), ("idle ball", original() | REAL),
    ("scaled convolution in float32", original(X03, w=np.ones((3, 1, 2)) / 2, s=[1.0, -2, 1], b=[1.0, 2, 1])),
    ("scaled convolution in float32", original(X03, s=[0.5, -2, 0], t=[1.5, 0, 2]) | REAL),
    ("scaled convolution of pixels", original(("x0", 4), s=[3.0, 1])),
]  # fmt: skip
"""Documents with an original, of which `bounds.json` has the changes that follow, too."""
HALVES = [row(each, "rounding", of, (1, 2, 2), dtype="bfloat16") for each, of in (("p", "d"), ("p2", "x"))]
TOKENS: Fields = stating("x", 3, 4, 5, shape=(1, 3, 1), gain=stated(99, shape=(1, 1, 1)))
REPORTS: list[tuple[str, Fields]] = [
    ("mlp", {"document.original": {"w": "original/w"}, "tensors.original/w": I4[:2] * 1.5, "document.tensors":
        dict.fromkeys(("w", "tied"), Proof({"w": I4[:2]}).stored["w"].digest),
        "document.lipschitz": "1.6875000000000001"}),
    ("mlp", {"document.each_sample": True, "tensors.v": I2, "document.fixed": ["v"]}), ("moves", {"p": HALVES}),
    ("margin", original(b=[3.0, 4.5])),
    ("margin", original(b=[3.0, 4.5]) | {"m.constants.factor": 1.0, "out.inputs.0": "y"}),
    ("promised", {}), ("promised", {"y.claims.0.values": [*promised((4, 3)).claim("spectral", "w").values]}),
    ("embedding in a box", {}), ("convolution", {}), ("mlp", {f"{each}.executed": None for each in "xyz"}),
    ("embedding", TOKENS), ("embedding", {"x": [HONEST["embedding"][0][0], start("u", 1, 1, 2, claims=[claim("row_norm",
        "wide", 1), claim("diameter", "wide", 1.5)], radius=2.0)], "tensors.wide": I2}),
    *(("clamp", {"x.constants": {"dtype": "float32", "low": low, "high": high}}) for low, high in ((-LARGEST[
        "float32"], LARGEST["float32"]), (-4e38, 1.0), (-1.0, 4e38))),
]  # fmt: skip
"""Documents of which `bounds.json` has the report."""
PARTLY: list[tuple[Any, ...]] = [
    ("adjoint", "must be convolution", {f"{x}.axes": [1] for x in ("x", "y", "out")} | {f"{x}.reads": [[1]] for x in (
        "y", "out")} | {"y.claims.0": claim("taps", "w", 2, groups=1)}),
    ("two axes", "its stride does not divide", {"y.constants.stride": [1, 2], "y.claims.0.constants.stride": [1, 2],
        "y.constants.circular": [1], "y.shape.3": 1, "out.shape.3": 1}),
    *(("margin", words, changes) for words, changes in (("weight or its result misfits", {"m.shape.0": 2}),
        ("result that is rounded", {"t": [row("t", "rounding", "y", (1, 2), dtype="bfloat16")]}),
        ("result that is a sum", {"t": [row("t", "constant", "", (2,), tensor="c")], "out.shape": [2], "out.axes": [0],
            "out.reads": [[0]]}), ("another map's input", {"y": [row("y", "convex_potential", "x", (1, 4), claim(
            "spectral", "w", 1), claim("positive_norm", "b", 5), factor=1.0)], "t.shape.1": 4, "out.shape.1": 4}))),
    ("scaled convolution in float32", "is not of the outputs", {"tensors.t": np.ones(1)}),
    ("adjoint", "no bias", {"y.claims.0.tensors": ["w", "s"], "tensors.s": np.ones(2)}),
    *(("moves", "either positions, or an offset", {f"p.constants.{key}": each for key, each in some.items()})
        for some in ({"offset": 0}, {"tables": [0, 2, 1]}, {"offset": 0, "tables": [0, 2, 1]})),
    ("average of tokens", "matrices are too many", {"x.shape": [1, 1, 3, 2], "x.axes": [3], "y.shape": [1, 1, 4, 2],
        "y.axes": [3], "y.reads": [[3]], "out.shape": [1, 1, 4, 2], "out.axes": [3], "out.reads": [[3]],
        "y.constants.parts": [1, 2], "y.claims.0": claim("row_sum", "heads", 3, 3, parts=2)}),
    ("potential", "no matrix of 4 columns", {"tensors.w": np.stack([2 * I4[:2], 0 * I4[:2]], 2)}),
    *(("slope", words, MARGIN | {"out": [some, end("s", 1, 2)]}) for words, some in (
        ("that is a sum", row("s", "add", "j x", (1, 2))), ("another map's", row("s", "times", "j", (1, 2), factor=3.0)
        ), ("another map's", row("s", "pick", "j", (1, 2), offset=1, tables=[0, -1])))),
    ("slope", "rounded after the map", MARGIN | {"out": [row("s", "add", "j", (1, 2), executed=ROUNDED), end("s",
        1, 2)]}),
    ("slope", "rounded after the map", {"j": [row("t", "times", "y", (1, 2), factor=-1.0, executed={"dtype": "float32",
        "beside": 9.0}), MARGIN["j"][0], MARGIN["j"][1] | {"inputs": ["t", "x"]}]}),
    ("mlp", "neither a ball nor a box", {"x.constants.high": 0.1}),
    *(("third", "product of its factors", {"z.constants": {"factor": each}}) for each in (-1e308, 1e308)),
    ("moves", "not shown to leave", {"i.constants.scale": 1.0}),
    ("cut", "not the map of", {"p": [{**HONEST["cut"][0][2], "name": "y/2/2"}, HONEST["cut"][0][3]]}),
    ("attention", "not made of heads", {"kh": [HEADS[1], row("k2", "pick", "k", (1, 2, 3, 2), offset=2,
        tables=[0, -2, 4, 1]),
        row("ks", "add", "kh k2", (1, 2, 3, 2))], "a.inputs.1": "ks"}),
    ("attention", "not made of heads", {"k": [row("k", "convex_potential", "x", (1, 3, 4), claim("spectral", "wk", 2),
    factor=1.0)]}),
    ("attention", "not made of heads", {"k.axes": [1, 2], "k.reads": [[1, 2]]}),
    ("attention", "not made of heads", {"kh.constants.tables.3": 0}),
    ("attention", "not made of heads", {"kh.constants.tables.1": [0, 1], "a.claims.2.constants.pairs": [[0, 0],
        [1, 0]]}),
    ("attention", "not made of heads", {"kh.constants.offset": 1, "kh.constants.tables.1": 0,
        "a.claims.2.constants.pairs":
        [[0, 0], [1, 0]]}),
    ("attention", "not made of heads", {"kh.constants.tables": [0, 2, [0, 4, 4], 5],
    "vh.constants.tables.2": [0, 4, 4]}),
    ("attention", "not made of heads", {"kh": [HEADS[1], row("ks", "times", "kh", (1, 2, 3, 2), factor="f")],
        "a.inputs.1": "ks", "tensors.f": np.array([0.5, 100])}),
    ("attention", "not made of heads", {"kh.constants": {"positions": "mixed"}, "tensors.mixed": np.array([[[[0, 1],
        [6, 7],
        [8, 9]], [[2, 3], [4, 5], [10, 11]]]])}),
    ("heads", "gain .* is less than what follows", stating("y/2", 99, shape=[1] * 4, gain=stated(99, "0.1",
        shape=(1, 1, 2, 1)))),
    ("mlp", "does not fit its groups", stating("y", 9, radius=stated(9, shape=(1,)))),
    ("mlp", "finite, or beyond", {"tensors.w": 1 - 2.0**1001 * I4[:2], "y.claims.0.values": [2.0**1003]}),
    ("mlp", "finite, or beyond", {"tensors.w": np.array([[np.nan, 0, 0, 0], [0, 1, 0, 0]])}),
    ("mlp", "is empty", {"tensors.w": np.zeros((2, 0)), "x.shape.1": 1}),
    ("mlp", "neither a ball nor a box", {"x.constants.low": -0.1}),
    ("mlp", "must be an integer from 1", {"y.constants.parts": True}),
    ("heads", "are not 2 norms", {"y/2.claims.0.values": [-1.125, 3.375]}),
    ("mlp", "must be a positive number", {"x.constants.radius": "1"}),
    *((name, "lead beyond", some) for name, some in (("cut", {"p.constants.offset": 3}), ("backwards",
        {"z.constants.offset": 4}))),
    ("mlp", "'shape' of an array is missing", {"x.radius": {"values": "1" * 2**20}}),
    ("mlp", "must be an array of at most", {"y.radius": stated(9)}),
    ("mlp", "dtype uint16 is none", {"tensors.b": np.ones(2, np.uint16)}),
    ("slope", "do not prove", {"j.constants.bound": 2.0**201}),
    ("clamp", "nothing is known of 'none'", {"y.constants": {"function": "none"}}),
    ("slope", "do not prove", {"z.constants": {"function": "elu", "numbers": [-1 - 2.0**-48, 2.0**-106, 1 - 2.0**-48]},
        "z.claims": [], "j.constants.bound": 9.0}),
    ("slope", "do not prove", {"tensors.d": np.array([2.0, 2.0**-201]), "tensors.u": np.array([[1.0, 0], [-1, 0]]),
        "y.claims.0.tensors": ["u"]}),
    ("attention", "not made of heads", {"x.shape": [3, 4], **{f"{x}.shape": [3, 4] for x in "qkv"}, **{
        f"{x}.axes": [1] for x in "xqkv"}, **{f"{x}.reads": [[1]] for x in "qkv"}, **ONE_HEAD, "a": [row("a",
        "attention", "q k v x", (3, 4), *ONE_HEAD["a"][0]["claims"], scale=0.5)], "out": [end("a", 3, 4)]}),
    *(("attention", "not made of heads", {"kh": [HEADS[1], some], "a.inputs.1": "ks",
        "tensors.c": np.ones((1, 2, 3, 2))}) for some in (row("ks",
        "constant", "", (1, 2, 3, 2), tensor="c"), row("ks", "rounding", "kh", (1, 2, 3, 2), dtype="float32"))),
    ("attention", "not made of heads", {f"tensors.w{x}": 2 * np.eye(8, 4) for x in "qkv"} | {
        f"{x}.shape": [1, 3, 8] for x in "qkv"} | {f"{x}h.shape": [1, 2, 3, 3] for x in "qkv"} | {
        f"{x}h.constants.tables": [0, 3, 8, 1] for x in "qkv"} | {"a.claims": ATTENTION["claims"][:2], "a.shape.3": 3,
        "out.shape.3": 3}),
    ("attention", "not made of heads", {f"{x}h": [row(f"{x}h", "pick", x, (1, 1, 3, 1), offset=3, tables=[0, 0, [0,
        -1 if x != "q" else 4, 8], 1])] for x in "qkv"} | {"a": [row("a", "attention", "qh kh vh x", (1, 1, 3, 1),
        *(claim("spectral", f"w{x}", *[2] * 4, parts=4) for x in "kv"), reads=ATTENTION["reads"], axes=[3],
        scale=0.5)], "out": [end("a", 1, 1, 3, 1)]}),
]  # fmt: skip
"""Forgeries that one operand of a condition refuses; with the whole condition dropped, something else does."""
EACH = ((2, 1, 1), 2.0, 0, (1, 0, 0)), ((2, 1, 1), 3.0, 2, (1, 0, 0))
SKEW = ((1, 2, 2), 2.0, 0, (0, 7, 4)), ((8, 1, 1), 2.0, 0, ((1, 2, 3, 5, 6, 8, 9, 10), 0, 0))
"""Parts of four entries; and of a kernel, one of them a matrix with a tap of its own for each entry."""
PAIR: Fields = {"parts": [1, 1], "transposed": [False, False]}
KERNEL = Proof({"w": np.arange(12.0).reshape(3, 2, 2)})
CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("of another arithmetic", lambda: concluded({"lanes": 8})),
    ("a folder has its tensors", lambda: with_files({}, tensors={})),
    ("beyond all floats", lambda: Proof({"w": np.diag([2.0**1000, 1])}).claim("product", "w", "w", pairs=[[0, 0], [1,
        1]], parts=[2, 2], transposed=[False, False])),
    ("three axes or more", lambda: Proof({"w": I2}).claim("taps", "w", groups=1)),
    ("is no matrix", lambda: KERNEL.claim("row_difference", "w", transposed=True)),
    ("do not fit its kernel", lambda: Proof({"w": I2}).claim("convolution", "w", size=[], stride=[], dilation=[],
        groups=1)),
    ("two tensors are called w", lambda: Proof({"w": I2}).store("w", I4)),
    ("used already", lambda: promised((2, 2), tensor=I2)),
    ("another promise", lambda: promised((2, 2)).promise(Promise("w", (2, 2), (Parts((1, 2, 2), 3.0, 0, (0, 2, 1)),)))),
    ("is not finite", lambda: Proof().add(replace(read_row(start("x", 1, 1)),
        bounds=Bounds(*[decimals([[np.inf]])] * 4)))),
    ("w is no matrix", lambda: promised((4,)).claim("spectral", "w")),
    ("w is no matrix", lambda: promised((2, 2, 1)).claim("spectral", "w", transposed=True)),
    ("w is no vector", lambda: promised((2, 2)).claim("group_norm", "w")),
    ("w is no matrix", lambda: promised((2, 2, 1)).claim("row_difference", "w", transposed=True)),
    ("w is no kernel", lambda: promised((2, 2)).claim("taps", "w", groups=1)),
    ("w is no kernel", lambda: promised((3, 1, 1)).claim("taps", "w", groups=2)),
    ("keep its promise", lambda: promised((4, 2), ((2, 2, 2), 2.0, 0, (4, 2, 1))).store("w",
        np.eye(4, 2) + 3 * np.eye(4, 2, -2))),
    ("lie in rows and columns", lambda: promised((4, 1), ((1, 2, 2), 2.0, 0, (0, 2, 1))).claim("spectral", "w")),
    ("lie in rows and columns", lambda: promised((2, 3), ((1, 2, 2), 2.0, 0, (0, 4, 1)), ((2, 1, 1), 2.0, 2, (1, 0,
        0))).claim("spectral", "w")),
    ("'tables' of parts is missing", lambda: read(Parts, {"shape": [1, 1, 1], "size": 1.0, "offset": 0}, "parts")),
    ("lie in rows and columns", lambda: promised((2, 2, 3), *SKEW).claim("taps", "w", groups=1)),
    ("no 3 equal parts", lambda: promised((4, 1)).claim("spectral", "w", parts=3)),
    ("parts of w misfit", lambda: promised((2, 2), ((1, 2, 2), 2.0**1001, 0, (0, 2, 1)))),
    ("parts of w misfit", lambda: promised((2, 2), ((1, 2, 2), 2.0**-1001, 0, (0, 2, 1)))),
    ("keep its promise", lambda: promised((2,)).store("w", np.array([1.5, 1.5]))),
    ("keep its promise", lambda: promised((2, 2), *EACH).store("w", np.array([[1.0, 1.0], [1.0, 3.5]]))),
]  # fmt: skip
"""Calls that are refused, with words of the refusal."""
TWO = packed({"u": ("F64", [1], [8, 16]), "v": ("F64", [1], [0, 8])}, bytes(16))
FILES: list[tuple[Any, ...]] = [
    ("a name stands twice in .*certificate.json", {"certificate.json": lambda x: x.replace(
        b'"fixed"', b'"lipschitz": "9", "fixed"')}),
    ("has a number NaN", {"certificate.json": lambda x: x.replace(b'"fixed"', b'"comparison": NaN, "fixed"')}),
    ("cannot be printed", {"b.safetensors": packed({"\n": ("F64", [1], [0, 8])}, bytes(8))}),
    ("does not lie where", {"b.safetensors": packed({"u": ("F64", [1], [0, 8]), "v": ("F64", [1], [0, 8])},
        bytes(16))}),
    ("belong to no tensor", {"b.safetensors": packed({"u": ("F64", [1], [0, 8])}, bytes(9))}),
    ("another tensor than elsewhere", {"b.safetensors": packed({"w": ("F64", [1], [0, 8])}, bytes(8))}),
    ("lists and objects, more than", {}, "files._NESTED", 9),
    ("certificate.json has", {}, "files._TEXT", 500),
    ("header of .* bytes, more than", {"b.safetensors": packed({"__metadata__": " " * 9999}, b"")}, "files._TEXT",
        9999),
]  # fmt: skip
"""Words of a refusal, files beside those of `mlp` or changes of these, and a limit of the kernel that is so small."""
LIMITS: list[tuple[str, str, str, int]] = [
    ("rules", "6 groups of a tensor", "gather._GROUPS", 5),
    ("all of two", "has entries of 6 groups", "gather._GROUPS", 5),
    ("moves", "have 12 entries, more than", "gather._ENTRIES", 11),
    ("moves", "have 6 entries, more than", "gather._GROUP", 5),
    *((name, "kinds of groups", "gather._KINDS", 0) for name in ("moves", "alike", "alike with gaps")),
    ("residual", "hold", "proof._HELD", 120),
    ("mlp", "has 4 entries, more than", "proof._ENTRIES", 3),
    ("promised", "promises are of 12 entries", "proof._PROMISED", 11),
    ("promised", "w has more than", "promises._ENTRIES", 11),
    ("moves", "a sum of 3 terms", "moves._TERMS", 2),
    ("all of two", "it moves 6 entries of 2 terms", "value._MOVED", 11),
    ("moves", "it moves 4 entries of 1 terms", "value._MOVED", 3),
    ("slope", "have 6 entries, more than", "lipsdp.MOST", 5),
    ("slope", "are too many", "lipsdp.DEEPEST", 2),
    ("slope", "are too many", "lipsdp._HELD", 2),
]  # fmt: skip
"""A document, words of its refusal, and the limit that it exceeds if that is so small."""


def forge(name: str, changes: Fields) -> tuple[Fields, dict[str, np.ndarray]]:
    """A document, its tensors under the key `tensors`, with changes: path -> content; a row of None is left out."""
    rows, tensors = HONEST[name]
    promises = copy.deepcopy(tensors).pop("promises", [])
    content: Fields = {
        "rows": {each["name"]: copy.deepcopy(each) for each in rows}, "promises": promises,
        "tensors": {key: each for key, each in tensors.items() if key != "promises"}, "document": {},
    }  # fmt: skip
    for path, new in changes.items():
        way = path.split(".") if path.split(".")[0] in content else ["rows", *path.split(".")]
        node: Any = content
        for key in way[:-1]:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if isinstance(new, list) and way[0] == "rows" and len(way) == 2:  # rows in the place of one
            some = {f"{way[1]}/{i}": each for i, each in enumerate(new)}
            content["rows"] = dict(
                x for key, old in node.items() for x in (some if key == way[1] else {key: old}).items()
            )
        elif new is ...:
            del node[int(way[-1]) if isinstance(node, list) else way[-1]]
        else:
            node[int(way[-1]) if isinstance(node, list) else way[-1]] = new
    document = {
        "format": 7, "arithmetic": "real numbers, tensors as stored", "tensors": {}, "computed": {}, "fixed": [],
        "promises": content["promises"], "rows": list(content["rows"].values()), "each_sample": False,
        "execution": {}, "attention_logits": {}, "lipschitz": "0", "rms_lipschitz": "0", "unbounded_at": "0",
    } | content["document"]  # fmt: skip
    return json.loads(json.dumps(document)), content["tensors"]


def settle(document: Fields, tensors: dict[str, np.ndarray]) -> Proof:
    """State the results that follow from the rows, where nothing else is stated."""
    proof = Proof(tensors, read(Arithmetic | None, document["execution"], "execution"))
    for promise in document["promises"]:
        proof.promise(read(Promise, promise, "the promise"))
    if document.get("original") is not None:
        proof.compare(document["original"])
    for each in document["rows"]:
        proof.add(read_row(each))
    last, result = proof.inferences[-1], next(reversed(proof.values.values()))
    with rounding_up():
        gain = next(reversed(proof.rows.values())).bounds.gain.max()
        smallest = min((row.entries() for row in proof.inferences if row.operation == "input"), default=1)
        sizes = {"lipschitz": smallest, "rms_lipschitz": last.entries()}
        results: Fields = {key: str(gain / root_down(size)) for key, size in sizes.items()}
    results["unbounded_at"] = result.fault
    results["attention_logits"] = {r.name: [*map(str, r.logits)] for r in proof.inferences if r.logits is not None}
    document |= {key: each for key, each in results.items() if document[key] in ("0", {})}
    return proof


def accepted(name: str, changes: Fields) -> Report:
    """The report on a forgery.

    Raises:
        CheckError: It is refused.
    """
    document, tensors = forge(name, changes)
    settle(document, tensors)
    return check(document, tensors)


def concluded(execution: Fields) -> Report:
    """The report on a proof whose certificate states another arithmetic."""
    document, tensors = forge("mlp", {})
    proof = settle(document, tensors)
    return conclude(read(Document, {**document, "execution": execution}, "the certificate"), proof)


def limits(limit: str, most: float) -> Any:
    """Let a limit of the kernel be so small in a `with` block."""
    return mock.patch(f"wellnormed.proof.{limit}", most)


def with_files(changes: dict[str, Any], *limit: Any, **settings: Any) -> str:
    """The report on the folder of `mlp` with other files beside it, or with changed ones."""
    document, tensors = forge("mlp", {})
    settle(document, tensors)
    places = {
        name: ("F64", each.shape, [8 * i, 8 * (i + each.size)])
        for (name, each), i in zip(tensors.items(), (0, 8), strict=True)
    }
    content = {
        "certificate.json": json.dumps(document).encode(),
        "a.safetensors": packed(places, b"".join(each.tobytes() for each in tensors.values())),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, new in {**dict.fromkeys(content, lambda x: x), **changes}.items():
            (Path(folder) / name).write_bytes(new if isinstance(new, bytes) else new(content[name]))
        with limits(*limit) if limit else nullcontext():
            return str(check(folder, **settings))


def limited(name: str, limit: str, most: float) -> Report:
    """The report on a document where a limit of the kernel is so small, rounded down."""
    with limits(limit, int(most)):
        return accepted(name, {})


PARTS = [
    *((words, partial(accepted, name, changes)) for name, words, changes in PARTLY),
    ("header of .* bytes, more than", partial(with_files, {"a.safetensors": lambda x: x[:7] + b"1" + x[8:]})),
    ("is rounded by more", lambda: prove(Claim("group_norm", (*"vvv",), (0, 9), {"parts": 2}), lambda _: np.ones(2))),
]
"""Words of a refusal, and the call of which a part of a condition refuses it."""
CASES: list[tuple[str, Callable[[], Any]]] = [
    *((words, partial(accepted, name, changes)) for name, words, changes, *_ in FORGED), *CALLS,
    *((words, partial(with_files, *each)) for words, *each in FILES),
    *((words, partial(limited, name, *limit)) for name, words, *limit in LIMITS),
]  # fmt: skip
"""Words of a refusal, and the call that is refused."""


def followed(shape: tuple[int, ...], capped: Sequence[Any], measure: str, **settings: Any) -> str:
    """What follows for a claim from promises, as `promised` makes them, and a matrix `v`; and bounds of sizes."""
    proof = promised(shape, *capped)
    proof.store("v", np.diag([3.0, 5.0]))
    found: list[Any] = [*proof.claim(measure, *("wv" if measure == "product" else "w"), **settings).values]
    found += proof.promises["w"].absolute(**settings) if measure == "spectral" else []
    found += [proof.promises["w"].absolute_kernel()] if measure == "taps" else []
    return " ".join(map(str, found))


def varied(name: str) -> str:
    """What is proved of a row if each group of its inputs has other bounds, and in 16 bits."""
    changes: Fields = {}
    for number, each in enumerate(HONEST[name][0]):
        if each["operation"] == "input":
            shape = [1 if axis in each["axes"] else n for axis, n in enumerate(each["shape"])]
            sizes = np.arange(math.prod(shape)) + 5 + number
            changes |= stating(each["name"], *sizes, shape=shape, error=stated(*sizes / 1024, shape=shape))
    return digits(name, changes) + " " + digits(name, {"y.executed.dtype": "float16"})


def room(name: str) -> str:
    """How many bytes moves ask for, and how many the rows of a document hold."""
    document, tensors = forge(name, {})
    with mock.patch.object(Move, "require_room", autospec=True) as asked:
        proof = settle(document, tensors)
    needed = [f"{call.args[1]} of {call.args[0].room}," for call in asked.call_args_list]
    return " ".join([*needed, str(proof._held)])


def maps_of(changes: Fields) -> str:
    """The functions and linear maps of a joint bound, where underflows are large."""
    row = settle(*forge("maps", changes)).inferences[-2]
    network = Network(row.inputs[1], row.tensor)
    return at_once("lipsdp.TINY", 2.0**-9, lambda: repr([network.maps(row.inputs[0]), network.functions]))


def at_once(limit: str, most: float, call: Callable[[], str]) -> str:
    """What is proved where the kernel does no more at once."""
    with limits(limit, most):
        return call()


def claimed(measure: str, *arrays: Any, **settings: Any) -> str:
    """The values of a claim on stored tensors, in so many digits as any machine gives."""
    tensors = dict(zip("vwx", map(np.asarray, arrays), strict=False))
    claim = Proof(tensors).claim(measure, *tensors, **settings)
    return " ".join(f"{value:.12g}" for value in claim.values)


def reported(name: str, changes: Fields) -> str:
    """The report on a valid document."""
    return str(accepted(name, changes))


def digits(name: str, changes: Fields | None = None) -> str:
    """Of a valid document: the bounds of its result, what else follows, and how it is executed."""
    document, tensors = forge(name, changes or {})
    proof, report = settle(document, tensors), check(document, tensors)
    rows = list(proof.rows.values())
    others = [report.margin, report.substitution, *(each for some in report.attention_logits.values() for each in some)]
    others += [each.max() for row in rows if row.operation == "margin" for each in row.bounds]
    changed = [row for row in rows if row.change is not None and row.operation in ("margin", "output")]
    others += [each for row in changed for each in row.change.flat]
    others += [report.change]
    numbers = [[*map(str, x.flat)] for x in rows[-1].bounds] + [[str(each)] for each in others if each is not None]
    return " ".join([*(",".join(each) for each in numbers), report.executed])


ROWS_OF_6 = [((1, 2, 3), 2.0, 0, (0, 3, 1)), ((1, 4, 3), 5.0, 6, (0, 3, 1))]
TAPS = [((2, 2, 2), 2.0, 0, (1, 4, 2)), ((2, 2, 2), 3.0, 8, (1, 4, 2))]
"""A kernel `(4, 2, 2)`: of two groups of two channels, one matrix for each tap."""
K = {"size": [1], "stride": [1], "dilation": [1], "groups": 1}
PROMISED: list[partial[str]] = [
    partial(followed, (6, 3), ROWS_OF_6, "spectral"),
    partial(followed, (6, 3), ROWS_OF_6, "spectral", parts=3),
    partial(followed, (6, 3), ROWS_OF_6, "spectral", parts=3, transposed=True),
    *(partial(followed, (6, 3), ROWS_OF_6, each) for each in ("row_norm", "max_abs", "diameter", "row_difference")),
    partial(followed, (3, 6), [((2, 3, 3), 2.0, 0, (3, 6, 1))], "spectral", parts=3, transposed=True),
    *(partial(followed, (4,), EACH, each) for each in ("max_abs", "row_norm", "positive_norm")),
    partial(followed, (4,), EACH, "group_norm", parts=2),
    partial(followed, (2, 2), EACH, "spectral"),
    partial(followed, (), [((1, 1, 1), 2.0, 0, (0, 0, 0))], "max_abs"),
    *(partial(followed, (4, 2, 2), TAPS, "taps", groups=each) for each in (1, 2)),
    partial(followed, (4, 2, 2), TAPS, "convolution", **K | {"groups": 2}),
    partial(followed, (4, 2, 2), TAPS, "spectral", parts=2), partial(followed, (2, 3), [((1, 2, 2), 2.0, 0, (0, 3, 1)),
        ((1, 2, 1), 5.0, 2, (0, 3, 0))], "row_difference", transposed=True),
    partial(followed, (), [((1, 1, 1), 2.0, 0, (0, 0, 0))], "row_norm"),
    *(partial(followed, (2, 2, 2), [each], "taps", groups=1) for each in (((1, 4, 2), 2.0, 0, (0, (0, 1, 4, 5), 2)),
        ((1, 2, 4), 2.0, 0, (0, 4, 1)))), partial(followed, (2, 3), [((1, 6, 1), 2.0, 0, (0, 1, 0))], "spectral"),
    partial(followed, (2, 2), [((1, 2, 2), 2.0, 0, (0, 1, 2))], "spectral"),
    *(partial(followed, (4, 3), [((1, 2, 3), 1e170, 0, (0, 3, 1)), ((1, 2, 3), each, 6, (0, 3, 1))], "spectral",
        parts=2) for each in (0.0, 1.0)),
    partial(followed, (4, 2), [((2, 2, 2), 2.0, 0, (4, 2, 1))], "product", pairs=[[0, 0], [1, 1]], parts=[2, 2],
        transposed=[False, False]),
]  # fmt: skip


PRINTED = "0.5", "0.1", "0.3", f"120.{'0' * 24}1", "12000000000.00000001", f"-1.4{'9' * 25}", f"1.{'0' * 16}1"
CAPPED = [Parts(each, 0.3, 0, (0, 0, 0)) for each in ((1, 1, 1), (2, 1, 1), (1, 1, 3), (2, 3, 1), (1, 2, 3), (2, 2, 3))]
NUMBERS = [
    "1", True, -2**40 - 1, -2**40, -1, 0, 1, 2**40 - 1, 2**40,
    *(sign * x for sign in (-1.0, 1.0) for x in (0.5, float(np.finfo(float).max), math.inf)),
]  # fmt: skip


def those_read(*kinds: Any) -> str:
    """The numbers that are read as each type."""
    found = []
    for kind, number in product(kinds, NUMBERS):
        with suppress(CheckError):
            found.append(read(kind, number, "a number"))
    return str(found)


def kept(size: float) -> str:
    """What is proved of a matrix that keeps its promise."""
    proof = promised((2, 2), ((1, 2, 2), size, 0, (0, 2, 1)))
    proof.store("w", I2)
    return str(proof.promises["w"])


SIGNED = np.array([[[1.0, 0], [-1, 0]], [[0, 1], [0, -1]], [[3, 0], [-3, 0.5]], [[0, 2], [0, -3]]])
IMAGES = np.arange(1, 25.0).reshape(2, 2, 3, 2) * [1, -1]
SLANTED = np.array([[3.0, 0, 0], [4.0, 0, 0], [0, 0, 1.5], [0, 0.75, 0]])
CLAIMED: list[partial[str]] = [
    partial(claimed, "spectral", SLANTED), partial(claimed, "spectral", SLANTED, parts=2),
    partial(claimed, "spectral", SLANTED, transposed=True), partial(claimed, "spectral", SLANTED, parts=3,
        transposed=True), partial(claimed, "product", SLANTED, 3 * I4, pairs=[[1, 0], [0, 1]], parts=[2, 2],
        transposed=[False, False]), partial(claimed, "product", 1e-200 * I2, 1e-200 * I2, pairs=[[0, 0]], **PAIR),
    *(partial(claimed, each, SLANTED) for each in ("row_norm", "row_difference", "row_sum", "diameter", "max_abs")),
    partial(claimed, "row_difference", SLANTED, transposed=True), partial(claimed, "row_sum", SLANTED, parts=2),
    partial(claimed, "group_norm", [3.0, 4, 0, -5], parts=2), partial(claimed, "positive_norm", [3.0, 4, -5]),
    partial(claimed, "diameter", [[0.0, 0], [5, 0], [0, 12]]), partial(claimed, "diameter", [[1e9, 0], [1e9, 3]]),
    *(partial(claimed, "taps", np.arange(16.0).reshape(4, 2, 2), groups=each) for each in (1, 2)),
    partial(claimed, "convolution", 2.0**700 * IMAGES, size=[5, 4], stride=[2, 1], dilation=[1, 2],
        groups=1), partial(claimed, "convolution", np.arange(8.0).reshape(4, 1, 2), size=[3], stride=[2], dilation=[1],
        groups=2),
    partial(claimed, "convolution", IMAGES, [3.0, -5], size=[5, 4], stride=[2, 1], dilation=[1, 2], groups=1),
    partial(claimed, "group_norm", [3.0, 4], [2.0, -3], [1.0, -7]),
    partial(claimed, "taps", IMAGES, [0.0, 0], groups=1),
]  # fmt: skip


def edge(accept: Callable[[float], Any], low: float, high: float) -> str:
    """The least number that is accepted, in so many digits as any machine gives; the first is not, and the last is."""
    accept(high)
    for step in range(44):
        middle = (low + high) / 2 if step else low
        try:
            accept(middle)
        except CheckError:
            low = middle
        else:
            high = middle
    return f"{high:.9g}"


def edge_of(measure: str, *arrays: Any, low: float = 1.0, **settings: Any) -> str:
    """The least value of a claim on stored tensors that is proved, up to 999."""
    tensors = dict(zip("vwx", map(np.asarray, arrays), strict=False))
    return edge(lambda x: prove(complete(Claim(measure, (*tensors,), (x,), settings)), tensors.__getitem__), low, 999.0)


EDGES: dict[str, Callable[[], str]] = {
    "spectral": partial(edge_of, "spectral", SLANTED), "product": partial(edge_of, "product", SLANTED, SLANTED, **PAIR,
        pairs=[[0, 0]]), "convolution": partial(edge_of, "convolution", IMAGES,
        size=[5, 4], stride=[2, 1], dilation=[1, 2], groups=1), "group_norm": partial(edge_of, "group_norm", [3.0, 4]),
    **{f"product of {name}": partial(edge_of, "product", some, I2[:, 1:], low=0.0, **PAIR, pairs=[[0, 0]])
        for name, some in (("orthogonal vectors", I2[:, :1]), ("zero", 0 * I2[:, :1]))},
    "scaled taps": partial(edge_of, "taps", IMAGES, [3.0, -5], groups=1),
    "scaled and shifted": partial(edge_of, "group_norm", [3.0, 4], [2.0, -3], [1.0, -7]),
    "slope": partial(edge, lambda x: accepted("slope", {"j.constants.bound": x}), 1.0, 99.0),
    "margin": partial(edge, lambda x: accepted("margin", {"t.constants": {"divisor": 3.0}, "m.constants.factor": x}),
        0.1, 9.0),
    "slope of a sum": partial(edge, lambda x: accepted("slope", {"y": [HONEST["slope"][0][3], row("s", "add", "x y",
        (1, 2)), row("h3", "times", "h", (1, 2), factor=3.0), row("t", "add", "s h3", (1, 2))], "j.inputs.0": "t",
        "j.constants.bound": x}), 1.0, 999.0),
}  # fmt: skip
"""Name -> the least number that is proved."""


SPLIT: list[tuple[str, int, Callable[[], str]]] = [
    ("moves._BLOCK", 1, partial(digits, "factors", {"tensors.f": np.array([0.5, 0.3])})),
    *(("gather._PAIRS", most, partial(digits, "rotated by thirds")) for most in (7, 8)),
    ("gather._BLOCK", 2, partial(digits, "moves")), ("value._BLOCK", 1, partial(digits, "backwards")),
    ("claims._BLOCK", 4, CLAIMED[9]),
    *(("matrices._BLOCK", 1, call) for call in (EDGES["convolution"], CLAIMED[-5], partial(claimed, "convolution",
        np.ones((3, 2, 1)), size=[9], stride=[16], dilation=[1], groups=1))),
    ("matrices._BLOCK", 100, lambda: str([x.shape for x in _symbols(SIGNED, (9,), (1,), (1,), 2)])),
]  # fmt: skip
"""A limit of what is done at once, and what is proved then."""


def coarsely(call: Callable[[], Any], unit: float = 2.0**-20) -> Any:
    """What is proved where roundings are so large, underflows 2^-30 or 2^-10, which shows every margin."""
    coarse = {name: form._replace(floor=decimal.Decimal(2.0**-10)) for name, form in FORMATS.items() if form.floor}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(FORMATS, coarse))
        both = ("claims", "matrices", "promises", "rules")
        for module in (*both, "value", "gather", "attention", "products", "moves", "proof"):
            stack.enter_context(limits(f"{module}.UNIT", unit))
        for module in (*both, "lipsdp"):
            stack.enter_context(limits(f"{module}.TINY", 2.0**-30))
        return call()


def results() -> dict[str, Callable[[], str]]:
    """Name -> a call that gives numbers that the kernel proves, as `bounds.json` has them."""
    calls = {name: partial(digits, name) for name in HONEST}
    calls |= {f"promised {i}: {call.args[2]}": call for i, call in enumerate(PROMISED)}
    calls |= {f"claimed {i}: {call.args[0]}": call for i, call in enumerate(CLAIMED)}
    calls |= {f"least {name}": call for name, call in EDGES.items()}
    for kind, documents in (("changed", CHANGED), ("an original", ORIGINALS)):
        calls |= {f"{kind} {i}: {each[0]}": partial(digits, *each) for i, each in enumerate(documents)}
    calls |= {f"varied {name}": partial(varied, name) for name in ROWS if ROWS[name][0][-2]["name"] == "y"}
    calls["sizes of kernels"] = lambda: " ".join(f"{absolute_kernel(2.0**size * kernel, groups, *how):.12g}"
        for kernel, groups in ((SIGNED, 1), (SIGNED, 2), (np.ones((2, 3, 4)), 1), (W[:, :, None], 1))
        for size, how in product((0, -700, 700), ((False,), (True,), (False, True))))  # fmt: skip
    calls |= {f"coarsely {name}": partial(coarsely, call) for name, call in calls.items()}
    calls |= {f"in 6 digits {x}": partial(coarsely, EDGES[x], 2.0**-6) for x in ("spectral", "product", "convolution")}
    calls["frequencies"] = partial(edge, lambda most: at_once("matrices._BLOCK", int(most), partial(claimed,
        "convolution", np.ones((3, 2, 1)), size=[9], stride=[50], dilation=[1], groups=1)), 0.0, 4096.0)  # fmt: skip
    calls |= {f"report {i}: {name}": partial(reported, name, changes) for i, (name, changes) in enumerate(REPORTS)}
    digits_of = product(map(decimal.Decimal, PRINTED), (".6g", ".0f"), (True, False))
    calls |= {f"printed {' '.join(map(str, each))}": partial(shown, *each) for each in digits_of}
    calls |= {f"a float above {x}": partial(lambda x: str(float_up(decimal.Decimal(x))), x) for x in PRINTED[:4]}
    calls |= {"maps": partial(maps_of, {}), "maps of elu": partial(maps_of, {"z.constants": {
        "function": "elu", "numbers": [3.7, -0.1, 1.1]}}), "large underflows": lambda: coarsely(partial(at_once,
        "lipsdp.TINY", 2.0**-9, EDGES["slope of a sum"]))}  # fmt: skip
    calls["an escaped text"] = partial(printable, "a\x1b\n\t")
    calls["a small GELU"] = lambda: str(sizes_at("gelu", np.array([-5e-324])))
    calls["sizes of matrices"] = lambda: " ".join(f"{absolute_norm(np.array(each)):.12g}"
        for each in ([[3.0, 5, 0], [4, 0, 2]], [[1.0, *[1e-7] * 4095]]))  # fmt: skip
    calls["the largest float"] = lambda: str(absolute_norm(np.full((1, 1), np.finfo(float).max)))
    calls |= {"change of no row": lambda: str(change_of([], None)), "caps": lambda: str(Promise("w", (9,), (*CAPPED,)))}
    calls["stored"] = lambda: str([Stored(kind, (2,), bytes(range(9, 9 + 2 * np.dtype(form).itemsize))).array().tolist()
        for kind, form in _KINDS.items()])  # fmt: skip
    calls["files in another order"] = partial(with_files, {"b.safetensors": TWO})
    calls |= {f"limit of files {i}": partial(edge, lambda x, limit=limit, files=files: with_files(files, limit, int(x)),
        0.0, 2.0**14) for i, (limit, files) in enumerate((("files._NESTED", {}), ("files._TEXT", {}), ("files._TEXT",
        {"b.safetensors": packed({"__metadata__": " " * 9999}, b"")})))}  # fmt: skip
    calls |= {"numbers": partial(those_read, int, Size, Offset, float, Positive), "a kept cap": partial(kept, 1.1)}
    calls |= {f"room {name}": partial(room, name) for name in MOVED}
    calls |= {f"limit {i}: {each}": partial(edge, partial(limited, name, each), 0.0, 4096.0)
        for i, (name, _, each, _) in enumerate(LIMITS)}  # fmt: skip
    calls |= {f"split {i}: {each[0]}": partial(at_once, *each) for i, each in enumerate(SPLIT)}
    return calls | {f"a fault {i}: {name}": partial(digits, name, changes) for i, (name, changes) in enumerate(FAULTS)}


if __name__ == "__main__":
    found = {name: call() for name, call in results().items()}
    BOUNDS_FILE.write_text(json.dumps(found, indent=0) + "\n")
