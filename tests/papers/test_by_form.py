"""The judgement of models that are 1-Lipschitz by form, on rows whose losses are chosen here."""

from dataclasses import asdict

from papers._by_form import Matched, verdicts


def row(cell, loss, **results):
    return {"config": asdict(cell), "results": {"validation_loss": loss, **results}}


def test_a_proved_model_is_judged_at_its_rate_beside_the_better_peer_of_its_tokens():
    rows = [
        row(Matched("NanoGPT, Muon", 0.05, 1), 1.5),
        row(Matched("NanoGPT, Muon", 0.1, 1), 1.4),  # not the rate that seed 0 chose
        row(Matched("NanoGPT, Scion", 0.08, 1), 1.7),
        row(Matched("speedrun, Muon", 0.05, 4), 1.2),
        row(Matched("by form, proved 10", 0.04, 1), 1.6, log10_lipschitz=1.0, lower_bound=4.0),
    ]
    lines = {line.what: (line.ours, line.why) for line in verdicts(rows)}
    assert len(lines) == 4
    assert lines["NanoGPT, Muon; 1 times the tokens, context 128"] == ("loss 1.500 at rate 0.05", "")
    assert lines["by form, proved 10; 1 times the tokens, context 128"] == (
        "loss 1.600 at rate 0.04, proved bound 10, largest gain found 4",
        "+0.100 beside NanoGPT, Muon, the best peer here",
    )
