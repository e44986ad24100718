"""A program in float64 with the groups of its variables and of its result, as a search calls it."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellnormed.program.program import Program, repeating
from wellnormed.program.shaking import Shaken


class Continuous:
    """The function of `Program.double`, called with a dictionary of its variables.

    Args:
        double: What `Program.double` returned.

    Example:
        >>> import wellnormed as wn
        >>> function = Continuous(wn.capture(torch.nn.Linear(2, 3), torch.zeros(1, 2)).double())
        >>> function({name: torch.ones(shape).double() for name, shape in function.shapes.items()}).shape
        torch.Size([1, 3])
    """

    def __init__(self, double: Program) -> None:
        self.double = double
        self.shapes = {name: tuple(example.shape) for name, example in double.inputs.values()}
        """Name of a variable -> its shape."""
        self.device = next(example.device for _, example in double.inputs.values())
        """The device of the example."""
        self.at_once = True
        """Whether `many` computes together; switched off by the first operation that torch cannot vectorize."""
        placeholders = {node.name: node for node in double.nodes if node.op == "placeholder"}
        self.axes = {name: _from_the_last(double, placeholders[name]) for name in self.shapes}
        """Name of a variable -> axes of a group of its entries, counted from the last."""
        self.output_axes = _from_the_last(double, double.result)
        """Axes of a group of the result's entries, counted from the last."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The result for one value of every variable, each of its shape in `shapes`."""
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            result = self.double.module(*(inputs[name] for name in self.shapes))
        return result if result.ndim else result[None]

    def shaken(self, inputs: Mapping[str, Tensor], share: float) -> Tensor:
        """The result where every operation's result is wrong by a share of itself; see `Shaken`."""
        with sdpa_kernel(SDPBackend.MATH):
            return Shaken(self.double, share)(*(inputs[name] for name in self.shapes))

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


def _from_the_last(double: Program, node: fx.Node) -> tuple[int, ...]:
    return tuple(axis - (node.meta["val"].ndim or 1) for axis in double.groups(node))
