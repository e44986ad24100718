"""Run Python code as it is, and compute the same in float64 beside it.

Whatever the code asks of its tensors (their dtype, their strides, whether they require gradients) has the answer of an
ordinary run, so that it takes the branches that it takes for its user. Conversions between floats of 16 bits or more
are the identity in float64: there they do not round.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from wellnormed.program.operation import name_of
from wellnormed.program.program import tensors_of


class InDouble(TorchDispatchMode):
    """Computes in float64 whatever is computed from some tensors while the mode is on.

    What does not depend on these tensors, such as weights, is taken as it was computed, in its own dtype.

    Args:
        inputs: The tensors, of any dtype; integers are followed too, for they look up floats.

    Example:
        >>> x = torch.ones(1)
        >>> with InDouble([x]) as doubled:
        ...     y = (x / 3).bfloat16()
        >>> y.item(), doubled.of(y).item()
        (0.333984375, 0.3333333333333333)
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._beside: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        """Memory of a tensor -> a flat tensor with an entry in float64 for each of its entries."""
        self._most = 64
        self.failure: str | None = None
        """Why float64 could not follow an operation; None if it followed all."""
        for each in inputs:
            self._add(each, _flat(each))

    def of(self, tensor: Tensor) -> Tensor | None:
        """The float64 companion of a tensor; None if float64 could not follow all operations."""
        return None if self.failure else self._companion(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # in inference mode operations come here before they are taken apart; the parts of an interpolation would make
        # its weights in float32
        if torch.is_inference_mode_enabled() and not name_of(func).startswith("aten.upsample_"):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        operands = tensors_of((args, kwargs))
        if self.failure or not any(_memory(each) in self._beside for each in operands):
            return func(*args, **kwargs)
        for each in operands if func._schema.is_mutable else ():
            if each.layout == torch.strided and _memory(each) not in self._beside:
                self._add(each, _flat(each))
        wide = torch.utils._pytree.tree_map(self._wide, (args, kwargs))
        _spell_out_eps(func, args, wide[1])
        result = func(*args, **kwargs)
        try:
            beside = func(*wide[0], **wide[1])
            for each, companion in zip(tensors_of(result), tensors_of(beside), strict=True):
                if _memory(each) not in self._beside:
                    self._add(each, _laid_out(companion, each))
        except Exception as error:  # of kernels that float64 does not have, whatever they raise
            self.failure = f"{func} has no float64 ({type(error).__name__})"
        return result

    def _add(self, tensor: Tensor, flat: Tensor) -> None:
        if len(self._beside) > self._most:
            self._beside = {key: each for key, each in self._beside.items() if not each[0].expired()}
            self._most = max(64, 2 * len(self._beside))
        self._beside[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), flat

    def _wide(self, each: Any) -> Any:
        if isinstance(each, Tensor):
            return self._companion(each)
        return _wide_dtype(each) if isinstance(each, torch.dtype) else each

    def _companion(self, tensor: Tensor) -> Tensor:
        known = self._beside.get(_memory(tensor))
        if known is None:
            return tensor.detach().to(_wide_dtype(tensor.dtype)) if tensor.layout == torch.strided else tensor
        flat = known[1]
        if flat.is_complex() and not tensor.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        elif tensor.is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        companion = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        companion = companion.conj() if tensor.is_conj() else companion
        return -companion if tensor.is_neg() else companion


def run_in_double(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Tensor | None:
    """The result of a call in float64, where its inputs are followed; None if float64 could not follow an operation.

    Args:
        function: Calls the code on the inputs.
        inputs: All tensors that the result depends on, but for constants.

    Example:
        >>> x = torch.ones(1)
        >>> run_in_double(lambda: (x + 1e10) - 1e10, [x])
        tensor([1.], dtype=torch.float64)
    """
    for vendor in (True, False):  # kernels of mkldnn are faster, and some of them are for float32 alone
        with vendor_kernels(vendor), InDouble(inputs) as doubled:
            result = function()
        companion = doubled.of(result)
        if companion is not None:
            return companion.detach()
    return None


@contextlib.contextmanager
def vendor_kernels(enabled: bool) -> Iterator[None]:
    """With the kernels of mkldnn, if the processor has them, or without; their other settings stay as they are."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(enabled)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def _memory(tensor: Tensor) -> int:
    """A number for the memory that a tensor is a view of, which no other memory has now; -1 if it is not dense."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else -1


def _flat(tensor: Tensor) -> Tensor:
    """A copy of all entries of a tensor's memory, in float64."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
    return whole.to(_wide_dtype(tensor.dtype), copy=True)


def _laid_out(companion: Tensor, tensor: Tensor) -> Tensor:
    """The entries of a result in float64, laid out in memory as those of the result."""
    entries = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat = companion.new_empty(entries)
    flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(companion)
    return flat


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds the same numbers in float64; floats of 8 bits stay as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _spell_out_eps(func: Any, args: Any, keywords: dict[str, Any]) -> None:
    """Give a normalization without an eps the eps that it has in the precision of the ordinary run."""
    names = [each.name for each in func._schema.arguments]
    if "rms_norm" not in func._schema.name or "eps" not in names:
        return
    place = names.index("eps")
    if len(args) <= place and keywords.get("eps") is None:
        keywords["eps"] = torch.finfo(torch.promote_types(args[0].dtype, torch.float32)).eps
