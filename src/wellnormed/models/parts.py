"""Checkpoints in parts: every rank writes a safetensors file, and one process reads them all."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wellnormed._files import MANIFEST, read_json

PARTS = "parts"
"""The folder in a checkpoint that holds the files of the ranks."""
ALONE = "model-00001-of-00001.safetensors"
"""The file of a single rank; any number of ranks can read it."""
MODEL = "model."
"""The prefix of the names of weights in it."""


def sha256_of(path: Path) -> str:
    """The checksum of a file, which may be larger than the memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_parts(parts: Path, checksums: Mapping[str, str], remedy: str) -> dict[str, Any]:
    """Read the manifest of a checkpoint; other checksums than these of its files are a `ValueError`."""
    facts = read_json(parts.with_name(MANIFEST), remedy, sealed=True)
    for name in sorted(facts["sha256"].keys() | checksums.keys()):
        if checksums.get(name) != facts["sha256"].get(name):
            what = "is missing" if name not in checksums else "is truncated or changed"
            raise ValueError(f"{parts / name} {what}: it does not match {MANIFEST}; {remedy}")
    return facts


def fill(tensors: dict[str, Tensor], parts: Path, alone: bool = True) -> None:
    """Read the parts of a checkpoint into tensors, in place; unless this process is `alone`, a collective call."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is alone
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(parts)), no_dist=alone)


def read_parts(parts: Path) -> dict[str, Tensor]:
    """The weights in the parts of a checkpoint, whole; damaged ones are a `ValueError`."""
    import torch.distributed.checkpoint as dcp

    remedy = f"remove {parts.parent}, and the checkpoint before it is read"
    sums = {path.name: sha256_of(path) for path in parts.glob("*.safetensors")}
    require_parts(parts, sums, remedy)
    if list(sums) == [ALONE]:
        return {n.removeprefix(MODEL): t for n, t in load_file(parts / ALONE).items() if n.startswith(MODEL)}
    stored: Any = dcp.HuggingFaceStorageReader(str(parts)).read_metadata().state_dict_metadata  # of tensors alone
    weights = [name for name in stored if name.startswith(MODEL)]
    tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in weights}
    fill(tensors, parts)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
