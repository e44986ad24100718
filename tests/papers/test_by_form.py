"""The judgement of models that are 1-Lipschitz by form, on rows whose losses are chosen here."""

from dataclasses import asdict

from papers._by_form import Matched, verdicts


def row(cell, loss, **results):
    return {"config": asdict(cell), "results": {"validation_loss": loss, **results}}


def test_the_larger_size_is_judged_at_the_best_rate_of_its_own_context_and_beside_its_own_peers():
    rows = [
        row(Matched("NanoGPT, Muon", 0.05, 1), 1.5),
        row(Matched("by form, proved 10", 0.04, 1), 1.6, log10_lipschitz=1.0, lower_bound=4.0),
        row(Matched("NanoGPT, Muon", 0.025, 1, 256, size="10m"), 4.2),
        row(Matched("NanoGPT, Muon", 0.05, 1, 256, size="10m"), 4.1),
        row(Matched("by form, proved 10", 0.01, 1, 256, size="10m"), 4.0, log10_lipschitz=1.0, lower_bound=3.0),
        row(Matched("by form, proved 10", 0.02, 1, 256, size="10m"), 4.3, log10_lipschitz=1.0, lower_bound=9.0),
    ]
    lines = [(line.what, line.ours, line.why, line.runs) for line in verdicts(rows)]
    assert lines == [
        ("NanoGPT, Muon; 1 times the tokens, context 128", "loss 1.500 at rate 0.05", "", 1),
        (
            "by form, proved 10; 1 times the tokens, context 128",
            "loss 1.600 at rate 0.04, proved bound 10, largest gain found 4",
            "+0.100 beside NanoGPT, Muon, the best peer here; at most +0.02 was asked for",
            1,
        ),
        ("NanoGPT, Muon; 10m parameters; 1 times the tokens, context 256", "loss 4.100 at rate 0.05", "", 1),
        (
            "by form, proved 10; 10m parameters; 1 times the tokens, context 256",
            "loss 4.000 at rate 0.01, proved bound 10, largest gain found 3",
            "-0.100 beside NanoGPT, Muon, the best peer here; at most +0.02 was asked for",
            1,
        ),
    ]
