"""Symmetric products and the matrix sign on a GPU, in bfloat16, at the shapes of GPT-2 small, of NanoGPT and GPT-2 XL.

python -m benchmarks.matrix.gpu

A product of side n and inner dimension k is counted twice: as `useful`, the n^2 k operations of one triangle, and as
`dense_equivalent`, the 2 n^2 k of a product that knows no symmetry. cuBLAS performs the dense ones, the kernel the
useful ones and those of half its diagonal tiles; so the kernel may exceed the peak in dense equivalents, and neither
can in useful ones. The peak is that of a large square product in the same run.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from wellnormed.matrix import REGISTRY, _triton, msign
from wellnormed.matrix._symmetric import full_product

from . import peers
from .inputs import gaussian, shown
from .record import finite, median, write
from .reference import Reference, polynomial

NANOGPT = ((768, 768), (768, 3072), (3072, 768), (2304, 768))
"""Hidden matrices of a NanoGPT of 12 layers; the last is query, key and value in one."""
SHAPES = (*NANOGPT, *((12, *shape) for shape in NANOGPT), (1600, 1600), (1600, 6400), (6400, 1600))
COEFFICIENTS = "jordan-5"
METHODS = ("newton-schulz", "triton", "gram")
PEAK_SIDE = 8192

Call = Callable[[], Tensor]
Timer = Callable[[Call], float]
"""Seconds of one call."""


def device_seconds(call: Call, calls: int = 20) -> float:
    """Time of a call on the device alone: the calls queue up behind a pause, so that launching them is not measured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # clock cycles, some 10 ms
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def eager_seconds(call: Call) -> float:
    """Time of a call as a training step meets it, launches and synchronisations included."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def alternate(calls: Mapping[str, Call], timer: Timer, rounds: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Medians over rounds in which the contenders take turns, and what each returned at its first, untimed call."""
    values = {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            seconds = timer(call)
            if index > 0:  # the first round warms up
                times[name].append(seconds)
    return {name: median(found) for name, found in times.items()}, values


def tall(x: Tensor) -> Tensor:
    """The matrix as `msign` iterates on it: a wide one is a transposed view."""
    return x if x.shape[-2] >= x.shape[-1] else x.mT


def peak(timer: Timer, device: str, side: int = PEAK_SIDE, rounds: int = 5) -> float:
    """Operations per second of a square product in bfloat16."""
    x = torch.randn(side, side, device=device).bfloat16()
    seconds, _ = alternate({"peak": lambda: x @ x}, timer, rounds)
    return 2 * side**3 / seconds["peak"]


def cuts() -> dict[str, _triton.Tiles | None]:
    """The kernel's own choice, its two ways of cutting, and one with more shared memory than every GPU has."""
    candidates = (_triton.SMALL, _triton.LARGE, _triton.LARGE._replace(stages=4))
    return {"kernel": None} | {
        f"kernel, {t.side} x {t.side} x {t.depth}, {t.warps} warps, {t.stages} stages": t for t in candidates
    }


def products(shape: tuple[int, ...], timer: Timer, rounds: int, device: str, peak_rate: float) -> Iterator[dict]:
    """`X^T X` of the small side, and `b G + c G^2`: the kernel against cuBLAS.

    A row per contender; `ratio` is over the time of cuBLAS. Errors are of entries, relative to the largest.
    """
    x = tall(gaussian(*shape).to(device, torch.bfloat16))
    g = x.mT @ x
    g = torch.tril(g) + torch.tril(g, -1).mT
    _, b, c = REGISTRY[COEFFICIENTS].steps[0]
    square = partial(_triton.symmetric_product, g, g, g, beta=b, alpha=c)
    groups: dict[str, tuple[int, Tensor, dict[str, Call | str]]] = {
        "X^T X": (
            x.shape[-2],
            x.mT.double() @ x.double(),
            {"cuBLAS": lambda: x.mT @ x}
            | {name: runnable(partial(_triton.symmetric_product, x.mT, x, tiles=t)) for name, t in cuts().items()},
        ),
        "b G + c G^2": (
            g.shape[-1],
            b * g.double() + c * (g.double() @ g.double()),
            {"cuBLAS": partial(full_product, g, g, g, beta=b, alpha=c)}
            | {name: runnable(partial(square, tiles=t)) for name, t in cuts().items()},
        ),
    }
    for function, (inner, truth, calls) in groups.items():
        seconds, values = alternate({n: call for n, call in calls.items() if not isinstance(call, str)}, timer, rounds)
        useful = math.prod(g.shape) * inner
        for name, call in calls.items():
            row = {"function": function, "input": shown(shape), "contender": name}
            if isinstance(call, str):
                yield {**row, "missing": call}
                continue
            rate = useful / seconds[name]
            yield {
                **row,
                "seconds": seconds[name],
                "ratio": seconds[name] / seconds["cuBLAS"],
                "useful_tflops": finite(rate * 1e-12),
                "dense_equivalent_tflops": finite(2 * rate * 1e-12),
                "useful_of_peak": finite(rate / peak_rate),
                "dense_equivalent_of_peak": finite(2 * rate / peak_rate),
                "error": finite(((values[name].double() - truth).abs().max() / truth.abs().max()).item()),
            }


def runnable(call: Call) -> Call | str:
    """The call, or in words why this GPU or this installation cannot run it."""
    try:
        call()
    except Exception as error:  # whatever a package or a cut for another GPU raises becomes its row
        return f"cannot run here: {type(error).__name__}: {error}"
    return call


def gram_newton_schulz(x: Tensor, kernels: bool) -> Call | str:
    """The package of that name with our coefficients, compiled as its default is; float16 inside."""
    package = peers.package("gram_newton_schulz")
    if package is None:
        return "not installed: pip install gram-newton-schulz"
    steps = [list(step) for step in REGISTRY[COEFFICIENTS].steps]
    made = cache(lambda: package.GramNewtonSchulz(ns_use_kernels=kernels, ns_coefficients=steps))
    return runnable(lambda: made()(x))


def signs(shape: tuple[int, ...], timer: Timer, rounds: int, device: str) -> Iterator[dict]:
    """The whole matrix sign of a Gaussian matrix by the same five steps: ours, `torch.optim.Muon`'s and the package's.

    A row per contender; `ratio` is over the time of `torch.optim.Muon`. Errors are spectral, of the first matrix:
    from the polar factor, and from the polynomial of the set in float64, which leaves only rounding.
    """
    x = gaussian(*shape).to(device, torch.bfloat16)
    reference = Reference(x.reshape(-1, *shape[-2:])[0])
    muon = "torch.optim.Muon"
    calls: dict[str, Call | str] = {muon: partial(peers.torch_muon, x)}
    calls |= {f'msign, method="{method}"': runnable(partial(msign, x, COEFFICIENTS, method)) for method in METHODS}
    calls["gram-newton-schulz, kernels"] = gram_newton_schulz(x, kernels=True)
    calls["gram-newton-schulz, plain"] = gram_newton_schulz(x, kernels=False)
    seconds, values = alternate({n: call for n, call in calls.items() if not isinstance(call, str)}, timer, rounds)
    for name, call in calls.items():
        row = {"function": f"msign, {COEFFICIENTS}", "input": shown(shape), "contender": name}
        if isinstance(call, str):
            yield {**row, "missing": call}
            continue
        value = values[name].reshape(-1, *shape[-2:])[0]
        yield {
            **row,
            "seconds": seconds[name],
            "ratio": seconds[name] / seconds[muon],
            "polar_error": finite(reference.error(value, torch.ones_like, 1.0)),
            "set_error": finite(reference.error(value, partial(polynomial, REGISTRY[COEFFICIENTS]), 1.0)),
        }


def line(row: dict) -> str:
    """One line for the terminal."""
    head = f"{row['function']:18} {row['input']:16} {row['contender']:44}"
    if "missing" in row:
        return f"{head} {row['missing']}"
    rest = f"{row['seconds'] * 1e3:8.3f}ms {row['ratio']:6.2f}"
    if "error" in row:
        rates = f"{row['useful_tflops']:g} useful, {row['dense_equivalent_tflops']:g} dense-equivalent TFLOP/s"
        return f"{head} {rest}  {rates} ({row['useful_of_peak']:.0%}, {row['dense_equivalent_of_peak']:.0%} of peak)"
    return f"{head} {rest}  {row['polar_error']:g} from polar, {row['set_error']:g} from the set"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none: nothing was measured.")
    peak_rate = peak(device_seconds, "cuda")
    rows = []
    for shape in SHAPES:
        torch.compiler.reset()  # the package compiles one function for all shapes, which torch allows eight times
        for row in (
            *products(shape, device_seconds, options.rounds, "cuda", peak_rate),
            *signs(shape, eager_seconds, options.rounds, "cuda"),
        ):
            rows.append(row)
            print(line(row), flush=True)
    settings = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": peers.package("triton").__version__,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "peak": f"{PEAK_SIDE}^3, bfloat16",
        "peak_tflops": finite(peak_rate * 1e-12),
    }
    write("gpu", "python -m benchmarks.matrix.gpu", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
