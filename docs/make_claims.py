"""The claims of the four papers' abstracts and introductions, for docs/papers.md: `python -m docs.make_results`.

The words are the papers'. What was found is the lines of experiments that a claim names by how they begin, so that a
figure is never typed here, and a line that is called otherwise ends the script.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from docs.make_reproduction import finished, seeds
from papers._experiment import Preset, Verdict, load
from papers._table import Row

CONFIRMED, SMALL = "**confirmed** at the paper's size", "**confirmed**, small"


class Claim(NamedTuple):
    """A sentence, where it stands, and the lines that answer it."""

    where: str
    words: str
    experiment: str
    lines: tuple[str, ...]
    preset: Preset = "cpu"


CLAIMS = (
    Claim(
        "LT abstract",
        "switching from AdamW to Muon improves weight decay: equal performance with a lower Lipschitz bound",
        "cifar-tradeoff",
        ("weight decay, Muon against AdamW",),
        "paper",
    ),
    Claim(
        "LT 1",
        "the same with spectral normalization, and on transformers trained on Shakespeare text",
        "shakespeare-tradeoff",
        ("weight decay, bound: LT's formula", "spectral normalization, bound: LT's formula"),
    ),
    Claim(
        "LT 1",
        "spectral soft cap performs similarly or slightly better than spectral normalization; both within 1% of weight "
        "decay (3.4)",
        "cifar-tradeoff",
        ("accuracy within 1%",),
        "paper",
    ),
    Claim("LT 3.4", "the other methods fall within 4%", "cifar-tradeoff", ("accuracy within 4%",), "paper"),
    Claim(
        "LT abstract",
        "our at most 2-Lipschitz transformer on Shakespeare text reaches validation accuracy 60%, and loss 1.29 (4.3)",
        "shakespeare-best",
        (
            "LT's transformer with plain residuals, at most 2 by its formula: accuracy",
            "LT's transformer with plain residuals, at most 2 by its formula: loss",
            "LT's transformer with plain residuals at the cap 1.146: largest gain found",
        ),
        "paper",
    ),
    Claim(
        "LT 1",
        "our at most 6-Lipschitz model reaches validation loss 1.20",
        "shakespeare-best",
        ("LT's transformer with plain residuals, at most 6.02 by its formula: loss",),
        "paper",
    ),
    Claim(
        "LT abstract",
        "scaling to 140M parameters, our at most 10-Lipschitz transformer reaches 21% accuracy on internet text",
        "nanogpt-table1",
        ("ours, normalized at 1",),
    ),
    Claim(
        "LT 1",
        "to reach a competitive accuracy of 37.4% requires an upper bound of 10^122",
        "nanogpt-table1",
        ("ours, soft cap 8",),
    ),
    Claim(
        "LT abstract",
        "a maximum activation of 112, compared to about 1,872 for the unconstrained network, 17 times",
        "nanogpt-table1",
        ("largest entry as LT has it: Modula's",),
    ),
    Claim(
        "LT abstract",
        "our transformers train without layer norm, QK norm and logit softcapping; unconstrained they diverge (4.4)",
        "stability-grid",
        ("diverges in every seed without",),
    ),
    Claim(
        "LT 3.3",
        "a network of lower bound keeps a higher accuracy under larger attacks",
        "cifar-robustness",
        ("Muon, soft cap as published against AdamW: attacked accuracy",),
    ),
    Claim(
        "LT 1",
        "for AdamW, spectral hammer elicits the strongest Lipschitz-constrained performance",
        "shakespeare-tradeoff",
        ("lowest loss of AdamW's pairs",),
    ),
    Claim(
        "LT 3.1",
        "soft cap and hard cap keep a trained network's norms at the cap",
        "caps",
        ("trained with a soft cap", "trained with a hard cap"),
    ),
    Claim(
        "SC 6.1",
        "nested matrix signs fail on norms as small as 100, the block form does not",
        "hardcap-stability",
        ("nested, float32", "block, float32"),
        "paper",
    ),
    Claim(
        "SC 5",
        "(12 T + 4) n m^2 operations for a hard cap by nested signs",
        "hardcap-cost",
        ("nested, 1024 x 4096",),
    ),
    Claim("SC 5", "the block form costs 3 to 4 times as much", "hardcap-cost", ("block over nested, 1024 x 4096",)),
    Claim(
        "SC 6.2",
        "without projections (none), and projected to matrix signs (stiefel), models fail to grok; all others grok",
        "grokking",
        ("sum: who groks last", "product: who groks last"),
    ),
    Claim(
        "SC 6.2",
        "without projections no model groks in 1,000 steps",
        "grokking",
        ("sum, none", "product, none"),
        "paper",
    ),
    Claim(
        "SC 6.2",
        "capping the embeddings alone allows models to grok: median 227 and 233 steps",
        "grokking",
        ("sum, embedding", "product, embedding"),
        "paper",
    ),
    Claim(
        "SC 6.2",
        "a larger decay leads to lower-Lipschitz models",
        "grokking",
        ("sum: bound with clipped decay", "product: bound with clipped decay"),
    ),
    Claim("MD abstract", "duality-based training is fast", "lr-transfer-mlp", ("lowest training loss",)),
    Claim(
        "MD abstract",
        "and scalable: the best rate stays across width, where Adam's drifts to the left",
        "lr-transfer-mlp",
        ("best rate, dualized", "best rate, Adam (SP)"),
    ),
    Claim(
        "MD 1.1",
        "weights move substantially further from their start than without dualization",
        "lr-transfer-mlp",
        ("movement, Frobenius",),
    ),
    Claim("MD figure 2", "so that a watermark is erased", "watermark", ("size under the letter",)),
    Claim(
        "LMO 1",
        "uSCG converges at the order n^(-1/4) under noise, SCG too",
        "rates",
        ("uSCG, vanishing momentum", "SCG, vanishing momentum"),
    ),
    Claim(
        "LMO abstract",
        "hyperparameters transfer across model sizes",
        "lr-transfer-gpt",
        ("best rate against width, uSCG", "best rate against width, SCG"),
    ),
    Claim(
        "LMO abstract",
        "significant speedups on nanoGPT training without any reliance on Adam (lower losses after as many steps)",
        "lr-transfer-gpt",
        ("lowest loss at the largest width, uSCG", "lowest loss at the largest width, SCG"),
    ),
    Claim(
        "LMO 1",
        "more tolerant to large batch sizes",
        "batch-size",
        ("rise of the lowest loss from batch 8 to 128, uSCG",),
    ),
    Claim(
        "LMO table 5",
        "Unconstrained Scion outperforms all other methods with the rate of a small model",
        "scion-3b",
        ("uSCG below Adam", "uSCG below Muon", "uSCG below SCG"),
    ),
    Claim("LMO 6", "only Adam needs a warm-up", "warm-up", ("one table: what leaving out",)),
    Claim(
        "LMO abstract",
        "requires only one set of weights and one set of gradients, in half-precision",
        "memory",
        ("Scion, memory-light",),
        "paper",
    ),
    Claim(
        "LMO 6",
        "Scion controls the norms of a convolutional network, whose stepsize transfers across width",
        "lr-transfer-cnn",
        ("best rate, Scion", "largest norm"),
    ),
)
"""In the order of the papers. Theorems stand in the tables below, each with its test."""


def judged(lines: list[Verdict]) -> str:
    """What the lines of a claim say together, with what speaks against it, or else what leaves it open."""
    kinds = {line.verdict for line in lines}
    against = [line for line in lines if line.verdict in ("not reached", "another shape", "corrected")]
    weak = against or [line for line in lines if line.verdict == "measured"]
    part = f" in {len(weak)} of {len(lines)} lines" if 0 < len(weak) < len(lines) else ""
    why = "; ".join(dict.fromkeys(filter(None, (line.why for line in weak or lines))))
    if against:
        word = "**corrected**" if "corrected" in kinds else f"**not confirmed**{part}"
    elif weak:
        word = f"not decided{part}"
    else:
        word = CONFIRMED if "reached" in kinds else SMALL
    return f"{word}: {why}" if why else word


def _named(verdicts: Sequence[Verdict], name: str) -> list[Verdict]:
    """The line of this name, or else those whose names begin so."""
    found = [line for line in verdicts if line.what == name] or [v for v in verdicts if v.what.startswith(name)]
    if not found:
        raise ValueError(f"a claim names {name!r}, and no line begins so: {[line.what for line in verdicts]}")
    return found


def claims() -> str:
    """The table of docs/papers.md, between its two comments."""
    return "\n".join(["| claim | here | verdict | run |", "|---|---|---|---|", *_rows()])


SIZES = {"short": "short side"} | {key: key for key in ("width", "rows", "columns", "blocks", "horizon", "steps")}
"""The fields of cells that say how large a run was, and their names."""


def _sizes(rows: Sequence[Row]) -> Iterator[str]:
    """The sizes of rows."""
    for key, name in SIZES.items():
        if values := {row["config"][key] for row in rows if key in row["config"]}:
            yield f"{name} {min(values):g}" + f" to {max(values):g}" * (len(values) > 1)


def _rows() -> Iterator[str]:
    for claim in CLAIMS:
        experiment = load(claim.experiment)
        rows = finished(experiment, claim.preset)
        verdicts = experiment.verdicts(rows, claim.preset)
        lines = [line for name in claim.lines for line in _named(verdicts, name)]
        here = "; ".join(f"{line.what}: {line.ours}" for line in lines)
        here = here.replace("LT's transformer with plain residuals", "plain residuals").replace("ours, ", "LT's own, ")
        folder, option = f"{claim.experiment}-{claim.preset}", " --preset paper" * (claim.preset == "paper")
        page = f"reproduction.md#{claim.experiment}-preset-{claim.preset}"
        run = f"`python -m papers {claim.experiment}{option}` ([setting]({page}), "
        run += f"[rows](../results/reproduce/{folder}/rows.jsonl)): {', '.join(_sizes(rows))}, "
        run += f"{seeds(experiment, claim.preset, rows)}, {sum(row['seconds'] for row in rows) / 60:.0f} minutes"
        cells = (f"{claim.where}: {claim.words}", here, judged(lines), run)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
