"""A small network, its gradients, a loop that trains it, and the optimizers that keep the contract of torch."""

import torch
from torch import nn

import wellnormed as wn

OURS = {
    "scion": lambda model, lr: wn.Scion(wn.assign_norms(model), lr=lr),
    "scion constrained": lambda model, lr: wn.Scion(wn.assign_norms(model), lr=lr, unconstrained=False, radius=2.0),
    "muon": lambda model, lr: wn.Muon(wn.assign_norms(model), lr=lr),
    "muon with adamw": lambda model, lr: wn.Muon(
        wn.assign_norms(model, recipe="muon"), lr=lr, adamw=wn.optim.AdamWSettings(lr=lr / 2)
    ),
    "engine": lambda model, lr: wn.optim.ConditionalGradient(wn.assign_norms(model), lr, momentum=0.5, nesterov=True),
    "almond": lambda model, lr: wn.Almond(wn.assign_norms(model), lr=lr),
    "spectral descent": lambda model, lr: wn.optim.SpectralDescent(wn.assign_norms(model), lr=lr),
    "signum": lambda model, lr: wn.optim.Signum(model.named_parameters(), lr=lr / 4),
    "normalized sgd": lambda model, lr: wn.optim.NormalizedSGD(model.named_parameters(), lr=lr * 2),
    "modular descent": lambda model, lr: wn.optim.ModularDescent(model, lr=lr * 4),
}
"""Name -> a function of a model and a learning rate."""
INNER = {
    "scion": lambda model: wn.Scion(model, lr=0.05, momentum=0.5),
    "light": lambda model: wn.Scion(model, lr=0.05, momentum=0.5, memory="gradient"),
    "muon": lambda model: wn.Muon(model, lr=0.05, recipe="muon"),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.5),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "clipped": lambda model: wn.optim.Clipped(torch.optim.AdamW(model.parameters(), lr=0.01), 2.0, norms=model),
}
"""Name -> an optimizer whose iterates `wn.Averaged` may average."""


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def backward(model, seed):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def train(model, optimizer, steps, first=0):
    for seed in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
