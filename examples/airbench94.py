"""airbench's record for 94% on CIFAR-10, `airbench94_muon.py`, with this package's Muon on its kernels, on a GPU.

    pip install . torchvision  # in a clone
    git clone https://github.com/KellerJordan/cifar10-airbench
    python examples/airbench94.py cifar10-airbench/airbench94_muon.py [--runs 200]

The script is run as it is, but for the two lines of `CHANGES`: data, network, rates and schedule are its own, and its
SGD moves biases and head. It keeps every kernel at the Frobenius norm `sqrt(d_out)` before a step, ours after it, which
its batch norms do not see; its Newton-Schulz takes three steps, ours five. For a proved cap on every kernel, replace
`FixedNorm` by `wn.HardCap`.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import wellnormed as wn

CHANGES = {  # the start is drawn before the optimizer is made, which keeps its norms
    "    optimizer2 = Muon(filter_params, lr=0.24, momentum=0.6, nesterov=True)\n": "    model.reset()\n"
    "    optimizer2 = muon([m for m in model.modules() if type(m) is Conv], lr=0.24)\n",
    "    model.reset()\n    step = 0\n": "    step = 0\n",
}


def muon(convolutions: list[nn.Conv2d], lr: float) -> torch.optim.Optimizer:
    """Muon on kernels as matrices `(d_out, 9 d_in)`, of Frobenius norm `sqrt(d_out)` after every step.

    `lr` is the largest singular value of a step; the norm of such a kernel has the unit 1 / 9.
    """
    patches = wn.norms.SpectralConv(mode="patches", inner=wn.Spectral(units="l2", coefficients="jordan-5"))
    optimizer = wn.Muon(nn.ModuleList(convolutions), 9 * lr, momentum=0.6, overrides={"*.weight": patches})
    with torch.no_grad():
        for convolution in convolutions:
            convolution.weight *= len(convolution.weight) ** 0.5 / convolution.weight.norm()
    wn.constrain(optimizer, {"*.weight": wn.constraints.FixedNorm(frobenius=True)})
    return optimizer


def changed(source: str) -> str:
    """The script with this package's optimizer."""
    for old, new in CHANGES.items():
        if source.count(old) != 1:
            raise ValueError(f"source must be airbench94_muon.py of March 2025; this one lacks {old.strip()!r}")
        source = source.replace(old, new)
    return source


def main() -> None:
    """Run the script, which prints a table and the mean accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    chosen = parser.parse_args()
    source = changed(chosen.script.read_text(encoding="utf-8")).replace("range(200)", f"range({chosen.runs})")
    sys.argv[0] = str(chosen.script)  # which it opens, to keep its own text with its results
    exec(compile(source, str(chosen.script), "exec"), {"__name__": "__main__", "muon": muon})


if __name__ == "__main__":
    main()
