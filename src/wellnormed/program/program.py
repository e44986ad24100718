"""A program: the operations of a model on ONE sample. Called with a batch, it is applied to each sample.

Both norms of a certificate are maxima over groups of entries inside a sample. So the batched function, which applies
the program to each sample alone, has exactly the Lipschitz constant of the program.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from wellnormed.program.dependence import Dependence, dependence, fixing
from wellnormed.program.domain import default_axes
from wellnormed.program.double import doubled
from wellnormed.program.errors import UncertifiableError

if TYPE_CHECKING:
    from wellnormed.program.comparing import Comparison


class Example(NamedTuple):
    """The arguments of a model's call."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def arguments_of(example: Any) -> Example:
    """An example input as arguments and keywords."""
    if isinstance(example, Example):
        return example
    if isinstance(example, Mapping):
        return Example((), dict(example))
    return Example(tuple(example) if isinstance(example, list | tuple) else (example,), {})


class OwnTensor(NamedTuple):
    """A tensor that is stored in a program."""

    tensor: Tensor
    persistent: bool
    """Whether the model's state dict has it; if not, the model's code creates it."""


@dataclass(frozen=True, eq=False)
class Program:
    """The executed operations of one call, with the tensors that they read.

    Call it with tensors like those of the example; it returns one tensor. If `each_sample`, it takes a batch of any
    size, runs for every sample, and concatenates the results along the first axis.

    Example:
        >>> import wellnormed as wn
        >>> model = torch.nn.Linear(2, 3)
        >>> program = wn.capture(model, torch.zeros(1, 2))
        >>> program.each_sample, program(torch.ones(5, 2)).shape, list(program.stored)
        (True, torch.Size([5, 3]), ['weight', 'bias'])
    """

    module: fx.GraphModule
    """The graph with its tensors; its arguments are the tensors of one sample, in order."""
    stored: dict[str, OwnTensor]
    """Name in the model -> a tensor that the graph reads."""
    inputs: dict[str, tuple[str, Tensor]]
    """Placeholder -> name of an input, and its tensor in the example, with a first axis of size 1 if it has samples."""
    batched: tuple[bool, ...]
    """For every input whether its first axis has the samples; all samples share the other inputs."""
    given: tuple[Tensor, ...]
    """The tensors of the whole call that was captured, with all its samples."""
    example: Example
    """One sample of the call that was captured, with all arguments that are not tensors."""
    size: int
    """The number of samples in the call that was captured; 1 if all of them count as one sample."""
    output: Any
    """Which of the model's results it returns: a key, an attribute's name or a position; None if there is one."""
    comparison: "Comparison | None" = None
    """How the model's code was compared with it; None if it was not."""
    signals: frozenset[str] = frozenset()
    """The placeholders of inputs `(batch, channels, length)` that windows slide over; see `signals_of`."""

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.inputs.values())
        sample = "each sample of a batch" if self.each_sample else "a whole batch"
        return f"Program of {sample}: {len(self.nodes)} operations, {len(self.stored)} tensors, from {inputs}"

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # without cached nodes of the graph

    @property
    def each_sample(self) -> bool:
        """Whether it takes batches of any size; if not, it takes inputs of exactly the example's shapes."""
        return any(self.batched)

    @property
    def arguments(self) -> list[str]:
        """The names of the tensors that it takes, in order."""
        return [str(node.target) for node in self.nodes if node.op == "placeholder"]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, in order of execution."""
        return list(self.module.graph.nodes)

    @property
    def result(self) -> fx.Node:
        """The node of the result."""
        (result,) = self.module.graph.output_node().all_input_nodes
        return result

    @cached_property
    def depends(self) -> Dependence:
        """Which nodes depend on the certified input, and which only on its integers."""
        if not any("val" in node.meta for node in self.nodes):
            raise ValueError("an unpickled program can be run, and no more; capture the model again, or deepcopy it")
        return dependence(self.nodes, self.inputs)

    def groups(self, node: fx.Node) -> tuple[int, ...]:
        """The axes along which a group of entries of an input or of the result extends.

        A signal is one group, and so is a result of a program of signals.
        """
        signal = node.name in self.signals or (node is self.result and bool(self.signals))
        return default_axes(node.meta["val"].shape or (1,), signal)

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """Name -> the example's value of every integer input that is used for more than lookups in tables.

        A certificate holds for these values alone. The graph determines which inputs these are.
        """
        nodes = fixing(self.result, self.depends)
        return dict(own for placeholder, own in self.inputs.items() if any(n.name == placeholder for n in nodes))

    @property
    def samples(self) -> list[list[Tensor]]:
        """The samples of the call that was captured, each a list of its tensors."""
        pairs = list(zip(self.given, self.batched, strict=True))
        return [[each[n : n + 1] if own else each for each, own in pairs] for n in range(self.size)]

    def __call__(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        """The result for a batch of any size, or for inputs of the example's shape if it is not of each sample.

        Raises:
            ValueError: An input is missing or not a tensor, its dtype, device or shape is not the example's, or the
                inputs have different numbers of samples.
        """
        given = dict(zip(self.arguments, tensors, strict=False)) | named
        if {*self.arguments} != given.keys() or len(tensors) + len(named) != len(self.arguments):
            got = f"{len(tensors)} and {', '.join(named) or 'none'} by name"
            raise ValueError(f"the program takes the tensors {', '.join(self.arguments)}, got {got}")
        own = dict(zip(self.arguments, self.batched, strict=True))
        for name, (_, example) in zip(self.arguments, self.inputs.values(), strict=True):
            _require_like(name, given[name], example, own[name])
        sizes = {name: len(given[name]) for name in self.arguments if own[name]}
        if len({*sizes.values()}) > 1:
            raise ValueError(f"the inputs must have one number of samples, got {sizes}; pass a batch of one size")
        return self.run([given[name] for name in self.arguments])

    def run(self, tensors: Sequence[Tensor], module: Callable[..., Tensor] | None = None) -> Tensor:
        """The result for the tensors in order, which are not checked, of this graph or of another one of its kind."""
        module = module or self.module
        sizes = {len(each) for each, own in zip(tensors, self.batched, strict=True) if own} or {1}
        if sizes == {1}:
            return module(*tensors)
        axes = tuple(0 if own else None for own in self.batched)

        def alone(*sample: Tensor) -> Tensor:
            return module(*(x[None] if own else x for x, own in zip(sample, self.batched, strict=True)))

        with repeating():
            try:
                results = torch.func.vmap(alone, in_dims=axes)(*tensors)
            except RuntimeError:  # torch lacks a rule for several samples, as it does for recurrent layers
                pairs = list(zip(tensors, self.batched, strict=True))
                samples = ([each[n] if own else each for each, own in pairs] for n in range(sizes.pop()))
                results = torch.stack([alone(*sample) for sample in samples])
        return results.flatten(0, 1) if results.ndim > 1 else results

    def double(self) -> "Program":
        """The same graph in float64, as a function of the variables of a certificate.

        The variables are the floating inputs of one sample, and the vectors that its integers look up; other uses of
        the integers are fixed to the example's values. Nodes that depend on no variable become constants, computed in
        the model's precision, because certificates use these values. All other nodes are computed in float64, without
        conversions to fewer digits, and without `detach`, so that derivatives pass.

        Raises:
            UncertifiableError: Nothing of the input is a variable, the result has no floats, the model draws random
                numbers, or it runs a graph within the graph.

        Example:
            >>> import wellnormed as wn
            >>> double = wn.capture(torch.nn.Linear(2, 3).bfloat16(), torch.zeros(1, 2).bfloat16()).double()
            >>> double(torch.ones(1, 2).double()).dtype
            torch.float64
        """
        return doubled(self)

    def batch(self, samples: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Join samples, each a list of its tensors, to one batch; what they share is taken from the first."""
        columns = zip(*samples, strict=True)
        return [torch.cat(each) if own else each[0] for each, own in zip(columns, self.batched, strict=True)]

    def call(self, tensors: Sequence[Tensor]) -> Example:
        """The arguments of the model for these tensors, in the structure of the example."""
        rest = iter(tensors)
        return map_tensors(lambda each: next(rest), self.example)


def _require_like(name: str, tensor: Any, example: Tensor, batched: bool) -> None:
    """Refuse an argument that is not a tensor like that of the example, in a batch of any size if it has samples."""
    shape = ("batch", *example.shape[1:]) if batched else tuple(example.shape)
    wanted = f"a tensor of {example.dtype} and shape ({', '.join(map(str, shape))}) on {example.device}"
    if not isinstance(tensor, Tensor):
        remedy = f"torch.as_tensor({name}, dtype={example.dtype})"
        raise ValueError(f"{name} must be {wanted}, got a {type(tensor).__name__}; pass {remedy}")
    got = f"{tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}"
    if (tensor.dtype, tensor.device) != (example.dtype, example.device):
        remedy = f"{name}.to({example.dtype})" if tensor.device == example.device else f"{name}.to({example.device})"
        raise ValueError(f"{name} must be {wanted}, got {got}; pass {remedy}")
    if tensor.ndim != example.ndim or tensor.shape[batched:] != example.shape[batched:] or 0 in tensor.shape[:batched]:
        raise ValueError(f"{name} must be {wanted}, got {got}; pass that shape, or capture an example of another one")


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """In the block, torch does not warn of operations that it has to repeat for every sample, such as batch norms."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[missing-attribute]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[missing-attribute]


def map_tensors(function: Any, tree: Any) -> Any:
    """Apply a function to all tensors of a tree."""
    return torch.utils._pytree.tree_map(lambda each: function(each) if isinstance(each, Tensor) else each, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def select(result: Any, output: Any) -> Tensor:
    """One tensor of what a model returns: by key, attribute or position, or the only one beside what has no parts.

    None, a number and an opaque object, such as the cache of a language model, have none.
    """
    if output is not None:
        try:
            if isinstance(result, Tensor):
                raise LookupError("it returns one tensor; leave output= out")
            parts = _parts(result)
            if isinstance(output, int):
                result = [*parts.values()][output]
            else:
                result = parts[output] if output in parts else getattr(result, output)
        except (LookupError, AttributeError, TypeError) as error:
            raise UncertifiableError(f"output={output!r} is nothing that the model returns ({error})") from error
    while not isinstance(result, Tensor):
        parts = _parts(result)
        present = [each for each in parts.values() if isinstance(each, Tensor) or _parts(each)]
        if len(present) != 1:
            kinds = {k: "Tensor" if isinstance(each, Tensor) else type(each).__name__ for k, each in parts.items()}
            words = ", ".join(f"{key!r} ({kind})" for key, kind in kinds.items())
            key = next((key for key, kind in kinds.items() if kind == "Tensor"), None)
            raise UncertifiableError(
                f"the model returns a {type(result).__name__} of {words or 'no tensor'}; pass "
                f"output={'' if key is None else repr(key)}, or another key, name or position of one tensor"
            )
        (result,) = present
    return result


def _parts(result: Any) -> dict[Any, Any]:
    """What a model returns by key, field or position; empty for an object of another kind."""
    if is_dataclass(result) and not isinstance(result, Mapping):
        return {each.name: getattr(result, each.name) for each in fields(result)}
    if isinstance(result, list | tuple):
        return dict(enumerate(result))
    return dict(result) if isinstance(result, Mapping) else {}
