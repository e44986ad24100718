"""The matrix sign on a GPU, in bfloat16, at the shapes of GPT-2 small, of NanoGPT and GPT-2 XL.

python -m benchmarks.matrix.gpu

`useful_of_peak` counts the operations that five steps on the short side `n` need at least, one triangle of symmetric
products counted once: `min(5 (3 a + 1), 14 + 6 a) n^3` for an aspect `a`, by the iteration on the matrix or on its Gram
matrix. The peak is that of a large square product in the same run.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from papers import published_matrix
from wellnormed.matrix import REGISTRY, msign

from . import peers
from .inputs import gaussian, shown
from .record import finite, median, write
from .reference import Reference, polynomial

NANOGPT = ((768, 768), (768, 3072), (3072, 768), (2304, 768))
"""Hidden matrices of a NanoGPT of 12 layers; the last is query, key and value in one."""
SHAPES = (*NANOGPT, *((12, *shape) for shape in NANOGPT), (1600, 1600), (1600, 6400), (6400, 1600))
COEFFICIENTS = "jordan-5"
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


def peak(timer: Timer, device: str, side: int = PEAK_SIDE, rounds: int = 5) -> float:
    """Operations per second of a square product in bfloat16."""
    x = torch.randn(side, side, device=device).bfloat16()
    seconds, _ = alternate({"peak": lambda: x @ x}, timer, rounds)
    return 2 * side**3 / seconds["peak"]


def necessary_operations(shape: tuple[int, ...]) -> float:
    """The operations that five steps on every matrix of a batch need; see the module's text."""
    n, m = sorted(shape[-2:])
    aspect = m / n
    return math.prod(shape[:-2]) * min(5 * (3 * aspect + 1), 14 + 6 * aspect) * n**3


def runnable(call: Call) -> Call | str:
    """The call, or in words why this GPU or this installation cannot run it."""
    try:
        call()
    except Exception as error:  # whatever a package raises becomes its row
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


def signs(shape: tuple[int, ...], timer: Timer, rounds: int, device: str, peak_rate: float) -> Iterator[dict]:
    """The whole matrix sign of a Gaussian matrix by the same five steps: ours, `torch.optim.Muon`'s and the package's.

    A row per contender; `ratio` is over the time of `torch.optim.Muon`. Errors are spectral, of the first matrix:
    from the polar factor, and from the polynomial of the set in float64, which leaves only rounding.
    """
    x = gaussian(*shape).to(device, torch.bfloat16)
    reference = Reference(x.reshape(-1, *shape[-2:])[0])
    muon = "torch.optim.Muon"
    calls: dict[str, Call | str] = {muon: partial(peers.torch_muon, x)}
    calls["msign"] = partial(msign, x, COEFFICIENTS)
    calls["published gram"] = partial(published_matrix.gram, x, COEFFICIENTS)
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
            "useful_of_peak": finite(necessary_operations(shape) / seconds[name] / peak_rate),
            "polar_error": finite(reference.error(value, torch.ones_like, 1.0)),
            "set_error": finite(reference.error(value, partial(polynomial, REGISTRY[COEFFICIENTS]), 1.0)),
        }


def line(row: dict) -> str:
    """One line for the terminal."""
    head = f"{row['function']:18} {row['input']:16} {row['contender']:30}"
    if "missing" in row:
        return f"{head} {row['missing']}"
    rest = f"{row['seconds'] * 1e3:8.3f}ms {row['ratio']:6.2f} {row['useful_of_peak']:.0%} of peak"
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
        for row in signs(shape, eager_seconds, options.rounds, "cuda", peak_rate):
            rows.append(row)
            print(line(row), flush=True)
    settings = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "peak": f"{PEAK_SIDE}^3, bfloat16",
        "peak_tflops": finite(peak_rate * 1e-12),
    }
    write("gpu", "python -m benchmarks.matrix.gpu", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
