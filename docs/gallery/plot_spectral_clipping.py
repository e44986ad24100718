"""
Caps and clips of singular values
=================================

What every cap and clip of :mod:`wellnormed.matrix` does to one singular value, where the published ways depart from
it, and what they cost. Scalar curves are computed here, by applying the functions to diagonal matrices; measurements
are drawn from the rows that ``python -m papers`` left in ``results/reproduce``. SC is *Spectral clipping*
(Cesista, 2025), LT is *Training Transformers with Enforced Lipschitz Bounds* (2025).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from papers import hardcap_cost, hardcap_stability, published_matrix
from papers._experiment import Experiment
from papers._table import Table
from wellnormed import matrix

RESULTS = Path(matrix.__file__).parents[3] / "results" / "reproduce"
ORANGE, BLUE, GREEN = "#D55E00", "#0072B2", "#009E73"  # Okabe and Ito: all kinds of colour vision tell them apart
SKY, PINK, YELLOW, GREY = "#56B4E9", "#CC79A7", "#E69F00", "#777777"
plt.rcParams.update({"figure.figsize": (7, 4), "figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "lines.linewidth": 1.5, "font.size": 10, "legend.fontsize": 9})


def on_values(function: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    """What a matrix function does to the singular values of a diagonal matrix."""
    return function(torch.diag(s)).diagonal()


def show_measured(experiment: Experiment, name: str) -> None:
    """One figure of an experiment, drawn from its committed rows."""
    rows = Table(RESULTS / f"{experiment.name}-cpu" / "rows.jsonl").rows_of(experiment.cells("cpu"))
    for drawn, figure in experiment.figures(rows).items():
        if drawn != name:
            plt.close(figure)
    plt.show()


# %%
# Clips
# -----
#
# The cap ``min(s, 1)`` gives the nearest matrix in the spectral ball. A clip has a floor, too, and the shifted ReLU
# only a floor. Zero has no direction in which it could be raised, so it stays zero.

s = torch.linspace(1e-3, 2, 256, dtype=torch.float64)
figure, axes = plt.subplots()
axes.plot(s, s, color="black", linestyle=":", linewidth=1, zorder=3, label="identity")
axes.plot(s, on_values(lambda w: matrix.spectral_hardcap(w, 1.0), s), color=BLUE, label="spectral_hardcap(w, 1)")
axes.plot(
    s, on_values(lambda w: matrix.spectral_clip(w, 0.5, 1.5), s), "--", color=ORANGE, label="spectral_clip(w, 0.5, 1.5)"
)
axes.plot(s, on_values(lambda w: matrix.spectral_relu(w, 0.25), s), "-.", color=GREEN, label="spectral_relu(w, 0.25)")
axes.set(xlabel="singular value (caps)", ylabel="after the clip (caps)")
axes.legend()
plt.show()

# %%
# Clipped weight decay
# --------------------
#
# Only what exceeds the cap decays: ``1 + (1 - decay)(s - 1)``. At a decay of 1 it is the hard cap. Below, it bounds
# nothing by itself; against steps of bounded norm it has an equilibrium, which
# :func:`wellnormed.matrix.clipped_weight_decay_equilibrium` gives.

s = torch.linspace(1e-3, 3, 256, dtype=torch.float64)
figure, axes = plt.subplots()
for decay, colour, style in (
    (0.0, GREY, ":"),
    (0.1, SKY, "-"),
    (0.25, BLUE, "--"),
    (0.5, GREEN, "-."),
    (1.0, ORANGE, "-"),
):
    after = on_values(lambda w, d=decay: matrix.spectral_clipped_weight_decay(w, 1.0, d), s)
    axes.plot(s, after, style, color=colour, label=f"decay {decay:g}")
axes.set(xlabel="singular value (caps)", ylabel="after the decay (caps)")
axes.legend()
plt.show()

# %%
# The soft cap, and its published strength
# ----------------------------------------
#
# After a step of norm ``eta`` the largest singular value is at most ``k = 1 + eta`` caps. LT (theorem B.1) chooses the
# strength with ``p(k) = 1``. That bounds ``p`` on all of ``[0, k]`` only up to ``k = 81/62``: beyond, ``p`` has its
# maximum inside and exceeds the cap. :func:`wellnormed.matrix.soft_cap_strength` puts that maximum at the cap, with one
# strength for all larger steps.

steps = ((0.05, SKY, "-"), (81 / 62 - 1, BLUE, "--"), (0.6, GREEN, "-."), (1.0, ORANGE, "-"))
figure, axes = plt.subplots(1, 2, sharey=True)
for axis, strength_of, title in (
    (axes[0], matrix.soft_cap_strength, "corrected strength"),
    (axes[1], published_matrix.soft_cap_strength_as_published, "strength as published"),
):
    for step, colour, style in steps:
        s = torch.linspace(0, 1 + step, 256, dtype=torch.float64)
        strength = strength_of(1.0, step)
        after = on_values(lambda w, a=strength: matrix.soft_cap(w, a), s)
        axis.plot(s, after, style, color=colour, label=f"step {step:.3g}: at most {after.max():.3f}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="singular value after the step (caps)", title=title, ylim=(0, 1.75))
    axis.legend(loc="upper left")
axes[0].set_ylabel("after the soft cap (caps)")
plt.show()

# %%
# LT's polynomial hard cap
# ------------------------
#
# Four quintics in a row (``HARD_CAP`` in ``papers/published_matrix.py``), fitted to ``min(s, 1)`` on
# ``[0, 3.5]``. One application looks right. But its slope at zero is 0.951 and a cap is applied after every step: what
# no gradient holds up drifts. In 100 applications 0.2 falls to 0.0015, and 0.6 rises to 0.9, where the polynomial
# crosses the identity; so does 1 itself fall to 0.9.


def quartet(s: Tensor) -> Tensor:
    """One application to a scalar."""
    for a, b, c in published_matrix.HARD_CAP:
        s = a * s + b * s**3 + c * s**5
    return s


s = torch.linspace(0, 3.5, 400, dtype=torch.float64)
figure, axes = plt.subplots(1, 2)
axes[0].plot(s, s.clamp_max(1), color=GREY, linestyle=":", label="min(s, 1)")
axes[0].plot(s, quartet(s), color=BLUE, label="four quintics")
axes[0].set(xlabel="singular value (caps)", ylabel="after one application (caps)", ylim=(0, 1.25))
axes[0].legend(loc="lower right")
for start, colour, style in (
    (0.2, ORANGE, "-"),
    (0.4, YELLOW, "--"),
    (0.6, GREEN, "-."),
    (0.8, BLUE, "-"),
    (1.0, SKY, ":"),
):
    values = [torch.tensor(start, dtype=torch.float64)]
    for _ in range(100):
        values.append(quartet(values[-1]))
    axes[1].plot(values, style, color=colour, label=f"{start:g} → {values[-1]:.2g}")
axes[1].set(xlabel="applications", ylabel="singular value (caps)", yscale="log", ylim=(1e-3, 1.5))
axes[1].legend(loc="lower left")
plt.show()

# %%
# The published caps on a diagonal matrix
# ---------------------------------------
#
# SC builds ``min(s, 1)`` from matrix signs: two nested ones, or one of the block matrix ``[[I, W], [W^T, I]]``. Six
# Newton-Schulz steps, scaled by the Frobenius norm, are no sign near zero: what is below half a percent of that norm
# has not converged. So the effective curve depends on what else the matrix holds. With 128 values up to 3 (left) both
# forms follow the cap, but the nested one lifts 0.01 to 0.1. One value at 1000 beside them (right) takes both away from
# it: they shrink what is below the cap, leave what is above at up to 1.27, and the nested form makes -5 of the 1000.
# The Gram form is drawn at 1e-9, the bottom of the scale, and is nearer than that.

figure, axes = plt.subplots(2, 2, figsize=(7, 5.5), sharex="col", sharey="row")
for column, largest in enumerate((3.0, 1000.0)):
    s = torch.cat((torch.linspace(0.01, 3, 127), torch.tensor([largest]))).double()
    for method, colour, style in (("nested", ORANGE, "-"), ("block", BLUE, "--"), ("gram", GREEN, ":")):
        published = partial(published_matrix.clip, lower=None, upper=1.0, method=method)
        after = on_values(partial(matrix.spectral_hardcap, upper=1.0) if method == "gram" else published, s)
        axes[0, column].plot(s[:-1], after[:-1], style, color=colour, label=method)
        axes[1, column].plot(s[:-1], (after - s.clamp_max(1)).abs()[:-1].clamp_min(1e-9), style, color=colour)
        axes[0, column].set_title("largest value 3" if largest == 3 else "largest value 1000", fontsize=10)
    axes[1, column].set(xlabel="singular value (caps)", yscale="log")
axes[0, 0].set_ylabel("after the cap (caps)")
axes[1, 0].set_ylabel("distance to min(s, 1) (caps)")
axes[0, 0].legend(loc="lower right")
plt.show()

# %%
# Coefficient sets of the matrix sign
# -----------------------------------
#
# A polynomial sign is judged by how small a singular value it still brings to 1, and by how close: the upper panel
# shows the value, the lower its distance from 1. A matrix is divided by its Frobenius norm first, so the abscissa is
# ``s / |W|_F``. Distances below 1e-9 are drawn there.

s = torch.logspace(-4, 0, 800, dtype=torch.float64)
figure, axes = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
for name, colour, style in (
    ("jordan-5", ORANGE, "-"),
    ("you-6", YELLOW, "--"),
    ("spectral-clipping-6", PINK, "-."),
    ("polar-express-5", SKY, "-"),
    ("polar-express-8", BLUE, "-"),
    ("cubic", GREY, ":"),
):
    value = s
    for a, b, c in matrix.REGISTRY[name].steps:
        value = a * value + b * value**3 + c * value**5
    axes[0].plot(s, value, style, color=colour, label=name)
    axes[1].plot(s, (value - 1).abs().clamp_min(1e-9), style, color=colour)
axes[0].set(xscale="log", ylabel="after all steps")
axes[0].legend(loc="lower right")
axes[1].set(yscale="log", xlabel="singular value / Frobenius norm", ylabel="distance from 1")
plt.show()

# %%
# Error against the norm of the input
# -----------------------------------
#
# SC's figure 6.1, measured: cap 1, the norm of the difference from a float64 SVD, at a quarter of the paper's sides. In
# a wide Gaussian matrix no singular value is below a third of the largest. There the error of the nested form grows
# with the norm of the input, and past some hundred caps the result is not capped at all; the block forms, in float32,
# stay within some hundredths of the cap. The Gram form (``method="auto"``) is exact to the rounding of its dtype.

show_measured(hardcap_stability.EXPERIMENT, "norm")

# %%
# Error against the distance from the cap
# ---------------------------------------
#
# A quarter of the singular values lies at ``1 + d`` or ``1 - d``, and the error is that of the cluster alone. Very
# close to the cap it is the error of the coefficient set, some thousandths; it is larger where ``d`` is too small for
# the sign to converge and too large not to matter. One large singular value moves that place to larger ``d``. The exact
# methods return a matrix inside the ball bit for bit.

show_measured(hardcap_stability.EXPERIMENT, "distance")

# %%
# Cost against size
# -----------------
#
# The time of a call over that of one product ``W W^T``, three rounds; bands reach from the least to the largest.
# *gram, far* has a norm of 100 caps, where the Gram form computes in float64.

show_measured(hardcap_cost.EXPERIMENT, "cost")
