"""Lazy package namespaces, so that importing `wellnormed` costs nothing until a name is used.

The command line prints its help without importing torch; `wn.certify` and its siblings load on first use.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_namespace(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module-level `__getattr__` and `__dir__` (PEP 562) of a package whose public names load on demand.

    The names are those that the package imports under `if TYPE_CHECKING:`, from their full modules. So type checkers
    read the same lines.
    """
    loader = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    blocks = [each for each in ast.parse(loader.get_source(package)).body if isinstance(each, ast.If)]  # type: ignore[union-attr]
    homes = {alias.name: node.module for block in blocks for node in block.body for alias in node.names}  # type: ignore[union-attr]

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    def __dir__() -> list[str]:
        return sorted(homes)

    return __getattr__, __dir__
