"""Groups as timm builds them (layer-wise rates, no decay for vectors) with Muon and AdamW in one optimizer.

timm hands an optimizer a list of dictionaries with `params`, `weight_decay` and a computed `lr`; ours takes the list as
it is, together with the norms.

    python examples/timm_groups.py
"""

import torch
from torch import nn

import wellnormed as wn


def layer_decay_groups(model: nn.Sequential, lr: float, weight_decay: float, layer_decay: float) -> list[dict]:
    """One group per layer and kind of parameter, the rate falling from the last layer to the first."""
    depth = len(model)
    groups = []
    for index, layer in enumerate(model):
        scale = layer_decay ** (depth - 1 - index)
        for decays in (True, False):
            members = [p for p in layer.parameters() if (p.ndim > 1) == decays]
            if members:
                groups.append({"params": members, "lr": lr * scale, "weight_decay": weight_decay * decays})
    return groups


def main(steps: int = 60) -> tuple[float, float]:
    """Train a small convolutional network on noisy stripes; print and return the first and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
        nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)),
    )
    norms = wn.assign_norms(model, recipe="muon")
    print(norms)
    groups = layer_decay_groups(model, lr=0.02, weight_decay=0.01, layer_decay=0.8)
    optimizer = wn.Muon(groups, norms=norms, adamw=wn.optim.AdamWSettings(lr=3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        labels = torch.randint(2, (64,))
        stripes = torch.arange(12).remainder(2).float()
        images = torch.where(labels[:, None, None] == 0, stripes[:, None], stripes[None, :])
        images = images[:, None] + 0.5 * torch.randn(64, 1, 12, 12)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
