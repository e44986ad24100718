"""Capture what a model executes: the graph of its tensor operations, and checks that it is the whole truth.

`torch.export` records operations while the model runs on fake tensors, with parameters as inputs. What it cannot see
is checked afterwards: that nothing stored changed, and that the model, left alone, executes the operations of the graph
and computes what it computes, call after call, with and without gradients.
"""

import contextlib
import copy
import inspect
import operator
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellnormed.propagation import operations as operations  # registers the bounds of operations
from wellnormed.propagation.dependence import LOOKUPS, dependence
from wellnormed.propagation.errors import UncertifiableError
from wellnormed.propagation.operations.movement import MOVES
from wellnormed.propagation.registry import OPERATIONS, name_of

_TORCH = torch.__file__.removesuffix("__init__.py")


@dataclass(frozen=True, eq=False)
class Captured:
    """The executed operations of one call."""

    program: ExportedProgram
    stored: dict[str, tuple[str, Tensor, bool]]
    """Placeholder -> the model's name of a tensor, the tensor, and whether the model's state dict has it."""
    inputs: dict[str, tuple[str, Tensor]]
    """Placeholder -> name of an input, and the example."""
    example: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments and keywords of the call."""

    @property
    def nodes(self) -> list[fx.Node]:
        """In order of execution."""
        return list(self.program.graph.nodes)


class _Selecting(nn.Module):
    """The model with one tensor as its result."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        if not isinstance(self.model, fx.GraphModule):
            return select(self.model(*arguments, **keywords), self._output)
        # run node by node, its operations keep the places that they were captured at
        inputs = inspect.signature(self.model.forward).bind(*arguments, **keywords).args
        with fx.traceback.preserve_node_meta():
            return select(fx.Interpreter(self.model).run(*inputs), self._output)


def select(result: Any, output: Any) -> Tensor:
    """One tensor of what a model returns: by key, attribute or position, or the only one."""
    if output is not None:
        try:
            if isinstance(output, int):
                result = tuple(result.values() if isinstance(result, Mapping) else result)[output]
            else:
                result = result[output] if isinstance(result, Mapping) else getattr(result, output)
        except (LookupError, AttributeError, TypeError) as error:
            raise UncertifiableError(f"output={output!r} is nothing that the model returns ({error})") from error
    if isinstance(result, Mapping):
        result = tuple(result.values())
    while isinstance(result, list | tuple) and len(result) == 1:
        (result,) = result
    if not isinstance(result, Tensor):
        kind = type(result).__name__
        if isinstance(result, list | tuple):
            kind = f"{kind} of {', '.join(type(each).__name__ for each in result)}"
        raise UncertifiableError(f"the model returns a {kind}; pass output=, a key, a name or a position of one tensor")
    return result


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example input as arguments and keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def capture(model: nn.Module, example: Any, output: Any = None) -> Captured:
    """The operations that a model executes on an example. `confirm` checks that they are the whole truth.

    Args:
        model: Any module; it is left as it was.
        example: A tensor, a tuple of arguments, or a dictionary of keywords.
        output: Key, attribute or position of the result, where the model returns several.

    Raises:
        UncertifiableError: The model cannot be captured.
        ValueError: The example has entries that are not finite.

    Example:
        >>> captured = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))
        >>> [str(node.target) for node in captured.nodes if node.op == "call_function"]
        ['aten.linear.default', 'aten.relu.default']
        >>> [name for name, _, _ in captured.stored.values()]
        ['0.weight', '0.bias']
    """
    _refuse_hooks()
    # copies, so that a tensor that is given twice counts as two
    arguments, keywords = _map(lambda each: each.detach().clone(), arguments_of(example))
    for each in _tensors((arguments, keywords)):
        if each.is_floating_point() and not bool(torch.isfinite(each).all()):
            raise ValueError("example_input has entries that are not finite; pass an input that the model is used with")
    with _quiet(), _restoring(_State(model)):
        return _export(model, arguments, keywords, output)


def confirm(
    model: nn.Module,
    captured: Captured,
    output: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Captured], set[str]]:
    """Check that a model does what was captured, always.

    `progress` is told how many steps are done, and of how many.

    Returns:
        If the model can be captured for a batch of any size, the same for twice the batch, and for a batch of one,
        otherwise nothing; and the names of inputs whose integers are as in the example, but for what they look up.

    Raises:
        UncertifiableError: The model does something that its captured operations do not show.
    """
    arguments, keywords = captured.example
    state = _State(model)
    with _quiet(), _restoring(state):
        fixed = _require_same_values(model, captured, arguments, keywords, output)
        state.restore()
        progress(1, 4)
        found = _other_batches(model, arguments, keywords, output, progress)
        progress(4, 4)
        return found, fixed


def capture_any_batch(model: nn.Module, captured: Captured, output: Any = None) -> Captured | None:
    """The operations for a batch of any size, with twice the batch as the example; None if the code depends on it."""
    with _quiet(), _restoring(_State(model)):
        return _any_batch(model, *captured.example, output)


def _any_batch(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Captured | None:
    tensors = _tensors((arguments, keywords))
    if len({t.shape[0] if t.ndim > 1 else None for t in tensors} | {None}) != 2 or any(t.ndim < 2 for t in tensors):
        return None
    twice = _map(lambda each: torch.cat([each, each.flip(-1)]), (arguments, keywords))
    batch = torch.export.Dim.DYNAMIC
    axes = torch.utils._pytree.tree_map(
        lambda each: {0: batch} if isinstance(each, Tensor) else None, (tuple(twice[0]), twice[1])
    )
    try:
        symbolic = _export(model, twice[0], twice[1], output, axes)
    except UncertifiableError:
        return None
    return symbolic if all(_always_holds(guard) for guard in _guards(symbolic)) else None


def _other_batches(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    output: Any,
    progress: Callable[[int, int], None],
) -> list[Captured]:
    symbolic = _any_batch(model, arguments, keywords, output)
    if symbolic is None:
        return []
    progress(2, 4)
    others = [symbolic.example]
    if len(_tensors((arguments, keywords))[0]) > 1:  # which a capture for any size leaves out
        others.append(_map(lambda each: each[:1], (arguments, keywords)))
    found = [_export(model, each[0], each[1], output) for each in others]
    progress(3, 4)
    for each, other in zip(others, found, strict=True):
        _require_same_values(model, other, each[0], each[1], output)
    return found


def _export(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any, shapes: Any = None
) -> Captured:
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Selecting(model, output), (arguments, keywords), strict=False, dynamic_shapes=shapes
            )
    except UncertifiableError:
        raise
    except Exception as error:  # the exporter raises whatever the model's own code raises on a fake tensor
        raise UncertifiableError(
            f"{type(model).__name__} cannot be captured{_line(error)}: {_first_line(error)}. Control flow may not "
            "depend on values of the input"
        ) from error
    signature = program.graph_signature
    _refuse_overwriting(program)
    persistent = model.state_dict(keep_vars=True)
    stored: dict[str, tuple[str, Tensor, bool]] = {}
    inputs: dict[str, tuple[str, Tensor]] = {}
    given = iter(_leaves((arguments, keywords)))
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.target is not None:
            tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            if not isinstance(tensor, Tensor):
                raise UncertifiableError(f"it uses {spec.target}, which is no tensor")
            path = shown(spec.target)
            stored[name] = (path, tensor, path in persistent)
        else:
            value = next(given)
            if isinstance(value, Tensor):
                inputs[name] = (_argument(model, name), value)
    return Captured(program, stored, inputs, (arguments, keywords))


def _guards(symbolic: Captured) -> list[Any]:
    """What a capture for a batch of any size found the model's Python code to ask of the size."""
    for node in symbolic.nodes:
        if isinstance(value := node.meta.get("val"), Tensor) and hasattr(value, "fake_mode"):
            environment = value.fake_mode.shape_env
            return [guard.expr for guard in environment.guards] + list(symbolic.program.range_constraints.items())
    return [False]


def _always_holds(guard: Any) -> bool:
    """Whether a condition on the size of the batch holds for every size from 2 on.

    It is asked of all sizes below 200, and may have no number above 64: what is periodic or monotone is found out.
    """
    if isinstance(guard, tuple):
        _, limits = guard
        return bool(limits.lower <= 2 and limits.upper > 10**9)
    numbers = [abs(int(each)) for each in guard.atoms() if each.is_Integer]
    # the sizes of the inputs' first axes, which are the same; sizes that depend on values begin with u
    sizes = guard.free_symbols
    if not sizes:
        return bool(guard)
    return (
        all(str(size).startswith("s") for size in sizes)
        and max(numbers, default=0) <= 64
        and all(bool(guard.subs(dict.fromkeys(sizes, n))) for n in range(2, 200))
    )


def _argument(model: nn.Module, placeholder: str) -> str:
    """The name of an argument of the model."""
    kind, _, name = placeholder.partition("_")
    if kind == "keywords":
        return name
    named = list(inspect.signature(model.forward).parameters)
    return named[int(name)] if name.isdigit() and int(name) < len(named) else name


def _refuse_overwriting(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            what = "the input" if spec.kind.name == "USER_INPUT_MUTATION" else shown(spec.target or "a tensor")
            raise UncertifiableError(
                f"it overwrites {what} while it runs; write its result elsewhere, or call `model.eval()` if it is a "
                "running statistic"
            )


@cache
def _taken_apart() -> dict[Any, Any]:
    table = torch.export.default_decompositions()
    return {operation: rule for operation, rule in table.items() if name_of(operation) not in OPERATIONS}


def _is_plain(captured: Captured) -> bool:
    """Whether no operation overwrites anything, and all that depend on the input have bounds as they are."""
    variable = dependence(captured.nodes, captured.inputs).variable
    for node in captured.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
                return False
            if node in variable and name_of(node.target) not in OPERATIONS:
                return False
    return True


def decomposed(captured: Captured) -> Captured:
    """The same operations without mutation; those without a bound, such as recurrent layers, as their parts."""
    return captured if _is_plain(captured) else _decomposed(captured, _taken_apart())


def _decomposed(captured: Captured, table: dict[Any, Any]) -> Captured:
    try:
        with _quiet():
            program = captured.program.run_decompositions(dict(table))
    except RuntimeError as error:  # of tensors that are overwritten although nothing registers them
        raise UncertifiableError(f"the model cannot be captured: {_first_line(error)}") from error
    _refuse_overwriting(program)  # what overwrites is known only without mutation
    return replace(captured, program=program)


def functional(captured: Captured) -> Captured:
    """The same operations, without mutation."""
    operations = [node.target for node in captured.nodes if node.op == "call_function"]
    if not any(isinstance(each, torch._ops.OpOverload) and each._schema.is_mutable for each in operations):
        return captured
    return _decomposed(captured, {})


class _Recording(TorchDispatchMode):
    """Notes which operations are executed on what depends on the certified variable, but for moves and shifts.

    A function that differs only by moves of entries, or by constants that are added, gives other values at the example.
    The variable is the floats among named tensors, and what the integers among them look up. Whose integers are used
    otherwise, as in masks, or read by code, is noted in `fixed`: they are as in the example.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.executed: list[str] = []
        self.fixed: set[str] = set()
        self._dependent = {id(each): each for _, each in named if each.is_floating_point()}
        self._integers = {id(each): (each, {name}) for name, each in named if not each.is_floating_point()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(str(func).removeprefix("aten.").partition(".")[0], _tensors((args, kwargs)), _tensors(result))
        return result

    def note(self, packet: str, given: list[Tensor], found: list[Tensor]) -> None:
        """An operation, and what it was given and gave; tensors are kept, so that no other gets the number of one."""
        names: set[str] = set().union(*(self._integers[id(each)][1] for each in given if id(each) in self._integers))
        depends = any(id(each) in self._dependent for each in given)
        if depends or packet in _READING:
            self.fixed |= names
        if depends or (
            names and packet in LOOKUPS and given[0].is_floating_point() and id(given[0]) not in self._integers
        ):
            shifts = packet in ("add", "add_") and sum(id(each) in self._dependent for each in given) == 1 < len(given)
            self._dependent |= {id(each): each for each in found}
            if packet not in MOVES and not shifts:
                self.executed.append(packet)
        elif names:
            self._integers |= {id(each): (each, names) for each in found}


_READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "numpy", "tolist", "__array__", "__dlpack__")
"""Operations that carry values of tensors into Python."""


class _Reading(TorchFunctionMode):
    """Notes the methods among them, which execute no operation."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            self._recording.note(name, _tensors((args, kwargs)), [])
        return func(*args, **(kwargs or {}))


def _require_same_values(
    model: nn.Module, captured: Captured, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
) -> set[str]:
    """Refuse a model that executes something else than its captured graph: other operations, or other values.

    Returns the names of inputs whose integers are used for more than looking up.
    """
    program = captured.program.module(check_guards=False)
    state: _State | None = None
    fixed: set[str] = set()
    names = [name for name, _ in captured.inputs.values()]
    for grad, required in ((True, True), (True, False), (False, False), (True, True)):
        inputs = _map(
            lambda each, r=required: each.detach().clone().requires_grad_(r and each.is_floating_point()),
            (arguments, keywords),
        )
        with torch.set_grad_enabled(grad):
            named = list(zip(names, _tensors(inputs), strict=True))
            with _Recording(named) as ours:
                expected = program(*inputs).detach()
            with _Recording(named) as theirs, _Reading(theirs):
                found = select(model(*inputs[0], **inputs[1]), output).detach()
        fixed |= ours.fixed | theirs.fixed
        # a first call may fill caches; after it nothing may change
        before, state = state, _State(model)
        if before is not None:
            before.require(state)
        # without gradients torch may choose fused kernels, which are other operations for the same function
        if (grad and ours.executed != theirs.executed) or any(name in theirs.executed for name in _READING):
            pairs = zip_longest(ours.executed, theirs.executed, fillvalue="nothing")
            wanted, executed = next((pair for pair in pairs if pair[0] != pair[1]), ("no such operation", _READING[0]))
            raise UncertifiableError(
                f"{type(model).__name__} executes `{executed}` where its captured graph has `{wanted}`: it looks at "
                "values of the input, or at whether it is captured; let it always do the same"
            )
        # half of the digits: fused and plain kernels differ by rounding, another function by more
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
        size = float(expected.abs().max()) if expected.numel() else 0.0
        if found.shape != expected.shape or not bool(((found - expected).abs() <= tolerance * size).all()):
            raise UncertifiableError(
                f"{type(model).__name__} does not compute what was captured: its result depends on something else than "
                "its input and its stored tensors, such as randomness, a call before, or whether gradients are recorded"
            )
    return fixed


class _State:
    """What a model holds at a moment: attributes, what is in them, and the bits of its tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name or "model" for name, module in model.named_modules()}
        self.contents = {module: _contents(vars(module)) for module in self.names}
        everything = [each for contents in self.contents.values() for each in contents]
        self.tensors = {
            id(t): (t, t.detach().clone(), t.requires_grad, t.grad) for t in everything if isinstance(t, Tensor)
        }
        self.containers = {id(c): (c, copy.copy(c)) for c in everything if isinstance(c, dict | list | set)}
        self.draws = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (models draw from it)

    def require(self, after: "_State") -> None:
        """Refuse a model that is in another state after a run."""
        for module, name in self.names.items():
            before, now = self.contents[module], after.contents.get(module, [])
            if len(before) != len(now) or not all(map(_same, before, now)):
                raise UncertifiableError(
                    f"module `{name}` changes its attributes while it runs; a certificate is of one function, so keep "
                    "what `forward` uses constant"
                )
            for tensor in before:
                if isinstance(tensor, Tensor) and not _same_bits(tensor, self.tensors[id(tensor)][1]):
                    raise UncertifiableError(
                        f"module `{name}` overwrites a tensor while it runs; write its result elsewhere"
                    )
        same_draws = torch.equal(self.draws[0], after.draws[0]) and self.draws[1] == after.draws[1]
        if not same_draws or str(self.draws[2]) != str(after.draws[2]):
            raise UncertifiableError("it draws random numbers; call `model.eval()`, and take noise out")

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self.draws[0])
        random.setstate(self.draws[1])
        np.random.set_state(self.draws[2])  # noqa: NPY002
        for container, content in self.containers.values():
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for tensor, content, requires_grad, grad in self.tensors.values():
            with torch.no_grad():
                if not _same_bits(tensor, content):
                    tensor.copy_(content)
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            tensor.grad = grad


@contextlib.contextmanager
def _restoring(state: _State) -> Iterator[None]:
    try:
        yield
    finally:
        state.restore()


def _contents(x: Any, seen: set[int] | None = None) -> list[Any]:
    """An object and all that it holds, but for other modules: containers, objects, tensors, numbers."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return []
    if isinstance(x, dict):
        held = [*x.keys(), *x.values()]
    elif isinstance(x, list | tuple | set | frozenset):
        held = list(x)
    elif isinstance(x, Tensor | nn.Module | type | ModuleType | FunctionType | MethodType) or not hasattr(
        x, "__dict__"
    ):
        # what has no attributes may still count, as iterators do, and show it
        return [x if isinstance(x, Tensor | nn.Module | int | float) else (x, repr(x))]
    else:
        held = [vars(x)]
    seen.add(id(x))
    return [x, *(each for part in held for each in _contents(part, seen))]


def _same(a: Any, b: Any) -> bool:
    plain = int | float | str | bytes | bool | complex | tuple | frozenset
    return a is b or (isinstance(a, plain) and type(a) is type(b) and (a == b or a != a))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (x.detach().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(first, second) or torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of the exporter about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _refuse_hooks() -> None:
    module = nn.modules.module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        raise UncertifiableError("a global forward hook is registered for all modules; remove it")


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to all tensors of a tree."""
    return torch.utils._pytree.tree_map(lambda each: function(each) if isinstance(each, Tensor) else each, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in _leaves(tree) if isinstance(each, Tensor)]


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def place(node: fx.Node) -> str:
    """Operation, module and line of the model behind a node."""
    frames = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_TORCH) and frame[0] != __file__]
    line = f" at {frames[-1][0]}:{frames[-1][1]} `{frames[-1][2].strip()}`" if frames else ""
    operation = str(node.target).removeprefix("aten.")
    return f"operation `{operation}` in module `{owner(node) or 'model'}`{line}"


def owner(node: fx.Node) -> str:
    """Path of the module whose `forward` executes a node; empty for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return shown(stack[-1][0]) if stack else ""


def shown(path: str) -> str:
    """A path as the user knows it, without the wrapper's attribute."""
    path = re.sub(r"^L\['self'\]\.?", "", str(path))
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else path


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _line(error: BaseException) -> str:
    """The innermost line of the traceback outside torch."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH) and file != __file__]
    return f" at {own[-1]}" if own else ""
