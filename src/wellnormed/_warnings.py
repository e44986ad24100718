"""Warnings that point to the user's line, skipping all calls of this package, of torch, and of its decorators."""

import sys
import warnings


def warn(message: str) -> None:
    """Warn at the innermost call that comes neither from this package nor from torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in ("wellnormed", "torch", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
