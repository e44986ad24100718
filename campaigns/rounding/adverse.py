"""Errors that the stated arithmetic allows, made by every operation with the signs that move the result most."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from campaigns.rounding.cases import UNITS
from wellnormed.lowering.rounding import rounds
from wellnormed.program.double import Writing
from wellnormed.program.operation import PLACING, kind_of, name_of, record_of
from wellnormed.program.program import Program

FIRST_ORDER = 1e-5
"""Relative share by which the sum of first-order changes may exceed the largest change."""
MOST = 1e9
"""The share that stands for any larger one."""
aten = torch.ops.aten


class Kept(Writing):
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

    def __init__(self, written: Kept, given: Sequence[Tensor] = ()) -> None:
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


def adverse(written: Kept, x: Sequence[Tensor], axes: tuple[int, ...], bound: Tensor) -> float:
    """The largest change of a group of the result by allowed errors, as a share of its bound.

    It is of first order; where it exceeds the bound, these errors are made.
    """
    run, best = Adverse(written), 0.0
    x = [each.detach().requires_grad_(each.is_floating_point()) for each in x]  # what needs none counts as a constant
    with torch.enable_grad():
        y = run.run(*x)
    leaves, sizes = zip(*run.leaves, strict=True) if run.leaves else ((), ())
    if not leaves or not y.requires_grad:
        return 0.0
    generator = torch.Generator().manual_seed(y.numel())
    bound = bound.expand(lengths(y.detach(), axes).shape)
    only = torch.zeros(bound.shape, dtype=torch.float64)
    only.view(-1)[int(torch.randint(only.numel(), (), generator=generator))] = 1.0
    v = torch.randn(y.shape, generator=generator, dtype=torch.float64) * only
    for _ in range(3):
        v = v / lengths(v, axes).amax().clamp(min=1e-300)
        grads = torch.autograd.grad((y * v).sum(), leaves, retain_graph=True, allow_unused=True)
        pairs = [
            (torch.zeros_like(d) if g is None else g.nan_to_num(0, 0, 0), d) for g, d in zip(grads, sizes, strict=True)
        ]
        change, most = sum(float((g.abs() * d).sum()) for g, d in pairs), float((bound * only).amax())
        share = change / most if most else MOST * bool(change)
        if share > 1 + FIRST_ORDER:
            with torch.enable_grad():
                made = Adverse(written, [(g.sign() * d).requires_grad_() for g, d in pairs]).run(*x)
            moved = lengths((made - y).detach(), axes)
            share = min(share, float(torch.where(moved > 0, moved / bound, 0.0).nan_to_num(0.0).amax()))
        best = max(best, share)
        dummy = torch.zeros_like(y, requires_grad=True)  # twice backward is forward: the change by these errors
        with suppress(RuntimeError):  # torch lacks some second derivatives
            back = torch.autograd.grad(y, leaves, dummy, create_graph=True, allow_unused=True)
            pushed = [(b * g.sign() * d).sum() for b, (g, d) in zip(back, pairs, strict=True) if b is not None]
            (v,) = torch.autograd.grad(torch.stack(pushed).sum(), dummy, retain_graph=True)
            v = v.nan_to_num(0, 0, 0) * only
    return best


def lengths(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Norms of the groups along some axes; squares of entries beyond 1e154 would leave the range."""
    largest = x.abs().amax(axes, keepdim=True).clamp(min=1e-300)
    return (x / largest).square().sum(axes, keepdim=True).sqrt() * largest
