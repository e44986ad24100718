"""What README.md and the guide print is what their examples print; the three lines serve a user's own model."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import wellnormed as wn

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_spec = importlib.util.spec_from_file_location("run_examples", ROOT / "docs" / "run_examples.py")
assert _spec is not None
assert _spec.loader is not None
examples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(examples)


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


@pytest.mark.parametrize("page", examples.PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, generator_state):
    assert not examples.differences(page)


@pytest.fixture
def generator_state():
    """Examples seed torch's global generator; other tests shall not notice."""
    with torch.random.fork_rng(devices=[]):
        yield


def test_a_changed_output_is_noticed():
    assert examples.same("norm 1.500 of 4 weights", "norm   1.503 of 4 weights")
    for other in ("norm 1.600 of 4 weights", "norm 1.500 of 5 weights", "norm 1.500 of 4 matrices", "norm 1.500 of 4"):
        assert not examples.same("norm 1.500 of 4 weights", other)


def test_every_door_of_the_readme_shows_its_output():
    text = README.read_text(encoding="utf-8")
    doors = re.findall(r"```python\n(.*?)```\n```text\n(.+?)```", text, flags=re.DOTALL)
    calls = ("wn.Scion(", "wn.constrain(", "wn.certify(")
    assert len(doors) == len(calls)
    assert all(call in code and output.strip() for call, (code, output) in zip(calls, doors, strict=True))
    assert len(text.splitlines()) <= 90


def test_the_readme_has_two_pictures_and_its_two_commands():
    text = README.read_text(encoding="utf-8")
    assert text.count("![") == 2
    assert "make train" in text
    assert "make test" in text


def test_three_lines_constrain_and_certify_a_users_own_model():
    torch.manual_seed(0)
    model = OwnModel()
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.02, momentum=0.95, nesterov=True)
    wn.constrain(optimizer, {"blocks": wn.SoftCap(2.0), "embed": wn.ColumnCap(1.0)})
    losses = []
    for _ in range(60):
        tokens = torch.randint(17, (32, 4))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (3 * tokens.flatten() + 1) % 17)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    certificate = wn.certify(model, tokens)
    found = wn.lower_bound(model, tokens, steps=30, generator=torch.Generator().manual_seed(0))
    assert found.value <= certificate.lipschitz
    # the caps promise this much before training starts: two blocks of 0.5 + 0.5 slope 2 2, and the head's own norm
    head = float(wn.norms.Spectral().upper_bound(model.head.weight))
    assert certificate.rms_lipschitz <= (0.5 + 0.5 * 1.128904146 * 4) ** 2 * head * (1 + 1e-6)
    assert math.isclose(wn.verify(certificate, model.state_dict()).lipschitz, certificate.lipschitz)


@pytest.mark.parametrize("name", [name for name in dir(wn) if not name.startswith("_")])
def test_every_public_name_resolves_and_is_documented(name):
    assert getattr(wn, name).__doc__
