"""A program in float64 with the groups of its variables and of its result, as a search calls it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellnormed.program.program import Program, repeating


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
        """The result where every operation's result is wrong by a random share of itself, of this size.

        So it shows how far rounding errors may reach, wherever in the model they arise, and whatever enlarges them.
        """
        with sdpa_kernel(SDPBackend.MATH):
            return _Shaking(self.double.module, share).run(*(inputs[name] for name in self.shapes))

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


class _Shaking(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, share: float) -> None:
        super().__init__(module)
        self._share, self._generator = share, torch.Generator().manual_seed(0)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map(self._shaken, super().call_function(target, args, kwargs))

    def _shaken(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        drawn = torch.rand(result.shape, generator=self._generator, dtype=result.dtype).to(result.device)
        return result * (1 + self._share * (2 * drawn - 1))


def _from_the_last(double: Program, node: fx.Node) -> tuple[int, ...]:
    return tuple(axis - (node.meta["val"].ndim or 1) for axis in double.groups(node))
