"""Tensors as bytes, from a safetensors file, a NumPy array or a torch tensor; never by pickle."""

import hashlib
from dataclasses import dataclass
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
