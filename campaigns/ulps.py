"""How far torch's functions of floats err, as shares of what `proof.functions.ERRORS` allows.

`python -m campaigns.ulps` writes `results/ulps.json`: all 65,536 floats of both 16-bit dtypes, and for float32 every
STEP-th of the 2^32 (`--step 1` takes them all, some hours of a core).
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.header import header, write_result
from wellnormed.proof.arithmetic import FORMATS
from wellnormed.proof.functions import ERRORS, UNDERFLOW

RESULTS = Path(__file__).parents[1] / "results" / "ulps.json"
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "abs": torch.abs, "relu6": F.relu6, "leaky_relu": lambda x: F.leaky_relu(x, 0.01), "elu": F.elu,
    "tanh": torch.tanh, "atan": torch.atan, "erf": torch.erf, "sigmoid": torch.sigmoid, "asinh": torch.asinh,
    "silu": F.silu, "sin": torch.sin, "cos": torch.cos, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "log_sigmoid": F.logsigmoid, "mish": F.mish,
    "softshrink": F.softshrink, "exp": torch.exp, "softplus": F.softplus,
}  # fmt: skip
"""Name in the kernel -> torch's function. The kernel bounds `softplus` as a `log_sigmoid`."""
UNITS = {**ERRORS, "softplus": ERRORS["log_sigmoid"]}


def share(name: str, x: Tensor) -> float:
    """The largest error of a function at some floats, as a share of what the kernel allows."""
    form = FORMATS[str(x.dtype).removeprefix("torch.")]
    sums, exact, executed = FORMATS[form.sums], FUNCTIONS[name](x.double()), FUNCTIONS[name](x)
    a, b, c = UNITS[name]
    inner = float(sums.unit) * (a * exact.abs() + b * x.double().abs() + c) + UNDERFLOW * float(sums.floor)
    allowed = inner if form is sums else inner + float(form.unit) * (exact.abs() + inner) + float(form.floor)
    error = (executed.double() - exact).abs()
    held = 8 * x.double().abs() <= float(form.largest)  # nothing is said of larger ones
    held &= exact.abs() <= float(form.largest) * (1 - 2 * float(form.unit))
    shares = torch.where(held, error / allowed, 0.0)
    return float(shares.max()) if any(UNITS[name]) else float(error.where(held, 0.0).max() > 0)


def floats(dtype: torch.dtype, step: int) -> Iterator[Tensor]:
    """All finite floats of a dtype of 16 bits, or every `step`-th of float32, in parts."""
    if dtype != torch.float32:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        yield every[every.isfinite()]
        return
    for start in range(-(2**31), 2**31, step * 2**20):
        bits = torch.arange(start, min(start + step * 2**20, 2**31), step, dtype=torch.int64).to(torch.int32)
        every = bits.view(torch.float32)
        yield every[every.isfinite()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1021)
    step = parser.parse_args().step
    shares: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x in floats(dtype, step):
            for name in FUNCTIONS:
                found = shares.setdefault(name, {})
                key = str(dtype).removeprefix("torch.")
                found[key] = round(max(found.get(key, 0.0), share(name, x)), 4)
    about = header(f"python -m campaigns.ulps --step {step}", 0)
    write_result(RESULTS, about | {"step": step, "rows": [{"name": name} | each for name, each in shares.items()]})


if __name__ == "__main__":
    main()
