"""The README's first example on a user's own model: plain torch layers, no import of ours in the model."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import wellnormed as wn

README = Path(__file__).parents[1] / "README.md"


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False)) for _ in range(2)
        )
        self.head = nn.Linear(16, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = 0.5 * x + 0.5 * block(x)
        return self.head(x)


def first_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    return blocks[0]


def test_three_lines_constrain_and_certify_a_users_own_model():
    torch.manual_seed(0)
    lines = first_example().splitlines()
    before = [line for line in lines if not line.startswith("certificate")]
    after = [line for line in lines if line.startswith("certificate")]
    assert len(after) == 1
    names: dict = {"model": (model := OwnModel())}
    exec("\n".join(before), names)
    losses = []
    for _ in range(60):
        tokens = torch.randint(17, (32, 4))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (3 * tokens.flatten() + 1) % 17)
        names["optimizer"].zero_grad()
        loss.backward()
        names["optimizer"].step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    exec("\n".join(after), names)
    certificate = names["certificate"]
    found = wn.lower_bound(model, steps=30, generator=torch.Generator().manual_seed(0))
    assert found.value <= certificate.lipschitz
    # the caps promise this much before training starts: two blocks of 0.5 + 0.5 slope 2 2, and the head's own norm
    head = float(wn.Spectral().upper_bound(model.head.weight))
    assert certificate.lipschitz <= (0.5 + 0.5 * 1.128904146 * 4) ** 2 * head * (1 + 1e-6)
    assert math.isclose(wn.verify(certificate, model.state_dict()).lipschitz, certificate.lipschitz)


def test_the_table_and_the_figures_of_the_readme_come_from_files():
    text = README.read_text(encoding="utf-8")
    assert "@@" not in text
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (README.parent / target).exists(), target


@pytest.mark.parametrize("name", [name for name in dir(wn) if not name.startswith("_")])
def test_every_public_name_resolves_and_is_documented(name):
    assert getattr(wn, name).__doc__
