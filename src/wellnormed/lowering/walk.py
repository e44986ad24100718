"""Walk through a program and add the rows of its certificate, operation after operation, to a ledger."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from wellnormed.lowering.contractions import CONTRACTIONS, rectified
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.matching import by_family, match, peel
from wellnormed.lowering.moves import pick
from wellnormed.lowering.operations.linear import margin
from wellnormed.lowering.operations.movement import as_value
from wellnormed.lowering.operations.source import embedding, source
from wellnormed.lowering.patterns import PATTERNS, Stated, attention_of, spelled_attention
from wellnormed.lowering.rounding import rounded, rounds
from wellnormed.lowering.softmaxes import SOFTMAXES
from wellnormed.program.constants import compute, draws, is_stored
from wellnormed.program.dependence import reached, repeats
from wellnormed.program.domain import Domain
from wellnormed.program.errors import DRAWS, UncertifiableError, refusing
from wellnormed.program.operation import PLACING, family_of, kind_of, name_of, packet, record_of
from wellnormed.program.places import first_line, owner, place
from wellnormed.program.program import Program, tensors_of
from wellnormed.proof import Claim, Promise, Proof, Row
from wellnormed.proof.arithmetic import ANY_ORDER, FORMATS, Arithmetic, Executed
from wellnormed.proof.value import Value


def _coarsest(nodes: Iterable[fx.Node]) -> Executed | None:
    """The coarsest dtype of floats among the results of operations, if the kernel knows all of them."""
    floats = [each for node in nodes for each in tensors_of(node.meta.get("val")) if each.is_floating_point()]
    named = {str(each.dtype).removeprefix("torch.") for each in floats}
    known: list[Any] = [name for name in FORMATS if name in named]  # from the finest to the coarsest
    return Executed(known[-1]) if known and len(known) == len(named) and not named >= {"float16", "bfloat16"} else None


class Walk:
    """Bounds, in order of execution, every node of a program that its result is computed from.

    Args:
        program: The program.
        radius: As for `Ledger`.
        promises: As for `Ledger`.
        improved: Node -> a function that takes its value, and returns it with lower bounds.
        apart: As for `Ledger`.
        arithmetic: As for `Ledger`.
    """

    def __init__(
        self,
        program: Program,
        radius: Domain,
        promises: Mapping[str, Promise | None] | None = None,
        improved: Mapping[fx.Node, Callable[[Ledger, Value], Value]] | None = None,
        apart: bool = False,
        arithmetic: Arithmetic | None = ANY_ORDER,
    ) -> None:
        self.program, self.depends = program, program.depends
        self._improved, self._plain = improved or {}, dict[Value, Value]()
        self.ledger = Ledger(radius, promises, apart, arithmetic)
        self.values: dict[fx.Node, Any] = {}
        self.stored: dict[str, Stored] = {}
        """Name -> a parameter or buffer of the model that the result depends on."""
        self.fixed: dict[str, Stored] = {}
        """Name -> an integer input that the program fixes to the values of the example."""
        for name, example in program.fixed.items():
            stored = self.ledger.computed(f"input.{name}", example)
            self.ledger.require_stored(stored)
            self.fixed[stored.name] = stored
            self.ledger.keep(stored)
        self.constants: dict[str, tuple[list[Stored], list[Row]]] = {}
        """Operation on the input -> the stored tensors among its operands, and the rows that bound it."""
        self.dependent = self.depends.variable
        self._rounded: dict[tuple[Value, torch.dtype], Value] = {}
        self._same = repeats(program.nodes)
        self.patterns = rectified(self.dependent, self._same)
        self.patterns |= {node: found for node in program.nodes if (found := self._pattern(node)) is not None}

    def run(self, margins: bool = False) -> Value:
        """Bound the model's result, in the groups of a certificate.

        With `margins`, a further row before it bounds the differences of its entries.
        """
        nodes = self.needed(self.program.result)
        for node in nodes:
            self.ledger.where, self.ledger.name = place(node), self._name(node)
            self.ledger.dtype = next((each.dtype for each in tensors_of(node.meta.get("val"))), torch.float32)
            self.ledger.executed, self.ledger.beside = self._executed(node), 0.0
            try:
                with refusing(self._unforeseen):
                    operands = fx.node.map_arg(self.operands(node), self.values.__getitem__)
                    self.values[node] = self.evaluate(node, operands)
            except UncertifiableError as error:
                raise UncertifiableError(f"{error}{self._alone(node)}{self._coverage(nodes)}") from error.__cause__
        result = self.values.get(self.program.result)
        self.ledger.where, self.ledger.name, self.ledger.executed = "output", "output", None
        if not isinstance(result, Value):
            raise self.ledger.refuse(
                "the model's result is not computed from the certified input: floats, or what an embedding looks up"
                f"{self._floats_of_integers(nodes)}"
            )
        if margins:
            self.ledger.name = "margin"
            margin(self.ledger, self._plain.get(result, result))
            self.ledger.name = "output"
        if not result.shape:
            result = pick(self.ledger, result, lambda t: t[None])
        axes = self.program.groups(self.program.result)
        return self.ledger.derive("output", [(result, axes)], shape=result.shape)

    def _executed(self, node: fx.Node) -> Executed | None:
        """How the rows of a node are executed; None if it executes other operations than its rows."""
        if node in self.patterns:
            bound, found = self.patterns[node]
            if bound is not spelled_attention and not isinstance(bound, Stated):
                return None
            ends = {self._same[each] for each in found.values() if isinstance(each, fx.Node)}
            nodes = reached(node, lambda each: [n for n in each.all_input_nodes if self._same[n] not in ends])
            executed = _coarsest(each for each in nodes if each is node or each in self.dependent)
            short = executed is not None and FORMATS[executed.dtype].sums != executed.dtype
            return None if short and isinstance(bound, Stated) and not bound.short else executed
        record = record_of(node)
        if record is None or not record.executed or (rounds(node, self.dependent) and record.kind not in PLACING):
            return None
        return _coarsest([node])

    def _unforeseen(self, error: Exception) -> str:
        reason = f"its bound does not cover these arguments ({first_line(error)}); write the operation in another way"
        return str(self.ledger.refuse(reason))

    def _floats_of_integers(self, nodes: Iterable[fx.Node]) -> str:
        """A clause that names the first operation that converts input integers to floats; empty without one."""
        for node in nodes:
            results = node.meta.get("val") if node in self.depends.integers else ()
            if any(each.is_floating_point() for each in tensors_of(results)):
                return f". {place(node)} makes floats of its integers, and is no lookup of rows, as nn.Embedding is"
        return ""

    def _alone(self, node: fx.Node) -> str:
        """A hint for an operation that depends on only one of several float inputs, as on a mask; empty otherwise."""
        floats = {each for each in self.dependent if each.op == "placeholder"}
        read = reached(node, lambda each: each.all_input_nodes) & floats
        if len(floats) == 1 or len(read) != 1:
            return ""
        name = self.program.inputs[next(iter(read)).name][0]
        return f". Floats of every input are variables: if the input {name} is a mask, pass booleans or integers"

    def _coverage(self, nodes: Iterable[fx.Node]) -> str:
        """A clause that counts the operations on the input with a bound, and names the others; empty if all have."""
        bounded = self.patterns.keys() | self.depends.lookups
        operations = [node for node in nodes if node in self.dependent and node.op == "call_function"]
        records = {node: record_of(node) for node in operations if node.target is not operator.getitem}
        without = [n for n, r in records.items() if n not in bounded and (r is None or not r.bounded)]
        names = ", ".join(dict.fromkeys(packet(node) for node in without))
        count = f"{len(records) - len(without)} of {len(records)} operations"
        return names and f" ({count} have a bound; without one: {names})"

    def _pattern(self, node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
        if node.op != "call_function" or node not in self.dependent:
            return None
        attention = attention_of(node, lambda each: isinstance(each, fx.Node) and each in self.dependent)
        if attention is not None:
            return spelled_attention, attention
        for pattern, bound in _FORMULAS.get(family_of(peel(node)), ()):
            if (found := match(pattern, node, {}, self._same)) is not None and found["x"] in self.dependent:
                return bound, found
        return None

    def operands(self, node: fx.Node) -> Any:
        """The arguments of a node, or the bindings of its pattern; `new_zeros` and the like get only a shape."""
        if node in self.patterns:
            return self.patterns[node][1]
        record, arguments = record_of(node), node.args
        if record is not None and record.makes and arguments[0] in self.dependent:
            shaped = Value("", tuple(arguments[0].meta["val"].shape), ())  # type: ignore[union-attr]
            arguments = (shaped, *arguments[1:])  # pyrefly: ignore[bad-assignment]
        return node.target, arguments, dict(node.kwargs)

    def needed(self, result: fx.Node) -> list[fx.Node]:
        """The nodes that a result is computed from, in order of execution, and the result."""
        found = reached(result, self.sources)
        return [node for node in self.program.nodes if node in found]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes among the operands of a node."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(self.operands(node), nodes.append)
        return nodes

    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """A `Value` for a tensor that depends on the certified input, a `Stored` or a plain value for a constant."""
        count = len(self.ledger.proof.rows)
        result = self._evaluated(node, operands)
        if given := [each for each in tree_leaves(operands) if isinstance(each, Stored) and node in self.dependent]:
            self.constants[node.name] = given, list(islice(self.ledger.proof.rows.values(), count, None))
        if node not in self._improved or result in self._plain:
            return result
        improved = self._improved[node](self.ledger, result)
        self._plain[improved] = result
        return improved

    def _evaluated(self, node: fx.Node, operands: Any) -> Any:
        if node.op == "placeholder" or is_stored(self.program, node):
            return self._tensor(node)
        if node in self.patterns:
            return self._checked(node, self.patterns[node][0](self.ledger, operands))
        _, arguments, keywords = operands
        if node in self.depends.lookups:
            return self._lookup(node, arguments)
        if node not in self.dependent and kind_of(node) == "product" and any(map(self.ledger.unknown, arguments)):
            scaled = any(isinstance(each, int | float) for each in arguments)  # such as a multiple of a position table
            arguments = tuple(self._as_value(each, scaled) for each in arguments)
        if node.target is operator.getitem and isinstance(part := arguments[0][arguments[1]], Stored):
            return part
        if not any(isinstance(each, Value) for each in tree_leaves((arguments, keywords))):
            return self._constant(node, arguments, keywords)  # also constants that only take the input's shape
        if node.target is operator.getitem:
            chosen = arguments[0][arguments[1]]
            if chosen is None:
                raise self.ledger.refuse("the positions of entries in their order are used, which have no bound")
            return self._checked(node, chosen)
        return self._bound(node, arguments, keywords)

    def _as_value(self, operand: Any, scaled: bool) -> Any:
        """Turn a computed constant into a value, so that its product with a weight of unknown entries has a bound.

        The first state of a recurrent layer is such a constant. If `scaled`, the product with a number, the weight of
        unknown entries itself becomes a value.
        """
        if scaled and self.ledger.unknown(operand):
            return as_value(self.ledger, operand)
        computed = isinstance(operand, Stored) and operand.computed and self.ledger.unknown(operand) is None
        return self.ledger.constant(operand) if computed and not bool(operand.tensor.isnan().any()) else operand

    def _lookup(self, node: fx.Node, arguments: tuple) -> Value:
        table, *others = plain_tree(arguments)
        if isinstance(table, Value) or not _looks_up_rows(node, table, others):
            reason = "integers of the input look up entries; look up rows of a stored table, as embeddings do"
            raise self.ledger.refuse(reason)
        return self._checked(node, embedding(self.ledger, arguments[0], tuple(node.meta["val"].shape[:-1])))

    def _bound(self, node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> Any:
        record = record_of(node)
        if record is None:
            if draws(node):
                raise self.ledger.refuse(DRAWS)
            raise self.ledger.refuse(
                f"`{name_of(node.target)}` has no bound; write one with `wellnormed.certificates.operation`, or "
                "replace the operation"
            )
        executed = node.meta["val"]
        if isinstance(executed, Tensor) and executed.is_complex():
            raise self.ledger.refuse(f"its result is of {executed.dtype}; compute with real and imaginary parts apart")
        keywords = {key: each for key, each in keywords.items() if key not in ("memory_format", "pin_memory")}
        result = record.lowering(self.ledger, *arguments, **keywords)
        return self._checked(node, result) if isinstance(result, Value) else result

    def _checked(self, node: fx.Node, result: Value) -> Value:
        """The result of an operation, rounded if it rounds; refused unless it has floats of 16 bits or more."""
        executed = node.meta["val"]
        if not all(isinstance(size, int) for size in executed.shape):
            raise self.ledger.refuse("the size of its result depends on values of an index; index by integers")
        if tuple(executed.shape) != result.shape:
            raise self.ledger.refuse(f"its bound has shape {result.shape} instead of {tuple(executed.shape)}")
        if not executed.dtype.is_floating_point or executed.dtype.itemsize == 1:  # 8-bit floats round in large steps
            raise self.ledger.refuse(
                f"its result is of {executed.dtype}, which is not continuous; keep it a float of 16 bits or more"
            )
        if not rounds(node, self.dependent if node in self.dependent else None):
            return result
        # the same tensor, rounded in the same way several times, is one
        key = result, executed.dtype
        if key not in self._rounded:
            self._rounded[key] = rounded(self.ledger, result, executed.dtype)
        return self._rounded[key]

    def _tensor(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            name = str(node.target)
            tensor, persistent = self.program.stored[name]
            self.ledger.where = f"tensor `{name}`"
            if persistent:
                stored = self.stored[name] = Stored(name, tensor.detach())
                self.ledger.require_stored(stored)
            if name in self.ledger.promises:
                return Stored(name, torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape))
            return self.stored[name] if persistent else self.ledger.computed(name, tensor.detach())
        name, example = self.program.inputs[node.name]
        self.ledger.where = f"input `{name}`"
        if node not in self.dependent:
            return self.ledger.computed(f"input.{name}", example)
        return source(self.ledger, tuple(example.shape), f"input.{name}", example.dtype, self.program.groups(node))

    def _constant(self, node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> Any:
        """Compute an operation that does not depend on the input; track transposes and moved rows of weights."""
        plain = plain_tree((arguments, dict(keywords)))
        first = arguments[0] if arguments else None
        parameter, positions = self._entries_of(first)
        matrix = isinstance(first, Stored) and first.tensor.ndim == 2 and kind_of(node) == "move"
        swapped = matrix and _transposes(node, *plain)
        moves = kind_of(node) in ("move", "copy", "lookup") and not rounds(node)
        moved: Any = node.target(positions, *plain[0][1:], **plain[1]) if parameter and moves else None  # type: ignore[operator]
        result, parts = compute(self.program, node, *plain), isinstance(moved, list | tuple)
        carried = parts or (isinstance(result, Tensor) and result.is_floating_point())
        operands = [each for each in tree_leaves((arguments, dict(keywords))) if isinstance(each, Stored)]
        if not (kind_of(node) in _CARRYING and carried):
            for each in operands:
                self.ledger.require_known(each)

        def made(name: str, tensor: Tensor, places: Any) -> Stored:
            if parameter is None or places is None:
                return self.ledger.computed(name, tensor, first if swapped else None)
            whole = parameter if _keeps_vectors(places, parameter.tensor.shape[-1:]) else None
            stored = self.ledger.computed(name, tensor, first if swapped else None, whole)
            return replace(stored, entries_of=(parameter, places))

        if isinstance(result, Tensor):
            stored = made(self.ledger.name, result, moved)
            if stored.transpose_of or stored.rows_of or not any(map(self._has_unknown, operands)):
                return stored
            return replace(stored, value_of=cache(partial(self._as_input, node, arguments, keywords)))
        if isinstance(result, list | tuple):
            places: Any = moved if parts else [None] * len(result)
            return [made(f"{self.ledger.name}.{i}", *each) for i, each in enumerate(zip(result, places, strict=True))]
        return result

    def _entries_of(self, operand: Any) -> tuple[Stored | None, Tensor]:
        """The parameter of unknown entries that an operand's entries are of, and their positions in it."""
        if isinstance(operand, Stored) and operand.entries_of is not None:
            return operand.entries_of
        if (parameter := self.ledger.unknown(operand)) is None:
            return None, torch.empty(0)
        shape = parameter.tensor.shape
        return parameter, torch.arange(math.prod(shape)).reshape(shape)

    def _has_unknown(self, operand: Any) -> bool:
        return isinstance(operand, Stored) and bool(operand.value_of or self.ledger.unknown(operand))

    def _as_input(self, node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> Value:
        """Bound an operation on parameters of unknown entries as if these were inputs, such as `1 + gain`."""
        opened = tree_map(
            lambda each: as_value(self.ledger, each) if self._has_unknown(each) else each, (arguments, dict(keywords))
        )
        with self.ledger.executing(self._executed(node)):
            return self._bound(node, *opened)

    def _name(self, node: fx.Node) -> str:
        return ".".join(filter(None, (owner(node), packet(node)))) if node.op == "call_function" else node.name


_FORMULAS = by_family((*PATTERNS, *CONTRACTIONS, *SOFTMAXES))
_CARRYING = ("move", "copy", "lookup", "affine")
"""Kinds of operations that map NaN to NaN. Unknown entries, which are NaN, may pass through them: a bound that needs
the result refuses it, and others, such as attention's with a learned bias of its logits, do not need it."""
_OF_RADII = {"attention", "matrix_product"}
"""Operations on tokens whose bounds grow with the radius of each token. `walked` tries a second proof only for these;
either proof holds."""


def walked(
    program: Program,
    domain: Domain,
    promises: Mapping[str, Promise | None] | None = None,
    margins: bool = False,
    arithmetic: Arithmetic | None = ANY_ORDER,
) -> Walk:
    """Walk through a program once or twice, and return the finished walk with the lower bound.

    The first walk may bound several vectors together, as one group; the second (`apart`) bounds each vector by itself.
    It is made only if norm layers or balls left vectors in common groups and attention or a matrix product follows, as
    in a vision transformer whose input is an image: in a group of n vectors of radius r, a single one could be as long
    as `sqrt(n) r`. In other models, the bound of all vectors together, such as the pixels of an image, is lower.

    Args:
        program: As for `Walk`.
        domain: As for `Walk`.
        promises: As for `Walk`.
        margins: As for `Walk.run`.
        arithmetic: As for `Walk`.
    """
    walk = Walk(program, domain, promises, arithmetic=arithmetic)
    walk.run(margins)
    if not (walk.ledger.joined and any(row.operation in _OF_RADII for row in walk.ledger.proof.rows.values())):
        return walk
    apart = Walk(program, domain, promises, apart=True, arithmetic=arithmetic)
    try:
        apart.run(margins)
    except UncertifiableError:  # the number of groups may be too large
        return walk
    return min(walk, apart, key=_gain)


def _gain(walk: Walk) -> Decimal:
    output = next(reversed(walk.ledger.proof.rows.values()))
    assert output.bounds is not None
    return output.bounds.gain.max()


def proved_again(walk: Walk, promises: Mapping[str, Promise]) -> Proof:
    """The proof of a finished walk for other promises; choices among several bounds are not made again.

    Raises:
        CheckError: A row does not follow.
    """
    first = walk.ledger.proof
    proof = first.again(promises)

    def claimed(claim: Claim) -> Claim:
        if first.promises.keys().isdisjoint(claim.tensors):
            return claim
        return proof.claim(claim.measure, *claim.tensors, **claim.constants)

    for row in first.rows.values():
        proof.add(replace(row, claims=tuple(map(claimed, row.claims)), bounds=None))
    return proof


def plain_tree(tree: Any) -> Any:
    """The arguments of an operation, with every `Stored` replaced by its tensor."""
    return tree_map(lambda each: each.tensor if isinstance(each, Stored) else each, tree)


def _transposes(node: fx.Node, arguments: tuple, keywords: Mapping[str, Any]) -> bool:
    """Whether the shape and strides of a view of a matrix, with these arguments, are those of its transpose."""
    matrix = torch.empty(arguments[0].shape, device="meta")
    view = node.target(matrix, *arguments[1:], **keywords)  # type: ignore[operator]
    return isinstance(view, Tensor) and (view.shape, view.stride()) == (matrix.mT.shape, matrix.mT.stride())


def _looks_up_rows(node: fx.Node, table: Tensor, others: Sequence[Any]) -> bool:
    """Whether every vector of a result is a row of the table; tested with a table of the positions of its entries."""
    if table.ndim != 2:
        return False
    width = table.shape[1]
    places: Tensor = node.target(torch.arange(table.numel()).view(table.shape), *others)  # type: ignore[operator]
    return torch.equal(places, places[..., :1] // width * width + torch.arange(width))


def _keeps_vectors(positions: Any, vector: Sequence[int]) -> bool:
    """Whether a tensor consists of whole rows, of shape `vector`, of another, by its entries' positions there."""
    if not vector or not isinstance(positions, Tensor):
        return False
    last = [size for size in positions.shape if size > 1][-1:]
    if last != list(vector):
        return False
    vectors = positions.reshape(-1, *vector)
    return bool((vectors == vectors[:, :1] + torch.arange(*vector)).all() and (vectors[:, 0] % vector[0] == 0).all())
