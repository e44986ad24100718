"""A modular tree as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wellnormed.modular.tree import NormedModule

HEADER = ("module", "mass", "sensitivity", "share", "lr factor", "norm")


def draw(tree: "NormedModule") -> str:
    """One line for each node: mass, sensitivity, share of the mass, factor on the learning rate, norm.

    Data flows from the top down. The share is the part of the output's change that a node may cause in one step.
    """
    factors = tree.lr_factors()
    rows = [HEADER, *_rows(tree, tree.mass, factors, "", "")]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _rows(
    node: "NormedModule", total: float, factors: dict[str, float], first: str, rest: str
) -> Iterator[tuple[str, ...]]:
    leaf = [place for place in node.places() if not node.children]
    mass = f"{node.mass:.4g}" if leaf or node.mass else ""
    share = f"{node.mass / total:.2%}" if mass and total else ""
    norm, factor = (repr(leaf[0].norm), f"{factors[leaf[0].name]:.4g}") if leaf else ("", "")
    yield first + node.title, mass, f"{node.sensitivity:.4g}", share, factor, norm
    for i, child in enumerate(node.children):
        last = i == len(node.children) - 1
        yield from _rows(child, total, factors, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
