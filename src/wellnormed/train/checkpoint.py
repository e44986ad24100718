"""Checkpoints: every rank writes its parts, in safetensors, and any number of ranks reads them.

All ranks see one folder, on a shared disk. A checkpoint counts once its manifest exists, which the first rank writes
last, with the checksum of every file.
"""

import hashlib
import inspect
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from wellnormed._files import MANIFEST, read_bytes, sync_folder, write_atomically, write_json, writing
from wellnormed.models.files import FORMAT, read_tensors, tensor_bytes
from wellnormed.models.parts import ALONE, PARTS, fill, require_parts, sha256_of
from wellnormed.train.ranks import Ranks
from wellnormed.train.run_folder import METRICS


def require_torch(ranks: int) -> None:
    """Refuse a torch that cannot write checkpoints of many ranks as safetensors; a single rank does not need it."""
    if ranks == 1:
        return
    writer = getattr(dcp, "HuggingFaceStorageWriter", None)
    if writer is None or "save_distributed" not in inspect.signature(writer).parameters:
        raise ValueError(
            f"torch {torch.__version__} cannot write checkpoints of many ranks as safetensors "
            "(torch.distributed.checkpoint.HuggingFaceStorageWriter with save_distributed); install a newer torch"
        )


def save_parts(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any], metrics: bytes, ranks: Ranks) -> None:
    """Write tensors, plain ones or `DTensor`s, facts that JSON can hold, and rows of metrics; a collective call.

    An `OSError` on any rank, such as for a full disk, is raised on all, and the checkpoint does not count: the first
    rank writes its manifest only after all have written their parts.
    """
    parts = folder / PARTS

    def begin() -> None:
        if folder.exists():  # leftovers of a killed run
            shutil.rmtree(folder)
        with writing(parts):
            parts.mkdir(parents=True)

    ranks.by_first(begin)
    if ranks.world == 1:
        write_atomically(parts / ALONE, tensor_bytes(tensors))
    else:
        with _explained(folder):
            dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(parts), save_distributed=True))
    sums = _sums(parts, ranks)

    def end() -> None:
        write_atomically(folder / METRICS, metrics)
        written = {"metrics_sha256": hashlib.sha256(metrics).hexdigest(), "shapes": _shapes(tensors), "sha256": sums}
        write_json(folder / MANIFEST, {"format": FORMAT, **facts, **written}, sealed=True)
        sync_folder(folder.parent)

    ranks.by_first(end)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}


def load_parts(
    folder: Path, tensors: dict[str, Tensor], expected: dict[str, Any], remedy: str, ranks: Ranks
) -> tuple[dict[str, Any], bytes]:
    """Read a checkpoint into these tensors, in place, and return its facts and its metrics; a collective call.

    A missing or damaged file, facts that differ from those expected, and a checkpoint of another model or optimizer are
    a `ValueError` on all ranks.
    """
    facts = require_parts(folder / PARTS, _sums(folder / PARTS, ranks), remedy)
    metrics = ranks.together(lambda: read_bytes(folder / METRICS, remedy))
    if hashlib.sha256(metrics).hexdigest() != facts.get("metrics_sha256"):
        raise ValueError(f"{folder / METRICS} is truncated or changed: it does not match {MANIFEST}; {remedy}")
    if (shapes := _shapes(tensors)) != facts["shapes"]:
        name = min(name for name in shapes.keys() | facts["shapes"] if shapes.get(name) != facts["shapes"].get(name))
        there, here = (f"the shape {at[name]}" if name in at else "no place" for at in (facts["shapes"], shapes))
        raise ValueError(
            f"{folder} is of another model or optimizer: {name!r} has {there} there and {here} here; {remedy}"
        )
    for name, value in expected.items():
        if facts.get(name) != value:
            raise ValueError(
                f"{folder} is of another run: its {name} is {facts.get(name)} instead of {value}; {remedy}"
            )
    if ranks.world == 1 and list(facts["sha256"]) == [ALONE]:
        content = read_bytes(folder / PARTS / ALONE, remedy)
        for name, tensor in read_tensors(content, str(folder / PARTS / ALONE)).items():
            tensors[name].copy_(tensor)
    else:
        with _explained(folder):
            fill(tensors, folder / PARTS, alone=ranks.world == 1)
    return facts, metrics


def _sums(parts: Path, ranks: Ranks) -> dict[str, str]:
    """The checksum of every file, each computed by one rank."""
    ranks.gather(None)  # wait until all have written their files
    files = sorted(parts.glob("*.safetensors"))

    def sums_here() -> dict[str, str]:
        return {path.name: sha256_of(path) for path in files[ranks.rank :: ranks.world]}

    return {name: value for part in ranks.gather(ranks.together(sums_here)) for name, value in part.items()}


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise one `OSError` with one sentence where torch collects the errors of many ranks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise OSError(
            f"rank {rank}: {folder} could not be written or read ({why}); make room or give permission"
        ) from error
