"""Walk through a captured graph and add the rows of its certificate, operation after operation, to a ledger."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.proof import Promise
from wellnormed.proof.value import Value
from wellnormed.propagation import operations as operations  # registers the bounds of operations
from wellnormed.propagation.axes import default_axes
from wellnormed.propagation.capture import Captured
from wellnormed.propagation.contractions import CONTRACTIONS, rectified
from wellnormed.propagation.dependence import packet
from wellnormed.propagation.domain import Domain
from wellnormed.propagation.errors import DRAWS, UncertifiableError, refusing
from wellnormed.propagation.interpreter import Interpreter, compute, draws
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.matching import match, repeats
from wellnormed.propagation.moves import pick
from wellnormed.propagation.operations.linear import margin
from wellnormed.propagation.operations.source import embedding, source
from wellnormed.propagation.patterns import PATTERNS, attention_of, spelled_attention
from wellnormed.propagation.places import first_line, owner, place
from wellnormed.propagation.registry import OPERATIONS, REFUSED, name_of
from wellnormed.propagation.rounding import rounded, rounds

_TRANSPOSITIONS = ("t", "transpose", "permute", "numpy_T", "mT")
_CHOOSING = (
    "embedding", "index_select", "slice", "select", "unsqueeze", "squeeze", "expand", "view", "reshape", "_unsafe_view",
    "contiguous", "clone", "detach", "alias",
)  # fmt: skip
"""Operations whose result may consist of whole rows of their first argument."""


class Walk(Interpreter):
    """Bounds the nodes of a captured graph that its result is computed from; takes the arguments of a `Ledger`."""

    def __init__(
        self,
        captured: Captured,
        radius: Domain,
        proved: Ledger | None = None,
        promises: Mapping[str, Promise | None] | None = None,
    ) -> None:
        super().__init__(captured)
        self.step = Ledger(radius, proved, promises)
        self.values: dict[fx.Node, Any] = {}
        self.stored: dict[str, Stored] = {}
        """The model's own tensors that its result depends on, by name."""
        self.fixed: dict[str, Stored] = {}
        """Integer inputs that are used for anything but table lookups, by name; the certificate holds only for their
        values in the example."""
        self.dependent = self.depends.variable
        self._rounded: dict[tuple[Value, torch.dtype], Value] = {}
        self._same = repeats(captured.nodes)
        self.patterns = rectified(self.dependent, self._same)
        self.patterns |= {node: found for node in captured.nodes if (found := self._pattern(node)) is not None}

    def run(self, margins: bool = False, progress: Callable[[int, int], None] = lambda done, total: None) -> Value:
        """Bound the model's result, in the groups of a certificate.

        With `margins`, a row bounds the margins of the result before. `progress` is called after every operation with
        the numbers of bounded and of all operations.
        """
        nodes = self.needed(self.captured.result)
        for number, node in enumerate(nodes, 1):
            self.step.where, self.step.name = place(node), self._name(node)
            self.step.dtype = getattr(node.meta.get("val"), "dtype", torch.float32)
            try:
                with refusing(self._unforeseen):
                    self.interpret([node], self.values)
            except UncertifiableError as error:
                raise UncertifiableError(f"{error}{self._coverage(nodes)}") from error.__cause__
            progress(number, len(nodes))
        result = self.values.get(self.captured.result)
        self.step.where = self.step.name = "output"
        if not isinstance(result, Value):
            raise self.step.refuse(
                "the model's result is not computed from the certified input: floats, or what an embedding looks up"
            )
        if margins:
            self.step.name = "margin"
            margin(self.step, result)
            self.step.name = "output"
        if not result.shape:
            result = pick(self.step, result, lambda t: t[None])
        return self.step.derive("output", [(result, default_axes(result.shape))], shape=result.shape)

    def _unforeseen(self, error: Exception) -> str:
        reason = f"its bound does not cover these arguments ({first_line(error)}); write the operation in another way"
        return str(self.step.refuse(reason))

    def _coverage(self, nodes: Iterable[fx.Node]) -> str:
        """Words that say how many of the operations that depend on the input have a bound; empty if all have."""
        bounded = self.patterns.keys() | self.depends.lookups
        operations = [node for node in nodes if node in self.dependent and node.op == "call_function"]
        operations = [node for node in operations if packet(node) != "<built-in function getitem>"]
        without = [n for n in operations if n not in bounded and name_of(n.target) not in OPERATIONS.keys() - REFUSED]
        names = ", ".join(dict.fromkeys(packet(node) for node in without))
        return (
            f" ({len(operations) - len(without)} of {len(operations)} operations have a bound; without one: {names})"
            if names
            else ""
        )

    def fix(self, names: Iterable[str]) -> None:
        """Note that the certificate holds only for the example's values of these inputs."""
        for name, example in self.captured.inputs.values():
            if name in names:
                stored = self.step.computed(f"input.{name}", example)
                self.step.require_stored(stored)
                self.fixed[stored.name] = stored
                self.step.keep(stored)

    def _pattern(self, node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
        if node.op != "call_function" or node not in self.dependent:
            return None
        attention = attention_of(node, lambda each: isinstance(each, fx.Node) and each in self.dependent)
        if attention is not None:
            return spelled_attention, attention
        for pattern, bound in (*PATTERNS, *CONTRACTIONS):
            if (found := match(pattern, node, {}, self._same)) is not None and found["x"] in self.dependent:
                return bound, found
        return None

    def operands(self, node: fx.Node) -> Any:
        """Its arguments, or what a pattern found in their place."""
        return self.patterns[node][1] if node in self.patterns else super().operands(node)

    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """A `Value` for what depends on the certified input, a `Stored` or a plain value for a constant."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node in self.patterns:
            self.fix(self.depends.names(self.sources(node)))
            return self._checked(node, self.patterns[node][0](self.step, operands))
        _, arguments, keywords = operands
        if node not in self.dependent:
            return self._constant(node, arguments, keywords)
        if node in self.depends.lookups:
            return self._lookup(node, arguments)
        if not any(isinstance(self.values[each], Value | list) for each in node.all_input_nodes):
            return self._constant(node, arguments, keywords)  # of ones like the input, say
        self.fix(self.depends.names(node.all_input_nodes))
        if name_of(node.target) == "<built-in function getitem>":
            chosen = arguments[0][arguments[1]]
            if chosen is None:
                raise self.step.refuse("the positions of entries in their order are used, which have no bound")
            return self._checked(node, chosen)
        return self._bound(node, arguments, keywords)

    def _lookup(self, node: fx.Node, arguments: tuple) -> Value:
        table, indices = arguments[:2]
        indices = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else indices
        if not isinstance(indices, Stored) or packet(node) not in ("embedding", "index"):
            raise self.step.refuse("integers of the input look up entries; look up rows of a table, as embeddings do")
        return self._checked(node, embedding(self.step, table, tuple(indices.tensor.shape)))

    def _bound(self, node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> Any:
        function = OPERATIONS.get(name_of(node.target))
        if function is None:
            if draws(node):
                raise self.step.refuse(DRAWS)
            raise self.step.refuse(
                f"`{name_of(node.target)}` has no bound; write one with `wellnormed.propagation.operation`, or replace "
                "the operation"
            )
        executed = node.meta["val"]
        if isinstance(executed, Tensor) and executed.is_complex():
            raise self.step.refuse(f"its result is of {executed.dtype}; compute with real and imaginary parts apart")
        keywords = {key: each for key, each in keywords.items() if key not in ("memory_format", "pin_memory")}
        result = function(self.step, *arguments, **keywords)
        return self._checked(node, result) if isinstance(result, Value) else result

    def _checked(self, node: fx.Node, result: Value) -> Value:
        """The result of an operation, rounded if it rounds; refused unless it has floats of 16 bits or more."""
        executed = node.meta["val"]
        if not all(isinstance(size, int) for size in executed.shape):
            raise self.step.refuse("the size of its result depends on values of an index; index by integers, not flags")
        if tuple(executed.shape) != result.shape:
            raise self.step.refuse(f"its bound has shape {result.shape} instead of {tuple(executed.shape)}")
        if not executed.dtype.is_floating_point or executed.dtype.itemsize == 1:  # 8-bit floats round in large steps
            raise self.step.refuse(
                f"its result is of {executed.dtype}, which is not continuous; keep it a float of 16 bits or more"
            )
        if not rounds(node, self.dependent):
            return result
        # the same tensor, rounded in the same way several times, is one
        key = result, executed.dtype
        if key not in self._rounded:
            self._rounded[key] = rounded(self.step, result, executed.dtype)
        return self._rounded[key]

    def _placeholder(self, node: fx.Node) -> Any:
        if node.name in self.captured.stored:
            name, tensor, persistent = self.captured.stored[node.name]
            self.step.where = f"tensor `{name}`"
            stored = Stored(name, tensor.detach(), computed=not persistent)
            if persistent:
                self.step.require_stored(stored)
                self.stored[name] = stored
            if name in self.step.promises:
                return Stored(name, torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape))
            return stored if persistent else self.step.computed(name, stored.tensor)
        name, example = self.captured.inputs[node.name]
        self.step.where = f"input `{name}`"
        if node not in self.dependent:
            return self.step.computed(f"input.{name}", example)
        return source(self.step, tuple(example.shape), f"input.{name}", example.dtype)

    def _constant(self, node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> Any:
        """Compute an operation that does not depend on the input; notes where rows of parameters go."""
        plain = torch.utils._pytree.tree_map(
            lambda each: each.tensor if isinstance(each, Stored) else each,
            (arguments, dict(keywords)),
            is_leaf=lambda each: isinstance(each, Stored),
        )
        first = arguments[0] if arguments else None
        parameter = self.step.unknown(first)
        matrix = isinstance(first, Stored) and first.tensor.ndim == 2 and packet(node) in _TRANSPOSITIONS
        swapped = matrix and _transposes(node, *plain)
        vector = () if parameter is None or packet(node) not in _CHOOSING else parameter.tensor.shape[-1:]
        vectors = _keeps_vectors(node, plain[0], plain[1], vector)
        for each in torch.utils._pytree.tree_leaves((arguments, dict(keywords))):
            if isinstance(each, Stored) and not (each is first and (swapped or vectors)):
                self.step.require_known(each)
        result = compute(node, *plain)
        if isinstance(result, Tensor):
            return self.step.computed(
                self.step.name, result, first if swapped else None, parameter if vectors else None
            )
        if isinstance(result, list | tuple):
            return [self.step.computed(f"{self.step.name}.{i}", each) for i, each in enumerate(result)]
        return result

    def _name(self, node: fx.Node) -> str:
        return ".".join(filter(None, (owner(node), packet(node)))) if node.op == "call_function" else node.name


def _transposes(node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> bool:
    """Whether the shape and strides of a view of a matrix, with these arguments, are those of its transpose."""
    matrix = torch.empty(arguments[0].shape, device="meta")
    view: Tensor = node.target(matrix, *arguments[1:], **keywords)  # type: ignore[operator]
    return (view.shape, view.stride()) == (matrix.mT.shape, matrix.mT.stride())


def _keeps_vectors(node: fx.Node, arguments: tuple, keywords: Mapping[str, Any], vector: Sequence[int]) -> bool:
    """Whether a result consists of whole rows, of shape `vector`, of a tensor; found by moving positions of entries."""
    if not vector:
        return False
    shape = arguments[0].shape
    positions = torch.arange(math.prod(shape)).reshape(shape)
    moved: Tensor = node.target(positions, *arguments[1:], **keywords)  # type: ignore[operator]
    last = [size for size in moved.shape if size > 1][-1:]
    if last != list(vector):
        return False
    vectors = moved.reshape(-1, *vector)
    return bool((vectors == vectors[:, :1] + torch.arange(*vector)).all() and (vectors[:, 0] % vector[0] == 0).all())
