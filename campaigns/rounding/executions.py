"""Ways to execute a model: kernels, batches, threads, orders of sums, compilers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.const_fold import split_const_subgraphs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import wellnormed as wn
from wellnormed.program import Program

aten = torch.ops.aten

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sequential": lambda t: t, "reversed": lambda t: t.flip(0),
    "rising": lambda t: t.gather(0, t.abs().argsort(0)),
    "falling": lambda t: t.gather(0, t.abs().argsort(0, descending=True)),
    "signed": lambda t: t.sort(0).values,
    "permuted": lambda t: t[torch.randperm(len(t), generator=torch.Generator().manual_seed(len(t)))],
    "blocked": lambda t: torch.stack([torch.stack([*block]).sum(0) for block in t.split(8)]),
}  # fmt: skip
"""Name -> a rearrangement of addends along the first axis, for every sum alone."""


class Reordered(TorchDispatchMode):
    """Executes products of matrices, convolutions, sums and means with sums in another order, one after another."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def _sum(self, addends: Tensor, dtype: torch.dtype) -> Tensor:
        wide = ORDERS[self.order](addends)
        total = wide[0]
        for each in wide[1:]:
            total = total + each
        return total.to(dtype)

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """`(n, k) (k, m) + bias`, where the bias is the first addend."""
        wide = torch.promote_types(a.dtype, torch.float32)
        addends = a.to(wide).mT[:, :, None] * b.to(wide)[:, None, :]
        if bias is not None:
            addends = torch.cat([bias.to(wide).expand(addends.shape[1:])[None], addends])
        return self._sum(addends, a.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.mm.default:
            return self._product(*args)
        if func is aten.addmm.default and kwargs.get("beta", 1) == 1:
            return self._product(args[1] * kwargs.get("alpha", 1), args[2], args[0])
        if func is aten.bmm.default:
            return torch.stack([self._product(a, b) for a, b in zip(*args, strict=True)])
        if func in (aten.mean.dim, aten.sum.dim_IntList) and len(args) > 1 and len(args[1] or ()) == 1:
            dtype, axis = kwargs.get("dtype") or args[0].dtype, args[1][0]
            x = args[0].to(torch.promote_types(dtype, torch.float32))
            total = self._sum(x.movedim(axis, 0), x.dtype) / (x.shape[axis] if func is aten.mean.dim else 1)
            return (total.unsqueeze(axis) if len(args) > 2 and args[2] else total).to(dtype)
        if func is aten.convolution.default and not args[6] and args[8] == 1 and args[1].ndim == 4:
            x, weight, bias, stride, padding, dilation = args[:6]
            columns = F.unfold(x, weight.shape[2:], dilation, padding, stride).transpose(0, 1).flatten(1)
            result = self._product(weight.flatten(1), columns, None if bias is None else bias[:, None])
            sizes = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
            size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes]
            return result.unflatten(1, (x.shape[0], *size)).transpose(0, 1)
        return func(*args, **kwargs)


@contextmanager
def _set(set_to: Callable[[Any], Any], value: Any, default: Any) -> Iterator[None]:
    """A setting of torch, in the block."""
    set_to(value)
    try:
        yield
    finally:
        set_to(default)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one by one": nullcontext, "as one batch": nullcontext, "of many": nullcontext, "strided": nullcontext,
    "captured": nullcontext, "compiled": nullcontext, "onnx": nullcontext,
    "without mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "without flash": lambda: sdpa_kernel(SDPBackend.MATH),
    "subnormal results are 0": lambda: _set(torch.set_flush_denormal, True, False),
    "two threads": lambda: _set(torch.set_num_threads, 2, 1),
    "deterministic": lambda: _set(lambda on: torch.use_deterministic_algorithms(on, warn_only=True), True, False),
    **{order: (lambda order=order: Reordered(order)) for order in ORDERS},
}  # fmt: skip
"""Name of a way of execution -> its context."""
OFTEN = "one by one", "subnormal results are 0", "signed"


def execute(model: Callable[[Tensor], Tensor], x: Tensor, way: str, alone: bool) -> Tensor:
    """The result for a batch in one of the `WAYS`; `alone` says that samples may be put into other batches."""
    if way == "onnx":
        return _by_onnx(model, x)
    if way == "strided":
        last = x.ndim == 4 and torch.channels_last
        return model(x.contiguous(memory_format=last) if last else x.repeat_interleave(2, -1)[..., ::2])
    if way == "of many" and alone:
        return model(x.repeat(17, *[1] * (x.ndim - 1))).unflatten(0, (17, -1))[-1]
    each = alone and way in ("one by one", "compiled", *ORDERS)
    return torch.cat([model(one[None]) for one in x]) if each else model(x)


def compiled(program: Program) -> Callable[[Tensor], Tensor]:
    """A program that is compiled with the constants that it computes stored, as a compiler may compute other ones."""
    module = split_const_subgraphs(program.module)
    module.run_folding()
    torch._dynamo.reset()
    return torch.compile(module)


def _by_onnx(model: Any, x: Tensor) -> Tensor:
    """The result of the file that `wn.export` writes, which refuses one that computes something else."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # as it is: optimized, a pool of maxima takes zeros that were padded before it for its own padding
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as place:
        folder = wn.export(model, Path(place) / "model", x, certificate=False, onnx=True)
        session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    (given,) = session.get_inputs()
    calls = x.split(1) if given.shape[0] == 1 else [x]
    return torch.cat([torch.from_numpy(session.run(None, {given.name: each.numpy()})[0]) for each in calls])
