"""The code of `docs/parallel.md` runs as it stands, in two processes."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

TEXT = Path(__file__).parents[2] / "docs" / "parallel.md"


def run_blocks(numbers, folder):
    blocks = re.findall(r"```python\n(.*?)```", TEXT.read_text(encoding="utf-8"), flags=re.DOTALL)
    torch.manual_seed(0)
    names = {
        "model": nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)),
        "batches": torch.randn(2, 4, 6),
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "print": lambda ratios: None,
    }
    before = os.getcwd()
    os.chdir(folder)
    try:
        for number in numbers:
            exec(blocks[number], names)
    finally:
        os.chdir(before)
    return names["constraints"].proved_ratios()


@pytest.mark.parametrize("numbers", [(0, 2), (1, 2)], ids=["copied", "cut"])
def test_the_guide_runs(processes, tmp_path, numbers):
    for ratios in processes(2).run(run_blocks, numbers, tmp_path):
        assert ratios
        assert max(ratios.values()) <= 1
