"""Ranges of numbers that users choose, each with its words. Free of torch, so that a command line reads it quickly.

No range contains NaN.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """A test of whether a number lies in the range, and the end of a sentence that begins with "x must"."""

    holds: Callable[[Any], bool]
    must: str


POSITIVE = Range(lambda x: 0 < x < math.inf, "be positive and finite")
NOT_NEGATIVE = Range(lambda x: 0 <= x < math.inf, "be finite and not negative")
FINITE = Range(lambda x: abs(x) < math.inf, "be finite")
SHARE = Range(lambda x: 0 <= x <= 1, "lie in [0, 1]: it is a share")
KEPT = Range(lambda x: 0 <= x < 1, "lie in [0, 1): it is the fraction kept")
PART = Range(lambda x: 0 < x <= 1, "lie in (0, 1]: it is a share, and not zero")
