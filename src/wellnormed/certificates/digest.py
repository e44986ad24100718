"""SHA-256 of a tensor: over the name of its dtype, its shape and its bytes. Standard library only."""

import hashlib
from collections.abc import Sequence


def tensor_digest(dtype: str, shape: Sequence[int], content: bytes) -> str:
    """Hexadecimal digest of one tensor.

    Args:
        dtype: Its name in the safetensors format (`F32`, `BF16`, `I64`, ...).
        shape: Its dimensions.
        content: Its entries in row-major order, little-endian.

    Example:
        >>> tensor_digest("F32", (0,), b"")[:8]
        '169dd0e2'
    """
    head = f"{dtype} {','.join(map(str, shape))}\n".encode()
    return hashlib.sha256(head + content).hexdigest()
