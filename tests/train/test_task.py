from dataclasses import replace

import pytest
import torch

from wellnormed.constraints import ClippedWeightDecay, Hammer
from wellnormed.data import load_shakespeare
from wellnormed.train import RunFolder, characters, weights


@pytest.mark.parametrize("tiny", ["gpt"], indirect=True)  # the other has constraints of its own
@pytest.mark.parametrize("constraint", [Hammer, lambda cap: ClippedWeightDecay(cap, 0.5)], ids=["vectors", "bounds"])
def test_what_a_constraint_remembers_survives_a_checkpoint(constraint, tiny, tmp_path, monkeypatch):
    """The other runs have constraints without memory; with these a lost state changes bits."""
    monkeypatch.setitem(weights.CONSTRAINTS, tiny.constraint, constraint)
    config = replace(tiny, learning_rate=0.5)

    def begin():
        return characters.CharacterTask(config, load_shakespeare(config.source), torch.device("cpu"))

    whole, run = begin(), RunFolder(tmp_path / "run")
    for _ in range(4):
        whole.advance()
    run.create(config, {"source": config.source})
    run.save_checkpoint(whole.checkpoint())
    resumed = begin()
    saved = run.load_checkpoint()
    assert saved is not None
    resumed.restore(saved)
    for _ in range(4):
        assert whole.advance() == resumed.advance()
    ours, theirs = whole.checkpoint(), resumed.checkpoint()
    for one, other in ((ours.weights, theirs.weights), (ours.state, theirs.state)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.startswith("constraints.") for name in ours.state)
    with pytest.raises(ValueError, match="the state lacks"):
        begin().restore(replace(saved, state={k: v for k, v in saved.state.items() if "constraints" not in k}))
