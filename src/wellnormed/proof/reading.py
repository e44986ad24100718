"""Readers of untrusted fields: each returns a checked value, or raises a `CheckError` that says what is wrong."""

import decimal
import re
import sys
from decimal import Decimal
from typing import Any


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
    return "".join(each if each.isprintable() or each in kept else _escaped(each) for each in text)


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


def of_type(x: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Return `x` if it has a type; booleans do not count as numbers."""
    fits = isinstance(x, kind) and (kind is bool or not isinstance(x, bool))
    require(fits, f"{what} is {str(x)[:60]!r}, which has the wrong type")
    return x


def field(mapping: Any, key: str, what: str) -> Any:
    """Return an entry of a dictionary, which must have it."""
    require(key in of_type(mapping, dict, what), f"{what} lacks {key!r}")
    return mapping[key]


def number(x: Any, what: str) -> float:
    """Return a finite number as a float."""
    of_type(x, (int, float), what)
    require(abs(x) <= sys.float_info.max, f"{what} is not finite, or too large")
    return float(x)


def integers(x: Any, what: str, low: int = 0) -> tuple[int, ...]:
    """Return a list of integers from `low` to 2^40 as a tuple."""
    numbers = tuple(of_type(each, int, what) for each in of_type(x, (list, tuple), what))
    require(all(low <= each < 2**40 for each in numbers), f"{what}={numbers} must be at least {low}, below 2^40")
    return numbers


def integer(x: Any, what: str, low: int = 0) -> int:
    """Return one integer from `low` to 2^40."""
    return integers([x], what, low)[0]


def texts(x: Any, what: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple."""
    return tuple(of_type(each, str, what) for each in of_type(x, (list, tuple), what))


def decimal_number(x: Any, what: str) -> Decimal:
    """Return a finite decimal that is not negative, from its string."""
    try:
        value = Decimal(of_type(x, str, what))
    except decimal.InvalidOperation as error:
        raise CheckError(f"{what} is {x[:60]!r}, which is no decimal") from error
    require(value.is_finite() and value >= 0, f"{what}={x[:60]} must be finite and not negative")
    return value
