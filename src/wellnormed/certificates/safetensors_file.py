"""Tensors as bytes, from a safetensors file, a NumPy array or a torch tensor; never by pickle."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
"""Names of dtypes in torch and NumPy -> in the safetensors format."""

_NUMPY = {name: np.dtype("<u2" if name == "BF16" else of).newbyteorder("<") for of, name in DTYPES.items()}


@dataclass(frozen=True)
class RawTensor:
    """One tensor's dtype (as safetensors names it), shape and bytes (row-major, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 over the name of the dtype, the shape and the bytes."""
        head = f"{self.dtype} {','.join(map(str, self.shape))}\n".encode()
        return hashlib.sha256(head + self.content).hexdigest()

    def array(self) -> np.ndarray:
        """Its entries in float64; exact for the floating dtypes."""
        entries = np.frombuffer(self.content, dtype=_NUMPY[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            entries = (entries.astype("<u4") << 16).view("<f4")
        return entries.astype(np.float64)


def raw_tensor(value: Any) -> RawTensor:
    """The bytes of a NumPy array or of a torch tensor; a `ValueError` for a dtype that certificates do not cover."""
    if hasattr(value, "detach"):  # a torch tensor: its bytes, for NumPy knows no bfloat16
        import torch

        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        value = np.asarray(value)
        shape, dtype = value.shape, value.dtype.name
        value = value.astype(value.dtype.newbyteorder("<"))
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype} is not one that a certificate covers; store floats or integers: {list(DTYPES)}"
        )
    return RawTensor(DTYPES[dtype], shape, value.tobytes())


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file whose header describes every byte of it exactly once; a `ValueError` names any other."""
    content = path.read_bytes()
    try:
        return _parse(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        # whatever a damaged header trips over is a damaged header
        raise ValueError(f"{path} is no intact safetensors file: {error}; write the weights again") from error


def _parse(content: bytes) -> dict[str, RawTensor]:
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or start > len(content):
        raise ValueError(f"its {len(content)} bytes are too few")
    header = json.loads(content[8:start], object_pairs_hook=_without_repeats)
    header.pop("__metadata__", None)
    tensors: dict[str, RawTensor] = {}
    position = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry.keys() != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in _NUMPY:
            raise ValueError(f"unknown description of {name}: {entry}")
        shape, end = tuple(entry["shape"]), position + math.prod(entry["shape"]) * _NUMPY[entry["dtype"]].itemsize
        if [start + offset for offset in entry["data_offsets"]] != [position, end] or any(n < 0 for n in shape):
            raise ValueError(f"{name} does not lie where its shape says")
        tensors[name] = RawTensor(entry["dtype"], shape, content[position:end])
        position = end
    if position != len(content):
        raise ValueError(f"{len(content) - position} bytes belong to no tensor")
    return tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return dict(pairs)
