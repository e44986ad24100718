"""The loss over a split of a text."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from papers import characters
from tests.certificates.adversary import Net


@torch.no_grad()
@pytest.mark.parametrize("at_once", [8, 16, 8192])
def test_validation_covers_every_token(at_once, monkeypatch):
    monkeypatch.setattr(characters, "TOKENS_AT_ONCE", at_once)
    torch.manual_seed(0)
    # logits that depend on every token of the window up to theirs
    model = Net(lambda s, tokens: s.table(tokens).cumsum(1), table=nn.Embedding(5, 5))
    tokens, by_hand = torch.arange(30) ** 2 % 5, 0.0
    for start in range(0, 29, 8):
        x, y = tokens[start : min(start + 8, 29)], tokens[start + 1 : min(start + 8, 29) + 1]
        by_hand += float(F.cross_entropy(model(x[None])[0], y, reduction="sum"))
    # float32 sums in another order
    assert characters.validation_loss(model, tokens, 8) == pytest.approx(by_hand / 29, rel=1e-5)


def test_a_split_without_a_prediction_is_refused():
    with pytest.raises(ValueError, match="the split has 1 tokens, but one prediction needs 2; use a longer text"):
        characters.validation_loss(nn.Identity(), torch.zeros(1, dtype=torch.long), 8)
