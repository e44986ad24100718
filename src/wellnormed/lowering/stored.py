"""Tensors as bytes, in the form that the kernel of proofs reads."""

from typing import Any

import numpy as np
import torch

from wellnormed.proof.files import Stored

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
"""Names of dtypes in torch and NumPy -> in the safetensors format."""


def raw_tensor(value: Any) -> Stored:
    """The bytes of a NumPy array or of a torch tensor; a `ValueError` for a dtype that certificates do not cover."""
    if isinstance(value, torch.Tensor):  # its bytes, for NumPy knows no bfloat16
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        value = value.detach().cpu().contiguous().as_strided((value.numel(),), (1,)).view(torch.uint8).numpy()
    else:
        value = np.asarray(value)
        shape, dtype = value.shape, value.dtype.name
        value = value.astype(value.dtype.newbyteorder("<"))
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype} is not one that a certificate covers; store floats or integers: {list(DTYPES)}"
        )
    return Stored(DTYPES[dtype], shape, value.tobytes())
