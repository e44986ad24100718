"""Record one call with `torch.export`, decompose operations without a record, and make a program of the graph."""

import contextlib
import io
import operator
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from wellnormed.program.dependence import dependence
from wellnormed.program.errors import OVERWRITES, UncertifiableError
from wellnormed.program.operation import OPERATIONS, name_of, record_of
from wellnormed.program.places import shown
from wellnormed.program.program import Example, OwnTensor, Program
from wellnormed.program.signals import signals_of


def record(module: nn.Module, example: Example, shapes: Any = None) -> ExportedProgram:
    """Record one call with the exporter; operations that are not in `OPERATIONS` are decomposed as far as torch can.

    Args:
        module: The module, which takes the fields of an `Example`.
        example: The arguments of the call.
        shapes: The `dynamic_shapes` of `torch.export.export`.
    """
    autocast = _Autocast()
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where the exporter prints graphs of its failures
        with autocast:
            program = torch.export.export(module, example, strict=False, dynamic_shapes=shapes)
        before = _targets(program)
        _refuse_overwriting(program)
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.detach_.default:  # it changes no entries; `torch.tensor` executes it
                node.target = torch.ops.aten.detach.default
        program.graph_module.recompile()
        if any(_overwrites(node) for node in program.graph.nodes):
            # functionalised first, since torch may reorder writes into views; everything below uses this graph
            program = program.run_decompositions({})
            _refuse_overwriting(program)  # only now are writes into the model's tensors visible
        _fill_with_zeros(program)
        variable = {node.target for node in dependence(program.graph.nodes, inputs_of(program, example)).variable}
        parts = {op: rule for name, op, rule in _decompositions() if name not in OPERATIONS}
        if not variable.isdisjoint(parts):
            others = {node.target for node in program.graph.nodes} - variable  # constants stay as the model makes them
            apart = program.run_decompositions({op: rule for op, rule in parts.items() if op not in others})
            if not any(spec.kind is InputKind.TOKEN for spec in apart.graph_signature.input_specs):
                program = apart  # the parts of an inverse would have an order beside their operands
    if autocast.active:
        _refuse_apart(before, _targets(program))
    return program


class _Autocast(TorchFunctionMode):
    """Notes whether any function was called under autocast."""

    active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.active = self.active or torch._C._is_any_autocast_enabled()
        return func(*args, **(kwargs or {}))


def _targets(program: ExportedProgram) -> Counter[Any]:
    """How often each operation is called; regions of autocast are graphs within the graph."""
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    return Counter(each for each in targets if isinstance(each, torch._ops.OpOverload))


def _refuse_apart(before: Counter[Any], after: Counter[Any]) -> None:
    """Refuse operations that were taken apart into some that autocast converts, which it does not do then."""
    keys = [key for key in torch._C.DispatchKey.__members__ if key.startswith("Autocast")]
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for op in after - before for key in keys):
        apart = ", ".join(map(str, before - after))
        raise UncertifiableError(f"under autocast {apart} cannot be captured; run it outside, and convert its inputs")


@cache
def _decompositions() -> tuple[tuple[str, Any, Any], ...]:
    """Name, operation and decomposition of all that torch has; cached, since listing them takes long."""
    return tuple((name_of(op), op, rule) for op, rule in torch.export.default_decompositions().items())


def inputs_of(program: ExportedProgram, example: Example) -> dict[str, tuple[str, Tensor]]:
    """Placeholder -> the exporter's name of an input, and its tensor in the example."""
    names = (spec.arg.name for spec in program.graph_signature.input_specs if spec.target is None)
    leaves = zip(names, torch.utils._pytree.tree_leaves(example), strict=True)
    return {name: (name, value) for name, value in leaves if isinstance(value, Tensor)}


def _fill_with_zeros(program: ExportedProgram) -> None:
    """Fill uninitialised memory with zeros, so that no certificate contains what was there before.

    A model that reads such memory differs from its program, and the comparison refuses it.
    """
    records = {node: record_of(node) for node in program.graph.nodes}
    nodes = [node for node, record in records.items() if record is not None and record.makes == "memory"]
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


def _refuse_overwriting(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            what = "the input" if spec.kind.name == "USER_INPUT_MUTATION" else shown(spec.target or "a tensor")
            raise UncertifiableError(OVERWRITES.format(what))


def program_of(
    graph: fx.Graph,
    stored: Mapping[str, tuple[str, OwnTensor]],
    parts: Mapping[str, Any],
    inputs: Mapping[str, tuple[str, Tensor]],
    **settings: Any,
) -> Program:
    """Make a program from an exported graph, which takes the model's tensors as inputs.

    Args:
        graph: The graph.
        stored: Placeholder -> the name of a tensor of the model, and the tensor.
        parts: Name of a graph within the graph -> its module.
        inputs: Placeholder -> the name of an input, and its example.
        settings: Further fields of the program.
    """
    own, attributes = fx.Graph(), dict[str, Any](parts)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):  # before the stored tensors, so that these take other names
        if node.name in inputs:  # other inputs are numbers or None, which the graph has as constants
            name = inputs[node.name][0]
            copies[node] = own.placeholder(name if name.isidentifier() else f"input_{name}")  # `0` inside of a list
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in stored:
            name, kept = stored[node.name]
            attributes[name] = kept.tensor
            copies[node] = own.get_attr(name)
        elif node.op == "output":
            copies[node] = own.output(copies[node.args[0][0]])
        elif node.op != "placeholder" and "_assert_" not in str(node.target):  # these assert facts of the capture
            copies[node] = own.node_copy(node, lambda each: copies[each])
            if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                copies[node].target = torch.ops.aten.reshape.default  # in other layouts `view` may fail
    for node, copy in copies.items():
        copy.meta = {key: _without_entries(node.meta[key]) for key in _META if key in node.meta}
    own.eliminate_dead_code()
    own.lint()
    used = dict.fromkeys(str(node.target) for node in own.nodes if node.op == "get_attr")
    module = fx.GraphModule({name: attributes[name] for name in used}, own, "Program")
    tensors = {name: each for name, each in stored.values() if name in used}
    takes = {copy.name: inputs[node.name] for node, copy in copies.items() if copy.op == "placeholder"}
    if any(_is_open(copy.meta.get("val")) for copy in own.nodes):
        _Sizes(module).run(*(value for _, value in takes.values()))
    return Program(module, tensors, takes, signals=signals_of(own.nodes, takes), **settings)


class _Sizes(fx.Interpreter):
    """Runs a graph on the example, to fix sizes that depend on values of integers, such as the number of set flags."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if _is_open(n.meta.get("val")):
            n.meta["val"] = torch.utils._pytree.tree_map_only(Tensor, _without_entries, result)
        return result


def _is_open(value: Any) -> bool:
    """Whether a description of a result has a symbolic size."""
    sizes = (s for each in torch.utils._pytree.tree_leaves(value) for s in getattr(each, "shape", (each,)))
    return any(isinstance(size, torch.SymInt | torch.SymBool) for size in sizes)


_META = ("val", "stack_trace", "nn_module_stack")
"""The keys of a node's `meta` that are kept: a description of its result, the line of the model, and the module."""


def _without_entries(value: Any) -> Any:
    """Replace the fake tensors of the exporter, which cannot be copied, by tensors of the device meta."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_entries, value))
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
