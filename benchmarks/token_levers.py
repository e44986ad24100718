"""What the choices of a model that is 1-Lipschitz by form are worth on bytes of books: one change at a time, one seed.

Each run is that of "by form, proved 10" in `papers.nanogpt_table1` with four times the tokens of its shortest rows, 420
steps, but for what its `LEVERS` say; all have as many parameters in blocks, 1.0 million. A row is written when its run
ends, and is not run again. `$WELLNORMED_DATA` holds the books as for that experiment.

    python -m benchmarks.token_levers --output results/token_levers.json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from papers._by_form import Matched, config_of
from papers._tokens import corpus_of, results
from papers.header import header, stored_rows, write_result
from wellnormed.models import build
from wellnormed.models.config import PotentialConfig
from wellnormed.train.setup import blocks, with_vocabulary

BASE = Matched("by form, proved 10", 0.02, 4)
BLOCK_PARAMETERS = 983_040
"""Those of the peers."""
LEVERS: dict[str, dict[str, Any]] = {
    "default": {},
    "a stream of 128": {"mixing_heads": 8, "blocks": 6},
    "a stream of 512": {"mixing_heads": 32, "blocks": 1, "attention_blocks": 0},
    "no attention": {"attention_blocks": 0},
    "two attentions": {"attention_blocks": 2, "blocks": 2},
    "token vectors of 32": {"token_width": 32, "mixing_heads": 8},
    "no attention, token vectors of 32": {"attention_blocks": 0, "token_width": 32, "mixing_heads": 8},
    "no attention, token vectors of 48": {"attention_blocks": 0, "token_width": 48, "mixing_heads": 6},
    "no attention, token vectors of 64": {"attention_blocks": 0, "token_width": 64, "mixing_heads": 4},
    "no attention, a stream of 128": {"attention_blocks": 0, "mixing_heads": 8, "blocks": 6},
    "no attention, token vectors of 32, a stream of 384": {
        "attention_blocks": 0,
        "token_width": 32,
        "mixing_heads": 12,
        "blocks": 2,
    },
    "three mixings by position": {
        "mixing_heads": 8,
        "blocks": 6,
        "attention_blocks": 3,
        "attention_logit": 0.001,
        "attention_share": 0.5,
    },
    "one potential, three times as wide": {"blocks": 1},
    "six potentials, half as wide": {"blocks": 6},
    "attention has 0.1 of the squares": {"attention_share": 0.1},
    "logits up to 1 in attention": {"attention_logit": 1.0},
    "eight heads of attention": {"attention_heads": 8},
}
"""Name -> what it changes in the model. In "three mixings by position" attention hardly reads the content, so that its
constant is 1.001 at any share. The hidden width follows from the number of parameters."""
RATES = {"half the rate": 0.01, "twice the rate": 0.04}


def model_of(base: PotentialConfig, changes: dict[str, Any]) -> PotentialConfig:
    """The changed model, with potentials as wide as the parameters of the blocks allow, in steps of 16."""
    model = replace(base, **changes)
    left = BLOCK_PARAMETERS - 5 * model.width**2 * model.attention_blocks
    return replace(model, hidden=left // (model.blocks * model.width) // 16 * 16)


def run(name: str) -> dict[str, Any]:
    """Loss, proved bound and largest gain found of one lever."""
    corpus, config = corpus_of("1m"), config_of(replace(BASE, rate=RATES.get(name, BASE.rate)))
    assert isinstance(config.model, PotentialConfig)
    config = replace(config, model=model_of(config.model, LEVERS.get(name, {})))
    model = build(with_vocabulary(config, corpus).model)
    counts = {"block_parameters": sum(p.numel() for block in blocks(model) for p in block.parameters())}
    shape = {"width": config.model.width, "hidden": config.model.hidden, "blocks": config.model.blocks}
    return {
        "lever": name,
        "rate": config.learning_rate,
        **shape,
        **counts,
        **results(config, corpus, torch.device("cpu")),
    }


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/token_levers.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = stored_rows(options.output)
    for name in [*LEVERS, *RATES]:
        if name not in {row["lever"] for row in rows}:
            rows.append(run(name))
            print(json.dumps(rows[-1]), flush=True)
            command = f"python -m benchmarks.token_levers --output {options.output}"
            write_result(options.output, {**header(command, [BASE.seed]), "rows": rows})


if __name__ == "__main__":
    main()
