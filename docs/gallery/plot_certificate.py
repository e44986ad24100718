"""
A bound before, during and after training
=========================================

Two networks learn the same task, one with a cap on every matrix. The proved Lipschitz constant of the free one grows
with training; that of the capped one stays below a number that is known, and proved, before the first step.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates import shown

plt.rcParams.update({"figure.figsize": (7, 3.6), "figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "font.size": 10, "legend.fontsize": 9})


def train(capped: bool) -> tuple[list[float], list[float], float | None]:
    """Proved constants and gains found, every ten steps, and what the caps promise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
    optimizer, data = wn.Scion(model, lr=0.05), torch.randn(512, 16)
    promised = None
    if capped:
        constraints = wn.constrain(optimizer, {"*": wn.HardCap(1.5)})
        promised = wn.certify(model, data[:1], within=constraints).lipschitz
    proved, found = [], []
    for step in range(61):
        if step % 10 == 0:
            proved.append(wn.certify(model, data[:1]).lipschitz)
            generator = torch.Generator().manual_seed(0)
            found.append(wn.lower_bound(model, data[:1], steps=20, generator=generator).value)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), 4 * data.roll(1, 1).relu()).backward()
        optimizer.step()
    return proved, found, promised


# %%
# The constant lies in the band: proved from above, found by a search from below. The dashed line is proved for all
# weights within the caps, so for every step, whatever the data.

figure, axis = plt.subplots()
for capped, colour in ((False, "#D55E00"), (True, "#0072B2")):
    proved, found, promised = train(capped)
    steps = range(0, 61, 10)
    axis.plot(
        steps,
        proved,
        color=colour,
        label=f"{'caps of 1.5' if capped else 'no caps'}: proved after {steps[-1]} steps {shown(proved[-1], '.2f')}",
    )
    axis.fill_between(steps, found, proved, color=colour, alpha=0.2, linewidth=0)
    if promised is not None:
        axis.axhline(promised, color="black", linestyle="--", linewidth=1, label=f"promised: {shown(promised, '.2f')}")
axis.set(xlabel="step", ylabel="Lipschitz constant", ylim=(0, None))
axis.legend()
plt.show()
