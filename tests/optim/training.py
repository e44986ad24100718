"""A small network, its gradients, and a loop that trains it."""

import torch
from torch import nn


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
