"""The door for JSON: `read` turns it into values of declared types, or raises a `CheckError` that says what is wrong.

Types are declared where the values are used: by the fields of a record, such as `Claim`, and by the keyword-only
parameters of a rule, a move or a measure. Nothing behind the door asks for a type again.
"""

import inspect
import math
import re
import reprlib
import sys
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from wellnormed.proof.decimals import decimals

Size = Annotated[int, "an integer from 1 to 2^40"]
"""A plain `int` may be 0."""
Offset = Annotated[int, "an integer from -2^40 to 2^40"]
Positive = Annotated[Decimal, "a positive number"]
"""A positive number, exactly. A plain `Decimal` is one that is not negative, from its digits in a string."""
Axes, Sizes = tuple[int, ...], tuple[Size, ...]
Test = Convert = Callable[[Any], Any]
Reader = Callable[[Any, str], Any]
"""A function of JSON and the words for it in a message, which returns a value of one type."""


class CheckError(ValueError):
    """The certificate is not proved; the message names the field, tensor, claim or row that failed, and the reason."""

    def __init__(self, sentence: object) -> None:
        """Escape the characters of the sentence that cannot be printed, such as a terminal's commands."""
        super().__init__(printable(str(sentence), kept=""))


def printable(text: str, kept: str = "\n\t") -> str:
    r"""Escape the characters of a text that cannot be printed, such as a terminal's commands, except those of `kept`.

    Example:
        >>> print(printable("a\x1b[2J b"))
        a\u{1b}[2J b
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c in kept else _escaped(c) for c in text)


def word(name: str) -> str:
    r"""Turn a name out of a file into one word of ASCII, with all but letters, digits and `_.#/-` escaped.

    Example:
        >>> print(word("blocks.0.linear#2"), word("any x"))
        blocks.0.linear#2 any\u{20}x
    """
    return re.sub(r"[^\w.#/-]", lambda match: _escaped(match[0]), name, flags=re.ASCII)


def _escaped(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"


def require(condition: bool, sentence: str) -> None:
    """Raise a `CheckError` unless a condition holds."""
    if not condition:
        raise CheckError(sentence)


def read(kind: Any, x: Any, what: str) -> Any:
    """Turn JSON into a value of a type.

    Args:
        kind: `bool`, `str`, `float`, `int`, `Decimal`, one of the types above, `Any`, a literal, a union, a tuple, a
            dictionary with strings as keys, an array of decimals, or the class of a record.
        x: Parsed JSON; tuples count as lists.
        what: What `x` is, for messages.

    Raises:
        CheckError: `x` is no such value; the message says what it must be, and what it is.

    Example:
        >>> read(tuple[Size, ...], [2, 3], "shape"), read(float, 1, "eps")
        ((2, 3), 1.0)
        >>> read(Size, True, "its number of parts")
        Traceback (most recent call last):
            ...
        wellnormed.proof.reading.CheckError: its number of parts must be an integer from 1 to 2^40, got True
    """
    return _reader(kind)(x, what)


def arguments(declared: Callable[..., Any], x: Any, what: str) -> dict[str, Any]:
    """Turn a JSON object into the keyword arguments that a record's class or a rule declares.

    Args:
        declared: The class, or a function whose keyword-only parameters are meant. All parameters are annotated; those
            with a default may be missing in `x`.
        x: Parsed JSON.
        what: What `x` is, for messages.

    Raises:
        CheckError: A field is unknown, missing, or of another type.
    """
    fields = _fields(declared)
    x = read(dict, x, what)
    for key in {**x, **fields}:
        if key not in fields or (key not in x and fields[key][1] is inspect.Parameter.empty):
            kind = "missing" if key in fields else f"unknown; known are {', '.join(fields) or 'none'}"
            raise CheckError(f"{reprlib.repr(key)} of {what} is {kind}")
    return {
        key: reader(x[key], f"{key} of {what}") if key in x else default for key, (reader, default) in fields.items()
    }


@cache
def _fields(declared: Callable[..., Any]) -> dict[str, tuple[Reader, Any]]:
    """Name -> reader and default of every field of a record, or of every keyword-only parameter of a function."""
    parameters = inspect.signature(declared, eval_str=True).parameters.values()
    fields = [each for each in parameters if isinstance(declared, type) or each.kind is each.KEYWORD_ONLY]
    return {each.name: (_reader(each.annotation), each.default) for each in fields}


@cache
def _reader(kind: Any) -> Reader:
    """The reader of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return partial(_simple, *_SIMPLE[kind])
    if origin is Literal:
        words, types = " or ".join(map(repr, inner)), tuple(map(type, inner))
        return partial(_simple, words, types, lambda x: x in inner, None)
    if origin in (Union, UnionType):
        return partial(_union, [_reader(each) for each in sorted(inner, key=lambda each: each is not type(None))])
    if origin is dict:
        return partial(_dictionary, _reader(inner[1]))
    if origin is tuple:
        return partial(_tuple, [_reader(each) for each in inner if each is not ...], inner[-1] is ...)
    return lambda x, what: kind(**arguments(kind, x, what))


def _simple(words: str, types: Any, fits: Test | None, convert: Convert | None, x: Any, what: str) -> Any:
    of_type = isinstance(x, types) and (type(x) is not bool or types in (bool, object))  # booleans are no numbers
    if not of_type or (fits is not None and not fits(x)):
        raise CheckError(f"{what} must be {words}, got {reprlib.repr(x)}")
    return x if convert is None else convert(x)


def _union(readers: list[Reader], x: Any, what: str) -> Any:
    *others, last = readers
    for reader in others:
        with suppress(CheckError):
            return reader(x, what)
    return last(x, what)


def _tuple(readers: list[Reader], of_any_length: bool, x: Any, what: str) -> tuple[Any, ...]:
    x = read(list, x, what)
    if of_any_length:
        return tuple([readers[0](each, what) for each in x])
    require(len(x) == len(readers), f"{what} must have {len(readers)} entries, got {len(x)}")
    return tuple([reader(each, what) for reader, each in zip(readers, x, strict=True)])


def _dictionary(reader: Reader, x: Any, what: str) -> dict[str, Any]:
    return {key: reader(each, what) for key, each in read(dict, x, what).items()}


def _array(*, shape: Sizes, values: tuple[Decimal, ...]) -> np.ndarray:
    require(math.prod(shape) == len(values), f"an array of shape {shape} must have {math.prod(shape)} values")
    return decimals(values).reshape(shape)


_DIGITS = re.compile(r"[0-9]+(\.[0-9]+)?(E[+-]?[0-9]{1,17})?")
_SIMPLE: dict[Any, tuple[str, Any, Test | None, Convert | None]] = {
    Any: ("", object, None, None), bool: ("true or false", bool, None, None), str: ("a string", str, None, None),
    type(None): ("null", type(None), None, None), list: ("a list", (list, tuple), None, None),
    dict: ("an object", dict, lambda x: {*map(type, x)} <= {str}, None),
    int: ("an integer from 0 to 2^40", int, lambda x: 0 <= x < 2**40, None),
    Size: (get_args(Size)[1], int, lambda x: 0 < x < 2**40, None),
    Offset: (get_args(Offset)[1], int, lambda x: -(2**40) <= x < 2**40, None),
    float: ("a finite number", (int, float), lambda x: abs(x) <= sys.float_info.max, float),
    Positive: (get_args(Positive)[1], (int, float), lambda x: 0 < x <= sys.float_info.max, lambda x: Decimal(float(x))),
    Decimal: ("the digits of a number", str, _DIGITS.fullmatch, Decimal),
    np.ndarray: ("an array of at most 2^20 decimals", dict, lambda x: len(x.get("values", "")) <= 2**20,
                 lambda x: _array(**arguments(_array, x, "an array"))),
}  # fmt: skip
"""Type -> what is of it, in words, as a type of Python and as a test; and what turns it into a value of that type."""
