"""What a certificate's rows compute, as a function in float64, and a search for what breaks the bounds they state.

Written from the meaning of the rows alone; it shares nothing with the checker's rules and proofs. `broken` asks three
things of a document that was accepted: whether every claim on a tensor is at least the number itself; whether a row's
bounds hold for all that the bounds of the rows before it allow, one row at a time, so that no looseness of others hides
a mistake; and whether the whole function keeps to what is stated of it.

What it cannot see: a bound that is too small by less than `SLACK`, one that only inputs break that a few starts and
steps of ascent do not find, and rows whose primitive stands for many functions (`contraction`, any mask of attention)
where another of them breaks what the one that is tried does not.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SLACK = 1e-9
"""Relative share of a measured number that rounding may have added."""
STARTS, STEPS = 10, 3
MOVES = ("pick", "times", "add", "constant", "idle_ball", "rounding")
KINDS = ("radius", "gain", "largest")
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "abs": torch.abs, "asinh": torch.asinh, "tanhshrink": F.tanhshrink, "softshrink": F.softshrink,
    "tanh": torch.tanh, "sin": torch.sin, "softsign": F.softsign, "cos": torch.cos, "atan": torch.atan,
    "log_sigmoid": F.logsigmoid, "sigmoid": torch.sigmoid, "erf": torch.erf, "gelu": F.gelu, "silu": F.silu,
    "mish": F.mish, "leaky_relu": F.leaky_relu, "clamp": torch.clamp,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu6": lambda x: x.clamp(0, 6),
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "elu": lambda x, alpha, scale, inner: scale * torch.where(x > 0, x, alpha * torch.expm1(inner * x)),
}  # fmt: skip


def matrix(tensor: Tensor, transposed: bool) -> Tensor:
    """A stored tensor as the matrix from inputs to outputs."""
    return tensor.T if transposed else tensor.reshape(len(tensor), -1)


def norms(measure: str, arrays: list[Tensor], c: Mapping[str, Any]) -> list[float]:
    """The numbers that a claim is an upper bound of, within rounding."""
    x, parts = arrays[0], c.get("parts", 1)
    if measure == "spectral":
        return torch.linalg.matrix_norm(matrix(x, c.get("transposed", False)).unflatten(0, (parts, -1)), 2).tolist()
    if measure == "product":
        a, b = (matrix(w, t).unflatten(0, (n, -1)) for w, t, n in zip(arrays, c["transposed"], parts, strict=True))
        return [float(torch.linalg.matrix_norm(a[i].T @ b[j], 2)) for i, j in c["pairs"]]
    if measure in ("group_norm", "positive_norm"):
        return (x.clamp(min=0) if measure[0] == "p" else x).reshape(parts, -1).norm(dim=1).tolist()
    if measure == "row_norm":
        return [float(x.reshape(-1, x.shape[-1]).norm(dim=1).max())]
    if measure == "diameter":
        return [float(torch.cdist(x, x).max())]
    if measure == "row_difference":
        rows = matrix(x, c.get("transposed", False))
        return [float((rows[:, None] - rows).norm(dim=2).max())]
    if measure == "row_sum":
        return x.abs().reshape(parts, -1, x.shape[-1]).sum(2).amax(1).tolist()
    if measure == "max_abs":
        return [float(x.abs().max())]
    if measure == "taps":
        taps = x.reshape(*x.shape[:2], -1).movedim(-1, 0).unflatten(1, (c["groups"], -1))
        return [float(torch.linalg.matrix_norm(taps, 2).amax(1).sum())]
    size, inputs = c["size"], x.shape[1] * c["groups"]
    identity = torch.eye(inputs * math.prod(size), dtype=torch.float64).reshape(-1, inputs, *size)
    step = {"stride": c["stride"], "dilation": c["dilation"], "groups": c["groups"]}
    return [float(torch.linalg.matrix_norm(_convolve(identity, x, **step).flatten(1), 2))]


def _convolve(x: Tensor, w: Tensor, adjoint: bool = False, **step: Any) -> Tensor:
    rank = w.ndim - 2
    if adjoint:
        return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1](x, w, **step)
    return (F.conv1d, F.conv2d, F.conv3d)[rank - 1](x, w, **step)


def _spread(x: Tensor, shape: tuple[int, ...] | list[int]) -> Tensor:
    """Broadcast all but the first axis, which counts the samples."""
    return x.reshape(len(x), *[1] * (len(shape) - x.ndim + 1), *x.shape[1:]).expand(-1, *shape)


class Function:
    """The function of a document's rows; every tensor has one more axis in front, which counts samples."""

    def __init__(self, document: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        self.rows = {row["name"]: row for row in document["rows"]}
        self.tensors = {name: torch.from_numpy(np.array(each)) for name, each in tensors.items()}
        self.causal = False

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def value(self, name: str, known: dict[str, Tensor]) -> Tensor:
        """A row's result, where some rows' results are known; what is computed on the way is added to them."""
        if name not in known:
            row = self.rows[name]
            known[name] = self._compute(row, [self.value(each, known) for each in row["inputs"]], known)
        return known[name]

    def _compute(self, row: Mapping[str, Any], inputs: list[Tensor], known: Mapping[str, Tensor]) -> Tensor:
        c, shape, operation = row["constants"], row["shape"], row["operation"]
        names = [claim["tensors"][0] for claim in row["claims"]]
        x = inputs[0] if inputs else next(iter(known.values()))
        count = len(x)
        if operation == "constant":
            each = torch.tensor(c["number"], dtype=torch.float64) if "number" in c else self.tensor(c["tensor"])
            return each.expand(count, *shape)
        if operation == "pick":
            return self._pick(x, c, shape)
        if operation == "rounding":
            return x
        if operation == "times":
            given = c.get("factor", c.get("divisor"))
            factor = self.tensor(given) if isinstance(given, str) else torch.tensor(given, dtype=torch.float64)
            return _spread(x, shape) * (1 / factor if "divisor" in c else factor)
        if operation == "add":
            return sum((_spread(each, shape) for each in inputs), torch.zeros((), dtype=torch.float64))
        if operation == "contraction":
            smaller = [i + 1 for i, (a, b) in enumerate(zip(x.shape[1:], shape, strict=True)) if a != b]
            return x.amax(smaller, keepdim=True) if smaller else x.sort(row["axes"][-1] + 1)[0] if row["axes"] else x
        if operation == "linear":
            y = x @ matrix(self.tensor(names[0]), row["claims"][0].get("constants", {}).get("transposed", False)).T
            return (y + self.tensor(names[1]).reshape(-1) if len(names) > 1 else y).reshape(count, *shape)
        if operation == "margin":  # of rows first: equal ones have no difference, of their results rounding has one
            w = matrix(self.tensor(names[0]), row["claims"][0].get("constants", {}).get("transposed", False))
            y = x @ (w[:, None] - w).flatten(0, 1).T
            bias = self.tensor(names[1]).reshape(-1) if len(names) > 1 else torch.zeros(len(w), dtype=torch.float64)
            return c["factor"] * (y + (bias[:, None] - bias).flatten())
        if operation == "average":
            return self.tensor(names[0]).reshape(*c["parts"], shape[-2], x.shape[-2]) @ x
        if operation == "matrix_product":
            return inputs[0] @ inputs[1]
        if operation == "product":
            return inputs[0] * inputs[1]
        if operation == "elementwise":
            return _FUNCTIONS[c["function"]](x, *c.get("numbers", []))
        if operation in ("ball", "idle_ball", "unit", "normalization"):
            over = [axis + 1 for axis in c["over"]]
            square = x.square().sum(over, keepdim=True)
            entries = math.prod(shape[axis] for axis in c["over"])
            if operation == "unit":
                return x / square.clamp(min=c["eps"] ** 2).sqrt()
            if operation == "normalization":
                return x / (square / entries + c["eps"]).sqrt()
            return x / (square / entries * c["scale"]).clamp(min=1).sqrt()
        if operation in ("softmax", "log_softmax"):
            return (x.softmax if operation == "softmax" else x.log_softmax)(c["over"] + 1)
        if operation == "attention":
            logits = c["scale"] * inputs[0] @ inputs[1].mT
            mask = torch.full(logits.shape[-2:], -math.inf, dtype=torch.float64).triu(1) if self.causal else 0.0
            return (logits + mask).softmax(-1) @ inputs[2]
        if operation == "convolution":
            step = {key: c[key] for key in ("stride", "dilation", "groups")}
            x, kernel = x.flatten(0, 1), self.tensor(names[0])
            if c.get("adjoint", False):  # pixels that no window reaches are zero
                y = _convolve(x, kernel, adjoint=True, **step)
                less = [
                    each for n, m in zip(reversed(shape[2:]), reversed(y.shape[2:]), strict=True) for each in (0, n - m)
                ]
                return F.pad(y, less).unflatten(0, (count, -1))
            y = _convolve(x, kernel, **step).unflatten(0, (count, -1))
            return y + self.tensor(names[1]).reshape(-1, *[1] * (len(shape) - 2)) if len(names) > 1 else y
        if operation == "convex_potential":
            w, bias = self.tensor(names[0]), self.tensor(names[1]).reshape(-1) if len(names) > 1 else 0.0
            return x - c["factor"] * (F.relu(x @ w.T + bias) @ w)
        return x  # the output

    def _pick(self, x: Tensor, c: Mapping[str, Any], shape: list[int]) -> Tensor:
        if "positions" in c:
            positions = self.tensors[c["positions"]].long()
        else:
            positions, missing = torch.full(shape, c["offset"]), torch.zeros(shape, dtype=torch.bool)
            for axis, (table, size) in enumerate(zip(c["tables"], shape, strict=True)):
                steps = torch.tensor(table) if isinstance(table, list) else torch.arange(size) * table
                view = [-1 if a == axis else 1 for a in range(len(shape))]
                missing = missing | ((steps < 0) & isinstance(table, list)).reshape(view)
                positions = positions + steps.reshape(view)
            positions = torch.where(missing, -1, positions)
        taken = x.flatten(1)[:, positions.clamp(min=0).flatten()]
        return torch.where(positions.flatten() < 0, 0.0, taken).reshape(len(x), *shape)

    def bases(self, name: str) -> list[str]:
        """The rows that compute what a row's result is moved from."""
        row = self.rows[name]
        if row["operation"] not in MOVES:
            return [name]
        return list(dict.fromkeys(base for each in row["inputs"] for base in self.bases(each)))

    def cuts(self, name: str) -> Iterator[Mapping[str, Any]]:
        """The rows that bound parts of a row."""
        for other in self.rows.values():
            cut = other["operation"] == "linear" and other["constants"]["parts"] > 1
            if cut and other["name"].rpartition("/")[0] == name:
                yield other

    def sources(self, row: Mapping[str, Any]) -> list[str]:
        """What a row is a function of, by what its bound rests on: attention of projected tokens, of its tokens."""
        if row["operation"] != "attention" or len(row["inputs"]) < 4:
            return list(dict.fromkeys(base for each in row["inputs"] for base in self.bases(each)))
        tokens = self.bases(row["inputs"][3])
        queries = [b for b in self.bases(row["inputs"][0]) if self.rows[b]["inputs"] != [row["inputs"][3]]]
        return list(dict.fromkeys([*tokens, *queries]))


def bound(row: Mapping[str, Any], what: str) -> Tensor:
    """A bound that a row states, as floats; beyond them infinity."""
    values = [float(each) for each in row[what]["values"]]
    return torch.tensor(values, dtype=torch.float64).reshape(row[what]["shape"])


def _length(x: Tensor, axes: list[int]) -> Tensor:
    return torch.linalg.vector_norm(x, dim=[a + 1 for a in axes], keepdim=True) if axes else x.abs()


class Search:
    """Attempts on the bounds of one document."""

    def __init__(self, function: Function, seed: int) -> None:
        self.function, self.generator = function, torch.Generator().manual_seed(seed)

    def within(self, name: str, x: Tensor, what: str, exactly: bool = True) -> Tensor:
        """A tensor scaled so that a row's bounds on norms (and largest entries) or on gains just hold."""
        row = self.function.rows[name]
        for each in [*self.function.cuts(name), row]:
            cut, limit = x.reshape(len(x), *each["shape"]), bound(each, what)
            scale = limit / _length(cut, each["axes"]).clamp(min=1e-300)
            if what == "radius":
                top = cut.abs().amax([a + 1 for a in each["axes"]], keepdim=True) if each["axes"] else cut.abs()
                scale = torch.minimum(scale, bound(each, "largest") / top.clamp(min=1e-300))
            x = cut * (scale if exactly and each is row and not [*self.function.cuts(name)] else scale.clamp(max=1.0))
            x = x.reshape(len(x), *row["shape"])
        return x

    def starts(self, name: str) -> Tensor:
        """Points within a row's bounds: random, of one sign, sparse, large and small."""
        shape = self.function.rows[name]["shape"]
        x = torch.randn((STARTS, *shape), dtype=torch.float64, generator=self.generator)
        x[1], x[2] = x[1].abs(), x[2].sign()
        x[3] = torch.where(x[3] > 1, x[3], 0.0)
        x[4] = x[4, ..., :1]
        x = self.within(name, x, "radius")
        sizes = torch.tensor([1, 1, 1, 1, 1, 1, 0.1, 0.01, 1e-3, 1e-5], dtype=torch.float64)
        return x * sizes.reshape(-1, *[1] * len(shape))

    def row(self, name: str, sources: list[str], margin: float | None = None) -> Iterator[str]:
        """What breaks a row's bounds, or one on differences of entries, among all values of the sources in theirs."""
        function, row = self.function, self.function.rows[name]
        if margin is not None:
            wide, one = (
                {"shape": [1], "values": [each]} for each in (math.inf, margin + 1e-12 * bound(row, "gain").max())
            )
            row = {**row, "name": f"the margin of {name}", "axes": [], "radius": wide, "gain": one, "largest": wide}
        axes = [] if row["operation"] == "margin" else row["axes"]

        def run(given: tuple[Tensor, ...]) -> Tensor:
            y = function.value(name, dict(zip(sources, given, strict=True)))
            return y if margin is None else (y[..., None] - y[..., None, :]).flatten(-2)

        function.causal = bool(torch.randint(2, (), generator=self.generator))
        x = tuple(self.starts(each) for each in sources)
        for step in range(STEPS):  # the longest result; every step is a point of its own
            at = tuple(each.requires_grad_() for each in x)
            y = run(at)
            yield from self._exceeded(row, "radius", _length(y, axes))
            yield from self._exceeded(row, "largest", y.abs().amax([a + 1 for a in axes], True) if axes else y.abs())
            if step == STEPS - 1 or not y.requires_grad:
                break
            longest = _length(y, axes).flatten(1).amax(1).sum()
            pulled = torch.autograd.grad(longest, at, materialize_grads=True)
            x = tuple(self.within(n, g, "radius").detach() for n, g in zip(sources, pulled, strict=True))
        x = tuple(self.starts(each).requires_grad_() for each in sources)
        y = run(x)
        v = torch.zeros_like(y, requires_grad=True)
        if not y.requires_grad:
            return
        pulled = torch.autograd.grad(y, x, v, create_graph=True, materialize_grads=True)
        d = tuple(torch.randn(each.shape, dtype=each.dtype, generator=self.generator) for each in x)
        for _ in range(STEPS):  # the power method at every point: J d is the derivative of (J^T v) d by v
            d = tuple(self.within(n, g.detach(), "gain") for n, g in zip(sources, d, strict=True))
            onto = sum(((g * e).sum() for g, e in zip(pulled, d, strict=True)), torch.zeros((), dtype=y.dtype))
            (pushed,) = torch.autograd.grad(onto, [v], retain_graph=True, materialize_grads=True)
            size = _length(pushed, axes)
            yield from self._exceeded(row, "gain", size)
            chosen = F.one_hot(size.flatten(1).argmax(1), size[0].numel()).reshape(size.shape)
            u = pushed * chosen / size.clamp(min=1e-300)
            d = torch.autograd.grad(y, x, u, retain_graph=True, materialize_grads=True)

    def _exceeded(self, row: Mapping[str, Any], what: str, measured: Tensor) -> Iterator[str]:
        limit = bound(row, what) * (1 + SLACK)
        over = (measured.detach() > limit) & measured.detach().isfinite()  # float64 holds no more
        if bool(over.any()):
            most = float(torch.where(over, measured.detach() / limit.clamp(min=1e-300), 0.0).max())
            yield f"{what} of {row['name']} ({row['operation']}) is met {most:.6g} times over"

    def whole(self, document: Mapping[str, Any], margin: float | None) -> Iterator[str]:
        """What breaks the statement: the result's gain and margin, and norms and logits of all rows."""
        rows = self.function.rows.values()
        inputs = [row["name"] for row in rows if row["operation"] == "input"]
        output = [row["name"] for row in rows][-1]
        yield from self.row(output, inputs)
        if margin is not None:
            yield from self.row(output, inputs, margin)
        x = {name: self.starts(name) for name in inputs}
        for row in rows:
            self.function.value(row["name"], x)
        last = self.function.rows[output]
        entries = math.prod(last["shape"][a] for a in last["axes"])
        yield from self._stated(document, "lipschitz", bound(last, "gain").max() / math.sqrt(entries))
        for row in rows:
            if row["operation"] not in (*MOVES, "margin"):
                yield from self._exceeded(row, "radius", _length(x[row["name"]], row["axes"]))
            if row["operation"] == "attention":
                q, k = (x[each] for each in row["inputs"][:2])
                logits = (row["constants"]["scale"] * q @ k.mT).abs().amax((-2, -1)).flatten(2).amax((0, 1))
                stated = torch.tensor([float(each) for each in document["attention_logits"][row["name"]]])
                if bool((logits > stated.double() * (1 + SLACK)).any()):
                    yield f"the logits of {row['name']} are met {float((logits / stated).max()):.6g} times over"

    def _stated(self, document: Mapping[str, Any], key: str, needed: Tensor) -> Iterator[str]:
        if float(document[key]) < float(needed) * (1 - SLACK):
            yield f"{key} is less than the bound of the last row"


def _mine(function: Function, row: Mapping[str, Any]) -> str:
    """All that a row's check depends on, as a text."""
    lines, todo = [], [row["name"]]
    stops = set(function.sources(row))
    while todo:
        each = function.rows[todo.pop()]
        held = [*(c["tensors"] for c in each["claims"]), *[v for v in each["constants"].values() if isinstance(v, str)]]
        names = [n for names in held for n in ([names] if isinstance(names, str) else names)]
        lines.append(json.dumps(each, sort_keys=True))
        lines += [function.tensors[n].numpy().tobytes().hex() for n in names if n in function.tensors]
        lines += [json.dumps(cut, sort_keys=True) for cut in function.cuts(each["name"])]
        if each["name"] not in stops or each is row:
            todo += each["inputs"]
    return "\n".join(lines)


def broken(
    document: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    margin: float | None,
    seed: int,
    seen: set[int],
    rows: Callable[[str], bool],
) -> list[str]:
    """What is false of an accepted document, each as a sentence; nothing that was looked at before is repeated.

    Args:
        document: The certificate as JSON holds it.
        tensors: The entries of the tensors that it names.
        margin: What was proved of differences of the result's entries.
        seed: Of the starts.
        seen: Hashes of what was found to hold; what is found to hold now is added.
        rows: Of a row's name, whether its bounds are to be searched.
    """
    function = Function(document, tensors)
    search, found = Search(function, seed), []
    for row in function.rows.values():
        for claim in row["claims"]:
            own = hash((json.dumps(claim), *(function.tensors[n].numpy().tobytes() for n in claim["tensors"])))
            if own in seen:
                continue
            true = norms(claim["measure"], [function.tensor(n) for n in claim["tensors"]], claim.get("constants", {}))
            if len(true) != len(claim["values"]) or any(
                a > b * (1 + SLACK) for a, b in zip(true, claim["values"], strict=True)
            ):
                found.append(f"{claim['measure']} of {claim['tensors']} is {true}, not {claim['values']}")
            seen.add(own)
    for name, row in function.rows.items():
        sources = function.sources(row)
        if row["operation"] in MOVES or row["operation"] == "input" or not sources or not rows(name):
            continue
        own = hash(_mine(function, row))
        if own not in seen:
            lies = list(search.row(name, sources))
            found += lies
            seen.update(set() if lies else {own})
    return found + list(search.whole(document, margin))
