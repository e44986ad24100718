"""A program in float64, as a function of its certified variables."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wellnormed.program.constants import compute, draws
from wellnormed.program.dependence import reached, repeats
from wellnormed.program.errors import DRAWS, UncertifiableError
from wellnormed.program.operation import kind_of, name_of
from wellnormed.program.places import place

if TYPE_CHECKING:
    from wellnormed.program.program import Program

aten = torch.ops.aten


def doubled(program: "Program") -> "Program":
    """The program that `Program.double` returns."""
    writing = Writing(program)
    writing.finish()
    module = fx.GraphModule(writing.constants, writing.graph, "Double")
    tensors = tuple(tensor for _, tensor in writing.inputs.values())
    return replace(
        program, module=module, stored={}, inputs=writing.inputs, batched=(False,) * len(tensors), given=tensors,
        example=program.example._replace(arguments=tensors, keywords={}), size=1, output=None, comparison=None,
        signals=frozenset(writing.signals),
    )  # fmt: skip


class Writing:
    """The float64 graph under construction."""

    def __init__(self, program: "Program") -> None:
        self.program, self.graph, self.same = program, fx.Graph(), repeats(program.nodes)
        inputs = [node for node in program.nodes if node.op == "placeholder" and node in program.depends.variable]
        self.variables = [*inputs, *(node for node in program.nodes if node in program.depends.lookups)]
        self.copies: dict[fx.Node, Any] = {}
        """Node of the program -> its node in float64, or the value of a constant."""
        self.inputs: dict[str, tuple[str, Tensor]] = {}
        self.constants: dict[str, Tensor] = {}
        self.signals: set[str] = set()

    def finish(self) -> None:
        """Add all that the result needs, and the result."""
        result = self.program.result
        needed = reached(result, lambda node: () if node in self.variables else node.all_input_nodes)
        for node in dict.fromkeys(self.same[each] for each in self.variables):
            self.add_variable(node)
        for node in self.program.nodes:
            if node in needed and node not in self.copies:
                self.add(node)
        if not self.inputs:
            raise UncertifiableError(
                "nothing of the input is a variable: pass an example with floats, or integers that go into an embedding"
            )
        example = result.meta["val"]
        if not isinstance(example, Tensor) or not example.is_floating_point():
            raise UncertifiableError("the model's result is not a tensor of floats, so it has no gain")
        self.graph.output(self.given(result))
        self.graph.lint()

    def add_variable(self, node: fx.Node) -> None:
        """Add an input that replaces a float input, or a lookup with its table and index."""
        if node.op == "placeholder":
            name, example = self.program.inputs[node.name]
        else:
            name, example = node.name, self._computed(node)
        if not example.ndim:
            raise UncertifiableError(f"the input {name} is a single number; pass a batch of vectors")
        copy = self.graph.placeholder(name if name.isidentifier() else f"input_{name}")
        copy.target, copy.meta = copy.name, {**node.meta, "val": example.double().to("meta")}
        self.signals |= {copy.name} if node.name in self.program.signals else set()
        self.inputs[copy.name] = copy.name, example.detach().double()
        self.copies |= {each: copy for each in self.variables if self.same[each] is node}

    def add(self, node: fx.Node) -> None:
        """Add a node whose operands have been added."""
        if node not in self.program.depends.variable:
            self.copies[node] = self._computed(node)
            return
        self.copies[node] = copy = self._in_float64(node)
        copy.meta = copy.meta or {**node.meta, "val": torch.utils._pytree.tree_map(_widened, node.meta.get("val"))}

    def given(self, node: fx.Node) -> Any:
        """The float64 graph's node for a node of the program."""
        copy = self.copies[node]
        return copy if isinstance(copy, fx.Node) else torch.utils._pytree.tree_map(self._constant, copy)

    def _constant(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = f"constant_{len(self.constants)}"
        self.constants[name] = _widened(value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.constants[name].to("meta")
        return node

    def _computed(self, node: fx.Node) -> Any:
        """A constant's value for the example, in the model's precision, as certificates use it."""
        if node.op == "placeholder":
            return self.program.inputs[node.name][1]
        return compute(self.program, node, *fx.node.map_arg((node.args, dict(node.kwargs)), self._value))

    def _value(self, node: fx.Node) -> Any:
        if node in self.program.depends.variable:  # only its shape counts
            return torch.utils._pytree.tree_map(lambda each: torch.zeros_like(each, device="cpu"), node.meta["val"])
        if node not in self.copies:
            self.copies[node] = self._computed(node)
        return self.copies[node]

    def _in_float64(self, node: fx.Node) -> fx.Node:
        """The call of a node in float64: conversions and `detach` left out, eps as in the model's precision."""
        name, executed = name_of(node.target), node.meta["val"]
        if draws(node):
            raise UncertifiableError(f"{place(node)}: {DRAWS}")
        if name == "aten.view.dtype":
            raise UncertifiableError(f"{place(node)}: the bits of a number are read as another; use `.to(dtype)`")
        call: Any = fx.node.map_arg((node.args, dict(node.kwargs)), self.given)
        arguments, keywords = call
        if kind_of(node) in ("copy", "random") and all(map(_is_float, (node, node.args[0]))):
            return arguments[0]
        if name == "aten.copy.default":  # what an assignment to a slice becomes; torch has no derivative for it
            wide = self.graph.call_function(aten.expand.default, (arguments[1], list(executed.shape)))
            return self.graph.call_function(aten.to.dtype, (wide, _wide(executed.dtype)))
        call = fx.node.map_aggregate(call, _wide)
        arguments, keywords = call
        if name in ("aten.rms_norm.default", "aten.softplus.default"):
            names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
            keywords, arguments = {**dict(zip(names, arguments, strict=False)), **keywords}, ()
        if name == "aten.rms_norm.default" and keywords.get("eps") is None:
            # torch's default is the machine epsilon of the precision in which it computes, at least float32
            dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            keywords["eps"] = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        if name == "aten.softplus.default":  # from 40 on, its jump is less than float64 rounds
            keywords["threshold"] = max(40.0, keywords.get("threshold", 20.0))
        return self.graph.create_node(node.op, node.target, arguments, keywords, name=node.name)


def _is_float(node: Any) -> bool:
    return isinstance(node, fx.Node) and bool(node.meta["val"].dtype.is_floating_point)


def _wide(each: Any) -> Any:
    if not isinstance(each, torch.dtype):
        return each
    return torch.float64 if each.is_floating_point else torch.complex128 if each.is_complex else each


def _widened(each: Any) -> Any:
    """A tensor with its floats in float64; anything else as it is."""
    return each.to(_wide(each.dtype)) if isinstance(each, Tensor) else each
