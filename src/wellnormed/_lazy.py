"""Lazy package namespaces, so that importing `wellnormed` costs nothing until a name is used.

The command line prints its help without importing torch; `wn.certify` and its siblings load on first use.
"""

import importlib
from collections.abc import Callable
from typing import Any


def lazy_namespace(package: str, names: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module-level `__getattr__` and `__dir__` (PEP 562) of a package whose public names load on demand.

    `names` maps every public name to the module that defines it, and to "" if it is a submodule itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = names[name]
        if not home:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(home, package), name)

    def __dir__() -> list[str]:
        return sorted(names)

    return __getattr__, __dir__
