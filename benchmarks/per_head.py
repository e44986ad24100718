"""What one norm for every head of queries, keys and values does to the loss, against one for each projection.

Three models of four blocks, width 128 and 4 heads in the protocol of `benchmarks/tied_tables.py`: nanoGPT's own
`model.py`, whose path is the argument, with queries, keys and values fused; a Llama of `transformers` with two heads of
keys and values; and a GPT-NeoX of `transformers`, in which the query, key and value of a head are followed by those of
the next, so that its projection was one matrix. A head is measured in two units: RMS, in which a step of a head is
shorter by the root of their number than its share of a step of the projection; and l2, in which it is as long.

    python -m benchmarks.per_head nanoGPT/model.py

Every finished run is written at once, and a run that the file holds already is not repeated. A file of another commit
is refused.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellnormed as wn
from papers.characters import validation_loss
from papers.header import header, write_result
from wellnormed.data import load_shakespeare
from wellnormed.norms import PerHead, Split
from wellnormed.norms.spectral import MatrixNorm

from .tied_tables import BATCH, LENGTH, SEEDS, STEPS, Logits, finished, fit, nanogpt

OUTPUT = Path("results/per-head.json")
WIDTH, HEADS, KV_HEADS, BLOCKS = 128, 4, 2, 4
OPTIMIZERS: dict[str, Any] = {"Scion(lr=0.02)": wn.Scion, "Muon(lr=0.02)": wn.Muon}
ONLY_SCION = ("Llama", "GPT-NeoX")
L2 = wn.Spectral(units="l2")
NORMS: dict[str, dict[str, tuple[MatrixNorm, int]]] = {
    "nanoGPT": {"*.c_attn": (Split(3), 3 * HEADS)},
    "Llama": {
        "*.q_proj": (wn.Spectral(), HEADS),
        "*.k_proj": (wn.Spectral(), KV_HEADS),
        "*.v_proj": (wn.Spectral(), KV_HEADS),
    },
    "GPT-NeoX": {"*.query_key_value.weight": (wn.Spectral(), 3 * HEADS)},
}
"""For each model the weights by pattern, with the norm by projections and the number of heads."""
WAYS: dict[str, Callable[[MatrixNorm, int], MatrixNorm]] = {
    "by projection": lambda whole, heads: whole,
    "by head, RMS": lambda whole, heads: PerHead(heads),
    "by head, l2": lambda whole, heads: PerHead(heads, L2),
}


class Trainable(nn.Module):
    """A language model of `transformers` that gives logits and loss, as nanoGPT's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens).logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name: str, symbols: int, nanogpt_model: Path) -> nn.Module:
    """One model with its own random start."""
    if name == "nanoGPT":
        module = nanogpt(nanogpt_model)
        return module.GPT(
            module.GPTConfig(LENGTH, symbols, n_layer=BLOCKS, n_head=HEADS, n_embd=WIDTH, dropout=0.0, bias=False)
        )
    import transformers as tf

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS, "vocab_size": symbols}
    if name == "Llama":
        config = tf.LlamaConfig(**sizes, intermediate_size=352, num_key_value_heads=KV_HEADS, use_cache=False)
        return Trainable(tf.LlamaForCausalLM(config))
    config = tf.GPTNeoXConfig(**sizes, intermediate_size=512, use_cache=False)
    return Trainable(tf.GPTNeoXForCausalLM(config))


def main() -> None:
    """Train what the results lack: all ways for one model, optimizer and seed, then for the next."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path, help="nanoGPT's model.py")
    options = parser.parse_args()
    text = load_shakespeare()
    results: dict[str, Any] = {
        **header("python -m benchmarks.per_head nanoGPT/model.py", list(SEEDS)),
        "config": {"length": LENGTH, "batch": BATCH, "steps": STEPS, "clip": 1.0, "schedule": "cosine to 0.1"},
        "source": text.source,
    }
    results["rows"] = finished(OUTPUT, results["commit"], "rows")
    for name, seed, optimizer, way in product(NORMS, SEEDS, OPTIMIZERS, WAYS):
        if name in ONLY_SCION and OPTIMIZERS[optimizer] is not wn.Scion:
            continue
        row = {"model": name, "optimizer": optimizer, "seed": seed, "way": way}
        if any(row == {key: done[key] for key in row} for done in results["rows"]):
            continue
        torch.manual_seed(seed)
        model = build(name, len(text.symbols), options.nanogpt)
        norms = {pattern: WAYS[way](*known) for pattern, known in NORMS[name].items()}
        fit(model, text, lambda m, o=OPTIMIZERS[optimizer], n=norms: o(m, lr=0.02, overrides=n), seed)
        loss = validation_loss(Logits(model), text.validation, LENGTH)
        results["rows"].append({**row, "validation_loss": loss})
        results["number_of_runs"] = len(results["rows"])
        write_result(OUTPUT, results)
        print(f"{name}, {optimizer}, seed {seed}, {way}: {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
