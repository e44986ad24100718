"""Mutants of the kernel: each lacks one check, or has one comparison, choice, rounding, number or operand replaced.

`within(mutant)` changes the code of one function in place, so that thousands of mutants need one process. (Public
tools for mutation start the tests anew for each, and know neither `require` nor margins for rounding.)

    python -m campaigns.mutants            # those that no document of `tests.proof.forged` notices, some hours
    python -m campaigns.mutants 1 3        # every third mutant, from the second on
"""

import ast
import copy
import decimal
import gc
import importlib
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

import wellnormed.proof
from tests.proof import forged
from wellnormed.proof import CheckError, decimals, reading

FOLDER = Path(wellnormed.proof.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
REASONS = json.loads(Path(forged.__file__).with_name("unnoticed.json").read_text(encoding="utf-8"))
UNNOTICED = {mutant for some in REASONS.values() for mutant in some}
"""The mutants of which no document needs to notice anything; the file says why."""
OPPOSITES = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
"""Comparison -> what takes its place: the one that differs at equality, and the opposite."""
OTHERS = {
    "min": "max", "max": "min", "all": "any", "any": "all", "maximum": "minimum", "minimum": "maximum",
    "root": "root_down", "roots": "roots_down", "rounding_up": "rounding_down",
}  # fmt: skip
"""Name of a function -> the one that takes its place."""
ARGUMENTS = {"least", "nextafter", "next_plus", "next_minus", "abs", "float_up", "root_down", "sorted"}
"""Functions of which each argument takes the place of the result."""


class Mutant(NamedTuple):
    """One change of one node of a module."""

    module: str
    line: int
    before: str
    after: str
    node: int
    change: int

    def __str__(self) -> str:
        return f"{self.module}: {self.before}  ->  {self.after}"


def rounding_down() -> Any:
    return decimal.localcontext(decimals.UP, rounding=decimal.ROUND_FLOOR)


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))


def changes(node: ast.AST) -> list[ast.AST]:
    """All nodes that take a node's place, one for each mutant."""
    match node:
        case ast.Raise() | ast.Expr(value=ast.Call(func=ast.Name(id="require"))):
            return [ast.If(ast.Constant(False), [node], [])]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="require_held"))):
            return [ast.Pass()]
        case ast.BoolOp(op, values):
            each = [values[:i] + values[i + 1 :] for i in range(len(values))]
            return [ast.BoolOp(op, some) if len(some) > 1 else some[0] for some in each]
        case ast.Compare(left, ops, comparators):
            swaps = [(i, other) for i, op in enumerate(ops) for other in OPPOSITES[type(op)]]
            return [ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], comparators) for i, other in swaps]
        case ast.Constant(int() as number) if number > 1:
            return [ast.Constant(number - 1)]
        case ast.Constant(float() as number) if number:
            return [ast.Constant(number / 2)]
        case ast.UnaryOp(ast.Not(), operand):
            return [operand]
        case ast.BinOp(left, ast.Add() | ast.Mult() | ast.Sub() | ast.Div() as op, right):
            return [left, right] if isinstance(op, ast.Add | ast.Mult) else [left]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as func, args=args):
            if name in OTHERS:
                new = copy.copy(func)
                setattr(new, "id" if isinstance(func, ast.Name) else "attr", OTHERS[name])
                return [ast.Call(new, args, node.keywords)]
            nothing = {"gamma": ast.Constant(0.0), "without_error": ast.parse("zero(0)", mode="eval").body}
            return [nothing[name]] if name in nothing else args if name in ARGUMENTS else []
    return []


def _nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """The nodes of functions, but for messages, annotations and defaults."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args", "exc") and not isinstance(tree, ast.Call):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.JoinedStr) or not isinstance(each, ast.AST):
                continue
            deeper = inside or isinstance(each, ast.FunctionDef | ast.Lambda)
            if deeper:
                yield each
            yield from _nodes(each, deeper)


def mutants() -> Iterator[Mutant]:
    """All mutants of the kernel, in the order of its lines."""
    for module in MODULES:
        for number, node in enumerate(_nodes(parsed(module))):
            for change, new in enumerate(changes(node)):
                before, after = ast.unparse(node), "dropped" if isinstance(new, ast.If) else ast.unparse(new)
                yield Mutant(module, node.lineno, before, after, number, change)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The outermost functions of a module's code, and those of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from [each] if each.co_flags & CO_OPTIMIZED else _functions(each)


@cache
def _living() -> dict[CodeType, list[FunctionType]]:
    """Code -> the functions of the kernel that have it."""
    for module in MODULES:
        names = vars(importlib.import_module(f"wellnormed.proof.{module}"))
        down = decimals.root_down
        names |= {"root_down": down, "roots_down": np.frompyfunc(down, 1, 1), "rounding_down": rounding_down}
        names["zero"] = decimal.Decimal
    found: dict[CodeType, list[FunctionType]] = {}
    gc.unfreeze()  # the collector lists no objects that were set aside
    for each in gc.get_objects():
        if type(each) is FunctionType and str(each.__module__).startswith("wellnormed.proof."):
            found.setdefault(each.__code__, []).append(each)
    return found


class _Replaced(ast.NodeTransformer):
    """A tree with one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


@cache
def _codes(module: str) -> list[CodeType]:
    return [*_functions(compile(parsed(module), str(FOLDER / f"{module}.py"), "exec"))]


def _forget() -> None:
    """Let the kernel read the declared types anew."""
    for each in (reading._reader, reading._fields):
        each.cache_clear()


@contextmanager
def within(mutant: Mutant) -> Iterator[str]:
    """Run a `with` block with a mutant in the place of the kernel; gives the name of the changed function."""
    living, tree = _living(), copy.deepcopy(parsed(mutant.module))
    node = next(islice(_nodes(tree), mutant.node, None))
    tree = ast.fix_missing_locations(_Replaced(node, changes(node)[mutant.change]).visit(tree))
    new = _functions(compile(tree, str(FOLDER / f"{mutant.module}.py"), "exec"))
    pairs = [(a, b) for a, b in zip(_codes(mutant.module), new, strict=True) if a != b]
    changed = [(each, a, b) for a, b in pairs for each in living[a]]
    try:
        for each, _, b in changed:
            each.__code__ = b
        _forget()
        yield pairs[0][0].co_qualname if pairs else ""
    finally:
        for each, a, _ in changed:
            each.__code__ = a
        _forget()


@cache
def _checks() -> dict[tuple[str, int], Mutant]:
    """File and line -> the mutant that lacks the check there."""
    dropped = [each for each in mutants() if each.after == "dropped"]
    ends = {each: next(islice(_nodes(parsed(each.module)), each.node, None)).end_lineno for each in dropped}
    return {(each.module, line): each for each, end in ends.items() for line in range(each.line, end + 1)}


def checks_of(error: BaseException | None) -> list[Mutant]:
    """The checks of the kernel that an error came from or went through, each as the mutant that lacks it."""
    found: list[Mutant] = []
    while error is not None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).parent == FOLDER]
        places = [(Path(each.filename).stem, each.lineno) for each in frames]
        found += [_checks()[each] for each in places if each in _checks()]
        error = error.__cause__
    return found


def _same(call: Callable[[], str], expected: str) -> None:
    assert call() == expected


def _refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except CheckError as error:
        if re.search(words, str(error)):
            return
    raise AssertionError


WITNESSES = {
    **{name: partial(_same, call, call()) for name, call in forged.results().items()},
    **{f"{i} {words}": partial(_refused, call, words) for i, (words, call) in enumerate(forged.CASES)},
    **{f"{i} partly": partial(_refused, call, words) for i, (words, call) in enumerate(forged.PARTS)},
}
"""Name -> a function that raises where a valid document is refused or bounded otherwise, or a forgery is accepted or
refused in other words."""


@cache
def _reached() -> dict[tuple[str, str], list[str]]:
    """File and function -> the witnesses that call it, the fastest first."""
    reached: dict[tuple[str, str], list[str]] = {}
    seconds = dict.fromkeys(WITNESSES, 0.0)
    for name, witness in WITNESSES.items():
        called: set[CodeType] = set()
        _forget()
        seconds[name] -= time.process_time()
        sys.setprofile(lambda frame, *_, called=called: called.add(frame.f_code))
        witness()
        sys.setprofile(None)
        seconds[name] += time.process_time()
        for file, function in {(c.co_filename, c.co_qualname.partition(".<locals>")[0]) for c in called}:
            reached.setdefault((Path(file).stem, function), []).append(name)
    return {function: sorted(names, key=seconds.__getitem__) for function, names in reached.items()}


def _stopped(*_: Any) -> None:
    raise TimeoutError


def noticed(mutant: Mutant) -> str:
    """The name of a witness that notices a mutant, or with which a loop of it has no end; nothing if none does."""
    reached = _reached()
    signal.signal(signal.SIGALRM, _stopped)
    with within(mutant) as function:
        names = reached.get((mutant.module, function), [])
        for place, name in enumerate(names):
            try:
                signal.setitimer(signal.ITIMER_REAL, 60, 1)  # again, as witnesses may catch what ends a loop
                WITNESSES[name]()
            except Exception:
                names.insert(0, names.pop(place))  # neighbours of a mutant are often noticed by the same witness
                return name
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


if __name__ == "__main__":
    start, step = map(int, sys.argv[1:] or (0, 1))
    every = [*mutants()][start::step]
    left = [each for each in every if str(each) not in UNNOTICED and not noticed(each) and not print(each, flush=True)]
    print(f"{len(every) - len(left)} of {len(every)} are noticed or listed")
