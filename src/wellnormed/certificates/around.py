"""Bounds of a program in balls around inputs: a zonotope for every node, from those of the nodes that it reads.

The linear part of every operation is its derivative by torch, in the direction of each generator, so that affine
operations need no rule: only functions, products, softmax and maxima do, for what they differ from their linear part.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import jvp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from wellnormed.certificates.continuous import Continuous
from wellnormed.certificates.operations.selection import settings_of, windows
from wellnormed.certificates.zonotope import BENT, CURVES, SHARE, TINY, Ball, Curve, Zonotope, along, gamma, line, most
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.operation import kind_of, name_of, packet
from wellnormed.program.places import place
from wellnormed.program.program import Program, repeating

aten = torch.ops.aten
Call = Callable[..., Any]
MOST = 2**26
"""The most entries of the generators of one tensor, 512 MiB, and of the matrix of an affine operation."""


class TooLargeError(UncertifiableError):
    """The generators of a tensor have too many entries."""

    def __init__(self) -> None:
        super().__init__(f"bounds in a ball take matrices of more than {MOST:,} entries; pass a smaller model")


class Around(Continuous):
    """The values of a program's nodes in Euclidean balls around some inputs.

    Args:
        program: Of one sample, with one input.

    Raises:
        UncertifiableError: As for `Continuous`, or there are several inputs.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        if len(self.shapes) != 1 or self._result not in self._steps:
            raise UncertifiableError(f"its result must depend on one tensor of floats, got {', '.join(self.shapes)}")
        (self.shape,), (axes,) = self.shapes.values(), self.axes.values()
        size, group = math.prod(self.shape), math.prod(self.shape[axis] for axis in axes)
        self._groups = size // group, group
        self.ball = Ball(torch.zeros(0), self._groups, size)
        self._last = {each: n for n, node in enumerate(self._steps) for each in self.sources(node)}
        before = [max(self._last.get(node, 0) for node in self._variables)]
        for node in self._steps:
            before.append(max(before[-1], self._last.get(node, 0)))
        self._cuts = {node for n, node in enumerate(self._steps) if before[n] <= n}
        """The nodes through which all that follows depends on the input."""
        self.peak = 1
        """The most entries that the generators of one tensor for one ball have had."""
        self._known: dict[Any, Any] = {}
        """What is the same for all balls: generators, factors of rounding errors."""

    def result(self, x: Tensor, radius: Tensor) -> Zonotope:
        """The result for all inputs `(B, *shape)` within their radius, `(B,)`; `ball` then has the symbols."""
        size = math.prod(self.shape)
        self.ball = Ball(radius, self._groups, size)
        unit = torch.eye(size, dtype=torch.float64).view(size, 1, *self.shape)
        start = Zonotope(x, unit, torch.zeros_like(radius), most(x.abs()) + radius, linear=True)
        values: dict[fx.Node, Any] = self._constants | dict.fromkeys(self._variables, start)
        with repeating():
            for number, node in enumerate(self._steps):
                self.interpret([node], values)
                if node in self._cuts and isinstance(values[node], Zonotope):
                    values[node] = self._turned(node, values[node])
                for each in {each for each in self.sources(node) if self._last[each] == number}:
                    del values[each]
        return values[self._result]

    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """A zonotope for what depends on the input."""
        leaves, tree = tree_flatten(operands[1:] if operands else ())
        places = [n for n, each in enumerate(leaves) if isinstance(each, Zonotope)]
        if not places:
            return super().evaluate(node, operands)
        target, arguments, keywords = operands
        if target is operator.getitem:
            return arguments[0][arguments[1]]

        def call(*tensors: Any) -> Any:
            given = dict(zip(places, tensors, strict=True))
            arguments, keywords = tree_unflatten([given.get(n, each) for n, each in enumerate(leaves)], tree)
            return target(*arguments, **keywords)

        try:
            return self._bounded(node, call, [leaves[n] for n in places], arguments, keywords)
        except RuntimeError as error:  # a NotImplementedError is one
            raise UncertifiableError(f"{place(node)}: torch has no derivative of it ({error})") from error

    def _bounded(self, node: fx.Node, call: Call, xs: list[Zonotope], arguments: tuple, keywords: dict) -> Any:
        kind, name, executed = kind_of(node), packet(node), node.meta["val"]
        if isinstance(executed, Tensor) and (not executed.is_floating_point() or executed.itemsize == 1):
            raise UncertifiableError(f"{place(node)}: its result is of {executed.dtype}, which is not continuous")
        if kind in ("move", "copy", "lookup", "filler", "random"):
            return self._moved(node, call, xs)
        if kind == "affine" or (kind == "product" and len(xs) == 1):
            return self._affine(node, call, xs)
        if kind == "product" and name in ("mul", "matmul", "mm", "bmm", "mv", "dot"):
            return self._product(call, *xs)
        given: dict[str, Any] = {each.name: each.default_value for each in node.target._schema.arguments}  # type: ignore[union-attr]
        given |= dict(zip(given, arguments, strict=False)) | keywords
        if len(xs) == 1 and (curve := _curve(name, given)) is not None:
            return self._function(_reciprocal if name == "reciprocal" else call, xs[0], curve)
        if name == "batch_norm" and not given["training"]:
            return self._affine(node, call, xs)
        if name_of(node.target) in ("aten.div.Tensor", "aten.div.Scalar"):
            a, b = given["self"], given["other"]
            if not isinstance(b, Zonotope):
                return self._affine(node, call, xs)
            inverse = self._function(_reciprocal, b, BENT)
            if isinstance(a, Zonotope):
                return self._product(torch.mul, a, inverse)
            return self._affine(node, lambda t: a * t, [inverse])
        if name in ("softmax", "_softmax", "_safe_softmax"):
            return self._softmax(node, xs[0], given["dim"])
        if name == "scaled_dot_product_attention" and len(xs) == 3 and not given["dropout_p"]:
            return self._attention(node, xs, given["attn_mask"], given["is_causal"], given["scale"])
        if name in ("layer_norm", "rms_norm", "group_norm") and len(xs) == 1:
            return self._norm(node, name, xs[0], given)
        if name.startswith("max_pool") and not given["ceil_mode"]:
            settings = settings_of(int(name[len("max_pool")]), *(given[each] for each in _WINDOWS))
            held = windows(torch.ones(1, *xs[0].centre.shape[-len(settings[0]) :]), *settings).bool()
            lines = self._moved((node, "lines"), lambda t: windows(t, *settings), xs)
            return self._largest(node, lines, held)
        if name in ("maximum", "minimum") and len(xs) == 2:
            lines = self._moved((node, "lines"), lambda *ab: torch.stack(torch.broadcast_tensors(*ab), -1), xs)
            return self._largest(node, lines, torch.ones((), dtype=torch.bool), -1.0 if name == "minimum" else 1.0)
        raise UncertifiableError(f"{place(node)}: `{name_of(node.target)}` has no bound in a ball")

    def _moved(self, key: Any, call: Call, xs: Sequence[Zonotope]) -> Any:
        """Entries in other places, beside constants."""
        rest, largest = (torch.stack(each).amax(0) for each in ([x.rest for x in xs], [x.largest for x in xs]))
        return self._pushed(key, call, xs, rest, largest)

    def _affine(self, key: Any, call: Call, xs: Sequence[Zonotope]) -> Any:
        """An affine function of all tensors together. Its rounding errors are those of sums of all entries."""
        if (key, "stretch") not in self._known:
            self._known[key, "stretch"] = [self._stretch(call, xs, n) for n in range(len(xs))]
        pairs = list(zip(self._known[key, "stretch"], xs, strict=True))
        share = gamma(sum(x.centre[0].numel() for x in xs))
        rest = torch.stack([by * (x.rest + 2 * share * x.largest) for by, x in pairs]).sum(0) + TINY
        return self._pushed(key, call, xs, rest, torch.stack([by * x.largest for by, x in pairs]).sum(0), share)

    def _stretch(self, call: Call, xs: Sequence[Zonotope], number: int) -> float:
        """The largest sum of absolute coefficients of an entry, rounded up: the norm from maximum to maximum."""
        zeros = tuple(torch.zeros_like(x.centre[0]) for x in xs)
        size, shape = zeros[number].numel(), zeros[number].shape
        results = tree_leaves(call(*zeros))
        if size * sum(each.numel() for each in results) > MOST:
            raise TooLargeError
        total: list[Any] = [0.0] * len(results)
        for part in torch.eye(size, dtype=torch.float64).split(256):
            columns = vmap(lambda t: jvp(call, zeros, (*zeros[:number], t, *zeros[number + 1 :]))[1])(
                part.view(-1, *shape)
            )
            total = [own + each.abs().sum(0) for own, each in zip(total, tree_leaves(columns), strict=True)]
        return max(float(each.max()) if each.numel() else 0.0 for each in total) * (1 + 2 * gamma(size))

    def _pushed(
        self, key: Any, call: Call, xs: Sequence[Zonotope], rest: Tensor, largest: Tensor, share: float = 0.0
    ) -> Any:
        """The images of centres and generators under an affine function; `share` of its constants is rounded."""
        count, zeros = len(rest), tuple(torch.zeros_like(x.centre[0]) for x in xs)
        offsets = [each.double() for each in tree_leaves(call(*zeros))]
        centres, tree = tree_flatten(vmap(call)(*(x.centre for x in xs)))
        shared = all(x.linear for x in xs)
        generators = self._known.get((key, "pushed"))
        if generators is None:
            symbols, balls = max(len(x.generators) for x in xs), 1 if shared else count
            if not shared:
                self._require_room(symbols, balls, centres)
            flat = (self._widened(x.generators, symbols, balls).flatten(0, 1) for x in xs)
            images = tree_leaves(vmap(lambda *t: jvp(call, zeros, t)[1])(*flat))
            generators = [each.unflatten(0, (symbols, balls)) for each in images]
        if shared:
            self._known[key, "pushed"] = generators
        made = []
        for centre, own, offset in zip(centres, generators, offsets, strict=True):
            constant = offset.abs().nan_to_num(posinf=0.0).amax() if offset.numel() else 0.0
            fine = (centre.isfinite() | offset.isneginf() | (not share)).flatten(1).all(1)
            error = torch.where(fine, rest + share * constant, torch.inf)
            made.append(Zonotope(centre, own, error, largest + constant, shared))
        return tree_unflatten(made, tree)

    @staticmethod
    def _widened(generators: Tensor, symbols: int, balls: int) -> Tensor:
        """The same with zeros for later symbols, for so many balls."""
        more = generators.new_zeros(symbols - len(generators), *generators.shape[1:])
        whole = torch.cat([generators, more]) if len(more) else generators
        return whole.expand(symbols, balls, *whole.shape[2:])

    def _require_room(self, symbols: int, balls: int, centres: Sequence[Tensor]) -> None:
        entries = symbols * max(each[0].numel() for each in centres)
        if balls * entries > MOST:
            raise TooLargeError
        self.peak = max(self.peak, entries)

    def _with_noise(self, centre: Tensor, generators: Tensor, noise: Tensor, rest: Tensor, largest: Tensor) -> Zonotope:
        """A zonotope with a further symbol for every entry of one ball whose noise is not 0."""
        fine = (centre.isfinite() & noise.isfinite()).flatten(1).all(1)
        rest = torch.where(fine, rest, torch.inf)
        flat = torch.where(along(fine, noise), noise, 0.0).flatten(1)
        count = int((flat > 0).sum(1).max())
        self._require_room(len(generators) + count, len(centre), [centre])
        if count:
            values, places = flat.topk(count, 1)
            new = flat.new_zeros(count, *flat.shape).scatter_(2, places.T[..., None], values.T[..., None])
            old = self._widened(generators, self.ball.symbols, len(centre))
            generators = torch.cat([old, new.view(count, *noise.shape)])
            self.ball.symbols += count
        return Zonotope(centre, generators, rest, largest + rest)

    def _function(self, call: Call, x: Zonotope, curve: Curve, least: float = -math.inf) -> Zonotope:
        """A function of every entry, which is known not to be below `least`."""
        extent = self.ball.extent(x)
        low, high = (x.centre - extent).clamp(min=least), x.centre + extent
        values = tuple(vmap(call)(each) for each in (low, high))
        slopes = values
        if curve.bend:
            slopes = tuple(vmap(lambda t: jvp(call, (t,), (torch.ones_like(t),))[1])(each) for each in (low, high))
        own = line(low, high, values, slopes, curve)
        largest = most(own.slope.abs() * torch.maximum(low.abs(), high.abs()) + own.shift.abs() + own.noise)
        rest = most(own.rest) + most(own.slope.abs()) * x.rest + TINY
        centre = own.slope * x.centre + own.shift
        return self._with_noise(centre, own.slope * x.generators, own.noise, rest, largest)

    def _product(self, call: Call, a: Zonotope, b: Zonotope) -> Zonotope:
        """A product of two tensors: what lies beside its linear part is the product of both deviations."""
        symbols, count = self.ball.symbols, len(a.centre)
        wide = [self._widened(x.generators, symbols, count) for x in (a, b)]
        points = a.centre, b.centre
        centre = vmap(call)(*points)
        self._require_room(symbols, count, [centre])

        def push(points: tuple, tangents: tuple) -> Tensor:
            return vmap(lambda *t: jvp(call, points, t)[1])(*tangents)

        generators = vmap(push, in_dims=(0, 1), out_dims=1)(points, tuple(wide))
        extents = [self.ball.extent(x) for x in (a, b)]
        sizes = [point.abs() + extent for point, extent in zip(points, extents, strict=True)]
        noise = vmap(call)(*extents) * (1 + 2 * gamma(a.centre[0].numel()))
        ones = [along(x.rest, x.centre).expand_as(x.centre) for x in (a, b)]
        largest = most(vmap(call)(*sizes)) * (1 + SHARE)
        rest = most(vmap(call)(sizes[0], ones[1]) + vmap(call)(ones[0], sizes[1]))
        rest = rest * (1 + SHARE) + 4 * gamma(a.centre[0].numel()) * largest + TINY
        return self._with_noise(centre, generators, noise, rest, largest)

    def _softmax(self, key: Any, x: Zonotope, dim: int) -> Zonotope:
        """Softmax. Its Jacobian lies between those at the corners of the box, where each of its entries is extreme.

        An entry rises with its own logit and falls with the others, so over a box its extremes are at corners.
        """
        x = self._moved((key, "turned"), lambda t: t.movedim(dim, -1), [x])
        dead, n = x.centre.isneginf(), x.centre.shape[-1]
        extent = torch.where(dead, 0.0, self.ball.extent(x))
        low, high = x.centre - extent, x.centre + extent
        others = ~torch.eye(n, dtype=torch.bool) & ~dead[..., None, :]

        def share(own: Tensor, other: Tensor) -> Tensor:
            terms = torch.where(others, (other[..., None, :] - own[..., None]).exp(), 0.0)
            return torch.where(dead, 0.0, 1 / (1 + terms.sum(-1)))

        least, most_of, p = share(low, high), share(high, low), share(x.centre, x.centre)
        pairs = [each[..., None] * each[..., None, :] for each in (least, most_of, p)]
        change = torch.maximum(pairs[1] - pairs[2], pairs[2] - pairs[0])
        steepest = torch.maximum((1 - 2 * least).abs(), (1 - 2 * most_of).abs())
        own = torch.maximum(most_of - p, p - least) * steepest
        change = torch.where(torch.eye(n, dtype=torch.bool), own[..., None], change)
        noise = (change * extent[..., None, :]).nan_to_num(nan=torch.inf).sum(-1)
        constant = (most_of - least) / 2 <= noise
        centre = torch.where(constant, (most_of + least) / 2, p)
        noise = torch.where(constant, (most_of - least) / 2, noise)
        generators = p * (x.generators - (p * x.generators).sum(-1, keepdim=True))
        size = most(torch.maximum(low.abs(), high.abs()).masked_fill(dead, 0.0))
        rest = x.rest / 2 + 8 * n * SHARE * (1 + size) * (1 + most(extent))
        largest = 1 + most(extent) + most(noise)
        made = self._with_noise(centre, torch.where(constant, 0.0, generators), noise, rest, largest)
        return self._moved((key, "back"), lambda t: t.movedim(-1, dim), [made])

    def _attention(
        self, key: Any, xs: list[Zonotope], mask: Tensor | None, causal: bool, scale: float | None
    ) -> Zonotope:
        """`softmax(scale q k^T + mask) v`."""
        heads = xs[0].centre.shape[-3] // xs[1].centre.shape[-3] if xs[0].centre.ndim > 3 else 1
        q, k, v = (
            x if x is xs[0] or heads == 1 else self._moved((key, n), lambda t: t.repeat_interleave(heads, -3), [x])
            for n, x in enumerate(xs)
        )
        scale = q.centre.shape[-1] ** -0.5 if scale is None else scale
        logits = self._product(lambda a, b: a @ b.mT, q, k)
        sizes = logits.centre.shape[-2:]
        allowed = torch.ones(sizes, dtype=torch.bool)
        allowed = allowed.tril() if causal else mask if mask is not None and mask.dtype == torch.bool else allowed
        bias = torch.zeros(()) if mask is None or mask.dtype == torch.bool else mask
        scaled = self._affine((key, "scaled"), lambda t: (scale * t + bias).masked_fill(~allowed, -math.inf), [logits])
        return self._product(torch.matmul, self._softmax(key, scaled, -1), v)

    def _norm(self, key: Any, name: str, x: Zonotope, given: dict[str, Any]) -> Zonotope:
        """LayerNorm, RMSNorm and GroupNorm, as a product of the input with the reciprocal of its deviation."""
        weight, bias, eps = given.get("weight"), given.get("bias"), given["eps"]
        shape, groups = x.centre.shape[1:], given.get("num_groups")
        if groups:
            x = self._moved((key, "groups"), lambda t: t.reshape(t.shape[0], groups, -1), [x])
            weight, bias = (None if w is None else w.reshape(-1, *[1] * (len(shape) - 2)) for w in (weight, bias))
        dims = [-1] if groups else list(range(-len(given["normalized_shape"]), 0))
        if name != "rms_norm":
            x = self._affine((key, "centred"), lambda t: t - t.mean(dims, keepdim=True), [x])
        squares = self._function(torch.square, x, BENT)
        mean = self._affine((key, "mean"), lambda t: t.mean(dims, keepdim=True), [squares])
        inverse = self._function(lambda t: (t + eps).rsqrt(), mean, BENT, 0.0)
        x = self._moved((key, "shape"), lambda t: t.reshape(shape), [self._product(torch.mul, x, inverse)])
        scaled = (1.0 if weight is None else weight), (0.0 if bias is None else bias)
        return self._affine((key, "scaled"), lambda t: t * scaled[0] + scaled[1], [x])

    def _largest(self, node: fx.Node, lines: Zonotope, held: Tensor, sign: float = 1.0) -> Any:
        """The largest entries of lines, or the least: that at the centre, and what others may exceed it by.

        Args:
            node: The operation.
            lines: `(*shape, entries)`.
            held: Which entries count.
            sign: -1 for the least ones.
        """
        centre, generators = sign * lines.centre, sign * lines.generators
        first = centre.masked_fill(~held, -math.inf).argmax(-1, keepdim=True)
        leader, chosen = centre.gather(-1, first), torch.take_along_dim(generators, first[None], -1)
        error = SHARE * lines.largest
        apart = Zonotope(centre - leader, generators - chosen, 2 * (lines.rest + error), lines.largest)
        above = (apart.centre + self.ball.extent(apart)).scatter(-1, first, 0.0).masked_fill(~held, 0.0)
        half = above.amax(-1).clamp(min=0) / 2 + 0 * leader[..., 0]
        centre, largest = sign * (leader[..., 0] + half), lines.largest + 2 * most(half)
        made = self._with_noise(centre, sign * chosen[..., 0], half, lines.rest + error, largest)
        results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        made = self._moved((node, "shape"), lambda t: t.reshape(results[0].shape), [made])
        return made if len(results) == 1 else [made, None]

    def _turned(self, node: fx.Node, x: Zonotope) -> Zonotope:
        """The same set with fewer symbols: an orthogonal map of a ball is that ball, and QR makes a square matrix.

        The rounding errors of QR are at most gamma of ten times its size, column by column (Higham, theorem 19.4).
        """
        (groups, size), width = self.ball.groups, x.centre[0].numel()
        if groups != 1 or width >= size or not x.linear:
            return x
        if (node, "turned") not in self._known:
            matrix = x.generators.flatten(1)
            turned = torch.linalg.qr(matrix, mode="r").R.view(width, *x.generators.shape[1:])
            self._known[node, "turned"] = turned, float(torch.linalg.vector_norm(matrix, dim=0).max()) + TINY
        turned, length = self._known[node, "turned"]
        self.ball.groups, self.ball.symbols = (1, width), width
        return Zonotope(
            x.centre, turned, x.rest + gamma(10 * size * width) * length * self.ball.radius, x.largest, True
        )


_WINDOWS = ("kernel_size", "stride", "padding", "dilation")


def _curve(name: str, given: dict[str, Any]) -> Curve | None:
    """The curve of a function of every entry with these arguments; None if it has none."""
    convex = False
    if name in ("leaky_relu", "prelu", "_prelu_kernel"):
        convex = bool((torch.as_tensor(given.get("weight", given.get("negative_slope"))) <= 1).all())
    if name in ("elu", "celu"):  # convex where its slope below zero is no larger than above
        alpha, scale, inner = given["alpha"], given.get("scale", 1), given.get("input_scale", 1)
        convex = alpha > 0 and scale > 0 and inner > 0 and (alpha * inner <= 1 or name == "celu")
    if name == "pow":
        convex = isinstance(given["exponent"], int | float) and given["exponent"] in (2, 4)
    return BENT if convex else CURVES.get(name)


def _reciprocal(x: Tensor) -> Tensor:
    """`1 / x` of positive numbers, where it is convex."""
    return torch.where(x > 0, 1 / x, math.nan)
