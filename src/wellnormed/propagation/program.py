"""The captured program as a module: the graph with its stored tensors."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.propagation.capture import Captured
from wellnormed.propagation.dependence import packet


def program_of(captured: Captured) -> fx.GraphModule:
    """The captured program as it is, as a module that takes the example's tensors.

    Example:
        >>> from wellnormed.propagation.capture import capture
        >>> model = torch.nn.Linear(2, 3)
        >>> program = program_of(capture(model, torch.zeros(1, 2)))
        >>> torch.equal(program(torch.ones(1, 2)), model(torch.ones(1, 2))), list(program.state_dict())
        (True, ['weight', 'bias'])
    """
    graph, tensors = fx.Graph(), dict[str, Tensor]()
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.nodes:
        if node.op == "placeholder" and node.name in captured.stored:
            name, tensors[name], _ = captured.stored[node.name]
            copies[node] = graph.get_attr(name)
        elif node.op == "placeholder":
            if node.name not in captured.inputs:  # a number or nothing, which the capture has taken in
                continue
            copies[node] = graph.placeholder(argument_name(captured.inputs[node.name][0]))
        elif node.op == "output":
            results: Any = node.args[0]
            copies[node] = graph.output(copies[results[0]])
        elif node.op == "get_attr":
            tensors[str(node.target)] = operator.attrgetter(str(node.target))(captured.program.graph_module)
            copies[node] = graph.get_attr(str(node.target))
        elif packet(node) == "_assert_tensor_metadata":  # the types are those of the capture anyway
            continue
        else:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
            if node.target is torch.ops.aten.view.default:  # a product beside it decides how entries lie in memory
                copies[node].target = torch.ops.aten.reshape.default
        copies[node].meta = dict(node.meta)
    graph.eliminate_dead_code()
    graph.lint()
    used = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    return fx.GraphModule({name: tensors[name] for name in used}, graph, "Program")


def argument_name(name: str) -> str:
    """An input's name as that of an argument; a tensor inside of a list has its place alone."""
    return name if name.isidentifier() else f"input_{name}"
