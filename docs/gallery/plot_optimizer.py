"""
A step of Scion, and what it gains
==================================

AdamW divides every entry of a gradient by its recent size. Scion asks the norm of the whole weight: of all steps of
norm 1 it takes the one along which the loss falls fastest. For a matrix that is a step whose singular values are all
equal, as nearly as five Newton-Schulz steps make them so.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import wellnormed as wn
from benchmarks.public_curves import draw_on

ROOT = Path(wn.__file__).parents[2]
plt.rcParams.update({"figure.figsize": (7, 3.6), "figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "font.size": 10, "legend.fontsize": 9})

# %%
# Singular values of a gradient and of the step
# ---------------------------------------------
#
# A gradient of a layer is dominated by few directions. The sign of Adam's first step evens out entries, not
# directions. The oracle of ``wn.Spectral()`` evens out directions, but for the least, which its steps do not reach.

generator = torch.Generator().manual_seed(0)
inputs, errors = torch.randn(64, 96, generator=generator), torch.randn(64, 96, generator=generator)
decay = torch.logspace(0, -2, 96)
gradient = (errors * decay).mT @ (inputs * decay) / 64

figure, axis = plt.subplots()
for label, step, colour, style in (
    ("gradient", gradient, "#777777", ":"),
    ("Adam's first step: signs", gradient.sign(), "#D55E00", "--"),
    ("wn.Spectral().dualize(gradient)", wn.Spectral().dualize(gradient), "#0072B2", "-"),
):
    values = torch.linalg.svdvals(step)
    axis.plot(values[:64] / values[0], style, color=colour, label=label)
axis.set(xlabel="number of the singular value", ylabel="over the largest", yscale="log", ylim=(3e-4, 2))
axis.legend()
plt.show()

# %%
# Three optimizers on a public model
# ----------------------------------
#
# GPT-2 with random weights on characters of Shakespeare, drawn from ``results/public-curves.json``, which
# ``python -m benchmarks.public_curves`` made: AdamW and torch's Muon have the best of three learning rates, Scion its
# default. Bands reach from the least to the largest of three seeds.

figure, axis = plt.subplots()
draw_on(axis, json.loads((ROOT / "results" / "public-curves.json").read_text())["rows"])
plt.show()
