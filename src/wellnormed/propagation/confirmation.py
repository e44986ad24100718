"""Check that a captured graph is the whole truth about a model.

What the exporter cannot see is checked by running: that nothing stored changes, and that the model, left alone,
executes the operations of the graph and computes what it computes, call after call, with and without gradients.
"""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellnormed.propagation.capture import Captured, any_batch, export, map_tensors, running, select, tensors_of
from wellnormed.propagation.dependence import LOOKUPS
from wellnormed.propagation.errors import UncertifiableError
from wellnormed.propagation.model_state import ModelState
from wellnormed.propagation.operations.movement import MOVES


def confirm(
    model: nn.Module,
    captured: Captured,
    output: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Captured], set[str]]:
    """Check that a model does what was captured, always.

    `progress` is told how many steps are done, and of how many.

    Returns:
        If the model can be captured for a batch of any size, the same for twice the batch, and for a batch of one,
        otherwise nothing; and the names of inputs whose integers are as in the example, but for what they look up.

    Raises:
        UncertifiableError: The model does something that its captured operations do not show.
    """
    with running(model) as state:
        fixed = _require_same_values(model, captured, output)
        state.restore()
        progress(1, 4)
        found = _other_batches(model, captured, output, progress)
        progress(4, 4)
        return found, fixed


def _other_batches(
    model: nn.Module, captured: Captured, output: Any, progress: Callable[[int, int], None]
) -> list[Captured]:
    symbolic = any_batch(model, captured, output)
    if symbolic is None:
        return []
    progress(2, 4)
    others = [symbolic.example]
    if len(tensors_of(captured.example)[0]) > 1:  # which a capture for any size leaves out
        others.append(map_tensors(lambda each: each[:1], captured.example))
    try:
        found = [export(model, example, output) for example in others]
        progress(3, 4)
        for each in found:
            _require_same_values(model, each, output)
    except UncertifiableError:
        raise
    except Exception:  # the model does not run with such a batch
        return []
    return found


class _Recording(TorchDispatchMode):
    """Notes which operations are executed on what depends on the certified variable, but for moves and shifts.

    A function that differs only by moves of entries, or by constants that are added, gives other values at the example.
    The variable is the floats among named tensors, and what the integers among them look up. Whose integers are used
    otherwise, as in masks, or read by code, is noted in `fixed`: they are as in the example.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.executed: list[str] = []
        self.fixed: set[str] = set()
        self._dependent = {id(each): each for _, each in named if each.is_floating_point()}
        self._integers = {id(each): (each, {name}) for name, each in named if not each.is_floating_point()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(str(func).removeprefix("aten.").partition(".")[0], tensors_of((args, kwargs)), tensors_of(result))
        return result

    def note(self, packet: str, given: list[Tensor], found: list[Tensor]) -> None:
        """An operation, and what it was given and gave; tensors are kept, so that no other gets the number of one."""
        names: set[str] = set().union(*(self._integers[id(each)][1] for each in given if id(each) in self._integers))
        depends = any(id(each) in self._dependent for each in given)
        if depends or packet in _READING:
            self.fixed |= names
        if depends or (
            names and packet in LOOKUPS and given[0].is_floating_point() and id(given[0]) not in self._integers
        ):
            shifts = packet in ("add", "add_") and sum(id(each) in self._dependent for each in given) == 1 < len(given)
            self._dependent |= {id(each): each for each in found}
            if packet not in MOVES and not shifts:
                self.executed.append(packet)
        elif names:
            self._integers |= {id(each): (each, names) for each in found}


_READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "numpy", "tolist", "__array__", "__dlpack__")
"""Operations that carry values of tensors into Python."""


class _Reading(TorchFunctionMode):
    """Notes the methods among them, which execute no operation."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            self._recording.note(name, tensors_of((args, kwargs)), [])
        return func(*args, **(kwargs or {}))


def _require_same_values(model: nn.Module, captured: Captured, output: Any) -> set[str]:
    """Refuse a model that executes something else than its captured graph: other operations, or other values.

    Returns the names of inputs whose integers are used for more than looking up.
    """
    program = captured.program.module(check_guards=False)
    state: ModelState | None = None
    fixed: set[str] = set()
    names = [name for name, _ in captured.inputs.values()]
    for grad, required in ((True, True), (True, False), (False, False), (True, True)):
        inputs = map_tensors(
            lambda each, r=required: each.detach().clone().requires_grad_(r and each.is_floating_point()),
            captured.example,
        )
        with torch.set_grad_enabled(grad):
            named = list(zip(names, tensors_of(inputs), strict=True))
            with _Recording(named) as ours:
                expected = program(*inputs).detach()
            with _Recording(named) as theirs, _Reading(theirs):
                found = select(model(*inputs[0], **inputs[1]), output).detach()
        fixed |= ours.fixed | theirs.fixed
        # a first call may fill caches; after it nothing may change
        before, state = state, ModelState(model)
        if before is not None:
            before.require(state)
        # without gradients torch may choose fused kernels, which are other operations for the same function
        if (grad and ours.executed != theirs.executed) or any(name in theirs.executed for name in _READING):
            pairs = zip_longest(ours.executed, theirs.executed, fillvalue="nothing")
            wanted, executed = next((pair for pair in pairs if pair[0] != pair[1]), ("no such operation", _READING[0]))
            raise UncertifiableError(
                f"{type(model).__name__} executes `{executed}` where its captured graph has `{wanted}`: it looks at "
                "values of the input, or at whether it is captured; let it always do the same"
            )
        # half of the digits: fused and plain kernels differ by rounding, another function by more
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
        size = float(expected.abs().max()) if expected.numel() else 0.0
        if found.shape != expected.shape or not bool(((found - expected).abs() <= tolerance * size).all()):
            raise UncertifiableError(
                f"{type(model).__name__} does not compute what was captured: its result depends on something else than "
                "its input and its stored tensors, such as randomness, a call before, or whether gradients are recorded"
            )
    return fixed
