"""`certify`: walk the executed operations in order and let each one's rule bound its value."""

import inspect
import math
import operator
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn

import wellnormed
from wellnormed._inputs import require_module, require_numbers
from wellnormed.certificates import functions as functions  # registers the rules of functions
from wellnormed.certificates.bound import Bound, rounding_up
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.recorder import Recorder, UncertifiableError
from wellnormed.certificates.rules import RULES
from wellnormed.certificates.safetensors_file import DTYPES, raw_tensor
from wellnormed.certificates.tracing import EMBEDDINGS, owner, place, shown, trace

_TOKENS = object()  # stands for the integers that an embedding looks up


def certify(model: nn.Module, example_input: Tensor | None = None, radius: float = 1.0) -> Certificate:
    """A proved Lipschitz bound of the executed model, by largest token RMS (LT section 4.2, corrected).

    The input variable is what the model's embedding looks up, or the model's input if it has no embedding. Every
    operation needs a rule (`rules.rule`, `functions`). The bound covers real arithmetic with the parameters as they are
    stored.

    Args:
        model: Any module with one tensor in and one out, `(*, tokens, width)` or integers `(*, tokens)`; in evaluation
            mode, or without layers that differ in training.
        example_input: Run through model and graph as a check that they agree.
        radius: Largest RMS of an input token.

    Raises:
        UncertifiableError: An operation has no rule, is used outside its rule, or cannot be traced; names the
            operation, the module and the line of the model.
        ValueError: `radius` is not positive, or smaller than an embedding's largest row.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 0.5)
        >>> certificate = certify(model)
        >>> 1 <= certificate.lipschitz < 1 + 1e-6
        True
    """
    require_module("certify", model)
    require_numbers("certify: ", {"radius": radius})
    if not 0 < radius < math.inf:
        raise ValueError(f"radius={radius} must be positive and finite")
    # parameters and persistent buffers by name: the very objects that the model uses
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise UncertifiableError(f"{name} is stored as {tensor.dtype}; certificates cover {list(DTYPES)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UncertifiableError(f"{name} has entries that are not finite; nothing holds for them")
    graph = trace(model)
    if example_input is not None:
        if not isinstance(example_input, Tensor):
            raise ValueError(
                f"certify: example_input={example_input!r} is no tensor; pass what the model is called with"
            )
        _check_example(model, graph, example_input)
    recorder = Recorder(tensors)
    domain = _walk(graph, recorder, float(radius))
    return Certificate(
        layers=tuple(recorder.rows.values()),
        tensors={name: raw_tensor(tensor).digest for name, tensor in sorted(tensors.items())},
        domain=domain,
        input_radius=float(radius),
        versions={"wellnormed": wellnormed.__version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
        | {"python": platform.python_version()},
    )


def embedding_node(graph: fx.GraphModule) -> fx.Node | None:
    """The lookup that makes vectors of the model's integers; None if the model takes vectors.

    Raises:
        UncertifiableError: Two lookups, or the integers are used besides: the input would be more than the vectors.
    """
    (tokens,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    lookups = [
        node
        for node in graph.graph.nodes
        if node.op == "call_module" and type(graph.get_submodule(str(node.target))) in EMBEDDINGS
    ]
    if not lookups:
        return None
    for other in [node for node in lookups if tokens not in node.args] + [n for n in tokens.users if n != lookups[0]]:
        raise UncertifiableError(
            f"{place(other)}: the model's integers must go into one embedding and nowhere else, for its "
            "vectors are the input that the certificate speaks of"
        )
    return lookups[0]


def _walk(graph: fx.GraphModule, recorder: Recorder, radius: float) -> str:
    """Bound every node in order; returns the domain in words."""
    embedding = embedding_node(graph)
    values: dict[fx.Node, Any] = {}
    domain = f"all inputs whose tokens have RMS <= {radius}"
    for node in graph.graph.nodes:
        recorder.where, recorder.name = place(node), _row_name(node)
        args, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            recorder.name = "input"
            values[node] = _TOKENS if embedding else recorder.derive("input", constants={"radius": radius})
        elif embedding is not None and node is embedding:
            values[node] = _embed(graph.get_submodule(str(node.target)), recorder, radius)
            domain = f"all sequences whose tokens have RMS <= {radius}, those of `{recorder.name}` among them"
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(graph)
        elif node.op == "output":
            _finish(args[0], recorder)
        else:
            values[node] = _apply(graph, node, recorder, args, keywords)
    return domain


def _apply(graph: fx.GraphModule, node: fx.Node, recorder: Recorder, args: tuple, keywords: Mapping[str, Any]) -> Bound:
    module = (graph.get_submodule(str(node.target)),) if node.op == "call_module" else ()
    function, args = RULES.get(type(module[0]) if module else node.target), (*module, recorder, *args)
    if function is None:
        raise recorder.refuse("there is no rule for it; write one with `rule` for a module or `function_rule`")
    try:
        inspect.signature(function).bind(*args, **keywords)
    except TypeError as error:
        raise recorder.refuse(f"its rule does not cover these arguments ({error})") from error
    if not any(isinstance(each, Bound) for each in (*args, *keywords.values())):
        raise recorder.refuse("none of its arguments is a value that depends on the input")
    with rounding_up():
        result = function(*args, **keywords)
    if not isinstance(result, Bound):
        raise recorder.refuse(f"its rule returned {type(result).__name__} instead of a Bound")
    return result


def _embed(layer: Any, recorder: Recorder, radius: float) -> Bound:
    if getattr(layer, "max_norm", None) is not None:
        raise recorder.refuse("max_norm rewrites the table while it runs; set it to None")
    claim = recorder.prove("row_rms", layer.weight)
    if claim.values[0] > radius:
        raise ValueError(
            f"radius={radius} is smaller than the largest row of {claim.tensors[0]}, which has RMS "
            f"{claim.values[0]}: pass radius={claim.values[0]} or more, or cap the embedding's rows"
        )
    return recorder.derive("embedding", constants={"radius": radius}, claims=(claim,))


def _finish(output: Any, recorder: Recorder) -> None:
    if not isinstance(output, Bound):
        raise recorder.refuse(
            "the model must return one tensor that its operations computed; wrap it if it returns more"
        )
    if next(reversed(recorder.rows)) != output.row:
        recorder.name = "output"
        recorder.derive("identity", output)


def _row_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return shown(str(node.target)) or "model"
    operation = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return ".".join(filter(None, (owner(node), operation)))


def _check_example(model: nn.Module, graph: fx.GraphModule, example_input: Tensor) -> None:
    with torch.no_grad():
        executed, traced = model(example_input), graph(example_input)
    if not (isinstance(executed, Tensor) and executed.shape == traced.shape and torch.allclose(executed, traced)):
        raise UncertifiableError(
            f"{type(model).__name__} does not compute on example_input what was traced: its control flow "
            "depends on something that tracing cannot see; remove it"
        )
