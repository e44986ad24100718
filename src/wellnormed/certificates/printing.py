"""A certificate in words: the statement that is proved, its norms, its domain, and the table that `print` shows."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING

from wellnormed.certificates.sizes import entries_of, greatest, group_size, largest_rms, short, slope
from wellnormed.program.comparing import NOT_COMPARED
from wellnormed.program.domain import Box, domain_of
from wellnormed.program.program import Program
from wellnormed.proof import Row
from wellnormed.proof.check import arithmetic_of, of_change, of_rounding
from wellnormed.proof.decimals import assumed, between, shown
from wellnormed.proof.reading import word

if TYPE_CHECKING:
    from wellnormed.certificates.certificate import Certificate

PROOF = (
    "of the captured program (the graph with its stored tensors, which `wn.export` writes and runs) in real arithmetic"
)
"""The end of the sentence "a certificate is a proof ..."."""


def table(certificate: "Certificate") -> str:
    """The text of `print`: the bound, the inputs and weights that it holds for, and a line per row with bounds."""
    replaced, entries = certificate.substitution, entries_of(certificate.rows, "euclidean")
    log10, rms = shown(certificate.lipschitz.log10, ".4f"), short(certificate.rms_lipschitz.exact)
    lines = [
        sentence(certificate),
        f"Lipschitz bound {short(certificate.lipschitz.exact)}  (log10 {log10}; {rms} from RMS to RMS)",
        f"norms: {certificate.norms}",
        f"domain: {certificate.domain}",
        *outside(certificate.program, certificate.inputs),
        f"proved of the captured program; {_briefly(certificate)}; statement() has all of it",
        rounding(certificate),
        *_change(certificate),
        *_why_large(certificate),
    ]
    if certificate.promises:
        lines.append(f"for every weight within these caps: {'; '.join(map(str, certificate.promises))}")
        if certificate.tensors:
            lines.append(f"and for these values as they are: {', '.join(map(word, certificate.tensors))}")
    lines += [f"rounds: {_conversions(rows, dtype)}" for dtype, rows in certificate.rounds.items()]
    if (logit := certificate.largest_logit) is not None:
        lines.append(f"largest attention logit, proved: {short(logit.exact)}")
    if replaced is not None:
        lines.append(f"replacing any tokens changes the result by at most, in l2: {short(replaced.exact)}")
    if certificate.lower_bound is not None:
        lines.append(f"largest gain found: {shown(certificate.lower_bound, up=False)}")
    names = [(word(row.name), word(row.operation)) for row in certificate.layers]
    width, kind = (max(map(len, column)) for column in zip(*names, strict=True))
    lines.append(f"{'operation':{width}}  {'primitive':{kind}}  {'RMS at most':>12}  {'Lipschitz':>12}")
    lines += [
        f"{name:{width}}  {operation:{kind}}  {short(largest_rms(row, 'radius')):>12}  {short(slope(row, entries)):>12}"
        for (name, operation), row in zip(names, certificate.layers, strict=True)
    ]
    return "\n".join(lines)


def sentence(certificate: "Certificate") -> str:
    """The bound as a sentence, in Euclidean norms: of a sample that is one group of entries, or of its groups."""
    inputs, result, bound = certificate.inputs, certificate.rows[-1], short(certificate.lipschitz.exact)
    if len(inputs) == 1 and all(group_size(row) == math.prod(row.shape) for row in (*inputs, result)):
        noun = "An image" if len(inputs[0].shape) == 4 else "An input"
        return f"{noun} moved by d in l2 moves the result by at most {bound} d."
    noun = "A sample" if certificate.each_sample else "A batch"
    moved = " and ".join(sorted({_groups(row) for row in inputs}))
    return (
        f"{noun} whose {moved} each move by at most d in l2 has a result whose {_groups(result)} each move by at most "
        f"{bound} d."
    )


def statement(certificate: "Certificate") -> str:
    """The proved statement, what rounding adds, the comparison with the model's code, and what that left out."""
    return "\n".join(
        [
            f"proof: {PROOF}",
            f"rounding: {rounding(certificate)}",
            *(f"change: {each}" for each in _change(certificate)),
            *outside(certificate.program, certificate.inputs),
            f"compared: {certificate.compared}",
            f"not compared: {', '.join(NOT_COMPARED)}",
        ]
    )


def rounding(certificate: "Certificate") -> str:
    """The statement about rounding errors."""
    error = certificate.forward_error
    words = arithmetic_of(certificate.rows, certificate.execution, certificate.unbounded_at)
    return of_rounding(words, None if error is None else error.exact)


def _change(certificate: "Certificate") -> list[str]:
    """The statement about the original, if there is one."""
    return [*filter(None, [of_change(certificate.rows, certificate.execution)])]


def _briefly(certificate: "Certificate") -> str:
    if certificate.comparison is None:
        return "the model's code was not compared with it"
    return f"the model's code was compared with it at {certificate.comparison.inputs} samples"


LARGE = 3.0
"""The decimal logarithm from which on `print` explains why a bound is large."""


def _why_large(certificate: "Certificate") -> list[str]:
    """If the bound is large, a line with the factor of each kind of operation on the largest path, and a remedy."""
    if (total := certificate.lipschitz.log10) < LARGE:
        return []
    made: dict[str, list[float]] = defaultdict(list)
    for row, factor in factors(certificate.rows):
        made[row.operation].append(factor)
    ranked = sorted(made, key=lambda kind: -sum(made[kind]))
    large = [kind for kind in ranked if sum(made[kind]) > total / 20]
    words = ", ".join(f"{word(x)} makes about 10^{sum(made[x]):.1f} in {len(made[x])} rows" for x in large)
    remedy = NORMALIZATIONS if ranked[0] == "normalization" else _WEIGHTS + _JOINTLY * _in_a_row(certificate)
    return [f"why it is large: {words}. {'. '.join([remedy, *[RECTIFIED] * only_relu(certificate.rows)])}"]


def only_relu(rows: Sequence[Row]) -> bool:
    """Whether a proof has activations, and all of them are ReLU."""
    return {row.constants["function"] for row in rows if row.operation == "elementwise"} == {"relu"}


RECTIFIED = "All activations are ReLU: under caps wn.nn.MaxMin reaches more"
"""The reason: MaxMin preserves the length of gradients, and ReLU loses half of it. A line of at most 80 letters."""


def _in_a_row(certificate: "Certificate") -> bool:
    """Whether `effort="high"` may help and was not used: linear maps follow each other on the largest path."""
    path = [row.operation for row, _ in factors(certificate.rows) if row.bounds is not None]
    bent = [kind for kind in path if kind not in ("elementwise", "add")]
    possible = not certificate.promises and not any(row.operation == "lipsdp" for row in certificate.rows)
    return possible and ("linear", "linear") in pairwise(bent)


def factors(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """The rows on the path of the largest gains, last row first, each with the decimal logarithm of its factor."""
    named, gains = {row.name: row for row in rows}, dict[str, Decimal]()
    for row in rows:
        inputs = [gains[name] for name in row.inputs]
        before = sum(inputs, Decimal(0)) if row.operation == "add" else max(inputs, default=Decimal(0))
        if row.operation == "times" and isinstance(number := next(iter(row.constants.values())), float) and number:
            before *= Decimal(abs(number)) ** (1 if "factor" in row.constants else -1)
        gains[row.name] = before if row.bounds is None else greatest(row, "gain")
    path, row = [], rows[-1]
    while row.inputs and gains[name := max(row.inputs, key=gains.__getitem__)]:
        path.append((row, float((gains[row.name] / gains[name]).log10())))
        row = named[name]
    return path


NORMALIZATIONS = "Norm layers make up to 1 / sqrt(eps): wn.calibrate(model, data) puts floors below, or says why not"
_WEIGHTS = "The layers' norms multiply: a bound of use needs caps on weights while they are trained, as by wn.constrain"
_JOINTLY = "; certify(effort='high') bounds layers jointly, and may prove less"


def norms(certificate: "Certificate") -> str:
    """The norms of the input and of the result that `lipschitz` compares."""
    return f"largest Euclidean norm of {_groups(certificate.inputs[0])} in, of {_groups(certificate.rows[-1])} out"


def domain(certificate: "Certificate") -> str:
    """The inputs that the bound holds for."""
    parts = []
    for row in certificate.inputs:
        limit, which, where = domain_of(row.constants), "all", ""
        if limit == math.inf:
            which, where = "all finite", " in real arithmetic (executed, large ones may overflow)"
        elif isinstance(limit, Box):
            where = f" with entries {between(limit.low, limit.high)}"
        else:
            where = f" with {_groups(row)} of RMS <= {assumed(limit)}"
        looked_up = f", the rows of `{word(row.claims[0].tensors[0])}` among them" if row.claims else ""
        dtype = word(row.constants["dtype"])
        parts.append(f"{which} {dtype} `{word(row.name)}` of shape {row.shape}{where}{looked_up}")
    fixed = [f"`{word(name)}` as in the example, lookups apart" for name in certificate.fixed]
    whole = "each sample of any batch" if certificate.each_sample else "the whole batch as one sample of fixed shape"
    return f"{whole}: {'; '.join(parts + fixed)}"


def outside(program: Program | None, inputs: Iterable[Row]) -> list[str]:
    """A line for every input of the example, while it is known, that lies outside of the domain."""
    rows = {row.name: row for row in inputs}
    given = [] if program is None else zip(program.inputs.values(), program.given, strict=True)
    found = []
    for (name, _), tensor in given:
        if (row := rows.get(f"input.{name}")) is None:
            continue
        limit, values = domain_of(row.constants), tensor.detach().double()
        if isinstance(limit, Box):
            low, high = values.min().item(), values.max().item()
            inside, has = limit.low <= low and high <= limit.high, f"entries from {low:.4g} to {high:.4g}"
        else:
            size = values.square().mean(row.axes).sqrt().max().item()
            inside, has = size <= limit * (1 + 1e-6), f"{_groups(row)} of RMS {size:.4g}"
        if not inside:
            found.append(f"the example lies outside of the domain: `{word(row.name)}` has {has}; pass radius= or box=")
    return found


def compared(certificate: "Certificate") -> str:
    """How the model's code was compared with the program."""
    if (comparison := certificate.comparison) is None:
        return "the model's code was not compared with the program"
    parts = [*comparison.circumstances, "called again"]
    if comparison.batches:
        *sizes, last = map(str, sorted(comparison.batches))
        parts.append(f"for batches of {', '.join(sizes)} and {last}")
    if comparison.hidden:
        parts.append(f"but for {comparison.hidden} entries of the result, which change by less than they round")
    drawn = f"{comparison.inputs} samples drawn from the domain"
    return f"the model's code, in {comparison.arithmetic} at {drawn}: {', '.join(parts)}"


def _conversions(rows: tuple[str, ...], dtype: str) -> str:
    """The number of conversions to a dtype, and the names of the first three rows."""
    shown = ", ".join(map(word, rows[:3])) + ", ..." * (len(rows) > 3)
    return f"{len(rows)} conversion{'s' * (len(rows) > 1)} to {word(dtype)}, counted as the identity ({shown})"


def _groups(row: Row) -> str:
    """The noun for a row's groups of entries, over which the RMS is taken."""
    if len(row.axes) > 1:
        return "whole samples"
    return "vectors" if len(row.shape) < 3 else "tokens"
