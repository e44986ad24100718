"""The protocol of the default rates: what is left to run, and what the table says of what has run."""

import json

import pytest
import torch

from benchmarks import public_defaults as protocol


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Rows as a function from (optimizer, seed, factor) to a loss has them, of one model; None leaves a cell out."""
    monkeypatch.setattr(protocol, "ROWS", tmp_path / "rows.jsonl")

    def write(loss):
        cells = [(o, s, f) for o in ("AdamW", "Scion") for s in protocol.SEEDS for f in protocol.FACTORS]
        rows = [
            {"model": "BERT", "optimizer": o, "seed": s, "factor": f, "loss_40": value, "loss_300": value}
            for o, s, f in cells
            if (value := loss(o, s, f)) is not None
        ]
        protocol.ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def test_finished_cells_are_not_run_again(written):
    written(lambda optimizer, seed, factor: 1.0 if seed == 0 else None)
    left = list(protocol.todo(["BERT"], ["AdamW"]))
    assert {(cell["seed"], cell["factor"]) for cell in left} == {(s, f) for s in (1, 2) for f in protocol.FACTORS}


def test_optimizers_are_compared_on_the_seeds_that_both_have_and_at_a_rate_not_a_seed(written):
    # with the third seed AdamW would be far ahead, but Scion has not run it at all three rates
    losses = {"AdamW": (3.0, 3.0, -99.0), "Scion": (1.0, 4.0, 2.0)}
    written(lambda o, seed, factor: None if (o, seed, factor) == ("Scion", 2, 3.0) else losses[o][seed] / factor)
    found = protocol.complete(40)
    assert (
        protocol.ahead(found, ("BERT", "T5"), "Scion") == "1 at the default rate, 1 at the best of three, of 1 models"
    )
    assert protocol.cell(found["BERT", "Scion"]) == "2.5, 0.833 (2)"


def test_the_halves_are_twelve_models_and_every_case_belongs_to_one_list():
    pytest.importorskip("transformers")
    named = [*protocol.HALF_A, *protocol.HALF_B, *protocol.TORCH_START]
    assert len({*protocol.HALF_A, *protocol.HALF_B}) == 12
    assert sorted(named) == sorted(protocol.cases())


def test_a_run_draws_the_same_data_whatever_the_optimizer():
    case = protocol.Case(protocol.QNetwork, protocol.transitions, protocol.dqn_loss)
    still = [protocol.train(case, lambda model: torch.optim.SGD(model.parameters(), lr=0.0), 0, steps=3) for _ in "ab"]
    assert still[0] == still[1]
    assert len(set(still[0])) == 3  # batches differ
