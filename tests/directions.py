"""The directions of docs/directions.md, as its blocks define them, and what its table says of each."""

import ast
import contextlib
import io
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import wellnormed as wn
from docs.run_examples import code_of

PAGE = Path(__file__).parents[1] / "docs" / "directions.md"
_CODE = "\n".join(code_of(PAGE))


def _page() -> types.ModuleType:
    """The page as a module, as a user's classes lie in one; `torch.compile` and pickle look it up by name."""
    module = sys.modules["directions_page"] = types.ModuleType("directions_page")
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(_CODE, str(PAGE), "exec"), module.__dict__)
    return module


page = _page()


@dataclass(frozen=True)
class Case:
    """A row of the page's table: how its optimizer is made for a weight named `weight`.

    `gain` is the largest factor beyond the oracle's norm, for a shape, in the norm's unit; None for none.
    """

    direction: wn.optim.Direction | None = None
    keeps: bool = False
    gain: Callable[[int, int], float] | None = None
    units: str = "rms"
    settings: dict[str, Any] = field(default_factory=dict)
    constraint: wn.constraints.Constraint | None = None
    heads: int = 1

    def optimizer(self, model, lr=0.1, method="svd", **settings):
        norm = wn.Spectral(method=method, units=self.units)
        norm = norm if self.heads == 1 else wn.norms.PerHead(self.heads, norm)
        directions = {} if self.direction is None else {"*": self.direction}
        settings = {"momentum": 0.95, "nesterov": True, "directions": directions, **self.settings, **settings}
        norms = wn.assign_norms(model, overrides={"*": norm})
        optimizer = wn.optim.ConditionalGradient(norms, lr, **settings)
        return optimizer, wn.constrain(optimizer, {"*": self.constraint}) if self.constraint else None


def one(rows, columns):
    return 1.0


CASES = {
    "MuonEq": Case(page.MuonEq(), True, one, "match-rms-adamw", {"weight_decay": 0.1}),
    "SOAP-Muon": Case(page.SoapMuon(every=2), True, one, "pixels"),
    "Spectral sphere": Case(page.Tangent(), True, one, constraint=wn.constraints.Sphere(1.0)),
    "MuonSphere": Case(None, True, one, constraint=wn.constraints.Sphere(1.0)),
    "Per-head Muon": Case(None, True, one, "match-rms-adamw", {"weight_decay": 0.1, "nesterov": False}, heads=2),
    "NorMuon": Case(
        wn.optim.directions.NorMuon(), False, lambda m, n: min(m, n) ** 0.5, "pixels", {"weight_decay": 0.025}
    ),
    "Hyperball, MuonH": Case(page.Relative(), constraint=wn.constraints.FixedNorm(frobenius=True)),
    "Radial brake": Case(page.RadialBrake(inward=0.75)),
}
OWN = {name: case for name, case in CASES.items() if case.direction is not None}


def table() -> dict[str, list[str]]:
    """The rows of the page's table by name: lines, label, gain, source."""
    row = re.compile(r"^\| \[(.*?)\]\(.*?\) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
    rows = row.findall(PAGE.read_text(encoding="utf-8"))
    return {name: rest for name, *rest in rows}


def lines_of(name: str) -> int:
    """Lines of a class on the page with its decorators, without blank ones; the text around it is its docstring."""
    [node] = [n for n in ast.parse(_CODE).body if isinstance(n, ast.ClassDef) and n.name == name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    held = _CODE.splitlines()[first - 1 : node.end_lineno]
    assert not any(ast.get_docstring(n) for n in ast.walk(node) if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return len([line for line in held if line.strip()])
