"""Fold the constant factors of a captured graph into the weights beside them, and store what weights are computed from.

A factor is moved back to where a value is made, or forward to where it is used, through operations that it commutes
with: `c (W x + b) = (c W) x + c b` and `W (c x) = (c W) x`. Weights that are used elsewhere too are left alone, for
they would have to be stored twice; so is whatever a pattern recognises as a whole, and so are embeddings, since the
vectors that they look up are the input that a certificate speaks of.
"""

import itertools
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from wellnormed.propagation.capture import Captured
from wellnormed.propagation.dependence import packet, reached
from wellnormed.propagation.operations.movement import MOVES
from wellnormed.propagation.registry import name_of
from wellnormed.propagation.walk import Walk

SUFFIX = "_folded"
"""Ends the name of a stored tensor that is not the model's own."""
_IDENTITIES = ("clone", "contiguous", "alias", "detach", "dropout")
_LINEAR = (
    "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "neg", "cumsum",
)  # fmt: skip
_POSITIVE = ("relu", "leaky_relu", "abs", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "amax")
_ENTRYWISE = (*_IDENTITIES, "relu", "leaky_relu", "abs", "neg")
_OTHERS = ("cat", "stack", "slice_scatter", "select_scatter", "copy", "copy_", "to", "_to_copy", "type_as")
"""Moves that take from several tensors, or convert."""
_FACTORS = ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
_PRODUCTS = ("matmul", "mm", "bmm")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_NORMALIZATIONS = {"layer_norm": 2, "rms_norm": 2, "group_norm": 2, "batch_norm": 1}
"""Name -> place of the weight among the arguments; the bias follows."""


@dataclass(frozen=True)
class _Weight:
    """The stored tensors of an operation, and the axes along which a vector of factors is folded."""

    weight: fx.Node
    bias: fx.Node | None
    outputs: int | None
    """Axis of the weight for factors of the result; None if only one number can be folded."""
    inputs: int | None
    feature: int
    """Axis of the value that the factors are along, from the end."""


_Edit = tuple[fx.Node, fx.Node, Tensor]
"""An operation, its stored tensor, and what that is multiplied by."""


def fold(captured: Captured) -> fx.GraphModule:
    """The captured program with its constant factors folded, as a module that takes the example's tensors.

    Its stored tensors keep their names; those that folding made end in `_folded`, so that nobody takes them for the
    model's own. A weight that the model computes from stored tensors, such as a normalized one, is stored too, unless
    it is larger than these.

    Example:
        >>> from wellnormed.propagation.capture import capture
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> model = Doubled(1, 1)
        >>> folded = fold(capture(model, torch.zeros(1, 1)))
        >>> [str(node.target) for node in folded.graph.nodes if node.op == "call_function"]
        ['aten.linear.default']
        >>> torch.equal(folded.get_parameter("weight_folded"), 2 * model.weight)
        True
    """
    folding = _Folding(captured)
    folding.factors()
    folding.computed()
    return folding.module()


def plain(captured: Captured) -> fx.GraphModule:
    """The captured program as it is, as a module that takes the example's tensors."""
    return _Folding(captured).module()


def argument_name(name: str) -> str:
    """An input's name as that of an argument; a tensor inside of a list has its place alone."""
    return name if name.isidentifier() else f"input_{name}"


class _Folding:
    def __init__(self, captured: Captured) -> None:
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}
        self.exact: dict[str, Tensor] = {}
        """Stored tensors that folding changed, before they are rounded."""
        copies: dict[fx.Node, Any] = {}
        for node in captured.nodes:
            self._copy(node, captured, copies)
        walk = Walk(captured, 1.0)
        self.dependent = _dependent(self.graph)
        self.whole = {copies[node] for node in _recognised(walk) if isinstance(copies.get(node), fx.Node)}
        self.values: dict[fx.Node, Any] = {}

    def _copy(self, node: fx.Node, captured: Captured, copies: dict[fx.Node, Any]) -> None:
        if node.op == "placeholder" and node.name in captured.stored:
            name, tensor, _ = captured.stored[node.name]
            self.tensors[name] = tensor
            copies[node] = self.graph.get_attr(name)
        elif node.op == "placeholder":
            if node.name not in captured.inputs:  # a number or nothing, which the capture has taken in
                return
            copies[node] = self.graph.placeholder(argument_name(captured.inputs[node.name][0]))
        elif node.op == "output":
            results: Any = node.args[0]
            copies[node] = self.graph.output(copies[results[0]])
        elif node.op == "get_attr":
            self.tensors[str(node.target)] = operator.attrgetter(str(node.target))(captured.program.graph_module)
            copies[node] = self.graph.get_attr(str(node.target))
        elif packet(node) != "_assert_tensor_metadata":  # the types are those of the capture anyway
            copies[node] = self.graph.node_copy(node, lambda each: copies[each])
            if node.target is torch.ops.aten.view.default:  # a product beside it decides how entries lie in memory
                copies[node].target = torch.ops.aten.reshape.default
        else:
            return
        copies[node].meta = dict(node.meta)

    def factors(self) -> None:
        """Fold every factor that a weight can take."""
        while sum(self._fold(node) for node in list(self.graph.nodes)):
            pass

    def _fold(self, node: fx.Node) -> bool:
        found = self._factor(node)
        if found is None:
            return False
        x, factor = found
        edits = [] if bool((factor == 1).all()) else self._back(x, factor, node)
        edits = self._forth(node, factor, set()) if edits is None else edits
        if edits is None:
            return False
        for user, weight, each in edits:
            self._multiply(user, weight, each)
        node.replace_all_uses_with(x)
        self.graph.erase_node(node)
        return True

    def _factor(self, node: fx.Node) -> tuple[fx.Node, Tensor] | None:
        """What a node multiplies or divides by a constant, and the factor."""
        if node.op != "call_function" or node in self.whole or node not in self.dependent:
            return None
        if name_of(node.target).removeprefix("aten.") not in _FACTORS or len(node.args) != 2 or node.kwargs:
            return None
        x, other = node.args
        if packet(node) == "mul" and not self._depends(x):
            x, other = other, x
        if not isinstance(x, fx.Node) or not self._depends(x) or self._depends(other):
            return None
        value, result = x.meta["val"], node.meta["val"]
        factor = torch.as_tensor(self._value(other) if isinstance(other, fx.Node) else other)
        if value.dtype != result.dtype or not value.dtype.is_floating_point or factor.is_complex():
            return None
        factor = factor.detach().double()
        factor = factor.reciprocal() if packet(node) == "div" else factor
        if not bool(torch.isfinite(factor).all()):
            return None
        if factor.numel() == 1 and factor.ndim <= value.ndim:
            return x, factor.reshape(())
        return (x, factor) if _keeps_shape(factor, value) else None

    def _back(self, node: Any, factor: Tensor, user: fx.Node) -> list[_Edit] | None:
        """What to multiply so that a value, which only one operation uses, comes out multiplied by a factor."""
        if not isinstance(node, fx.Node) or not _only_user(node, user) or node in self.whole:
            return None
        if not self._depends(node):
            return self._own(user, node, factor)
        name = packet(node)
        if (weight := self._weight(node)) is not None:
            return self._scaled(node, weight, factor, weight.outputs, with_bias=True)
        if name in ("add", "sub") and node.kwargs.get("alpha", 1) == 1:
            return self._all(self._back(each, factor, node) for each in node.args)
        if self._factor(node) is not None:
            return self._back(self._factor(node)[0], factor, node)  # type: ignore[index]
        if name == "cat" and factor.ndim == 0:
            return self._all(self._back(each, factor, node) for each in node.args[0])  # type: ignore[union-attr]
        if name in ("mul", *_PRODUCTS) and factor.ndim == 0:
            first = self._back(node.args[0], factor, node)
            return self._back(node.args[1], factor, node) if first is None else first
        if name == "scaled_dot_product_attention" and factor.ndim == 0:
            return self._back(node.args[2], factor, node)
        return self._back(node.args[0], factor, node) if _commutes(node, factor) else None

    def _forth(self, node: fx.Node, factor: Tensor, seen: set[fx.Node]) -> list[_Edit] | None:
        """What to multiply so that all users of a value give the same although it comes without its factor."""
        return self._all(self._into(user, node, factor, seen) for user in node.users)

    def _into(self, user: fx.Node, node: fx.Node, factor: Tensor, seen: set[fx.Node]) -> list[_Edit] | None:
        if user in seen or user in self.whole or _occurrences(user, node) != 1:
            return None
        seen.add(user)
        name = packet(user)
        weight = self._weight(user)
        if weight is not None and name not in _NORMALIZATIONS:
            return self._scaled(user, weight, factor, weight.inputs, with_bias=False)
        others = [each for each in user.all_input_nodes if each is not node and self._depends(each)]
        if others:
            attends = name == "scaled_dot_product_attention" and user.args[2] is node
            passes = factor.ndim == 0 and (attends or name in ("mul", *_PRODUCTS))
        else:
            first = bool(user.args) and user.args[0] is node
            passes = self._factor(user) is not None or (first and _commutes(user, factor))
        return self._forth(user, factor, seen) if passes else None

    def _all(self, parts: Iterable[list[_Edit] | None]) -> list[_Edit] | None:
        edits: list[_Edit] = []
        for part in parts:
            if part is None:
                return None
            edits += part
        return edits or None

    def _weight(self, node: fx.Node) -> _Weight | None:
        """The stored tensors of an operation that multiplies by one."""
        name, found = packet(node), None
        arguments: list[Any] = [*node.args, *[None] * 4]
        groups = _setting(node, "groups", 1)
        if name == "linear":
            found = arguments[1], arguments[2], 0, 1, 1
        elif name == "addmm":
            found = arguments[2], arguments[0], 1, 0, 1
        elif name in _PRODUCTS and self._depends(arguments[0]):
            plain = isinstance(arguments[1], fx.Node) and arguments[1].meta["val"].ndim == 2
            found = arguments[1], None, 1 if plain else None, 0 if plain else None, 1
        elif name in _PRODUCTS:
            found = arguments[0], None, None, None, 1
        elif name in (*_CONVOLUTIONS, *_TRANSPOSED):
            axes = (0, 1) if name in _CONVOLUTIONS else (1, 0)
            outputs = 0 if name in _CONVOLUTIONS else 1 if groups == 1 else None
            along = arguments[1].meta["val"].ndim - 1
            found = arguments[1], arguments[2], outputs, axes[1] if groups == 1 else None, along
        elif name in _NORMALIZATIONS:
            place = _NORMALIZATIONS[name]
            bias = None if name == "rms_norm" else arguments[place + 1]
            along = node.meta["val"].ndim - 1 if name in ("group_norm", "batch_norm") else 1
            one_axis = isinstance(arguments[place], fx.Node) and arguments[place].meta["val"].ndim == 1
            found = arguments[place], bias, 0 if one_axis else None, None, along
        if found is None or not isinstance(found[0], fx.Node) or self._depends(found[0]) or self._depends(found[1]):
            return None
        return _Weight(*found)

    def _scaled(
        self, node: fx.Node, weight: _Weight, factor: Tensor, axis: int | None, with_bias: bool
    ) -> list[_Edit] | None:
        """Edits of an operation's weight, and of its bias if factors of the result are folded."""
        size = weight.weight.meta["val"]
        if factor.ndim and not (
            axis is not None
            and axis < size.ndim
            and factor.numel() == size.shape[axis]
            and _is_along(factor, weight.feature)
        ):
            return None
        vector = factor.reshape(-1) if factor.ndim else factor
        shaped = vector.reshape([-1 if each == axis else 1 for each in range(size.ndim)]) if factor.ndim else factor
        edits = self._own(node, weight.weight, shaped)
        if not with_bias or weight.bias is None:
            return edits
        return self._all([edits, self._own(node, weight.bias, vector)])

    def _own(self, user: fx.Node, node: fx.Node, factor: Tensor) -> list[_Edit] | None:
        """The edit of a stored tensor, if nothing else uses it or what it is computed from."""
        value = node.meta.get("val")
        if not _only_user(node, user) or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        if not _keeps_shape(factor, value) or not self._can_be_stored(node) or not self._can_be_rounded(node, factor):
            return None
        parts = _ancestors(node)
        if any(user not in parts for each in parts - {node} for user in each.users):
            return None
        names = [str(each.target) for each in parts if each.op == "get_attr"]
        storages = [each.untyped_storage().data_ptr() for each in self.tensors.values() if isinstance(each, Tensor)]
        tied = any(storages.count(self.tensors[each].untyped_storage().data_ptr()) > 1 for each in names)
        return None if tied else [(user, node, factor)]

    def _can_be_rounded(self, node: fx.Node, factor: Tensor) -> bool:
        """Whether the product with a factor is neither too large nor too small for the dtype."""
        product = self._product(node, factor)
        rounded, eps = product.to(node.meta["val"].dtype), torch.finfo(node.meta["val"].dtype).eps
        return not product.numel() or bool((rounded - product).abs().max() <= eps * product.abs().max())

    def _product(self, node: fx.Node, factor: Tensor) -> Tensor:
        exact = self.exact.get(str(node.target))
        exact = self._value(node).detach().double() if exact is None else exact
        return exact * factor.to(exact.device)

    def _can_be_stored(self, node: fx.Node) -> bool:
        """Whether a constant comes from stored tensors, and is no larger than they are."""
        value = node.meta.get("val")
        stored = [each.meta["val"].numel() for each in _ancestors(node) if each.op == "get_attr"]
        return isinstance(value, Tensor) and bool(stored) and value.numel() <= sum(stored)

    def _multiply(self, user: fx.Node, node: fx.Node, factor: Tensor) -> None:
        """Replace a stored tensor of an operation by its product with a factor, rounded once however many there are."""
        product = self._product(node, factor)
        if node.target not in self.exact:
            node = self._store(user, node, self._value(node))
        name = str(node.target)
        self.exact[name] = product
        with torch.no_grad():
            self.tensors[name].copy_(product)

    def _store(self, before: fx.Node, node: fx.Node, value: Tensor) -> fx.Node:
        """A new stored tensor in the place of a constant."""
        sources = sorted((e for e in _ancestors(node) if e.op == "get_attr"), key=lambda e: -e.meta["val"].numel())
        name = re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", str(sources[0].target))
        name = re.sub(rf"{SUFFIX}\d*$", "", name) + SUFFIX
        name = next(each for n in itertools.count(1) if (each := f"{name}{n if n > 1 else ''}") not in self.tensors)
        learned = any(isinstance(self.tensors[str(each.target)], nn.Parameter) for each in sources)
        value = value.detach().clone()
        self.tensors[name] = nn.Parameter(value) if learned and value.is_floating_point() else value
        with self.graph.inserting_before(before):
            new = self.graph.get_attr(name)
        new.meta = {"val": value}
        node.replace_all_uses_with(new)
        return new

    def computed(self) -> None:
        """Store what is computed from stored tensors, if it takes arithmetic and comes out no larger."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function" and node not in self.dependent]
        stored = {node for node in nodes if packet(node) not in MOVES and self._can_be_stored(node)}
        for node in nodes:
            if node in stored and any(user not in stored for user in node.users):
                self._store(node, node, self._value(node))

    def _value(self, node: Any) -> Any:
        """A constant, computed as the model does."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.values:
            if node.op == "get_attr":
                self.values[node] = self.tensors[str(node.target)]
            else:
                arguments: Any = fx.node.map_arg((node.args, node.kwargs), self._value)
                with torch.no_grad():
                    self.values[node] = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
        return self.values[node]

    def _depends(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node in self.dependent

    def module(self) -> fx.GraphModule:
        """The graph with the stored tensors that it uses."""
        self.graph.eliminate_dead_code()
        self.graph.lint()
        used = dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "get_attr")
        return fx.GraphModule({name: self.tensors[name] for name in used}, self.graph, "Folded")


def _recognised(walk: Walk) -> Iterator[fx.Node]:
    """The nodes that patterns bound as a whole, but for what they read."""
    for node, (_, found) in walk.patterns.items():
        sources = {each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, fx.Node)}
        yield from reached(node, lambda each, own=sources: (e for e in each.all_input_nodes if e not in own))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    return reached(node, lambda each: each.all_input_nodes)


def _commutes(node: fx.Node, factor: Tensor) -> bool:
    """Whether an operation of one value gives a multiple of its result for a multiple of the value."""
    name, more = packet(node), list(node.args[1:])
    if factor.ndim and name not in _ENTRYWISE:
        return False
    if name in _POSITIVE:
        return bool((factor > 0).all())
    if name == "dropout":
        return not more[1]
    if name in ("pad", "constant_pad_nd"):
        numbers = [each for each in more[1:] if isinstance(each, int | float)]
        return "value" not in node.kwargs and not any(numbers)
    return name in _LINEAR or (name in MOVES and name not in _OTHERS)


def _keeps_shape(factor: Tensor, value: Tensor) -> bool:
    """Whether a value has its shape still when it is multiplied."""
    sizes = zip(reversed(factor.shape), reversed(value.shape), strict=False)
    same = all(n == 1 or (isinstance(size, int) and n == size) for n, size in sizes)
    return factor.ndim <= value.ndim and same


def _is_along(factor: Tensor, feature: int) -> bool:
    """Whether all entries are along one axis, counted from the end."""
    return factor.ndim >= feature and factor.shape[-feature] == factor.numel()


def _setting(node: fx.Node, name: str, default: Any) -> Any:
    """An argument by its name in the operation's schema."""
    schema = getattr(node.target, "_schema", None)
    names = [each.name for each in schema.arguments] if schema else []
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _only_user(node: fx.Node, user: fx.Node) -> bool:
    return list(node.users) == [user] and _occurrences(user, node) == 1


def _occurrences(user: fx.Node, node: fx.Node) -> int:
    return sum(each is node for each in torch.utils._pytree.tree_leaves((user.args, user.kwargs)))


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the inputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op != "output" and any(each in found for each in node.all_input_nodes)):
            found.add(node)
    return found
