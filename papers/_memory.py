"""The memory that cells need, measured on torch's fake tensors before any of them is started.

A cell is run as it is, but for two things. Tensors of floating-point numbers are made on the meta device, where they
have sizes and no content: what is computed from them is that too, and their storages are counted from their making to
their end. And the run ends after its second step of an optimizer, the first that begins with the optimizer's state.
Data are real, so that they are read as ever, and are not counted; only FineWeb's tokens are zeros in their place.
Kernels are those of the CPU: on a GPU some need other space for what they compute on the way.
"""

import os
import tempfile
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import ge
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from papers._experiment import Experiment
from papers._grid import Chunk, missing
from wellnormed.data.shards import header

FINEWEB = "fineweb10B"
STEPS = 2
"""Steps of an optimizer that are taken; the second is the first with the optimizer's state beside activations."""

NO_SIZES = {"seed", "steps", "lr", "rate"}
"""Numbers of a cell on which no tensor's size depends."""
_BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_WHOLE = 2**16  # whole numbers from which on a tensor of them is fake too, for they are no data of a batch


class Memory(NamedTuple):
    """Bytes."""

    parameters: int
    gradients: int
    state: int
    """The optimizer's."""
    peak: int
    """The most that there is at a time: all of these, activations, and what an update needs for a while."""

    @property
    def rest(self) -> int:
        """Activations, and what is computed on the way."""
        return self.peak - self.parameters - self.gradients - self.state


class _Enough(BaseException):
    """The steps that are measured are done; no error, for a run catches some."""


class _Meter(TorchDispatchMode):
    """Makes floating-point tensors fake, and counts what is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        # modules refuse to move a tensor with weak references, by which this remembers it, and copies of layers copy it
        self.fake.fake_tensor_converter.set_tensor_memo = lambda *_: None  # pyrefly: ignore[bad-assignment]
        self.fake.__deepcopy__ = lambda _: self.fake  # pyrefly: ignore[missing-attribute]
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            made = func(*args, **kwargs) if tensors else self._made(func, args, kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            return tensors[0].dtype is torch.bool  # yes, or zero
        elif func is torch.ops.aten.nonzero.default:
            made = torch.stack(_places(tensors[0]), -1)
        else:
            made = self._faked(func, [*map(_with_all_places, args)] if func in _BY_MASK else args, kwargs)
            if isinstance(made, Tensor) and not made.ndim and not made.is_floating_point():
                made = _decided(func, args, kwargs, made.dtype)
        for tensor in tree_leaves(made):
            if isinstance(tensor, FakeTensor):
                self._count(tensor)
        return made

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What is made of no tensors: a fake, if it holds several floating-point numbers."""
        made = self._faked(func, args, kwargs)
        least = _WHOLE if not isinstance(made, Tensor) or not made.is_floating_point() else 1
        return made if isinstance(made, Tensor) and made.numel() > least else func(*args, **kwargs)

    def _faked(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self.fake:  # which draws nothing
            return func(*args, **kwargs | ({"generator": None} if "generator" in kwargs else {}))

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self._forget, key)
            self.now += self.alive[key]
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def _decided(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Tensor:
    """A number or an answer that is asked of fakes, for code to go on: that of zeros, which are finite and few."""
    fakes = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
    every = func.overloadpacket is torch.ops.aten.all
    if every or any(fake.ndim for fake in fakes):
        return torch.full((), every, dtype=dtype)
    return func(*tree_map(lambda x: torch.zeros((), dtype=x.dtype) if isinstance(x, FakeTensor) else x, args), **kwargs)


def _places(mask: Tensor) -> list[Tensor]:
    return list(torch.ones(mask.shape, dtype=torch.bool).nonzero().unbind(-1))


def _with_all_places(index: Any) -> Any:
    """Where a mask selects entries, all of them: no case needs more memory."""
    if not isinstance(index, list) or not any(isinstance(each, FakeTensor) for each in index):
        return index
    return [place for each in index for place in
            (_places(each) if isinstance(each, FakeTensor) and each.dtype is torch.bool else [each])]  # fmt: skip


class _Addresses(TorchFunctionMode):
    """What is asked of tensors in Python: fakes have no address to tell them apart by, and their storages have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage()._cdata + args[0].storage_offset()
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            return np.zeros(args[0].shape)
        made = func(*args, **(kwargs or {}))
        # of a batch that is computed in parts two, for each takes the memory of the second
        return made[:2] if func is Tensor.split and not isinstance(args[0], FakeTensor) else made


def measure(experiment: Experiment, chunk: Sequence[Any]) -> Memory:
    """The bytes of cells that are run at once, with two steps of an optimizer if they take any."""
    meter, found, steps = _Meter(), dict.fromkeys(Memory._fields, 0), 0

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps < STEPS:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, Tensor)]
        seen: set[int] = set()  # for momentum may lie in the gradients
        for name, tensors in (("parameters", parameters), ("gradients", gradients), ("state", state)):
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            found[name] = sum(size for key, size in storages.items() if key not in seen)
            seen |= storages.keys()
        raise _Enough

    handle = register_optimizer_step_post_hook(after)
    try:
        with _stand_in() as folder, warnings.catch_warnings(), meter, _Addresses():
            warnings.simplefilter("ignore", UserWarning)  # by which torch tells what fakes do not have
            experiment.run(chunk, torch.device("cpu"), *[folder / "cell"] * experiment.keeps)
    except _Enough:
        pass
    finally:
        handle.remove()
    return Memory(**found | {"peak": meter.peak})


@contextmanager
def _stand_in() -> Iterator[Path]:
    """A folder in which the data of this machine lie, with zeros for FineWeb's tokens."""
    own = os.environ.get("WELLNORMED_DATA")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in Path(own).resolve().iterdir() if own and Path(own).is_dir() else ():
            if path.name != FINEWEB:
                (folder / path.name).symlink_to(path)
        (folder / FINEWEB).mkdir()
        for split in ("train", "val"):
            (folder / FINEWEB / f"zeros_{split}_000000.bin").write_bytes(header(2**16) + bytes(2 * 2**16))
        os.environ["WELLNORMED_DATA"] = name
        try:
            yield folder
        finally:
            os.environ.pop("WELLNORMED_DATA") if own is None else os.environ.update(WELLNORMED_DATA=own)


def largest(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Of the chunks whose cells differ in numbers alone, those that no other exceeds or equals in all sizes."""
    found: dict[Any, list[tuple[Chunk, list[float]]]] = {}
    for chunk in chunks:
        words, numbers = _described(chunk)
        others = found.setdefault(words, [])
        if not any(all(map(ge, more, numbers)) for _, more in others):
            others[:] = [(each, less) for each, less in others if not all(map(ge, numbers, less))]
            others.append((chunk, numbers))
    return [chunk for kind in found.values() for chunk, _ in kind]


def _described(chunk: Chunk) -> tuple[Hashable, list[float]]:
    """The words of cells that are run at once; and the largest of each of their sizes, and how many they are."""
    values = [[(key, value) for key, value in vars(cell).items() if key not in NO_SIZES] for cell in chunk]
    numbers = {key: 0.0 for cell in values for key, value in cell if _is_number(value)}
    for key, value in (each for cell in values for each in cell):
        if _is_number(value):
            numbers[key] = max(numbers[key], float(value))
    words = {(type(cell).__name__, key, str(value)) for cell in chunk for key, value in vars(cell).items()
             if not _is_number(value)}  # fmt: skip
    return (frozenset(words), *numbers), [len(chunk), *numbers.values()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def memory_of(device: str) -> int:
    """The bytes of a device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def dry_run(experiment: Experiment, cells: Sequence[Any], device: str, jobs: int, console: Console) -> None:
    """Print what the largest of the cells need, and refuse them if the device has less.

    Raises:
        ValueError: If a cell, or as many as run at the same time, need more than the device has.
    """
    names, most = ("parameters", "gradients", "optimizer's state", "activations and updates"), 0
    for chunk in largest(missing(experiment, cells, ())):
        memory = measure(experiment, chunk)
        most = max(most, memory.peak)
        cell = str(chunk[0]) if len(chunk) == 1 else f"{len(chunk)} cells at once, the first {chunk[0]}"
        parts = zip(names, (*memory[:-1], memory.rest), strict=True)
        line = f"{shown(memory.peak)}: {', '.join(f'{name} {shown(size)}' for name, size in parts)}; {cell}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    here = memory_of(device)
    console.print(f"{device} has {shown(here)}; no cell was started", highlight=False, soft_wrap=True)
    if most * jobs > here:
        many = f", {jobs} of them at the same time {shown(most * jobs)}" if jobs > 1 else ""
        raise ValueError(
            f"cells of {experiment.name} need up to {shown(most)}{many}, and {device} has {shown(here)}; pass a "
            "--device that has as much, fewer --jobs, or --only with the cells that fit"
        )


def shown(size: int) -> str:
    """Bytes in a unit in which they can be read.

    Example:
        >>> shown(3 * 10**9), shown(2 * 10**5)
        ('3.0 GB', '0.2 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
