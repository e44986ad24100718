"""Write docs/scaling.md: what one step would take at sizes that nobody here has run: `python docs/make_scaling.py`.

Everything is computed: the norms, the owners, the parts of cut weights, the state of an optimizer and the steps between
projections by the library's own functions, on weights without content. The assumptions are the arguments of this
script. A test compares the page with what this script writes by default.
"""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import wellnormed as wn
from wellnormed.constraints.caps import Cap
from wellnormed.matrix import coefficients
from wellnormed.matrix.msign import newton_schulz
from wellnormed.norms import Norm
from wellnormed.optim.parts import NeuronNormalized, Oracle
from wellnormed.parallel import Job
from wellnormed.parallel.layout import part_lengths
from wellnormed.parallel.placement import deal
from wellnormed.routing import AssignedParameter

ROOT = Path(__file__).resolve().parents[1]
SMALL_SIDE = 120
"""Of the matrices whose operations are counted; many numbers of ranks divide it."""
PAGE = ROOT / "docs" / "scaling.md"
CERTIFICATE = "public-models.json"
EVERY = (1, 8)
"""Steps from one projection of caps to the next."""


def assumption(default: Any, text: str) -> Any:
    """A field with the words that the page and the command have for it."""
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True)
class Assumptions:
    """What the page supposes; every field is an argument of the script."""

    gpus: int = assumption(1000, "GPUs, over which FSDP2 cuts every parameter by rows")
    hybrid: int = assumption(128, "GPUs that hold one copy together, with hybrid sharding")
    weight_bytes: int = assumption(4, "bytes of an entry of weights, gradients and state, which the optimizer sends")
    gathered_bytes: int = assumption(2, "bytes of an entry that FSDP2 gathers, for the forward and the backward pass")
    reduced_bytes: int = assumption(4, "bytes of an entry of a gradient that FSDP2 reduces")
    tokens: int = assumption(4_194_304, "tokens of a step, all GPUs together")
    product_flops: float = assumption(989e12, "peak operations a second of a GPU's 16-bit products")
    float32_flops: float = assumption(67e12, "peak operations a second of its float32 products")
    utilization: float = assumption(0.4, "share of a peak that is reached, by everything")
    bandwidth: float = assumption(50e9, "bytes a second that a GPU sends to others")
    cap: float = assumption(2.0, "cap of the constraints, in units of the norm")
    learning_rate: float = assumption(0.02, "length of a step, in units of the norm")


MODELS = {"1B": (2048, 16, 50304), "10B": (4096, 48, 50304), "100B": (10240, 80, 50304)}
"""Width of the state, blocks, vocabulary."""
GPT2_SMALL = (768, 12, 50257)
"""The model of the measured certificate; its head is its embedding."""


class Block(nn.Module):
    """The matrices of one block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)


class Model(nn.Module):
    """The parameters of a NanoGPT-like model: attention, a feed-forward layer four times as wide, no biases."""

    def __init__(self, width: int, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)


OPTIMIZERS: dict[str, tuple[str | None, type[torch.optim.Optimizer]]] = {
    "Scion": ("scion-gpt", wn.Scion),
    "Muon": ("muon", wn.Muon),
    "AdamW": (None, torch.optim.AdamW),
}
"""Name -> recipe of norms, None where there are none; and class."""
KEYS = {"momentum_buffer": "momentum", "exp_avg": "momentum", "exp_avg_sq": "second moment"}


@cache
def assigned(size: tuple[int, int, int], recipe: str | None) -> tuple[AssignedParameter, ...]:
    """Every parameter, without content, and its norm."""
    with torch.device("meta"):
        found = wn.assign_norms(Model(*size), recipe or "muon")
    return tuple(found if recipe else (replace(each, norm=None) for each in found))


ORACLE = wn.Spectral(coefficients="jordan-5", method="newton-schulz")
"""Of Muon's matrices, by products, as on GPUs."""


def second_moment(parameter: Tensor) -> int:
    """Entries of NorMuon's own tensor."""
    return NeuronNormalized(0.95, Oracle()).start("second_moment", parameter, ORACLE).numel()


@cache
def state_kinds(optimizer: str) -> dict[str, dict[str, bool]]:
    """Parameter of a model of one block -> tensors of its state -> whether they are as large as the parameter."""
    recipe, kind = OPTIMIZERS[optimizer]
    model = Model(8, 1, 16)
    settings: dict[str, Any] = {"recipe": recipe} if recipe else {}
    made = kind(model if recipe else model.parameters(), lr=0.01, **settings)  # type: ignore[call-arg]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.step()
    return {
        name: {KEYS[key]: x.shape == p.shape for key, x in made.state[p].items() if key in KEYS}
        for name, p in model.named_parameters()
    }


@cache
def _cut(shape: torch.Size, gpus: int) -> list[int]:
    row = shape[1:].numel()
    return [length * row for length in part_lengths(shape[0], gpus)]


def entries_of_rank(parameter: Tensor, gpus: int) -> list[int]:
    """Entries of every rank's part, as FSDP2 cuts the rows."""
    return _cut(parameter.shape, gpus)


def parts(parameters: Iterable[Tensor], gpus: int) -> list[int]:
    """Entries of every rank, of all these parameters together."""
    return [sum(each) for each in zip([0] * gpus, *(entries_of_rank(p, gpus) for p in parameters), strict=True)]


@dataclass(frozen=True)
class Dealt:
    """Who owns what: parameters with a norm, the rank that computes each, and the cost that decided it."""

    parameters: list[Tensor]
    norms: list[Norm]
    costs: list[int]
    owners: list[int]

    def by_rank(self, amounts: Iterable[float], gpus: int) -> list[float]:
        """Sum of an amount over what each rank owns."""
        found = [0.0] * gpus
        for owner, amount in zip(self.owners, amounts, strict=True):
            found[owner] += amount
        return found


def dealt(size: tuple[int, int, int], recipe: str | None, gpus: int) -> Dealt:
    """As `Placement` deals the oracles of cut weights: all that have a norm."""
    own = [(each.parameter, each.norm) for each in assigned(size, recipe) if each.norm is not None]
    jobs = [Job(([p],), lambda batch: (batch,), cubic=norm.measures == "singular values") for p, norm in own]
    costs = [job.cost for job in jobs]
    return Dealt([p for p, _ in own], [norm for _, norm in own], costs, deal(costs, gpus))


def sent(work: Dealt, assumed: Assumptions) -> list[int]:
    """Bytes that every rank sends in a step: its parts to the owners, and results of what it owns to all others."""
    found = parts(work.parameters, assumed.gpus)
    for p, owner in zip(work.parameters, work.owners, strict=True):
        # the owner keeps its part twice: on the way there and on the way back
        found[owner] += p.numel() - 2 * entries_of_rank(p, assumed.gpus)[owner]
    return [each * assumed.weight_bytes for each in found]


@cache
def operations_over_cost(aspect: int) -> float:
    """Operations of one oracle by products, as GPUs run it, over `m n min(m, n)`; counted while a small one runs."""
    with FlopCounterMode(display=False) as counter:
        ORACLE.dualize(torch.randn(64, aspect * 64))
    return counter.get_total_flops() / (aspect * 64**3)


def operations(work: Dealt, over_cost: Callable[[int], float]) -> list[float]:
    """Operations for every matrix, given those over `m n min(m, n)` by the longer side over the shorter."""
    assert all(norm.measures == "singular values" for norm in work.norms)
    aspects = [max(p.shape) // min(p.shape) for p in work.parameters]
    return [cost * over_cost(aspect) for cost, aspect in zip(work.costs, aspects, strict=True)]


def load(name: str) -> dict[str, Any]:
    """A file under `results/`."""
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def spectral_cost(size: tuple[int, int, int]) -> int:
    """`m n min(m, n)` of all matrices whose norms a certificate proves: those of blocks, and the head."""
    own = [each.parameter for each in assigned(size, None) if each.name != "embedding.weight"]
    return sum(Job(([parameter],), lambda batch: (batch,)).cost for parameter in own)


def steps_per_projection(every: int, assumed: Assumptions, weight: Tensor, steps: int = 2000) -> float:
    """Steps from one projection to the next, counted by the cap's own rule."""
    cap: Cap = wn.HardCap(assumed.cap, every=every)
    reach, projections = cap.first_reach(), 0
    step = cap.seen_step(assumed.learning_rate * ORACLE.overshoot, weight)
    for _ in range(steps):
        projections += reach is None or not cap.may_wait(reach, step)
    return steps / projections


def amount(number: float, unit: str = "") -> str:
    """Three digits, with a prefix for thousands."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def seconds(number: float) -> str:
    """A time."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number * 1e3:.3g} ms"


def table(first: str, rows: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """A Markdown table with one column for each model."""
    yield f"| {first} | {' | '.join(MODELS)} |"
    yield f"|{'---|' * (1 + len(MODELS))}"
    yield from (f"| {name} | {' | '.join(cells)} |" for name, cells in rows)
    yield ""


def fullest(sizes: list[int], scale: float) -> str:
    """The largest and the mean over ranks."""
    return f"{amount(max(sizes) * scale, 'B')} ({amount(sum(sizes) * scale / len(sizes), 'B')})"


def memory(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: what every GPU keeps between steps, and its owned matrices during one."""
    models = [assigned(size, None) for size in MODELS.values()]

    def held(chosen: Callable[[str], bool]) -> list[str]:
        of_ranks = [parts([each.parameter for each in model if chosen(each.name)], assumed.gpus) for model in models]
        return [fullest(sizes, assumed.weight_bytes) for sizes in of_ranks]

    yield "parameters", held(lambda name: True)
    yield "gradients", held(lambda name: True)
    for optimizer in OPTIMIZERS:
        kinds = state_kinds(optimizer)
        for key in dict.fromkeys(KEYS.values()):
            large, small = ({name for name, own in kinds.items() if own.get(key) is what} for what in (True, False))
            if large:
                yield f"{optimizer}: {key}", held(lambda name, large=large: _of_first_block(name) in large)
            if small:  # a number for each parameter, in every rank
                counts = [sum(_of_first_block(each.name) in small for each in model) for model in models]
                yield f"{optimizer}: {key}", [amount(count * assumed.weight_bytes, "B") for count in counts]
    yield (
        "Muon with `normuon`: its second moment, in every rank",
        [
            amount(assumed.weight_bytes * sum(second_moment(p) for p in w.parameters), "B")
            for w in (dealt(size, "muon", assumed.gpus) for size in MODELS.values())
        ],
    )
    for optimizer, (recipe, _) in OPTIMIZERS.items():
        if recipe is not None:
            works = [dealt(size, recipe, assumed.gpus) for size in MODELS.values()]
            owned = [max(w.by_rank((p.numel() for p in w.parameters), assumed.gpus)) for w in works]
            cells = [amount(2 * each * assumed.weight_bytes, "B") for each in owned]
            yield f"{optimizer}: what a rank owns, twice, during a step", cells


def _of_first_block(name: str) -> str:
    return ".".join("0" if part.isdigit() else part for part in name.split("."))


def communication(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: bytes that a GPU sends in a step."""
    share = (assumed.gpus - 1) / assumed.gpus
    totals = [sum(each.parameter.numel() for each in assigned(size, None)) for size in MODELS.values()]
    of_fsdp = [total * share * (2 * assumed.gathered_bytes + assumed.reduced_bytes) for total in totals]
    yield "FSDP2: two gathers of weights, one reduction of gradients", [amount(each, "B") for each in of_fsdp]
    for optimizer, (recipe, _) in OPTIMIZERS.items():
        if recipe is None:
            yield f"{optimizer}", ["0" for _ in MODELS]
            continue
        found = [sent(dealt(size, recipe, assumed.gpus), assumed) for size in MODELS.values()]
        yield f"{optimizer}: the rank that sends most (mean)", [fullest(each, 1.0) for each in found]
        yield (
            f"{optimizer}: the mean over what FSDP2 sends",
            [f"{sum(s) / len(s) / f:.2%}" for s, f in zip(found, of_fsdp, strict=True)],
        )
        yield (
            f"{optimizer}: time of the rank that sends most",
            [seconds(max(each) / assumed.bandwidth) for each in found],
        )
    yield "FSDP2: its time", [seconds(each / assumed.bandwidth) for each in of_fsdp]


def training_seconds(size: tuple[int, int, int], assumed: Assumptions) -> float:
    """Of the forward and backward pass: 6 operations for each parameter and token."""
    total = sum(each.parameter.numel() for each in assigned(size, None))
    return 6 * total * assumed.tokens / (assumed.gpus * assumed.product_flops * assumed.utilization)


def work(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: how evenly the update falls on owners, and what that takes."""
    works = [dealt(size, "muon", assumed.gpus) for size in MODELS.values()]
    loads = [w.by_rank(w.costs, assumed.gpus) for w in works]
    yield "matrices", [f"{len(w.owners)}" for w in works]
    yield "ranks that own one or more", [f"{len(set(w.owners))} of {assumed.gpus:,}" for w in works]
    yield "largest share of the work on one rank", [f"{max(each) / sum(each):.2%}" for each in loads]
    yield "that over an even share", [f"{max(each) * assumed.gpus / sum(each):.3g}" for each in loads]
    most = [max(w.by_rank(operations(w, operations_over_cost), assumed.gpus)) for w in works]
    yield "operations of the busiest rank", [amount(each) for each in most]
    for name, peak in (("float32", assumed.float32_flops), ("16 bits", assumed.product_flops)):
        yield f"its time, products in {name}", [seconds(each / (peak * assumed.utilization)) for each in most]
    hybrid = [dealt(size, "muon", assumed.hybrid) for size in MODELS.values()]
    most = [max(w.by_rank(operations(w, operations_over_cost), assumed.hybrid)) for w in hybrid]
    peak = assumed.float32_flops * assumed.utilization
    yield f"its time with {assumed.hybrid} owners, in float32", [seconds(each / peak) for each in most]
    yield "forward and backward pass", [seconds(training_seconds(size, assumed)) for size in MODELS.values()]


def shares_of_rows(matrix: Tensor, ranks: int) -> tuple[float, float, int]:
    """Of one matrix whose rows several ranks share: operations of one that has it all, of each, and bytes each sends.

    A rank multiplies its own rows and all of the small side, and each Gram matrix of `n x n` is a sum over ranks, which
    sends `2 (ranks - 1) / ranks` times its size. Counted as the library's own iteration runs.
    """
    m, n = max(matrix.shape), min(matrix.shape)
    aspect, steps = m // n, coefficients.get("jordan-5").steps
    pairs = [steps[i : i + (2 if aspect >= 2 else 1)] for i in range(0, len(steps), 2 if aspect >= 2 else 1)]
    share = torch.randn(part_lengths(aspect * SMALL_SIDE, ranks)[0], SMALL_SIDE)
    with FlopCounterMode(display=False) as counter:
        for pair in pairs:
            newton_schulz(share, *pair)
    of_each = counter.get_total_flops() / SMALL_SIDE**3 * n**3
    return operations_over_cost(aspect) * m * n**2, of_each, len(pairs) * 2 * (ranks - 1) * n**2 // ranks


def splitting(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: what it would take to share the costliest matrix among the ranks that have nothing to do."""
    works = [dealt(size, "muon", assumed.gpus) for size in MODELS.values()]
    ranks = [max(1, assumed.gpus // len(w.owners)) for w in works]
    largest = [max(w.parameters, key=lambda p: p.numel() * min(p.shape)) for w in works]
    found = [shares_of_rows(matrix, count) for matrix, count in zip(largest, ranks, strict=True)]
    yield "ranks for each matrix", [f"{count}" for count in ranks]
    yield "operations of one rank alone", [amount(alone) for alone, _, _ in found]
    yield "operations of each of them", [amount(each) for _, each, _ in found]
    for name, peak, width in (("float32", assumed.float32_flops, 4), ("16 bits", assumed.product_flops, 2)):
        rate = peak * assumed.utilization
        yield f"{name}: one rank alone", [seconds(alone / rate) for alone, _, _ in found]
        times = [(each / rate, sends * width / assumed.bandwidth) for _, each, sends in found]
        yield f"{name}: shared, of which sending", [f"{seconds(a + b)}, {seconds(b)}" for a, b in times]


def rows_that_pay(peak: float, width: int, assumed: Assumptions) -> float:
    """Rows above which a shared Newton-Schulz takes less time, whatever the columns and the ranks.

    One sum of Gram matrices, of `2 (p - 1) / p n^2` entries, saves `(p - 1) / p` of two products with the matrix, which
    are `4 m n^2` operations.
    """
    return peak * assumed.utilization * width / (2 * assumed.bandwidth)


class HardCapByProducts(wn.HardCap):
    """As a GPU computes it."""

    _method = "products"


def busiest_in_turn(costs: list[int], operations: list[float], turns: int, ranks: int) -> float:
    """Operations of the busiest rank of a step, on average, where every so manieth matrix is due in each step."""
    most = []
    for turn in range(turns):
        loads = [0.0] * ranks
        for owner, number in zip(deal(costs[turn::turns], ranks), operations[turn::turns], strict=True):
            loads[owner] += number
        most.append(max(loads))
    return sum(most) / turns


@cache
def cap_operations_over_cost(every: int, aspect: int, assumed: Assumptions) -> float:
    """Operations of one projection over `m n min(m, n)`; counted while one of a small matrix at its cap runs."""
    weight = torch.nn.init.orthogonal_(torch.empty(64, aspect * 64))
    weight *= assumed.cap / float(ORACLE.norm(weight))
    cap = HardCapByProducts(assumed.cap, every=every)
    step = cap.seen_step(assumed.learning_rate * ORACLE.overshoot, weight)
    with FlopCounterMode(display=False) as counter:
        cap.apply(weight[None], ORACLE, step, {})
    return counter.get_total_flops() / (aspect * 64**3)


def _projection(every: int, assumed: Assumptions) -> str:
    square, long = (cap_operations_over_cost(every, aspect, assumed) for aspect in (1, 4))
    return f"{square:.3g} `m n min(m, n)` for squares and {long:.3g} for four times as long ones with `every={every}`"


def caps(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: how often caps act, and what they take."""
    for every in EVERY:
        intervals, shares, busiest, due, hybrid, bytes_sent = [], [], [], [], [], []
        in_turn: dict[int, list[str]] = {assumed.gpus: [], assumed.hybrid: []}
        for size in MODELS.values():
            w = dealt(size, "muon", assumed.gpus)
            steps = steps_per_projection(every, assumed, w.parameters[0])
            training = 6 * sum(each.parameter.numel() for each in assigned(size, None)) * assumed.tokens
            intervals.append(f"{steps:.3g}")
            found = operations(w, lambda aspect, every=every: cap_operations_over_cost(every, aspect, assumed))
            shares.append(f"{sum(found) / steps / training:.2%}")
            most = max(w.by_rank(found, assumed.gpus))
            busiest.append(seconds(most / steps / (assumed.float32_flops * assumed.utilization)))
            due.append(seconds(most / (assumed.float32_flops * assumed.utilization)))
            fewer = dealt(size, "muon", assumed.hybrid)
            most = max(fewer.by_rank(found, assumed.hybrid))
            rate = assumed.float32_flops * assumed.utilization
            hybrid.append(f"{seconds(most / rate)}" + (f" ({seconds(most / rate / steps)})" if every > 1 else ""))
            bytes_sent.append(amount(sum(sent(w, assumed)) / assumed.gpus / steps, "B"))
            for ranks, times in in_turn.items():
                most = busiest_in_turn(w.costs, found, every, ranks)
                times.append(seconds(most / (assumed.float32_flops * assumed.utilization)))
        name = f"`HardCap({assumed.cap:g}, every={every})`"
        yield f"{name}: steps from one projection to the next", intervals
        yield f"{name}: operations over those of training", shares
        yield f"{name}: time of the busiest rank, a step on average, in float32", busiest
        yield f"{name}: that time in a step in which caps are due", due
        average = " (a step on average)" if every > 1 else ""
        yield f"{name}: the same with {assumed.hybrid} owners{average}", hybrid
        if every > 1:
            for ranks, times in in_turn.items():
                yield f"a step, if 1/{every} of the caps were due in each, with {ranks:,} owners", times
        yield f"{name}: bytes that a rank sends, a step on average", bytes_sent


def checkpoints(assumed: Assumptions) -> Iterator[tuple[str, list[str]]]:
    """Rows: bytes of a checkpoint of the trainer, which holds weights and the optimizer's state."""
    for optimizer in OPTIMIZERS:
        kinds, found = state_kinds(optimizer), []
        for size in MODELS.values():
            own = ((each.parameter.numel(), kinds[_of_first_block(each.name)]) for each in assigned(size, None))
            entries = sum(count * (1 + sum(large for large in state.values())) for count, state in own)
            found.append(amount(entries * assumed.weight_bytes, "B"))
        yield optimizer, found


def certificates() -> Iterator[tuple[str, list[str]]]:
    """Rows: what a certificate would take, from one that was measured."""
    measured = load(CERTIFICATE)["results"]["GPT-2 small, whole"]
    total, cost = measured["parameters"], spectral_cost(GPT2_SMALL)
    sizes = [sum(each.parameter.numel() for each in assigned(size, None)) for size in MODELS.values()]
    costs = [spectral_cost(size) for size in MODELS.values()]
    for name, key in (("`certify`", "seconds"), ("the checker", "seconds_of_the_checker")):
        low = [seconds(measured[key] * size / total) for size in sizes]
        high = [seconds(measured[key] * each / cost) for each in costs]
        yield name, [f"{a} to {b}" for a, b in zip(low, high, strict=True)]


def text(words: str) -> list[str]:
    """A paragraph."""
    return [*textwrap.wrap(words, 130, break_long_words=False, break_on_hyphens=False), ""]


def page(assumed: Assumptions | None = None) -> str:
    """The whole page."""
    assumed = assumed or Assumptions()
    measured = load(CERTIFICATE)
    whole = measured["results"]["GPT-2 small, whole"]
    lines = [
        f"# At scale: 1B to 100B parameters on {assumed.gpus:,} GPUs",
        "",
        *text(
            "Nobody has run this library at these sizes. This page computes what a step would take, by the library's "
            "own functions for norms, owners, parts and states, on weights without content. It is written by `python "
            "docs/make_scaling.py`, whose arguments are the assumptions:"
        ),
        "| argument | value | what it is |",
        "|---|---|---|",
        *(
            f"| `--{each.name.replace('_', '-')}` | {_plain(getattr(assumed, each.name))} | {each.metadata['text']} |"
            for each in fields(Assumptions)
        ),
        "",
        *text(
            "By default peaks are those of an H100 with dense products, and a GPU sends 400 Gbit/s. Nothing is assumed "
            "to overlap. The models are like NanoGPT: in every block four matrices of attention and a feed-forward "
            "layer four times as wide, no biases, and a head of its own."
        ),
        *table(
            "",
            [
                ("width, blocks, vocabulary", [f"{d:,}, {n}, {v:,}" for d, n, v in MODELS.values()]),
                ("parameters", [amount(sum(a.parameter.numel() for a in assigned(s, None))) for s in MODELS.values()]),
            ],
        ),
        *text(
            "Scion has the recipe `scion-gpt`, in which all parameters have a norm. Muon has `muon`: the matrices of "
            "blocks have the spectral norm, and AdamW moves embedding and head."
        ),
        "## Memory",
        "",
        *text(
            "Of the GPU that holds most; in parentheses the mean. They differ because rows do not divide: of 2,048 "
            "rows on 1,000 GPUs most hold 3 and others none. What FSDP2 gathers and activations are not in it. During "
            "a step a GPU also holds its parts on their way to the owners, and those that come back: each about as "
            "large as its gradients."
        ),
        *table("a GPU keeps", memory(assumed)),
        *text(
            'With `memory="gradient"` there is no momentum buffer: the gradient holds the momentum. While a rank '
            "computes, the batch that it computes takes 3 times its size, or 10 with hard caps; at these sizes a batch "
            "is one matrix."
        ),
        "## What is sent",
        "",
        *text(
            "Each matrix has one owner, which collects its parts, computes, and sends parts of the result back ([many "
            "processes](parallel.md)). On average that is little beside what FSDP2 sends anyway. But an owner sends a "
            "whole matrix, and the others wait for the owner of the largest. Where weights are cut, norms that work by "
            "entry or column have owners too, so that Scion's largest messages are its embedding and its head. "
            "Every rank receives as many bytes as it sends, the owner's before it computes: a step that waits for that "
            "owner takes the time below twice. "
            "Besides, three numbers of 8 bytes for each parameter are compared in every step."
        ),
        *table("a GPU sends in a step", communication(assumed)),
        "## How evenly the update falls on owners",
        "",
        *text(
            "Muon's matrices, dealt by cost `m n min(m, n)`, longest first. With fewer matrices than GPUs the other "
            "GPUs have nothing to do, and the update takes as long as the costliest matrix, however many GPUs there "
            "are. Operations are those of Newton-Schulz products, counted as they run. Products are in 16 bits where "
            "weights and gradients are. The forward and backward pass is taken as six operations for every parameter, "
            "the embedding's among them, and every token; what attention computes between tokens is left out."
        ),
        *table("a step", work(assumed)),
        *text(
            "Where that is too long, hybrid sharding does not help, for each set of copies does all of the work, "
            "with fewer owners; products in 16 bits do. The ranks without a matrix could share those of the others: "
            "each would multiply its share of the rows (of the longer side), every Gram matrix would be summed over "
            "the ranks of its matrix, and each of them would multiply the small side in full. Sending such a sum "
            "takes less time than it saves where a matrix has more than "
            f"{rows_that_pay(assumed.float32_flops, 4, assumed):,.0f} rows in float32, and "
            f"{rows_that_pay(assumed.product_flops, 2, assumed):,.0f} with products and sums in 16 bits, whatever "
            "the number of columns and of ranks; the time that a message takes to start is left out. The library "
            "does not do this. The table says what it would bring."
        ),
        *table("of the costliest matrix", splitting(assumed)),
        "## Constraints",
        "",
        *text(
            "Hard caps are computed by matrix products alone, as on GPUs, whose operations are counted as they run: "
            f"{', and '.join(_projection(every, assumed) for every in EVERY)}. The steps between projections are "
            "counted by the cap's own rule. Constraints have the owners of the update, and send as much whenever "
            "they act. With equal rates all caps are due in the same steps. Due in turn, an eighth in each step, "
            "they would make steps alike and training slower: a step waits for its busiest rank, so that eight "
            "steps with an eighth of the caps each are one way to compute all of them, and no faster than the best "
            "way. Where a rank owns one matrix at most, each of the eight would take as long as the one in which "
            "all are due; and one process would compute smaller batches of equal matrices."
        ),
        *table("caps on Muon's matrices", caps(assumed)),
        "## Checkpoints",
        "",
        *text(
            "Every rank copies its own parts of the weights and of the optimizer's state to main memory, and writes "
            "them while training goes on; the next checkpoint waits until all have written theirs. A run folder keeps "
            "the last two."
        ),
        *table("a checkpoint on disk", checkpoints(assumed)),
        "## Start and resume",
        "",
        *text(
            "No rank makes the whole model: it is made without values and cut. Then its weights are filled one after "
            "the other, those of 2^20 entries or more by owners, one each at a time, by products in float32. No norm "
            "is proved at the start or when a run is resumed. At regular checkpoints the owners prove all norms, one "
            "CPU thread each, unless `--certify no` is passed; the first rank assembles the whole model in its main "
            "memory at the end."
        ),
        "## Certificates",
        "",
        *text(
            f"**An extrapolation**, from one measurement: GPT-2 small, {whole['parameters']:,} parameters, "
            f"{whole['seconds']:.3g} s, and {whole['seconds_of_the_checker']:.3g} s for the checker, in one process on "
            f"a CPU ({measured['machine']}; [{CERTIFICATE}](../results/{CERTIFICATE}), `{measured['command']}`). The "
            "lower time grows as the number of parameters, the higher as `m n min(m, n)` over matrices, as proofs of "
            "spectral norms do. Certificates are not made by several processes."
        ),
        *table("time of one process", certificates()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _plain(number: float) -> str:
    return amount(number).replace(" ", "") if isinstance(number, float) and number >= 1e6 else f"{number:,}"


def main() -> None:
    """Write the page, or print it for other assumptions."""
    parser = argparse.ArgumentParser(description=__doc__)
    for each in fields(Assumptions):
        name, text = f"--{each.name.replace('_', '-')}", each.metadata["text"]
        parser.add_argument(name, type=type(each.default), default=each.default, help=text)
    assumed = Assumptions(**vars(parser.parse_args()))
    if assumed == Assumptions():
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(assumed))


if __name__ == "__main__":
    main()
