"""What the tests of a model's start run in every process."""

import hashlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wellnormed.data import load_corpus
from wellnormed.models.files import BUILDERS
from wellnormed.nn import starting
from wellnormed.norms import spectral
from wellnormed.parallel.layout import local, whole
from wellnormed.train.config import TrainConfig
from wellnormed.train.environment import threads
from wellnormed.train.language import LanguageTask
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import built, named_generators

CPU = torch.device("cpu")


def here():
    return Ranks(dist.get_rank(), dist.get_world_size(), CPU) if dist.is_initialized() else Ranks(0, 1, CPU)


def large(entries):
    """Weights of so many entries are taken for large ones."""
    modules = (starting, spectral)
    patches = [mock.patch.object(module, "LARGE", entries) for module in modules]
    return patches[0], patches[1]


class Live(TorchDispatchMode):
    """The bytes of all tensors with values that were made here and live, and the most there were at one time."""

    def __init__(self):
        super().__init__()
        self.known, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (part := local(tensor)).device.type != "meta":
                storage = part.untyped_storage()
                self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result


def start(model, entries, seed=5):
    """Of a model that is made on all processes: digests of its whole weights, and the peak over its size.

    The peak is this process', over the bytes of the whole model.
    """
    config = TrainConfig(model=model, parallel="fsdp", lipschitz=3.0 if model.architecture == "potential" else None,
                         constraint="none" if model.architecture == "nanogpt" else "soft-cap")  # fmt: skip
    one, other = large(entries)
    with one, other, threads(1), Live() as live:
        made, _, _ = built(config, named_generators(seed)["initial weights"], here(), None)
    digests = {name: hashlib.sha256(whole(p).numpy().tobytes()).hexdigest() for name, p in made.named_parameters()}
    return digests, live.peak / sum(4 * p.numel() for p in made.parameters())


def gathered(model, source):
    """The entries of the largest weight that a process assembles until the first step is taken."""
    config = TrainConfig(model=model, parallel="fsdp", source=source, batch=4, steps=2, device="cpu",
                         lipschitz=3.0 if model.architecture == "potential" else None, precision="float32")  # fmt: skip
    sizes, full_tensor = [0], DTensor.full_tensor
    with mock.patch.object(DTensor, "full_tensor", lambda t, **k: sizes.append(t.numel()) or full_tensor(t, **k)):
        task = LanguageTask(config, load_corpus(config.data, source), here())
        task.advance()
    return max(sizes)


def with_a_buffer(model):
    """What is said of a model that has a buffer."""

    class Buffered(BUILDERS[type(model)]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.register_buffer("table", torch.ones(2))

    with mock.patch.dict(BUILDERS, {type(model): Buffered}):
        try:
            start(model, 2**20)
        except ValueError as error:
            return str(error)
    return None
