"""A program as a function in float64 of the variables that its certificate speaks of."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellnormed.certificates.matching import repeats
from wellnormed.program.capturing import capture
from wellnormed.program.domain import default_axes
from wellnormed.program.errors import DRAWS, UncertifiableError
from wellnormed.program.interpreter import Interpreter, compute, draws, is_stored
from wellnormed.program.operation import kind_of, name_of
from wellnormed.program.places import place
from wellnormed.program.program import Program, repeating


class Continuous(Interpreter):
    """The function that a program computes, in float64 in the place of real arithmetic.

    The variables are the floating inputs, and the vectors that integers of the input look up; other uses of these
    integers are as in the example. Nodes that depend on no variable are computed once, in the precision of the model,
    because a certificate is about these values. The others are computed in float64, without conversions to fewer
    digits. Gradients pass where the model detaches them, because a derivative does.

    Args:
        program: As `capture` returns it.

    Raises:
        UncertifiableError: Nothing of the input is a variable, the result has no floats, the model draws random
            numbers, or it runs a graph within the graph.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._result = program.result
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name of a variable -> its shape."""
        self.device = torch.device("cpu")
        """The device of the example."""
        self.at_once = True
        """Whether `many` computes together; switched off by the first operation that torch cannot vectorize."""
        self._variables: dict[fx.Node, str] = {}
        self._constants: dict[fx.Node, Any] = {}
        self._calls: dict[fx.Node, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        same = repeats(program.nodes)
        for node in program.nodes:
            if node in self.depends.lookups and same[node] is not node:  # the same vectors are one variable
                self._variables[node] = self._variables[same[node]]
            elif node in self.depends.lookups or (node in self.depends.variable and node.op == "placeholder"):
                self._add_variable(node)
        needed = [node for node in self.needed(self._result) if node not in self._variables]
        self._steps = [node for node in needed if node in self.depends.variable]
        """The nodes that are computed from the variables, in order of execution."""
        self._calls.update((node, _in_float64(node)) for node in self._steps)
        self.interpret([node for node in needed if node not in self.depends.variable], self._constants)
        if not self.shapes:
            raise UncertifiableError(
                "nothing of the input is a variable: pass an example with floats, or integers that go into an embedding"
            )
        example = self._result.meta["val"]
        if not isinstance(example, Tensor) or not example.is_floating_point():
            raise UncertifiableError("the model's result is no tensor of floats, so it has no gain")
        read = {each for node in self._steps for each in self.sources(node)} | {self._result}
        self._constants = {node: _widened(each) for node, each in self._constants.items() if node in read}
        self.axes = {name: _groups(shape) for name, shape in self.shapes.items()}
        """Name of a variable -> axes of a group of its entries, counted from the last."""
        self.output_axes = _groups(tuple(example.shape) or (1,))
        """Axes of a group of the result's entries, counted from the last."""
        ones = {name: torch.ones(s, dtype=torch.float64, device=self.device) for name, s in self.shapes.items()}
        with torch.no_grad():
            if not torch.allclose(self(ones), self(ones), equal_nan=True):
                raise UncertifiableError("the model draws random numbers; call `model.eval()`, and take noise out")

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The model's result for one value of every variable, each of its shape in `shapes`."""
        result = self.values(inputs)[self._result]
        return result if result.ndim else result[None]

    def values(self, inputs: Mapping[str, Tensor]) -> dict[fx.Node, Any]:
        """The values of all nodes that the result is computed from, for one value of every variable."""
        values = self._constants | {node: inputs[name] for node, name in self._variables.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            self.interpret(self._steps, values)
        return values

    def shaken(self, inputs: Mapping[str, Tensor], share: float) -> Tensor:
        """The result where every operation's result is wrong by a random share of itself, of this size.

        So it shows how far rounding errors may reach, wherever in the model they arise, and whatever enlarges them.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        values = self._constants | {node: inputs[name] for node, name in self._variables.items()}
        with sdpa_kernel(SDPBackend.MATH):
            for node in self._steps:
                self.interpret([node], values)
                values[node] = _shaken(values[node], share, generator)
        return values[self._result]

    def operands(self, node: fx.Node) -> Any:
        """Nothing for a variable; the call in float64 for what is computed from variables."""
        return () if node in self._variables else self._calls.get(node) or super().operands(node)

    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """A tensor in float64, or as the model computes it where it depends on no variable."""
        if node.op == "placeholder":
            return self.program.inputs[node.name][1]
        if is_stored(node, self.program):
            return self.program.stored[str(node.target)].tensor.detach()
        target, arguments, keywords = operands
        if node in self.depends.variable:
            return _widened(target(*arguments, **keywords))
        return compute(node, arguments, keywords)

    def many(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The results for several values, one behind the other along an additional first axis."""
        if self.at_once:
            try:
                with repeating():
                    return torch.func.vmap(self)(dict(inputs))
            except RuntimeError:
                self.at_once = False
        count = len(next(iter(inputs.values())))
        return torch.stack([self({name: x[number] for name, x in inputs.items()}) for number in range(count)])

    def _add_variable(self, node: fx.Node) -> None:
        example = node.meta["val"]
        name = self.program.inputs[node.name][0] if node.op == "placeholder" else node.name
        if not example.ndim:
            raise UncertifiableError(f"the input {name} is a single number; pass a batch of vectors")
        if name in self.shapes:  # an argument has the name of a lookup
            name = f"{name}#{len(self.shapes)}"
        self._variables[node] = name
        self.shapes[name] = tuple(example.shape)
        self.device = next(iter(self.program.inputs.values()))[1].device


def continuous(model: nn.Module | Program, example_input: Any = None, output: Any = None) -> Continuous:
    """A model, or its program, as a function in float64 of the variables of its certificate.

    It repeats what `lower_bound` found.

    Args:
        model: As for `certify`.
        example_input: A tensor, a tuple of arguments, or a dictionary of keywords; its first sample counts.
        output: Key, attribute or position of the result, where the model returns several.

    Raises:
        UncertifiableError: The model cannot be captured, or nothing of its input is a variable.

    Example:
        >>> function = continuous(nn.Linear(2, 3), torch.zeros(1, 2))
        >>> function({name: torch.ones(shape).double() for name, shape in function.shapes.items()}).shape
        torch.Size([1, 3])
    """
    return Continuous(model if isinstance(model, Program) else capture(model, example_input, output))


def _groups(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis - len(shape) for axis in default_axes(shape))


def _in_float64(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A node's call without conversions to fewer digits, without detaching, and with the eps that it has."""
    arguments, keywords = fx.node.map_aggregate((node.args, dict(node.kwargs)), _wide)
    name = name_of(node.target)
    if draws(node):
        raise UncertifiableError(f"{place(node)}: {DRAWS}")
    if kind_of(node) in ("copy", "random") and node.meta["val"].is_floating_point():
        return _itself, arguments[:1], {}
    if name == "aten.copy.default":  # what an assignment to a slice becomes; torch has no derivative for it
        return _copied, arguments[:2], {}
    if name == "aten.view.dtype":
        raise UncertifiableError(f"{place(node)}: the bits of a number are read as another; use `.to(dtype)`")
    if name == "aten.rms_norm.default":
        names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
        keywords = {**dict(zip(names, arguments, strict=False)), **keywords}
        if keywords.get("eps") is None:  # torch takes that of the precision it computes in, float32 for fewer digits
            own = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            keywords["eps"] = torch.finfo(torch.promote_types(own, torch.float32)).eps
        return node.target, (), keywords
    return node.target, arguments, keywords


def _shaken(result: Any, share: float, generator: torch.Generator) -> Any:
    if isinstance(result, list | tuple):
        return [_shaken(each, share, generator) for each in result]
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    drawn = torch.rand(result.shape, generator=generator, dtype=result.dtype, device=generator.device)
    return result * (1 + share * (2 * drawn - 1))


def _itself(x: Any) -> Any:
    return x


def _copied(x: Tensor, source: Tensor) -> Tensor:
    return source.expand_as(x).to(x.dtype)


def _wide(each: Any) -> Any:
    if not isinstance(each, torch.dtype):
        return each
    return torch.float64 if each.is_floating_point else torch.complex128 if each.is_complex else each


def _widened(result: Any) -> Any:
    """A result, or several, with its floats in float64."""
    if isinstance(result, list | tuple):
        return [_widened(each) for each in result]
    return result.to(_wide(result.dtype)) if isinstance(result, Tensor) else result
