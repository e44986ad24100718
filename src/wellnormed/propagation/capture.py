"""Capture what a model executes: the graph of its tensor operations, and checks that it is the whole truth.

`torch.export` records operations while the model runs on fake tensors, with parameters as inputs. What it cannot see
is checked afterwards: that nothing stored changed, that a second capture gives the same graph, that another batch size
does up to sizes, and that the graph computes what the model computes.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from wellnormed.propagation.rows import UncertifiableError

_TORCH = torch.__file__.removesuffix("__init__.py")
_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")


@dataclass(frozen=True, eq=False)
class Captured:
    """The executed operations of one call."""

    program: ExportedProgram
    stored: dict[str, tuple[str, Tensor, bool]]
    """Placeholder -> the model's name of a tensor, the tensor, and whether the model's state dict has it."""
    inputs: dict[str, tuple[str, Tensor]]
    """Placeholder -> name of an input, and the example."""
    any_batch: bool = False
    """Whether another batch size gave the same graph, up to sizes."""

    @property
    def nodes(self) -> list[fx.Node]:
        """In order of execution."""
        return list(self.program.graph.nodes)


class _Selecting(nn.Module):
    """The model with one tensor as its result."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        return select(self.model(*arguments, **keywords), self._output)


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
    """The operations that a model executes on an example, checked.

    Raises:
        UncertifiableError: The model cannot be captured, or does something that a capture does not show.
    """
    _refuse_hooks()
    # copies, so that a tensor that is given twice counts as two
    arguments, keywords = torch.utils._pytree.tree_map(
        lambda each: each.detach().clone() if isinstance(each, Tensor) else each, arguments_of(example)
    )
    for each in _tensors((arguments, keywords)):
        if each.is_floating_point() and not bool(torch.isfinite(each).all()):
            raise ValueError("example_input has entries that are not finite; pass an input that the model is used with")
    with _untouched(model), _quiet():
        captured = _export(model, arguments, keywords, output)
        _compare(_export(model, arguments, keywords, output), captured, "at the second call", 1)
        other, factor = _another_batch(arguments, keywords)
        _compare_values(model, captured, arguments, keywords, output)
        if factor:
            larger = _export(model, *other, output)
            _compare(larger, captured, "for another batch size", factor)
            _compare_values(model, larger, *other, output)
    return replace(captured, any_batch=bool(factor))


def _export(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Captured:
    try:
        with torch.no_grad():
            program = torch.export.export(_Selecting(model, output), arguments, keywords, strict=False)
    except UncertifiableError:
        raise
    except Exception as error:  # the exporter raises whatever the model's own code raises on a fake tensor
        raise UncertifiableError(
            f"{type(model).__name__} cannot be captured{_line(error)}: {_first_line(error)}. Control flow may not "
            "depend on values of the input"
        ) from error
    signature = program.graph_signature
    for kind, names in (("buffer", signature.buffers_to_mutate), ("input", signature.user_inputs_to_mutate)):
        if names:
            raise UncertifiableError(
                f"it overwrites the {kind} {', '.join(_shown(name) for name in names.values())} while it runs; write "
                "its result elsewhere, or call `model.eval()` if it is a running statistic"
            )
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
            shown = _shown(spec.target)
            stored[name] = (shown, tensor, shown in persistent)
        else:
            value = next(given)
            if isinstance(value, Tensor):
                inputs[name] = (name, value)
    return Captured(program, stored, inputs)


def decomposed(captured: Captured) -> Captured:
    """The same operations, without mutation, and recurrent layers as their steps."""
    table = torch.export.default_decompositions()
    wanted = {
        operation: rule for operation, rule in table.items() if str(operation).removeprefix("aten.") in _RECURRENT
    }
    with _quiet():
        program = captured.program.run_decompositions(wanted)
    return replace(captured, program=program)


def _another_batch(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, Any], int]:
    """The example with twice its batch, and 2; 0 where its tensors do not share a batch axis."""
    tensors = _tensors((arguments, keywords))
    sizes = {t.shape[0] if t.ndim > 1 else None for t in tensors}
    if len(sizes) != 1 or None in sizes:
        return ((), {}), 0

    def twice(x: Any) -> Any:
        return torch.cat([x, x.flip(-1)]) if isinstance(x, Tensor) else x

    return torch.utils._pytree.tree_map(twice, (arguments, keywords)), 2


def _compare(other: Captured, captured: Captured, when: str, factor: int) -> None:
    """Refuse graphs that differ by more than sizes in proportion to the batch."""
    pairs = list(zip(other.nodes, captured.nodes, strict=False))
    for a, b in pairs:
        if a.op != b.op or (a.op == "call_function" and (a.target != b.target or not _like(a, b, factor))):
            raise UncertifiableError(
                f"{place(b)}: the model does something else {when} ({_shown_call(a)}); make it do the same always"
            )
    if len(other.nodes) != len(captured.nodes):
        raise UncertifiableError(f"the model executes another number of operations {when}; make it do the same always")


def _like(a: Any, b: Any, factor: int) -> bool:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        left, right = (torch.utils._pytree.tree_leaves((x.args, x.kwargs)) for x in (a, b))
        return len(left) == len(right) and all(_like_leaf(x, y, factor) for x, y in zip(left, right, strict=True))
    return False


def _like_leaf(x: Any, y: Any, factor: int) -> bool:
    if isinstance(x, fx.Node) and isinstance(y, fx.Node):
        return x.name == y.name
    whole = isinstance(x, int) and isinstance(y, int) and not isinstance(x, bool)
    return x == y or (whole and x == factor * y) or (x != x and y != y)


def _compare_values(
    model: nn.Module, captured: Captured, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
) -> None:
    """Refuse a model that computes something else than its captured graph, with and without gradients, or twice."""
    with torch.no_grad():
        expected = captured.program.module()(*arguments, **keywords)
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            found = select(model(*arguments, **keywords), output).detach()
        # half of the digits: fused and plain kernels differ by rounding, another function by more
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
        size = float(expected.abs().max()) if expected.numel() else 0.0
        same = found.shape == expected.shape and bool(((found - expected).abs() <= tolerance * size).all())
        if not same:
            raise UncertifiableError(
                f"{type(model).__name__} does not compute what was captured: its result depends on something else than "
                "its input and its stored tensors, such as randomness, a call before, or whether gradients are recorded"
            )


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Refuse a model that changes while it runs; leave it as it was."""
    tensors = [tensor for module in model.modules() for tensor in _own_tensors(module).values()]
    before = [(tensor, tensor.detach().clone(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    attributes = {module: dict(vars(module)) for module in model.modules()}
    contents = {module: _snapshot(module) for module in model.modules()}
    random = torch.get_rng_state()
    try:
        yield
        for tensor, content, *_ in before:
            same = tensor.shape == content.shape and bool(
                torch.equal(tensor.detach().view(-1).view(torch.uint8), content.view(-1).view(torch.uint8))
                if tensor.numel() and tensor.dtype != torch.bool
                else torch.equal(tensor, content)
            )
            if not same:
                name = next(n for n, t in _named_tensors(model) if t is tensor)
                raise UncertifiableError(f"it overwrites {name} while it runs; write its result elsewhere")
        for module, content in contents.items():
            after = _snapshot(module)
            changed = [key for key in content.keys() | after.keys() if not _same(content.get(key), after.get(key))]
            if changed:
                name = next((n for n, m in model.named_modules() if m is module), "") or "model"
                raise UncertifiableError(
                    f"module `{name}` changes its attribute {sorted(changed)[0]} while it runs; a certificate is of "
                    "one function, so keep what `forward` uses constant"
                )
        if not torch.equal(random, torch.get_rng_state()):
            raise UncertifiableError("it draws random numbers; call `model.eval()`, and take noise out")
    finally:
        torch.set_rng_state(random)
        for module, content in attributes.items():
            for key in vars(module).keys() - content.keys():
                vars(module).pop(key)
            vars(module).update(content)
        for tensor, content, requires_grad, grad in before:
            with torch.no_grad():
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            tensor.grad = grad


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, tensor in _own_tensors(module).items():
            yield f"{prefix}.{name}" if prefix else name, tensor


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {**module._parameters, **module._buffers, **vars(module)}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Attributes of an instance; containers by their elements."""

    def content(x: Any, depth: int = 0) -> Any:
        if isinstance(x, dict) and depth < 3:
            return {key: content(each, depth + 1) for key, each in x.items()}
        if isinstance(x, list | tuple | set | frozenset) and depth < 3:
            return [type(x), *(content(each, depth + 1) for each in x)]
        return x

    return {key: content(each) for key, each in vars(module).items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    plain = (int, float, str, bytes, bool, complex)
    return a is b or (isinstance(a, plain) and type(a) is type(b) and (a == b or (a != a and b != b)))


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
    return _shown(stack[-1][0]) if stack else ""


def _shown(path: str) -> str:
    """A path as the user knows it, without the wrapper's attribute."""
    path = re.sub(r"^L\['self'\]\.?", "", str(path))
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else path


def _shown_call(node: fx.Node) -> str:
    return f"`{node.target}`" if node.op == "call_function" else node.op


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _line(error: BaseException) -> str:
    """The innermost line of the traceback outside torch."""
    import traceback

    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH) and file != __file__]
    return f" at {own[-1]}" if own else ""
