"""Capture what a model executes: the graph of its tensor operations.

`torch.export` records operations while the model runs on fake tensors, with parameters as inputs. That the graph is
the whole truth is checked in `confirmation`.
"""

import contextlib
import inspect
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from wellnormed.propagation import operations as operations  # registers the bounds of operations
from wellnormed.propagation.batch_size import constants_of, is_any_size
from wellnormed.propagation.dependence import EMPTY, Dependence, dependence, packet
from wellnormed.propagation.domain import DTYPES
from wellnormed.propagation.errors import UncertifiableError, refusing
from wellnormed.propagation.model_state import ModelState, require_values, restoring
from wellnormed.propagation.places import first_line, line_of, shown
from wellnormed.propagation.registry import OPERATIONS, name_of


class Example(NamedTuple):
    """What a model is called with."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """The executed operations of one call."""

    program: ExportedProgram
    stored: dict[str, tuple[str, Tensor, bool]]
    """Placeholder -> the model's name of a tensor, the tensor, and whether the model's state dict has it."""
    inputs: dict[str, tuple[str, Tensor]]
    """Placeholder -> name of an input, and the example."""
    example: Example

    @property
    def nodes(self) -> list[fx.Node]:
        """In order of execution."""
        return list(self.program.graph.nodes)

    @property
    def result(self) -> fx.Node:
        """The node of the one tensor that the model returns."""
        (result,) = self.nodes[-1].args[0]  # type: ignore[misc]
        assert isinstance(result, fx.Node)
        return result

    @cached_property
    def depends(self) -> Dependence:
        """Which nodes depend on the certified input, and which only on its integers."""
        return dependence(self.nodes, self.inputs)


class _Selecting(nn.Module):
    """The model with one tensor as its result."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        with contextlib.ExitStack() as stack:
            # the conversions of an autocast that the caller is in are part of the program only if it begins inside
            for device in {each.device.type for each in (*tensors_of((arguments, keywords)), *self.parameters())}:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, torch.get_autocast_dtype(device)))
            return self._select(arguments, keywords)

    def _select(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
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
            kinds = ("Tensor" if isinstance(each, Tensor) else type(each).__name__ for each in result)
            kind = f"{kind} of {', '.join(kinds)}"
        raise UncertifiableError(f"the model returns a {kind}; pass output=, a key, a name or a position of one tensor")
    return result


def arguments_of(example: Any) -> Example:
    """An example input as arguments and keywords."""
    if isinstance(example, Example):
        return example
    if isinstance(example, Mapping):
        return Example((), dict(example))
    return Example(tuple(example) if isinstance(example, list | tuple) else (example,), {})


def capture(model: nn.Module, example: Any, output: Any = None) -> Captured:
    """The operations that a model executes on an example. `confirm` checks that they are the whole truth.

    Args:
        model: Any module; it is left as it was.
        example: A tensor, a tuple of arguments, or a dictionary of keywords.
        output: Key, attribute or position of the result, where the model returns several.

    Raises:
        UncertifiableError: The model fails on the example, or cannot be captured.
        ValueError: The example has entries that are not finite.

    Example:
        >>> captured = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))
        >>> [str(node.target) for node in captured.nodes if node.op == "call_function"]
        ['aten.linear.default', 'aten.relu.default']
        >>> [name for name, _, _ in captured.stored.values()]
        ['0.weight', '0.bias']
    """
    _refuse_hooks()
    _refuse_parts(model)
    # copies, so that a tensor that is given twice counts as two
    given = arguments_of(example)
    for each in tensors_of(given):
        require_values("example_input", each)
        if each.dtype in DTYPES.values() and not bool(torch.isfinite(each).all()):
            raise ValueError("example_input has entries that are not finite; pass an input that the model is used with")
    copied = map_tensors(lambda each: each.detach().clone(), given)
    with running(model) as state:
        try:
            return export(model, copied, output)
        finally:  # what the model itself says of the example is better than what the exporter says
            state.restore()
            arguments, keywords = map_tensors(torch.clone, copied)
            with refusing(lambda error: _itself_fails(model, error)):
                model(*arguments, **keywords)


def capture_any_batch(model: nn.Module, captured: Captured, output: Any = None) -> Captured | None:
    """The operations for a batch of any size, with twice the batch as the example; None if the code depends on it."""
    with running(model):
        return any_batch(model, captured, output)


def any_batch(model: nn.Module, captured: Captured, output: Any) -> Captured | None:
    """The same, of a model whose state is put back by the caller."""
    tensors = tensors_of(captured.example)
    if len({t.shape[0] if t.ndim > 1 else None for t in tensors} | {None}) != 2 or any(t.ndim < 2 for t in tensors):
        return None
    twice = map_tensors(lambda each: torch.cat([each, each.flip(-1)]), captured.example)
    batch = torch.export.Dim.DYNAMIC
    axes = torch.utils._pytree.tree_map(
        lambda each: {0: batch} if isinstance(each, Tensor) else None, (tuple(twice[0]), twice[1])
    )
    try:
        symbolic = export(model, twice, output, axes)
        is_any = is_any_size(symbolic.nodes, _constants(symbolic), _guards(symbolic))
    except Exception:  # as in `refusing`: whatever it is, the model is not captured for any batch
        return None
    return symbolic if is_any else None


def export(model: nn.Module, example: Example, output: Any, shapes: Any = None) -> Captured:
    """What the exporter records of one call, within `running`; `shapes` are its `dynamic_shapes`."""
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where the exporter prints graphs of its failures
        program = torch.export.export(_Selecting(model, output), example, strict=False, dynamic_shapes=shapes)
        _refuse_overwriting(program)
        _detach_out_of_place(program)
        if any(_overwrites(node) for node in program.graph.nodes):
            # what is compared, bounded and written is this graph: of writing into views, torch may take another order
            program = program.run_decompositions({})
            _refuse_overwriting(program)  # what overwrites the model's own tensors is known only now
        _fill_with_zeros(program)
    signature = program.graph_signature
    persistent = model.state_dict(keep_vars=True)
    stored: dict[str, tuple[str, Tensor, bool]] = {}
    inputs: dict[str, tuple[str, Tensor]] = {}
    given = iter(torch.utils._pytree.tree_leaves(example))
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
    return Captured(program, stored, inputs, example)


def _constants(captured: Captured) -> set[fx.Node]:
    """The nodes whose values do not depend on the certified input, which are found by changing it."""
    tensors = captured.stored | captured.inputs
    placeholders = [node for node in captured.nodes if node.op == "placeholder"]
    variable = captured.depends.lookups | {
        node for node in placeholders if node.name in captured.inputs and node in captured.depends.variable
    }
    values = [tensors[node.name][1] if node.name in tensors else None for node in placeholders]
    with torch.no_grad():
        return constants_of(captured.program.graph_module, values, variable)


def _guards(symbolic: Captured) -> list[Any]:
    """What a capture for a batch of any size assumes of the size, as relations."""
    for node in symbolic.nodes:
        if isinstance(value := node.meta.get("val"), Tensor) and hasattr(value, "fake_mode"):
            environment = value.fake_mode.shape_env
            ranges = symbolic.program.range_constraints.values()
            return [guard.expr for guard in environment.guards] + [
                each.lower <= 2 and each.upper > 10**9 for each in ranges
            ]
    return [False]


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


def _detach_out_of_place(program: ExportedProgram) -> None:
    """Let `detach_`, which changes no entries, be `detach`; a constant made by `torch.tensor` executes it."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.detach_.default:
            node.target = torch.ops.aten.detach.default
    program.graph_module.recompile()


def _fill_with_zeros(program: ExportedProgram) -> None:
    """Let memory that nothing has written yet be zeros, so that a certificate does not hold what lay there before.

    A model that reads such memory does not compute what its program computes, and is refused for that.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and packet(node) in EMPTY]
    for node in nodes:
        with program.graph.inserting_after(node):
            zeros = program.graph.call_function(torch.ops.aten.zero.default, (node,))
        zeros.meta = dict(node.meta)
        node.replace_all_uses_with(zeros, delete_user_cb=lambda user, own=zeros: user is not own)
    if nodes:
        program.graph_module.recompile()


def _overwrites(node: fx.Node) -> bool:
    """Whether an operation may overwrite a tensor; arithmetic on sizes does not."""
    sizes = torch.SymInt | torch.SymFloat | torch.SymBool
    if node.op != "call_function" or node.target is operator.getitem or isinstance(node.meta.get("val"), sizes):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable


def decomposed(captured: Captured) -> Captured:
    """The same, with operations that depend on the input and lack a bound, such as recurrent layers, as their parts."""
    variable = captured.depends.variable
    if not any(_overwrites(node) or (node in variable and node.target in _taken_apart()) for node in captured.nodes):
        return captured
    with quiet(), refusing(lambda error: f"the model cannot be captured: {first_line(error)}. {_REMEDY}"):
        return replace(captured, program=captured.program.run_decompositions(dict(_taken_apart())))


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[ModelState]:
    """Capture or run a model in the block; it is left as it was, and refused for whatever is raised."""
    with refusing(lambda error: _not_captured(model, error)), quiet():
        state = ModelState(model)
        with restoring(state):
            yield state


def _itself_fails(model: nn.Module, error: Exception) -> str:
    name, where = type(model).__name__, line_of(error)
    return f"{name} itself fails on the example{where}: {first_line(error)}; pass an example that it is called with"


def _not_captured(model: nn.Module, error: Exception) -> str:
    name, where = type(model).__name__, line_of(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{name} runs on the example, but cannot be captured{where}: values of the input decide there what is "
            "executed, such as the branch of an `if`, the number of turns of a loop, or a size. Control flow may not "
            "depend on values of the input; let it execute the same operations for every input"
        )
    return f"{name} runs on the example, but cannot be captured{where}: {first_line(error)}. {_REMEDY}"


_REMEDY = (
    "Control flow may not depend on values of the input, and nothing may replace or convert the model's own tensors "
    "while it runs; let it execute operations of tensors alone"
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and log lines of the exporter about itself."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(disabled)


def _refuse_parts(model: nn.Module) -> None:
    """Refuse a model whose parameters are split over processes; FSDP may have freed the whole ones after a run."""
    cut = any(base.__name__ == "FSDPModule" for each in model.modules() for base in type(each).__mro__)
    if cut or any(hasattr(each, "full_tensor") for each in model.parameters()):
        raise UncertifiableError(
            "the parameters of this model are split over processes (by FSDP, or as DTensors); load its full state "
            "dict, torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)), into a model that is not split, and pass that"
        )


def _refuse_hooks() -> None:
    module = nn.modules.module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        raise UncertifiableError("a global forward hook is registered for all modules; remove it")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to all tensors of a tree."""
    return torch.utils._pytree.tree_map(lambda each: function(each) if isinstance(each, Tensor) else each, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor)]
