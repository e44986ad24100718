"""A job: a function of whole tensors, which a `Placement` does here at once or deals to processes.

An oracle or a constraint needs its weight whole; everything else an optimizer does is elementwise. Both hand their
whole-tensor work over as jobs, so that one mechanism decides who does it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.parallel.layout import like, local


@dataclass(frozen=True)
class Job:
    """A batched function, and the tensors of equal shape and layout that it takes.

    Args:
        inputs: One list per argument, all of the same length; `inputs[i][j]` is argument `i` of member `j`.
        function: From the arguments, each stacked along a new first dimension, to results of the same number, shapes,
            dtypes and order.
        returned: The arguments, by number and rising, in whose place the results stand; all of them if None.
        cubic: Whether the work on a member grows as `m n min(m, n)`, as singular values do. False for work entry by
            entry or column by column, whose result costs more to send than to compute.

    Example:
        >>> import torch
        >>> Job(([torch.eye(2), torch.ones(2, 2)],), lambda batch: (2 * batch,)).run()[0][1]
        tensor([[2., 2.],
                [2., 2.]])
    """

    inputs: tuple[list[Tensor], ...]
    function: Callable[..., tuple[Tensor, ...]]
    returned: tuple[int, ...] | None = None
    cubic: bool = True

    def run(self) -> tuple[list[Tensor], ...]:
        """Done here, with all of every tensor: one list per returned argument, laid out as the argument."""
        parts = ([local(t) for t in tensors] for tensors in self.inputs)
        results = self.function(*(torch.stack(own) if len(own) > 1 else own[0][None] for own in parts))
        pairs = zip(results, self.replaced, strict=True)
        return tuple([like(part, t) for part, t in zip(result, tensors, strict=True)] for result, tensors in pairs)

    @property
    def replaced(self) -> tuple[list[Tensor], ...]:
        """The inputs in whose place the results stand."""
        return self.inputs if self.returned is None else tuple(self.inputs[i] for i in self.returned)

    @property
    def cost(self) -> int:
        """Multiplications for one member, up to a factor: `m n min(m, n)`, or its entries if the job is not cubic."""
        shape = self.inputs[0][0].shape
        count = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        return count * min(rows, count // max(rows, 1)) if self.cubic else count
