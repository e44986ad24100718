"""
Certified MNIST
===============

How many of the test images are classified rightly and proved to stay so, against the Euclidean distance by which an
image may move. Drawn from ``results/certified-mnist.json`` and ``results/torchlip-mnist.json``, which
``python -m benchmarks.certified_mnist`` and ``python -m benchmarks.torchlip_mnist`` made.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

import wellnormed as wn

RESULTS = Path(wn.__file__).parents[2] / "results"
plt.rcParams.update({"figure.figsize": (7, 3.6), "figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "font.size": 10, "legend.fontsize": 9})

ours = json.loads((RESULTS / "certified-mnist.json").read_text())
peer = json.loads((RESULTS / "torchlip-mnist.json").read_text())
best = max(peer["rows"], key=lambda row: row["certified"]["1.0"])
radii = [0.0] + [row["radius"] for row in ours["rows"]]

# %%
# Proved, and not broken
# ----------------------
#
# The attack sees the gradient. What it leaves standing of 300 images is a bound from above on what can be true, the
# certificate a bound from below; the truth lies between them.

figure, axis = plt.subplots()
stands = [row["not_broken_of_attacked"] for row in ours["rows"]]
proved = [row["certified_of_attacked"] for row in ours["rows"]]
axis.plot(radii[1:], stands, "--", marker="v", color="#D55E00", label="not broken by the attack")
axis.plot(radii[1:], proved, marker="^", color="#0072B2", label="certified")
axis.fill_between(radii[1:], proved, stands, color="#777777", alpha=0.15, linewidth=0)
axis.set(xlabel="Euclidean distance", ylabel="share of 300 test images", ylim=(0, 1))
axis.legend()
plt.show()

# %%
# Beside deel-torchlip
# --------------------
#
# The network of that library's examples after as many epochs of the same images with the same loss, at the best of its
# rates. At distance 0 stands the accuracy.

figure, axis = plt.subplots()
axis.plot(
    radii,
    [ours["accuracy"]] + [row["certified"] for row in ours["rows"]],
    marker="o",
    color="#0072B2",
    label="wellnormed",
)
shares = [best["accuracy"], *(best["certified"][str(radius)] for radius in radii[1:])]
axis.plot(radii, shares, "--", marker="s", color="#777777", label=f"{peer['peer']}, rate {best['rate']:g}")
axis.set(xlabel="Euclidean distance", ylabel="certified share of 10,000 test images", ylim=(0, 1))
axis.legend()
plt.show()
