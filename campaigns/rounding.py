"""An attack on certified rounding errors: nothing that random small programs execute may lie beyond them.

A model of `campaigns.random_models` is converted to a dtype, mixed with layers that round much, certified, and attacked
at inputs of its domain in two ways. It is executed by many kernels, in batches and with sums in many orders, and
compared with the same program in float64. And each operation of that program gets the errors that the stated arithmetic
allows, with the signs that move the result most: these lie close to the bound, and show what float64 cannot show of a
float64 program. `--pairs` searches for two inputs, closer than a certified radius, of which one is executed with
another largest logit, and for settled predictions that differ.

    python -m campaigns.rounding --models 10000 --minutes 60
    python -m campaigns.rounding --only 17      # one model, in full
    python -m campaigns.rounding --pairs 480
"""

import io
import json
import logging
import math
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import wellnormed as wn
from campaigns.outcomes import parser_of, read
from campaigns.random_models import draw_model
from campaigns.random_models.draw import Draw, Layer
from papers.header import header, write_result
from wellnormed.certificates.certificate import Certificate
from wellnormed.lowering.rounding import rounds
from wellnormed.program import double
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.operation import PLACING, kind_of, name_of, record_of
from wellnormed.program.program import Program
from wellnormed.proof.decimals import float_up

RESULTS, PROGRESS = Path("results/rounding.json"), Path("runs/rounding")
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Dtype -> the largest relative error of one rounding."""
DTYPES = {str(each).removeprefix("torch."): each for each in UNITS}
NOISE = 1e-12
"""Relative share of an exact result that float64 may have added to it."""
FIRST_ORDER = 1e-5
"""Relative share by which the sum of first-order changes may exceed the largest change."""
MOST = 1e9
"""The share that stands for any larger one."""
aten = torch.ops.aten


# ---------------------------------------------------------------- programs


def _chosen(x: Tensor) -> Tensor:
    """Every other entry along the last axis."""
    return torch.arange(x.shape[-1]) % 2 == 0


def twists(draw: Draw, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Layers for any shape that round more than they change."""
    other, size = draw.choice([each for each in UNITS if each != dtype]), draw.between(1.0, 1e4)
    c, tiny, tenth = math.ldexp(round(size * 256), -8), torch.finfo(dtype).tiny, torch.tensor(0.1, dtype=torch.float64)
    parts = {"a": draw.tensor(1), "b": draw.tensor(1, size=draw.between(0.1, 1e3))}
    functions: dict[str, Callable[..., Tensor]] = {
        "there and back": lambda s, x: (x + c) - c, "added and taken": lambda s, x: x + size * x - size * x,
        "conversion": lambda s, x: x.to(other).to(x.dtype), "far shift": lambda s, x: x + size,
        "small and large": lambda s, x: (x * 1e-3) * 1e3, "least": lambda s, x: x * (tiny * size) * (0.5 / tiny),
        "very small and large": lambda s, x: (x * 1e-30) * 1e30, "thirds": lambda s, x: x / 3 + x / 7 - x,
        "written": lambda s, x: torch.cat([x[..., :1] * 0 + 0.1, x], -1), "limits": lambda s, x: x.clamp(-0.1, 0.7),
        "stored": lambda s, x: x * s.a + s.b, "subtracted from": lambda s, x: torch.rsub(x, 0.3, alpha=0.7),
        "mixed": lambda s, x: (x.float() + 0.1 * x.to(other)).to(x.dtype),
        "twice": lambda s, x: x.tanh() - 0.9 * x.tanh(),
        "assigned": lambda s, x: torch.slice_scatter(x, x[..., :1] * 0.7, -1, 0, 1),
        "linked": lambda s, x: x.lerp(-x, 0.3), "lengths": lambda s, x: x.norm(dim=-1, keepdim=True) + x,
        "summed": lambda s, x: x + x.sum(-1, keepdim=True), "centred": lambda s, x: x - x.mean(-1, keepdim=True),
        "running": lambda s, x: x.cumsum(-1), "where": lambda s, x: torch.where(_chosen(x), x, 0.1),
        "filled": lambda s, x: x.masked_fill(_chosen(x), 0.1),
        "of its shape": lambda s, x: torch.ones_like(x) * 0.7 * x + torch.full_like(x, 0.1),
        "wide": lambda s, x: x * tenth, "wide divisor": lambda s, x: x / (3 * tenth),
        "long mean": lambda s, x: x.mean(-1, True, dtype=torch.float64).to(x.dtype),
        "polynomial": lambda s, x: x * x * 0.3 - 0.7 * x + 0.1, "steep": lambda s, x: (100 * x).tanh(),
        "smooth": lambda s, x: F.softmax(3 * x, -1) + F.log_softmax(x, -1),
        "far cosine": lambda s, x: (x + 1e3).cos(),
        "root": lambda s, x: x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
        "near": lambda s, x: F.normalize(x, dim=-1), "added part": lambda s, x: torch.add(x, x.flip(-1), alpha=-0.3),
        "products": lambda s, x: torch.addcmul(x, x, s.a, value=0.3), "elu": lambda s, x: F.elu(x, 0.7),
        "leaky": lambda s, x: F.leaky_relu(x, 0.1), "number": lambda s, x: F.pad(x, (1, 1), value=0.1),
    }  # fmt: skip
    return {name: Layer(function, **parts) for name, function in functions.items()}


class Autocast(nn.Module):
    """A module under autocast to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@dataclass(frozen=True)
class Case:
    """A model with its example input and domain."""

    number: int
    model: nn.Module
    example: Tensor
    radius: float
    layers: tuple[str, ...]


def draw_case(seed: int, number: int) -> Case:
    """Case `number` of a seed: every other one has one layer or two, where a missing term is seen best."""
    draw, drawn = Draw(seed + 77, number), draw_model(seed, number)
    dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    example, names, modules = drawn.example, list(drawn.layers), list(drawn.model)
    if draw.chance():
        count = draw.choice([1, 1, 2])
        names, modules = names[:count], modules[:count]
    for _ in range(draw.choice([0, 1, 1, 2])):
        known, place = twists(draw, dtype), draw.whole(0 if example.is_floating_point() else 1, len(modules))
        twist = draw.choice(list(known))
        modules.insert(place, known[twist])
        names.insert(place, f"twist: {twist}")
    model = nn.Sequential(*modules)
    if draw.chance(0.15):
        for each in (*model.parameters(), *model.buffers()):
            if each.is_floating_point():
                size = draw.choice([1.0, 1.0, 1e-30, 1e30, 1e-38, 100.0, 1e-3])
                each.data = each.data * (0.01 if dtype == torch.float16 else size)
    model = model.to(dtype).eval()
    if dtype == torch.float32 and draw.chance(0.2):
        names.append("autocast")
        model = Autocast(model)
    radius = drawn.radius * draw.choice([1.0, 1.0, 1.0, 0.1, 1e-3, 30.0])
    return Case(number, model, example.to(dtype) if example.is_floating_point() else example, radius, tuple(names))


# ---------------------------------------------------------------- executions

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
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(model)(x)
    if way == "onnx":
        return _by_onnx(model, x)
    if way == "strided":
        last = x.ndim == 4 and torch.channels_last
        return model(x.contiguous(memory_format=last) if last else x.repeat_interleave(2, -1)[..., ::2])
    if way == "of many" and alone:
        return model(x.repeat(17, *[1] * (x.ndim - 1))).unflatten(0, (17, -1))[-1]
    return torch.cat([model(one[None]) for one in x]) if alone and way in ("one by one", *ORDERS) else model(x)


def _by_onnx(model: Any, x: Tensor) -> Tensor:
    import onnxruntime

    file, options = io.BytesIO(), onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # as it is: optimized, a pool of maxima takes zeros that were padded before it for its own padding
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    logging.disable(logging.WARNING)
    torch.onnx.export(model, (x,), dynamo=True, verbose=False).save(file)  # type: ignore[union-attr]
    session = onnxruntime.InferenceSession(file.getvalue(), options)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(result)


# ---------------------------------------------------------------- errors that the arithmetic allows


class _Kept(double._Writing):
    """The float64 graph with conversions as nodes, and how its nodes are executed."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.executed: dict[str, tuple[torch.dtype, bool, str]] = {}

    def _in_float64(self, node: fx.Node) -> fx.Node:
        copy, value = super()._in_float64(node), node.meta["val"]
        rounding = rounds(node, self.program.depends.variable)
        if kind_of(node) in ("copy", "random"):
            if not rounding:
                return copy
            copy = self.graph.call_function(aten.mul.Scalar, (copy, 1.0))
        if isinstance(value, Tensor):
            self.executed[copy.name] = value.dtype, rounding, self.same[node].name
        return copy


def kept(program: Program) -> _Kept:
    """The program in float64, written out: its graph, and dtypes and repetitions of its nodes."""
    written: list[_Kept] = []
    with mock.patch.object(double, "_Writing", lambda given: written.append(_Kept(given)) or written[-1]):
        program.double()
    return written[-1]


_SELECTIONS = (
    "relu abs neg max min amax amin maximum minimum sort topk kthvalue median clamp clamp_min clamp_max hardtanh relu6 "
    "threshold where masked_fill fill copy zero max_pool1d max_pool2d max_pool3d max_pool2d_with_indices msort aminmax "
    "max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
)
"""Operations that round nothing."""


class Adverse(fx.Interpreter):
    """Runs a float64 program in which each operation may err: `leaves` has these errors and their sizes.

    The errors are 0, so that the result has derivatives by them, or those that are given.
    """

    def __init__(self, written: _Kept, given: Sequence[Tensor] = ()) -> None:
        super().__init__(fx.GraphModule(written.constants, written.graph))
        self.executed, self.leaves = written.executed, list[tuple[Tensor, Tensor]]()
        self._known, self._given = dict[str, Any](), list(given)

    def err(self, y: Tensor, delta: Tensor | float, dtype: torch.dtype) -> Tensor:
        """A result that may err by `delta`, or by all of it where it underflows."""
        size, least = y.detach().abs(), torch.finfo(dtype).tiny if dtype != torch.float16 else 0.0
        delta = torch.where(size < least, size, torch.as_tensor(delta, dtype=torch.float64).detach())
        return y + self.leaf(delta.expand(y.shape))

    def leaf(self, delta: Tensor) -> Tensor:
        """An error of at most `delta`."""
        error = self._given.pop(0) if self._given else torch.zeros_like(delta, requires_grad=True)
        self.leaves.append((error, torch.where(delta.isfinite(), delta, 0.0)))
        return error

    def once(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """A result that is rounded once."""
        return self.err(y, UNITS[dtype] * y.abs(), dtype)

    def run_node(self, node: fx.Node) -> Any:
        if node.name not in self.executed or node.op != "call_function":
            return super().run_node(node)
        dtype, rounding, first = self.executed[node.name]
        if first not in self._known:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            self._known[first] = self._execute(node, dtype, rounding, args, kwargs)
        return self._known[first]

    def _execute(self, node: fx.Node, dtype: torch.dtype, rounding: bool, args: Any, kwargs: Any) -> Any:
        name, record = name_of(node.target).removeprefix("aten.").split(".")[0], record_of(node)
        if (formula := getattr(self, f"_{name}", None)) and dtype.is_floating_point:
            wide = torch.promote_types(dtype, torch.float32)
            y = formula(wide, *args, **kwargs)
            return self.once(y, dtype) if wide != dtype else y
        y = node.target(*args, **kwargs)  # type: ignore[operator]
        exact = name in _SELECTIONS.split() or "getitem" in name or (record is not None and record.kind in PLACING)
        if not isinstance(y, Tensor) or not dtype.is_floating_point or (exact and not rounding):
            return y
        constants = [each for each in args if not getattr(each, "requires_grad", False)]
        if name in ("mul", "div") and constants and not rounding and _power_of_two(torch.as_tensor(constants[0])):
            return self.err(y, 0.0, dtype)
        added = name == "add" and constants and bool(torch.as_tensor(constants[0]).any())
        return self.once(y, dtype) if name != "add" or added or not constants else y

    # sums

    def _sum_of(self, wide: torch.dtype, addends: Tensor, products: bool = True) -> Tensor:
        """The sum over the first axis, with the largest, or the least, addends first."""
        ordered = addends.detach().sort(0).values
        partial = (t.cumsum(0)[1:].abs().sum(0) for t in (ordered, ordered.flip(0)))
        size = addends.detach().abs().sum(0) if products else 0.0
        return self.err(addends.sum(0), UNITS[wide] * (torch.maximum(*partial) + size), wide)

    def _mm(self, wide: torch.dtype, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if a.ndim == 1 or b.ndim == 1:
            return self.err(a @ b, UNITS[wide] * (a.detach().abs() @ b.detach().abs()), wide)
        addends = (a[..., :, :, None] * b[..., None, :, :]).movedim(-2, 0)
        bias = bias if bias is None else bias.expand(addends.shape[1:])[None]
        return self._sum_of(wide, addends if bias is None else torch.cat([addends, bias]))

    _bmm = _matmul = _mm

    def _linear(self, wide: torch.dtype, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return self._mm(wide, x, w.mT, b)

    def _addmm(self, wide: torch.dtype, c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
        return self._mm(wide, alpha * a, b, beta * c)

    _baddbmm = _addmm

    def _convolve(self, target: Any, wide: torch.dtype, x: Tensor, w: Tensor, b: Any = None, *rest: Any) -> Tensor:
        y, size = target(x, w, b, *rest), target(x.detach().abs(), w.abs(), None, *rest)
        return self.err(y, UNITS[wide] * (size + y.detach().abs()), wide)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_conv"):
            return lambda wide, *args: self._convolve(getattr(F, name[1:]), wide, *args)
        raise AttributeError(name)

    def _sum(self, wide: torch.dtype, x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        dims = sorted(d % x.ndim for d in ([dims] if isinstance(dims, int) else dims or range(x.ndim)))
        rest = [n for axis, n in enumerate(x.shape) if axis not in dims]
        y = self._sum_of(wide, x.movedim(dims, list(range(len(dims)))).reshape(-1, *rest), products=False)
        return y.reshape([1 if axis in dims else n for axis, n in enumerate(x.shape)]) if keepdim else y

    def _mean(self, wide: torch.dtype, x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        y = self._sum(wide, x, dims, keepdim)
        return self.once(y * (y.numel() / x.numel()), wide)

    def _cumsum(self, wide: torch.dtype, x: Tensor, dim: int, **_: Any) -> Tensor:
        y = x.cumsum(dim)
        delta = UNITS[wide] * y.detach().abs()
        delta.narrow(dim, 0, 1).zero_()
        return y + self.leaf(delta).cumsum(dim)

    # formulas of one operation

    def _linalg_vector_norm(
        self, wide: torch.dtype, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Tensor:
        return self.once(self._sum(wide, self.once(x * x, wide), dim, keepdim).clamp(min=1e-300).sqrt(), wide)

    def _softmax(self, wide: torch.dtype, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
        e = self.once(self.once(x - x.detach().amax(dim, keepdim=True), wide).exp(), wide)
        return self.once(e / self._sum(wide, e, dim, True), wide)

    def _log_softmax(self, wide: torch.dtype, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
        d = self.once(x - x.detach().amax(dim, keepdim=True), wide)
        return self.once(d - self.once(self._sum(wide, self.once(d.exp(), wide), dim, True).log(), wide), wide)

    def _over_root(self, wide: torch.dtype, x: Tensor, dims: Sequence[int], eps: float, *affine: Any) -> Tensor:
        """`x / sqrt(mean x^2 + eps)`, times a weight, plus a bias."""
        square = self.once(self._mean(wide, self.once(x * x, wide), list(dims), True) + eps, wide)
        y = self.once(x * self.once(square.rsqrt(), wide), wide)
        for each, act in zip(affine, (torch.mul, torch.add), strict=False):
            y = y if each is None else self.once(act(y, each), wide)
        return y

    def _centred(self, wide: torch.dtype, x: Tensor, dims: Sequence[int]) -> Tensor:
        return self.once(x - self._mean(wide, x, list(dims), True), wide)

    def _layer_norm(
        self, wide: torch.dtype, x: Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any
    ) -> Tensor:
        dims = range(-len(shape), 0)
        return self._over_root(wide, self._centred(wide, x, dims), dims, eps, w, b)

    def _group_norm(
        self, wide: torch.dtype, x: Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any
    ) -> Tensor:
        cut = x.unflatten(1, (groups, -1))
        dims, ones = range(2, cut.ndim), [1] * (x.ndim - 2)
        w, b = (t if t is None else t.reshape(groups, -1, *ones) for t in (w, b))
        return self._over_root(wide, self._centred(wide, cut, dims), dims, eps, w, b).reshape(x.shape)

    def _rms_norm(
        self, wide: torch.dtype, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
    ) -> Tensor:
        return self._over_root(wide, input, range(-len(normalized_shape), 0), eps, weight)

    def _scaled_dot_product_attention(
        self, wide: torch.dtype, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0,
        is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) if enable_gqa else t for t in (k, v))
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (t.expand(*batch, *t.shape[-2:]) for t in (q, k, v))
        logits = self.once(self._mm(wide, q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale), wide)
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril() if is_causal else mask
        if mask is not None and mask.dtype == torch.bool:
            logits = torch.where(mask, logits, -1e30)
        elif mask is not None:
            logits = self.once(logits + mask.clamp(min=-1e30), wide)
        return self._mm(wide, self._softmax(wide, logits, -1), v)


def _power_of_two(number: Tensor) -> bool:
    return bool((number.double().frexp().mantissa.abs() == 0.5).all())


def adverse(written: _Kept, x: Sequence[Tensor], axes: tuple[int, ...], bound: Tensor) -> float:
    """The largest change of a group of the result by allowed errors, as a share of its bound.

    It is of first order; where it exceeds the bound, these errors are made.
    """
    run, best = Adverse(written), 0.0
    with torch.enable_grad():
        y = run.run(*x)
    leaves, sizes = zip(*run.leaves, strict=True) if run.leaves else ((), ())
    if not leaves or not y.requires_grad:
        return 0.0
    generator = torch.Generator().manual_seed(y.numel())
    bound = bound.expand(_lengths(y.detach(), axes).shape)
    only = torch.zeros(bound.shape, dtype=torch.float64)
    only.view(-1)[int(torch.randint(only.numel(), (), generator=generator))] = 1.0
    v = torch.randn(y.shape, generator=generator, dtype=torch.float64) * only
    for _ in range(3):
        v = v / _lengths(v, axes).amax().clamp(min=1e-300)
        grads = torch.autograd.grad((y * v).sum(), leaves, retain_graph=True, allow_unused=True)
        pairs = [
            (torch.zeros_like(d) if g is None else g.nan_to_num(0, 0, 0), d) for g, d in zip(grads, sizes, strict=True)
        ]
        change, most = sum(float((g.abs() * d).sum()) for g, d in pairs), float((bound * only).amax())
        share = change / most if most else MOST * bool(change)
        if share > 1 + FIRST_ORDER:
            with torch.enable_grad():  # as before, since what needs no gradient counts as a constant
                made = Adverse(written, [(g.sign() * d).requires_grad_() for g, d in pairs]).run(*x)
            moved = _lengths((made - y).detach(), axes)
            share = min(share, float(torch.where(moved > 0, moved / bound, 0.0).nan_to_num(0.0).amax()))
        best = max(best, share)
        dummy = torch.zeros_like(y, requires_grad=True)  # twice backward is forward: the change by these errors
        with suppress(RuntimeError):  # torch lacks some second derivatives
            back = torch.autograd.grad(y, leaves, dummy, create_graph=True, allow_unused=True)
            pushed = [(b * g.sign() * d).sum() for b, (g, d) in zip(back, pairs, strict=True) if b is not None]
            (v,) = torch.autograd.grad(torch.stack(pushed).sum(), dummy, retain_graph=True)
            v = v.nan_to_num(0, 0, 0) * only
    return best


def _lengths(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.square().sum(axes, keepdim=True).sqrt()


# ---------------------------------------------------------------- the attack


@dataclass
class Outcome:
    """The outcome of one model."""

    number: int
    layers: tuple[str, ...]
    dtype: str
    radius: float
    status: str = "within"
    """Or `beyond`, `no bound`, `refused`, `crashed`."""
    reason: str = ""
    error: float | None = None
    """The certified one."""
    executed: float = 0.0
    """The largest share of the certified error of a group that was executed; of float64, half the difference of two."""
    way: str = ""
    adverse: float = 0.0
    """The largest share that allowed errors make."""
    seconds: float = 0.0


class Attack:
    """Executions of a certified model."""

    def __init__(self, case: Case, certificate: Certificate) -> None:
        assert certificate.program is not None
        assert certificate.rows[-1].bounds is not None
        self.case, self.certificate, self.program = case, certificate, certificate.program
        self.written, self.axes = kept(self.program), certificate.rows[-1].axes
        self.double = fx.GraphModule(self.written.constants, self.written.graph)
        error = certificate.rows[-1].bounds.error
        self.bound = torch.tensor([float_up(each) for each in error.reshape(-1)], dtype=torch.float64).reshape(
            error.shape
        )
        self.alone, self.floats = certificate.each_sample, case.example.is_floating_point()
        self.generator = torch.Generator().manual_seed(case.number)
        stored = [each.tensor for each in self.program.stored.values() if each.tensor.is_floating_point()]
        subnormal = any(bool(((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).any()) for t in stored)
        short = case.example.dtype in (torch.float32, torch.float16)  # ONNX runtime lacks much in float64
        rare = {"compiled": case.number % 50, "onnx": case.number % 10 or not short, OFTEN[1]: subnormal}
        self.ways = [way for way in WAYS if not rare.get(way)]

    def draw(self, kind: int) -> Tensor:
        """Inputs of the domain: random, far from 0 or with equal signs, nearly one entry, nearly alike, small."""
        x = self.case.example
        if not self.floats:
            return x[:1] if self.alone else x
        shape = (3, *x.shape[1:]) if self.alone else tuple(x.shape)
        noise, far = torch.randn(2, *shape, generator=self.generator, dtype=torch.float64)
        kinds = noise, noise + 5 * far.flatten()[0], noise.sign(), noise.abs() ** 8 * noise.sign(), 1 + 1e-3 * noise
        return self.fitted(kinds[kind]) if kind < 5 else self.fitted(noise) * 10.0 ** float(-far.flatten()[0].abs())

    def fitted(self, noise: Tensor) -> Tensor:
        """Inputs on the boundary of the domain."""
        size = noise.square().mean(self.certificate.inputs[0].axes, keepdim=True).sqrt().clamp(min=1e-300)
        return (noise / size * float(self.certificate.input_domain) * (1 - 2.0**-7)).to(self.case.example.dtype)  # type: ignore[arg-type]

    def variables(self, x: Tensor) -> list[Tensor]:
        """The variables of the float64 program."""
        return [x.double()] if self.floats else [each for _, each in self.written.inputs.values()]

    def exact(self, x: Tensor) -> Tensor:
        """The result in float64."""
        samples = [one[None] for one in x] if self.floats and self.alone else [x]
        return torch.cat([self.double(*self.variables(each)) for each in samples])

    def shares(self, x: Tensor, ways: Sequence[str]) -> Iterator[tuple[float, str]]:
        """The executed share of the certified error, and the way of execution."""
        known = self.case.example.dtype == torch.float64 and self.floats  # two results in float64 are compared
        for way in ways:
            with torch.no_grad(), WAYS[way](), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model = self.program if way == "captured" else self.case.model
                    executed = execute(model, x, way, self.alone and self.floats)
                except Exception as error:
                    if way == "onnx" or "not implemented" in str(error) or "No available kernel" in str(error):
                        continue
                    raise
            real = self.exact(x)
            difference = _lengths(executed.double().reshape(real.shape) - real, self.axes)
            difference = difference.nan_to_num(math.inf) - (0.0 if known else NOISE * real.abs().amax())
            share = torch.where(difference > 0, difference / (self.bound * (1 + known)), 0.0)
            yield min(float(share.max()), MOST), way

    def run(self, outcome: Outcome) -> None:
        """Attack: random inputs, ascent from the worst, allowed errors."""
        found: list[tuple[float, str, Tensor]] = [(0.0, "", self.draw(0))]
        for kind in range(6):
            x = self.draw(kind)
            ways = self.ways if kind == 0 else [way for way in self.ways if way in OFTEN]
            found += [(share, f"{way}, {kind}", x) for share, way in self.shares(x, ways)]
            if kind in (0, 1, 2, 4):
                one = x[:1] if self.alone else x
                share = adverse(self.written, self.variables(one), self.axes, self.bound)
                outcome.adverse = max(outcome.adverse, share)
        best = max(found, key=lambda each: each[0])
        for step in range(8 if best[0] and self.floats else 0):
            noise = torch.randn(best[2].shape, generator=self.generator, dtype=torch.float64)
            x = self.fitted(best[2].double() + 0.3 * 0.5**step * best[2].abs().max() * noise)
            way = best[1].split(", ")[0]
            way = way if way not in ("compiled", "onnx") else OFTEN[0]
            best = max(
                [best, *((share, f"{way}, ascent", x) for share, _ in self.shares(x, [way]))], key=lambda t: t[0]
            )
        outcome.executed, outcome.way = best[:2]


def examine(case: Case, full: bool = False) -> Outcome:
    """Certify one model and attack it; `full` prints it, too."""
    dtype = str(case.example.dtype if case.example.is_floating_point() else next(case.model.parameters()).dtype)
    outcome = Outcome(case.number, case.layers, dtype.removeprefix("torch."), case.radius)
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            certificate = wn.certify(case.model, case.example, case.radius)
            if full:
                print(case, certificate, certificate.program.module.graph, sep="\n")  # type: ignore[union-attr]
            if certificate.forward_error is None:
                row = next(row for row in certificate.rows if row.name == certificate.unbounded_at)
                outcome.status = "no bound"
                outcome.reason = f"{row.operation} {row.constants.get('function', '')}".strip()
            else:
                outcome.error = float(certificate.forward_error)
                Attack(case, certificate).run(outcome)
    except UncertifiableError as error:
        outcome.status, outcome.reason = "refused", str(error)[:200]
    except Exception:  # any error belongs in the list of failures
        outcome.status, outcome.reason = "crashed", traceback.format_exc().replace(f"{Path.cwd()}/", "")
    if outcome.executed > 1 or outcome.adverse > 1 + FIRST_ORDER:
        outcome.status, outcome.reason = "beyond", outcome.way if outcome.executed > 1 else "allowed errors"
    outcome.seconds = round(time.process_time() - start, 3)
    return outcome


# ---------------------------------------------------------------- pairs of inputs

KINDS = ("linear", "MaxMin", "deep", "ReLU", "abs", "potential", "large bias", "offset")
FAR = 10.0
"""The largest distance of another prediction, in radii, that is searched."""
FORMS = ("float32", "bfloat16", "float16", "returned in bfloat16", "returned in float16", "autocast")


class Returned(nn.Module):
    """A module whose result is converted."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).to(self.dtype)


def classifier(number: int) -> tuple[str, str, nn.Module, Tensor, float]:
    """Kind, form, model, example, radius: maps with orthogonal weights, whose radii are nearly distances to a tie."""
    torch.manual_seed(number)
    draw = Draw(3, number)
    kind, form, n = KINDS[number % 8], FORMS[number // 8 % 6], draw.whole(2, 24)
    count = draw.whole(2, min(n, 6))
    layers: list[nn.Module] = []
    for _ in range({"linear": 0, "large bias": 0, "deep": 3}.get(kind, 1)):
        layers.append(wn.nn.ConvexPotential(n, n) if kind == "potential" else nn.Linear(n, n))
        after = {
            "ReLU": nn.ReLU(),
            "abs": Layer(lambda s, x: x.abs()),
            "offset": Layer(lambda s, x: (x + 100.0) - 100.0),
        }
        layers += [after.get(kind, wn.nn.MaxMin())] if kind != "potential" else []
    model = nn.Sequential(*layers, nn.Linear(n, count))
    for each in model.parameters():
        each.data = nn.init.orthogonal_(torch.empty_like(each)) if each.ndim == 2 else 0.1 * torch.randn_like(each)
    if kind == "large bias":
        model[-1].bias.data += 300.0  # type: ignore[union-attr]
    dtype = DTYPES.get(form, torch.float32)
    model = model.to(dtype).eval()
    if form.startswith("returned"):
        model = Returned(model, DTYPES[form.split()[-1]])
    model = Autocast(model) if form == "autocast" else model
    return kind, form, model, torch.zeros(1, n, dtype=dtype), draw.between(0.1, 100.0)


def pairs(number: int) -> dict[str, Any]:
    """Search for inputs within a certified radius that are executed with another largest logit; and settled ones.

    Half of the inputs lie near a tie, and all move towards one, by shares of their radius; so `least` shows the least
    distance of another prediction, in radii, and whether the search sees anything.
    """
    kind, form, model, example, radius = classifier(number)
    outcome: dict[str, Any] = {
        "number": number,
        "kind": kind,
        "form": form,
        "inputs": 0,
        "least": FAR,
        "broken": [],
    }
    margins, dtype = form in DTYPES and number % 3 > 0, example.dtype
    with warnings.catch_warnings(), torch.no_grad(), suppress(UncertifiableError):
        warnings.simplefilter("ignore")
        certificate = wn.certify(model, example, radius, margins=margins)
        if certificate.forward_error is None:
            return outcome
        noise = torch.randn(300, example.shape[1], dtype=torch.float64)
        x = (
            radius
            * noise
            / noise.square().mean(-1, keepdim=True).sqrt()
            * torch.rand(300, 1, dtype=torch.float64)
            * 0.98
        )
        first, low, high = model(x.to(dtype)).argmax(-1), x, x.roll(1, 0)
        for _ in range(30):
            middle = (low + high) / 2
            same = (model(middle.to(dtype)).argmax(-1) == first)[:, None]
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        x = torch.cat([x, low + (x - low) * torch.rand(300, 1, dtype=torch.float64) ** 4]).to(dtype)
        logits = model(x)
        best, radii, settled = logits.argmax(-1), certificate.certified_radius(logits), certificate.settled(logits)
        for way in WAYS:
            if way not in ("compiled", "onnx"):
                with WAYS[way]():
                    other = execute(model, x[::4], way, alone=True)[:150].argmax(-1)
                if way != "of many" and bool(((other != best[::4]) & settled[::4]).any()):
                    outcome["broken"].append(f"settled, {way}")
        x, best, radii = (each[radii > 0] for each in (x, best, radii))
        if not len(x):
            return outcome
        outcome["inputs"], towards = len(x), _towards_a_tie(certificate, x, best)
        for share in (0.9, 0.97, 0.99, 0.999, 1.0, 1.001, 1.01, 1.05, 1.2, 1.5, 2, 3, 5, 10):
            for size in (0, 1, 2):
                moved = x.double() + radii[:, None] * share * towards
                moved = (moved * (1 + size * UNITS[dtype] * torch.randn_like(moved))).to(dtype)
                distance = (moved.double() - x.double()).norm(dim=-1)
                inside = (moved.double().square().mean(-1).sqrt() <= radius) & (distance > 0)
                other = execute(model, moved, "one by one", alone=size == 1).argmax(-1) != best
                least = float((distance / radii)[other & inside].min()) if bool((other & inside).any()) else FAR
                outcome["least"] = min(outcome["least"], least)
        if outcome["least"] <= 1:
            outcome["broken"].append("radius")
    return outcome


def _towards_a_tie(certificate: Certificate, x: Tensor, best: Tensor) -> Tensor:
    """The directions in which the two largest logits approach each other fastest."""
    with torch.enable_grad():
        given, module = x.double().requires_grad_(), certificate.program.double().module  # type: ignore[union-attr]
        y = torch.cat([module(one[None]) for one in given])
        rest = y.detach().scatter(1, best[:, None], -math.inf).argmax(-1)
        (slope,) = torch.autograd.grad((y.gather(1, rest[:, None]) - y.gather(1, best[:, None])).sum(), given)
    return slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-300)


# ---------------------------------------------------------------- results


def summary(outcomes: Sequence[Mapping[str, Any]], searched: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of `results/rounding.json`, without its header."""
    shares: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    held = [each for each in outcomes if each["error"] is not None]
    for each in held:
        layers = {layer for layer in each["layers"] if layer != "autocast"}
        kinds = [("dtype", each["dtype"] + " under autocast" * ("autocast" in each["layers"]))]
        kinds += [("layer", layer) for layer in layers if len(layers) <= 2]
        for kind in kinds:
            shares[kind].append((each["executed"], each["adverse"]))
    forms: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in searched:
        forms["form", each["form"]].append(each)
        forms["kind", each["kind"]].append(each)
    return {
        "models": len(outcomes),
        "status": dict(Counter(each["status"] for each in outcomes)),
        "beyond": [each for each in outcomes if each["status"] == "beyond"],
        "crashes": [each for each in outcomes if each["status"] == "crashed"],
        "no_bound": dict(Counter(each["reason"] for each in outcomes if each["status"] == "no bound").most_common()),
        "seconds": round(sum(each["seconds"] for each in outcomes), 1),
        "rows": [
            {
                "kind": kind, "name": name, "models": len(found),
                "executed": round(max(a for a, _ in found), 4), "adverse": round(max(b for _, b in found), 4),
                "median_executed": round(median(a for a, _ in found), 4),
                "median_adverse": round(median(b for _, b in found), 4),
            }
            for (kind, name), found in sorted(shares.items())
        ],
        "pairs": {
            "models": len(searched), "inputs": sum(each["inputs"] for each in searched),
            "broken": [each for each in searched if each["broken"]],
            "rows": [
                {"by": by, "name": name, "models": len(found), "inputs": sum(each["inputs"] for each in found),
                 "least_distance": round(min(each["least"] for each in found), 4)}
                for (by, name), found in sorted(forms.items())
            ],
        },
    }  # fmt: skip


def _go_on(
    path: Path, count: int, end: float, attack: Callable[[int], dict[str, Any]], again: str
) -> list[dict[str, Any]]:
    """Attack the numbers that have no outcome on disk yet; all outcomes. One that ended the process is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done, begun = {each["number"] for each in read(path)}, path.with_suffix(".begun")
    left_out = set(map(int, begun.read_text().split())) if begun.exists() else set()
    with path.open("a") as file, begun.open("a") as mark:
        file.write("\n" if path.stat().st_size else "")
        for number in range(count):
            if number in done | left_out or time.monotonic() > end:
                continue
            mark.write(f"{number} ")
            mark.flush()
            outcome = attack(number)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            if outcome.get("status") in ("beyond", "crashed") or outcome.get("broken"):
                print(f"{again} {number}: {outcome}", flush=True)
    return [each for each in read(path) if each["number"] < count]


def main() -> None:
    """Attack what has no outcome yet, and write the summary."""
    parser = parser_of(__doc__, 10_000)
    parser.add_argument("--pairs", type=int, default=480, help="so many classifiers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        print(json.dumps(asdict(examine(draw_case(options.seed, options.only), full=True)), indent=1))
        return
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    again = f"python -m campaigns.rounding --seed {seed} --only"
    searched = _go_on(PROGRESS / "pairs.jsonl", options.pairs, end, pairs, "pairs")
    path = PROGRESS / f"seed-{seed}.jsonl"
    outcomes = _go_on(path, options.models, end, lambda number: asdict(examine(draw_case(seed, number))), again)
    command = f"python -m campaigns.rounding --models {options.models} --pairs {options.pairs} --seed {seed}"
    content = summary(outcomes, searched)
    write_result(RESULTS, header(command, seed) | content)
    print({key: content[key] for key in ("models", "status", "no_bound")}, content["pairs"]["broken"])


if __name__ == "__main__":
    main()
