"""The ways to cap singular values at 1 that `hardcap-stability` and `hardcap-cost` compare, and how they are drawn."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from papers import published_matrix
from papers._figures import draw_band
from wellnormed.matrix import spectral_hardcap

METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    name: partial(spectral_hardcap, upper=1.0, method=name)
    if name == "gram"
    else partial(published_matrix.clip, lower=None, upper=1.0, method=name)
    for name in ("nested", "block", "blockwise", "gram", "svd")
}
"""The methods of Spectral clipping (SC), of which "block" is dense and "blockwise" sparse; and the exact ones."""
STYLES = {
    "nested": ("#D55E00", "o-"), "block": ("#0072B2", "s-"), "blockwise": ("#56B4E9", "x--"),
    "gram": ("#009E73", "^-"), "svd": ("#000000", "+:"), "gram, far": ("#009E73", "v:"),
    "soft cap": ("#CC79A7", "D-"), "one product": ("#999999", ".-"),
}  # fmt: skip
"""Colours of Okabe and Ito, which all kinds of colour vision tell apart, and a marker each."""


def draw(axis: Any, points: Mapping[str, Iterable[tuple[float, float | None]]]) -> None:
    """Medians and extremes over the seeds by method, on logarithmic axes, without values of None or zero."""
    for method, (colour, style) in STYLES.items():
        values: dict[float, list[float]] = {}
        for x, y in points.get(method, ()):
            if y:
                values.setdefault(x, []).append(y)
        if values:
            values, look = dict(sorted(values.items())), {"color": colour, "fillstyle": "none"}
            draw_band(axis, values, style, middle=median, alpha=0.15, label=method, **look)
            axis.set(xscale="log", yscale="log")
