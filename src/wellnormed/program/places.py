"""The place of a node or an error for messages: the operation, the user's module, and the line of its code."""

import contextlib
import re
import traceback
from pathlib import Path

import torch
from torch import fx

_FOREIGN = torch.__file__.removesuffix("__init__.py"), str(Path(__file__).parent), contextlib.__file__
"""Prefixes of paths that are not the model's code: torch, this package, and `with` blocks."""


def place(node: fx.Node) -> str:
    """Operation, module and line of the model behind a node."""
    frames = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_FOREIGN)]
    line = f" at {frames[-1][0]}:{frames[-1][1]} `{frames[-1][2].strip()}`" if frames else ""
    operation = str(node.target).removeprefix("aten.")
    return f"operation `{operation}` in module `{owner(node) or 'model'}`{line}"


def owner(node: fx.Node) -> str:
    """Path of the module whose `forward` executes a node; empty for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return shown(stack[-1][0]) if stack else ""


def shown(path: str) -> str:
    """A path in the user's model, without the name that the exporter's wrapper has for the model."""
    path = re.sub(r"^L\['self'\]\.?", "", str(path))
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else path


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, without the full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".")


def line_of(error: BaseException) -> str:
    """The innermost line of the traceback outside torch."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(("<", *_FOREIGN))]
    return f" at {own[-1]}" if own else ""
