"""Capture what a model executes: the graph of its tensor operations, for one sample.

This module decides which inputs have samples, and refuses models that cannot be captured; `recording` records one call
with torch's exporter, and `comparing` tests whether the model's code computes the same.
"""

import contextlib
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations, islice
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from wellnormed.program.comparing import BatchError, compare
from wellnormed.program.domain import DTYPES, Domain
from wellnormed.program.errors import UncertifiableError, refusing
from wellnormed.program.integers import Integers, equal
from wellnormed.program.operation import OPERATIONS
from wellnormed.program.places import first_line, line_of, shown
from wellnormed.program.program import Example, OwnTensor, Program, arguments_of, map_tensors, select, tensors_of
from wellnormed.program.recording import inputs_of, program_of, record
from wellnormed.program.snapshot import Snapshot, require_values


def capture(
    model: nn.Module,
    example: Any,
    output: Any = None,
    *,
    domain: Domain | None = None,
    whole_batch: bool = False,
    accept: Callable[[Program], Any] = lambda program: None,
) -> Program:
    """Record the tensor operations that a model executes on the first sample of an example, as a `Program`.

    The program is compared with the model's code on batches of drawn samples. The first tensor of the example with two
    axes or more gives the number of samples. Tensors whose first axis has that size have the samples along it; the
    others, such as a mask `(T, T)`, are shared by all samples. If several tensors have that size, those have samples
    that the model accepts with one sample more.

    The whole example counts as one sample of fixed shape if the model does not run on the first sample alone, if it
    computes something else for a batch than for its samples, if constants that it makes of integers, such as masks (see
    `Program.fixed`), differ between samples, or if no tensor has two axes.

    Args:
        model: Any module; it is left as it was.
        example: A tensor, a tuple of arguments, or a dictionary of keywords.
        output: Key, attribute or position of the result, if the model returns several.
        domain: The inputs of a certificate, as for `compare`.
        whole_batch: Whether to capture the example as one sample of fixed shape in any case.
        accept: Called with every program before the comparison; raises an `UncertifiableError` to refuse it.

    Raises:
        UncertifiableError: The model fails on the example, cannot be captured, or its code computes something else than
            the captured operations.
        ValueError: The example has entries that are not finite.

    Example:
        >>> import wellnormed as wn
        >>> program = wn.capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2))
        >>> [str(node.target) for node in program.nodes if node.op == "call_function"]
        ['aten.linear.default', 'aten.relu.default']
        >>> list(program.stored), program.size, program.comparison.batches
        (['0.weight', '0.bias'], 4, (4, 2, 7))
    """
    if not OPERATIONS:
        raise RuntimeError("no operation has a bound yet; import wellnormed.certificates, which registers all of them")
    _refuse_hooks()
    _refuse_packed_weights(model)
    _refuse_split_parameters(model)

    def compared(program: Program) -> Program:
        with refusing(lambda error: _not_captured(model, error)), quiet():
            return replace(program, comparison=compare(program, model, domain))

    _require_runs(model, arguments_of(example))
    program = _captured(model, example, output, whole_batch)
    try:
        accept(program)
        return compared(program)
    except UncertifiableError as error:
        # one sample is the whole example: to capture it again helps only if batches of other sizes differ
        if not program.each_sample or (program.size == 1 and not isinstance(error, BatchError)):
            raise
    if program.size == 1:  # the graph of the whole example is the same one, which `accept` has passed
        return compared(replace(program, batched=(False,) * len(program.batched)))
    program = _captured(model, example, output, True)
    accept(program)
    return compared(program)


def _captured(model: nn.Module, example: Any, output: Any, whole_batch: bool) -> Program:
    """The program of the first sample, or of the whole example, before the comparison."""
    given = arguments_of(example)  # cloned below, so that a tensor that is passed twice counts as two
    given = map_tensors(lambda each: each.detach().clone(), given)
    tensors = tensors_of(given)
    if not whole_batch:
        with contextlib.suppress(UncertifiableError), running(model):
            size, batched = _with_samples(model, given)
            if any(batched):
                program = _exported(model, _first(given, batched), output, batched, size, tuple(tensors))
                if _same_for_all(program):
                    return program
    with running(model):
        return _exported(model, given, output, (False,) * len(tensors), 1, tuple(tensors))


def _require_runs(model: nn.Module, example: Example) -> None:
    """Refuse an example without finite numbers, and a model that fails on the example."""
    for each in tensors_of(example):
        require_values("example_input", each)
        if each.dtype in DTYPES.values() and not bool(torch.isfinite(each).all()):
            raise ValueError("example_input has entries that are not finite; pass an input that the model is used with")
    arguments, keywords = map_tensors(lambda each: each.detach().clone(), example)
    with running(model), refusing(lambda error: _itself_fails(model, error)), torch.no_grad():
        model(*arguments, **keywords)


def capture_batched(model: nn.Module, program: Program) -> fx.GraphModule:
    """Capture the model's code on a batch of any size, as a module that takes the tensors of a batch.

    Raises:
        UncertifiableError: The code cannot be captured for a batch of any size.
    """
    sample, batched = tensors_of(program.example), iter(program.batched)
    example = program.call(program.batch([sample, sample]))  # two, as the exporter takes a size of 1 for a constant
    axes = torch.utils._pytree.tree_map(
        lambda each: ({0: torch.export.Dim.DYNAMIC} if next(batched) else None) if isinstance(each, Tensor) else None,
        (tuple(example.arguments), example.keywords),
    )
    with running(model):
        return _exported(model, example, program.output, program.batched, 2, program.given, axes).module


def _first(example: Example, batched: tuple[bool, ...]) -> Example:
    """The first sample, with a first axis of size 1."""
    flags = iter(batched)
    return map_tensors(lambda each: each[:1].clone() if next(flags) else each.clone(), example)


def _with_samples(model: nn.Module, example: Example) -> tuple[int, tuple[bool, ...]]:
    """The number of samples of an example, and for each of its tensors whether its first axis has the samples."""
    tensors = tensors_of(example)
    first = next((place for place, each in enumerate(tensors) if each.ndim > 1), None)
    if first is None or not len(tensors[first]):
        return 0, ()
    size = len(tensors[first])
    alike = [place for place, each in enumerate(tensors) if each.ndim and len(each) == size and place != first]
    for left_out in islice(chain.from_iterable(combinations(alike, n) for n in range(len(alike) + 1)), _CHOICES):
        batched = tuple(place == first or place in {*alike}.difference(left_out) for place in range(len(tensors)))
        if not alike or _runs_on_more(model, example, batched):
            return size, batched
    return 0, ()


def _runs_on_more(model: nn.Module, example: Example, batched: tuple[bool, ...]) -> bool:
    """Whether a model runs if some of its inputs have one sample more, and the others stay as they are."""
    flags = iter(batched)
    arguments, keywords = map_tensors(lambda x: torch.cat([x, x[:1]]) if next(flags) else x.clone(), example)
    try:
        with torch.no_grad():
            model(*arguments, **keywords)
    except Exception:  # whatever the model raises
        return False
    return True


def _same_for_all(program: Program) -> bool:
    """Whether the constants that a program makes of the integers of its sample are the same for the other samples."""
    pairs = list(zip(program.batched, program.given, program.inputs.values(), strict=True))
    if not any(own and name in program.fixed and not bool((x == x[:1]).all()) for own, x, (name, _) in pairs):
        return True
    first, *others = map(Integers(program).constants, program.samples)
    return all(equal(first, each) for each in others)


def _exported(
    model: nn.Module,
    example: Example,
    output: Any,
    batched: tuple[bool, ...],
    size: int,
    given: tuple[Tensor, ...],
    shapes: Any = None,
) -> Program:
    """The program of one call; `shapes` are the `dynamic_shapes` of `torch.export.export`."""
    exported = record(_Selecting(model, output), example, shapes)
    signature, persistent = exported.graph_signature, model.state_dict(keep_vars=True)
    stored: dict[str, tuple[str, OwnTensor]] = {}
    inputs = {name: (_argument(model, name), value) for name, (_, value) in inputs_of(exported, example).items()}
    for spec in signature.input_specs:
        if spec.target is not None:
            tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            if not isinstance(tensor, Tensor):
                raise UncertifiableError(f"it uses {spec.target}, which is not a tensor")
            path = shown(spec.target)
            stored[spec.arg.name] = path, OwnTensor(tensor, path in persistent)
    parts = {
        str(node.target): operator.attrgetter(str(node.target))(exported.graph_module)
        for node in exported.graph.nodes
        if node.op == "get_attr"
    }
    return program_of(
        exported.graph, stored, parts, inputs, batched=batched, given=given, example=example, size=size, output=output
    )


class _Selecting(nn.Module):
    """The model with one tensor as its result."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        with contextlib.ExitStack() as stack:
            # the program contains an active autocast's conversions only if the autocast is entered during the capture
            for device in {each.device.type for each in (*tensors_of((arguments, keywords)), *self.parameters())}:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, torch.get_autocast_dtype(device)))
            return self._select(arguments, keywords)

    def _select(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        if not isinstance(self.model, fx.GraphModule):
            return select(self.model(*arguments, **keywords), self._output)
        # run node by node, its operations keep the places that they were captured at
        inputs = inspect.signature(self.model.forward).bind(*arguments, **keywords).args
        with fx.traceback.preserve_node_meta():
            return select(fx.Interpreter(self.model).run(*inputs), self._output)


def _argument(model: nn.Module, placeholder: str) -> str:
    """The name of an argument of the model."""
    kind, _, name = placeholder.partition("_")
    if kind == "keywords":
        return name
    named = list(inspect.signature(model.forward).parameters)
    return named[int(name)] if name.isdigit() and int(name) < len(named) else name


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Capture or run a model in the block: restores the model, and turns any error into an `UncertifiableError`."""
    with refusing(lambda error: _not_captured(model, error)), quiet():
        before = Snapshot(model)
        try:
            yield
        finally:
            before.restore()


def _itself_fails(model: nn.Module, error: Exception) -> str:
    name, where = type(model).__name__, line_of(error)
    remedy = "call model.eval(), or pass" if model.training else "pass"
    return f"{name} itself fails on the example{where}: {first_line(error)}; {remedy} an example that it is called with"


def _not_captured(model: nn.Module, error: Exception) -> str:
    name, where = type(model).__name__, line_of(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{name} runs on the example, but cannot be captured{where}: values of the input decide there what is "
            "executed, such as the branch of an `if`, the number of turns of a loop, or a size. Control flow may not "
            "depend on values of the input; let it execute the same operations for every input"
        )
    return f"{name} runs on the example, but cannot be captured{where}: {first_line(error)}. {_REMEDY}"


_CHOICES = 16
"""How many choices of the inputs with samples are tried: all choices if up to five inputs have the same size."""
_REMEDY = (
    "Control flow may not depend on values of the input, and nothing may replace or convert the model's own tensors "
    "while it runs; let it execute operations of tensors alone"
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's warnings and log lines."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(disabled)


def _refuse_packed_weights(model: nn.Module) -> None:
    """Refuse layers whose weights are objects of compiled code, as those that `torch.ao.quantization` makes."""
    for name, module in model.named_modules():
        packed = any(isinstance(each, torch.ScriptObject) for each in vars(module).values())
        if packed and not isinstance(module, torch.jit.ScriptModule):
            raise UncertifiableError(
                f"{name} packs its weights, as quantized layers do, so that no operation shows them; pass the model in "
                "floats, with the weights that the codes stand for"
            )


def _refuse_split_parameters(model: nn.Module) -> None:
    """Refuse a model whose parameters are split over processes; FSDP may have freed the whole ones after a run."""
    cut = any(base.__name__ == "FSDPModule" for each in model.modules() for base in type(each).__mro__)
    if cut or any(hasattr(each, "full_tensor") for each in model.parameters()):
        raise UncertifiableError(
            "the parameters of this model are split over processes (by FSDP, or as DTensors); load its full state "
            "dict, torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)), into a model that is not split, and pass that"
        )


def _refuse_hooks() -> None:
    module = nn.modules.module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        raise UncertifiableError("a global forward hook is registered for all modules; remove it")
