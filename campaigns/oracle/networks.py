"""The joint bound of a network, from the rows between its start and its end: another form of `proof.lipsdp`.

With `dz = m dy + r w` for entries with `|w| <= |dy|`, everything is linear in the change x of the start and in all w,
and the multipliers d prove L if the matrix from `(L x, d w)` to `(d dy, the end's change)` has no singular value
beyond 1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from campaigns.oracle.primitives import FUNCTIONS
from wellnormed.certificates import Row

_LOWEST = {
    "abs": -1.0, "sin": -1.0, "cos": -1.0, "hardswish": -0.5, "gelu": -0.12890414518516, "gelu_tanh": -0.12899306865878,
    "silu": -0.09983932012887, "mish": -0.1125261223895,
}  # fmt: skip
"""The least slopes of functions that have negative ones; those with settings apart."""
_CLOSE = 1e-7


def slopes_of(row: Row) -> tuple[float, float]:
    """The least and the largest slope of a row's function."""
    name, numbers = row.constants["function"], row.constants["numbers"]
    if name == "leaky_relu":
        ends = [1.0, *numbers, *(-each for each in numbers if row.claims)]
    elif name == "elu":
        alpha, scale, inner = numbers
        ends = [0.0, scale, scale * alpha * inner]
    elif name == "exp":
        ends = [0.0, float(row.bounds.largest.max())]
    else:
        ends = [_LOWEST.get(name, 0.0), float(FUNCTIONS[name](*numbers).slope.exact())]
    return min(ends), max(ends)


def is_proved(rows: Mapping[str, Row], row: Row, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the multipliers of a row prove its bound, up to rounding.

    Args:
        rows: All rows by name.
        row: The row of the joint bound.
        tensors: Stored tensors by name.
    """
    end, start = row.inputs
    outputs: list[Tensor] = []  # of the matrix, a block of rows for each function
    known = {start: {0: torch.eye(rows[start].shape[-1]).double()}}
    slopes: list[tuple[float, float]] = []

    def of(name: str) -> dict[int, Tensor]:
        if name not in known:
            known[name] = made(rows[name])
        return known[name]

    def made(each: Row) -> dict[int, Tensor]:
        if each.operation == "constant":
            return {}
        if each.operation == "lipsdp":
            return of(each.inputs[0])
        inputs = [of(name) for name in each.inputs]
        if not any(inputs):  # a constant that is moved
            return {}
        if each.operation == "add":
            return {j: sum(x[j] for x in inputs if j in x) for x in inputs for j in x}
        if each.operation == "times":
            ((key, factor),) = each.constants.items()
            tensor = tensors[factor].double() if isinstance(factor, str) else torch.tensor(factor).double()
            column = tensor.reshape(-1, 1) if key == "factor" else 1 / tensor.reshape(-1, 1)
            return {j: column * x for j, x in inputs[0].items()}
        if each.operation == "linear":
            (claim, *_), weight = each.claims, tensors[each.claims[0].tensors[0]].double()
            weight = weight.mT if claim.constants.get("transposed") else weight.flatten(1)
            return {j: weight @ x for j, x in inputs[0].items()}
        assert each.operation == "elementwise", each.operation
        low, high = slopes_of(each)
        slopes.append(((high + low) / 2, (high - low) / 2))
        outputs.append(inputs[0])
        centre, radius = slopes[-1]
        own = {j: centre * x for j, x in inputs[0].items()}
        return own | {len(slopes): radius * torch.eye(each.shape[-1]).double()}

    last = of(end)
    d = [tensors[name].double() for name in row.constants["multipliers"]]
    if [len(x) for x in d] != [len(next(iter(x.values()))) for x in outputs]:
        return False
    d = [each * radius for each, (_, radius) in zip(d, slopes, strict=True)]  # of w in the place of r w
    into = [torch.full((rows[start].shape[-1],), row.constants["bound"]).double(), *d]
    whole = torch.cat(
        [
            torch.cat([weight[:, None] * x[j] / into[j] if j in x else torch.zeros(len(weight), len(into[j])).double()
                       for j in range(len(into))], 1)
            for weight, x in zip([*d, torch.ones(rows[end].shape[-1]).double()], [*outputs, last], strict=True)
        ]
    )  # fmt: skip
    return float(torch.linalg.matrix_norm(whole, 2)) <= 1 + _CLOSE
