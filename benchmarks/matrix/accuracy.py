"""Spectral error of every function and method on the published suite, against a float64 SVD of the same input.

Errors are over the largest singular value of the input (of `msign`: 1). Exact methods of `msign` are held to the polar
factor; polynomial ones to their set's own polynomial at the float64 singular values, with the same normalisation.

    python -m benchmarks.matrix.accuracy
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from papers import published_matrix
from wellnormed.matrix import (
    REGISTRY,
    msign,
    soft_cap,
    soft_cap_strength,
    spectral_clip,
    spectral_clipped_weight_decay,
    spectral_hardcap,
    spectral_normalize,
    spectral_relu,
)
from wellnormed.matrix.soft_cap import SOFT_CAP_LIMIT

from .inputs import Case, shown, suite
from .record import finite, write
from .reference import Reference, polynomial, soft_capped, spectral_norm

LIMITS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Demanded of default methods: error over the largest singular value."""
EXCESS = 5e-6
"""Demanded of default methods in float32: relative excess of the result over the cap."""
FLOOR, DECAY = 0.3, 0.5
PUBLISHED = ("nested", "block", "blockwise")
PUBLISHED_SIDE = 800
"""The published methods run where m + n is at most this, to save minutes."""

Contender = tuple[str, str, bool, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Function, method, whether the result is capped, the function, the reference of the singular values."""


def contenders(cap: float, ratio: float, methods: bool) -> Iterator[Contender]:
    """The functions to run on a matrix.

    Args:
        cap: Upper bound.
        ratio: Largest singular value over it.
        methods: Every method, or the default alone.
    """
    floor = FLOOR * cap
    for method in ("auto", *published_matrix.CLIPS) if methods else ("auto",):
        published = partial(published_matrix.clip, method=method)
        hardcap, clip, relu = (
            (partial(spectral_hardcap, upper=cap), partial(spectral_clip, lower=floor, upper=cap),
             partial(spectral_relu, lower=floor))
            if method == "auto" else
            (partial(published, lower=None, upper=cap), partial(published, lower=floor, upper=cap),
             partial(published, lower=floor, upper=None))
        )  # fmt: skip
        yield "spectral_hardcap", method, True, hardcap, lambda s: s.clamp_max(cap)
        yield "spectral_clip", method, True, clip, lambda s: s.clamp(floor, cap)
        yield "spectral_relu", method, False, relu, lambda s: s.clamp_min(floor)
    decay = partial(spectral_clipped_weight_decay, upper=cap, decay=DECAY)
    yield "spectral_clipped_weight_decay", "auto", False, decay, lambda s: s - DECAY * (s - cap).clamp_min(0)
    yield "spectral_normalize", "auto", True, partial(spectral_normalize, upper=cap), \
        lambda s: s * min(1.0, cap / s[0].item())  # fmt: skip
    if 1 < ratio <= SOFT_CAP_LIMIT:  # beyond, no strength is known to hold
        strength = soft_cap_strength(cap, (ratio - 1) * cap)
        yield "soft_cap", "auto", True, partial(soft_cap, strength=strength), partial(soft_capped, strength)
    for name in ("polar-express-8", "jordan-5"):
        own = partial(polynomial, REGISTRY[name])
        yield f"msign {name}", "auto", False, partial(msign, coefficients=name), own
        if methods:
            yield f"msign {name}", "gram", False, partial(published_matrix.gram, coefficients=name), own
    if methods:
        yield "msign exact", "svd", False, partial(msign, method="svd"), torch.ones_like
        yield "msign exact", "eigh", False, published_matrix.eigh, torch.ones_like
        yield "msign exact", "inverse-root", False, published_matrix.inverse_root, torch.ones_like


def measure(case: Case, dtype: torch.dtype) -> Iterator[dict]:
    """One row per function and method that applies to the case."""
    w = case.make(*case.shape).to(dtype)
    reference = Reference(w)
    small = sum(case.shape) <= PUBLISHED_SIDE
    for function, method, capped, call, expected in contenders(
        case.cap, reference.norm / case.cap, methods=dtype == torch.float32
    ):
        if method in PUBLISHED and not small:
            continue
        value = call(w)
        error = finite(reference.error(value, expected, 1.0 if function.startswith("msign") else None))
        excess = finite(spectral_norm(value.double() / case.cap) - 1) if capped else None
        holds = error is not None and error <= LIMITS[dtype]
        if capped and dtype == torch.float32:
            holds = holds and excess is not None and excess <= EXCESS
        yield {
            "function": function,
            "method": method,
            "case": case.name,
            "shape": shown(case.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "error": error,
            "excess": excess,
            "holds": holds,
        }


def summary(rows: list[dict]) -> list[dict]:
    """Per function, method and dtype: the worst case, and how many miss what is demanded of default methods."""
    groups: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["function"], row["method"]), []).append(row)
    result = []
    for (dtype, function, method), members in groups.items():
        worst = max(members, key=lambda row: float("inf") if row["error"] is None else row["error"])
        excesses = [row["excess"] for row in members if row["excess"] is not None]
        result.append(
            {
                "function": function,
                "method": method,
                "dtype": dtype,
                "cases": len(members),
                "missed": sum(not row["holds"] for row in members),
                "worst_error": worst["error"],
                "worst_case": f"{worst['case']}, {worst['shape']}",
                "worst_excess": max(excesses, default=None),
            }
        )
    return result


def run(cases: list[Case]) -> dict:
    """All rows and their summary."""
    rows = [row for dtype in LIMITS for case in cases for row in measure(case, dtype)]
    return {"limits": {str(k).removeprefix("torch."): v for k, v in LIMITS.items()}, "excess_limit": EXCESS,
            "summary": summary(rows), "rows": rows}  # fmt: skip


def main() -> None:
    """Measure the suite, write it, and print the worst cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = run(suite())
    for row in results["summary"]:
        error = "not finite" if row["worst_error"] is None else f"{row['worst_error']:.1e}"
        print(f"{row['dtype']:9}{row['function']:30} {row['method']:14} {error:>10} "
              f"{row['missed']:3} of {row['cases']:3} missed; worst: {row['worst_case']}")  # fmt: skip
    write("accuracy", "python -m benchmarks.matrix.accuracy", results)


if __name__ == "__main__":
    main()
