"""Which inputs are signals `(batch, channels, length)`, along whose last axis windows slide."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from wellnormed.program.operation import record_of


def signals_of(nodes: Iterable[fx.Node], inputs: Mapping[str, tuple[str, Tensor]]) -> frozenset[str]:
    """Find the inputs of three axes that are first mixed by windows along the last axis, of a convolution or a pooling.

    Moves, such as transpositions and padding, are applied to the positions of entries along the input's last axis;
    operations that keep the shape keep positions. So tokens `(batch, tokens, width)` that are transposed before a
    convolution are no signal: windows slide over tokens, and the last axis is theirs.

    Args:
        nodes: In order of execution.
        inputs: Placeholder -> name of an input, and its tensor in the example.

    Returns:
        The placeholders of signals.
    """
    found, mixed = set[str](), set[fx.Node]()
    places: dict[fx.Node, tuple[str, Tensor]] = {}
    for node in nodes:
        read, record = [places[each] for each in node.all_input_nodes if each in places], record_of(node)
        if node.op == "placeholder" and node.name in inputs and len(shape := inputs[node.name][1].shape) == 3:
            places[node] = node.name, torch.arange(shape[-1], dtype=torch.float64).expand(shape)
        elif not mixed.isdisjoint(node.all_input_nodes):
            mixed.add(node)
        elif read:
            (name, place), value = read[0], node.meta.get("val")
            if record is not None and record.kind == "move" and isinstance(value, Tensor):
                given = {each: places[each][1] if each in places else _zeros(each) for each in node.all_input_nodes}
                arguments, keywords = fx.node.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
                places[node] = name, node.target(*arguments, **keywords)  # type: ignore[operator]
            elif _first(value) == place.shape and (record is None or record.kind != "product"):
                places[node] = name, place
            else:
                mixed.add(node)
                found |= {name} if record is not None and record.slides and _along_the_last(place) else set()
    return frozenset(found)


def _along_the_last(place: Tensor) -> bool:
    """Whether positions differ along the last axis, and along no other."""
    return bool(place.numel()) and bool((place == place.flatten(0, -2)[0]).all() & (place != place[..., :1]).any())


def _zeros(node: fx.Node) -> Tensor:
    """The positions of a tensor that does not come from a signal."""
    return torch.zeros(node.meta["val"].shape, dtype=torch.float64)


def _first(value: object) -> torch.Size | None:
    """The shape of a result, or of the first of several."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return first.shape if isinstance(first, Tensor) else None
