"""Operations that do not depend on the certified variable: they are computed as the model computes them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from wellnormed.program.errors import DRAWS, UncertifiableError
from wellnormed.program.operation import kind_of
from wellnormed.program.places import place

if TYPE_CHECKING:
    from wellnormed.program.program import Program


def is_stored(program: "Program", node: fx.Node) -> bool:
    """Whether a node is a stored tensor of the program; other attributes are graphs within the graph."""
    return node.op == "get_attr" and str(node.target) in program.stored


def draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    kind = kind_of(node)
    if kind is not None:  # the arguments of `random` are x, a probability, and the flag of training
        return kind == "random" and bool(node.args[1] and node.args[2])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def compute(program: "Program", node: fx.Node, arguments: Any, keywords: Any) -> Any:
    """The result of a node that does not depend on the certified input, as the model computes it.

    Raises:
        UncertifiableError: It draws random numbers, or runs a graph of its own.
    """
    if node.op == "get_attr":
        if not is_stored(program, node):
            raise UncertifiableError(f"{place(node)}: a graph within the graph is run; write its operations out")
        return program.stored[str(node.target)].tensor.detach()
    if draws(node):
        raise UncertifiableError(f"{place(node)}: {DRAWS}")
    with torch.no_grad():
        return node.target(*arguments, **keywords)  # type: ignore[operator]
