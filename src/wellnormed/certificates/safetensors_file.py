"""Tensors as bytes, from a safetensors file, a NumPy array or a torch tensor; never by pickle."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8":
    "<u1", "BOOL": "|b1", "BF16": "<u2",
}  # fmt: skip


@dataclass(frozen=True)
class RawTensor:
    """One tensor's dtype (as safetensors names it), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def array(self) -> np.ndarray:
        """Its entries in float64; exact for the floating dtypes."""
        entries = np.frombuffer(self.content, dtype=_NUMPY[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            entries = (entries.astype("<u4") << 16).view("<f4")
        return entries.astype(np.float64)


def raw_tensor(value: Any) -> RawTensor:
    """The bytes of a NumPy array or of a torch tensor."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        if name == "bfloat16":  # NumPy has no such dtype
            import torch

            halves = np.atleast_1d(value.view(torch.int16).numpy()).astype("<u2")
            return RawTensor("BF16", tuple(value.shape), halves.tobytes())
        value = value.numpy()
    array = np.asarray(value)
    kind = array.dtype.newbyteorder("<")
    dtype = next((name for name, code in _NUMPY.items() if np.dtype(code) == kind and name != "BF16"), None)
    if dtype is None:
        raise ValueError(f"dtype {array.dtype} is not one that a certificate covers; store floats or integers")
    return RawTensor(dtype, array.shape, array.astype(kind).tobytes())


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file whose header describes every byte of it exactly once.

    Raises:
        ValueError: Anything else; names the file.
    """
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
    tensors: dict[str, RawTensor] = {}
    position = 0
    entries = sorted(((n, e) for n, e in header.items() if n != "__metadata__"), key=lambda e: e[1]["data_offsets"])
    for name, entry in entries:
        if entry.keys() != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in _NUMPY:
            raise ValueError(f"unknown description of {name}: {entry}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        size = math.prod(shape) * np.dtype(_NUMPY[entry["dtype"]]).itemsize
        if begin != position or end - begin != size or any(length < 0 for length in shape):
            raise ValueError(f"{name} does not lie where its shape says")
        tensors[name] = RawTensor(entry["dtype"], shape, content[start + begin : start + end])
        position = end
    if start + position != len(content):
        raise ValueError(f"{len(content) - start - position} bytes belong to no tensor")
    return tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return dict(pairs)
