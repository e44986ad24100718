"""Warnings that point to the user's line, skipping all calls of this package, of torch, and of its decorators."""

import sys
import warnings


def warn(message: str) -> None:
    """Warn at the innermost call that comes neither from this package nor from torch."""
    level, frame, ours = 2, sys._getframe(1), ("wellnormed", "torch", "contextlib")
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
