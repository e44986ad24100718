"""Trains twelve public models by `wn.Scion(model)` and `wn.Muon(model)` at their defaults, against others' best.

Every model is a configuration of Hugging Face's `transformers` with random weights, at the sizes written here. The data
is synthetic, fixed by a seed of its own, and learnable; batches are drawn from it with replacement. A run has 300
steps, in training mode. Its figure is the mean loss, in training mode, of 20 further batches at the weights that the
run hands out: its last ones, or their average. Every arm is tried at its rates; where the best of a peer's, by the mean
over the seeds, is the largest or the least one, a further rate is tried, three times as far. Ours run at their
default alone.

    python -m benchmarks.public_defaults                    # the rows that are missing, then the table
    python -m benchmarks.public_defaults --seeds 0          # those of one seed
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from papers.header import Stored
from wellnormed.optim.directions import BoundedAdam, Direction

OUTPUT = Path("results/public-defaults.json")
STEPS, LAST, DATA_SEED, SEEDS, MOST = 300, 20, 1234, (0, 1, 2), 7
MODELS = (
    "ViT, width 64", "ViT, width 128", "ConvNeXt", "ConvNeXt V2", "Swin", "ResNet", "BERT", "GPT-2", "Llama", "Mamba",
    "T5", "Whisper",
)  # fmt: skip
PEERS = ("AdamW, falling", "torch's Muon with AdamW, falling")

Data = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and its data with labels, from which it computes its loss."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Data]
    batch: int = 32


@dataclass(frozen=True)
class Arm:
    """Optimizers of a model at a rate, which falls to zero or not, and the rates to try."""

    make: Callable[[nn.Module, float], list[torch.optim.Optimizer]]
    rates: tuple[float, ...] = (0.02,)
    falls: bool = True
    once: bool = False
    """Whether it runs with the first seed alone."""


def with_muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Torch's Muon on the hidden matrices, with the step sizes of AdamW, which moves the rest at the same rate."""
    assigned = list(wn.assign_norms(model, "muon"))
    hidden = [a.parameter for a in assigned if a.norm and a.parameter.ndim == 2]
    others = [a.parameter for a in assigned if not (a.norm and a.parameter.ndim == 2)]
    muon = [torch.optim.Muon(hidden, lr=rate, adjust_lr_fn="match_rms_adamw")] if hidden else []
    return [*muon, torch.optim.AdamW(others, lr=rate)]


@dataclass(frozen=True)
class OnVectors(BoundedAdam):
    """Bounded Adam on vectors and numbers alone."""

    def acts_on(self, norm: wn.norms.Norm) -> bool:
        """Whether the norm is one of vectors or of numbers."""
        return super().acts_on(norm) and norm.ndim < 2


def bounded(directions: dict[str, Direction], falls: bool) -> Arm:
    """Scion with these directions."""
    return Arm(lambda model, rate: [wn.Scion(model, lr=rate, directions=directions)], falls=falls, once=True)


ON_VECTORS, ON_ALL = {"*": OnVectors()}, {"*": BoundedAdam()}
ARMS = {
    PEERS[0]: Arm(lambda model, rate: [torch.optim.AdamW(model.parameters(), lr=rate)], (0.001, 0.003, 0.01)),
    PEERS[1]: Arm(with_muon, (0.001, 0.003, 0.01)),
    "Scion, falling": Arm(lambda model, rate: [wn.Scion(model, lr=rate)]),
    "Muon, falling": Arm(lambda model, rate: [wn.Muon(model, lr=rate)]),
    'Muon, recipe "muon", falling': Arm(lambda model, rate: [wn.Muon(model, lr=rate, recipe="muon")]),
    "Scion, averaged": Arm(lambda model, rate: [wn.Averaged(wn.Scion(model, lr=rate, momentum=0.5))], falls=False),
    "Scion, constant": Arm(lambda model, rate: [wn.Scion(model, lr=rate)], falls=False),
    "bounded Adam on vectors, falling": bounded(ON_VECTORS, True),
    "bounded Adam on vectors, constant": bounded(ON_VECTORS, False),
    "bounded Adam on vectors and tables, falling": bounded(ON_ALL, True),
    "bounded Adam on vectors and tables, constant": bounded(ON_ALL, False),
}
"""Name -> how a model is trained."""


def images(generator: torch.Generator, size: int = 32, classes: int = 10, count: int = 512) -> Data:
    """Images of ten classes: a smooth pattern of the class, of RMS 1, under noise of RMS 1."""
    patterns = F.interpolate(torch.randn(classes, 3, 4, 4, generator=generator), size, mode="bilinear")
    patterns = patterns / patterns.square().mean((1, 2, 3), keepdim=True).sqrt()
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return {"pixel_values": patterns[labels] + noise, "labels": labels}


def topics(generator: torch.Generator, classes: int = 4, symbols: int = 256, length: int = 32) -> Data:
    """Texts of four topics, in each of which words have other frequencies."""
    words = torch.randn(classes, symbols, generator=generator).mul(1.5).softmax(-1)
    labels = torch.randint(classes, (512,), generator=generator)
    tokens = torch.multinomial(words[labels], length, replacement=True, generator=generator)
    return {"input_ids": tokens, "labels": labels}


def chain(generator: torch.Generator, symbols: int = 64, length: int = 32, count: int = 2048) -> Data:
    """Texts of a Markov chain, whose next symbol depends on the last one by a table drawn at random."""
    table = torch.randn(symbols, symbols, generator=generator).mul(2.5).softmax(-1)
    tokens = torch.randint(symbols, (count, 1), generator=generator)
    for _ in range(length - 1):
        tokens = torch.cat([tokens, torch.multinomial(table[tokens[:, -1]], 1, generator=generator)], 1)
    return {"input_ids": tokens, "labels": tokens}


def reversal(generator: torch.Generator, symbols: int = 32, length: int = 8, count: int = 2048) -> Data:
    """Sequences, and the same in the opposite order."""
    tokens = torch.randint(2, symbols, (count, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1)}


def speech(generator: torch.Generator, symbols: int = 32, length: int = 6, count: int = 512) -> Data:
    """Spectra of 16 bands in which every word sounds for 8 frames, under noise of RMS 1, and the words."""
    sounds = torch.randn(symbols, 16, generator=generator)
    words = torch.randint(3, symbols, (count, length), generator=generator)
    frames = sounds[words].repeat_interleave(8, 1).mT
    return {"input_features": frames + torch.randn(frames.shape, generator=generator), "labels": words}


def cases() -> dict[str, Case]:
    """All models by name, at their sizes."""
    import transformers as tf

    vision = {"image_size": 32, "num_labels": 10}

    def vit(width: int, layers: int) -> Callable[[], nn.Module]:
        size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "patch_size": 8}
        config = tf.ViTConfig(**size, intermediate_size=2 * width, **vision)
        return lambda: tf.ViTForImageClassification(config)

    def convnext(kind: str) -> Callable[[], nn.Module]:
        config = getattr(tf, f"{kind}Config")(hidden_sizes=[16, 32, 64], depths=[1, 1, 1], num_stages=3, num_labels=10)
        return lambda: getattr(tf, f"{kind}ForImageClassification")(config)

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    swin = tf.SwinConfig(**vision, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    residual = tf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic", num_labels=10
    )
    bert = tf.BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=4,
    )  # fmt: skip
    gpt2 = tf.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32, **special)
    llama = tf.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=160, max_position_embeddings=32, **special,
    )  # fmt: skip
    mamba = tf.MambaConfig(vocab_size=64, hidden_size=48, num_hidden_layers=2, state_size=8, **special)
    t5 = tf.T5Config(
        vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )  # fmt: skip
    whisper = tf.WhisperConfig(
        vocab_size=32, num_mel_bins=16, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=24,
        max_target_positions=16, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None, **special,
    )  # fmt: skip
    return {
        "ViT, width 64": Case(vit(64, 2), images),
        "ViT, width 128": Case(vit(128, 3), images, batch=16),
        "ConvNeXt": Case(convnext("ConvNext"), images),
        "ConvNeXt V2": Case(convnext("ConvNextV2"), images),
        "Swin": Case(lambda: tf.SwinForImageClassification(swin), images, batch=16),
        "ResNet": Case(lambda: tf.ResNetForImageClassification(residual), images),
        "BERT": Case(lambda: tf.BertForSequenceClassification(bert), topics, batch=16),
        "GPT-2": Case(lambda: tf.GPT2LMHeadModel(gpt2), chain, batch=16),
        "Llama": Case(lambda: tf.LlamaForCausalLM(llama), chain, batch=16),
        "Mamba": Case(lambda: tf.MambaForCausalLM(mamba), chain, batch=8),
        "T5": Case(lambda: tf.T5ForConditionalGeneration(t5), reversal),
        "Whisper": Case(lambda: tf.WhisperForConditionalGeneration(whisper), speech),
    }


def train(case: Case, arm: Arm, rate: float, seed: int) -> float:
    """The mean loss of `LAST` further batches after the steps of a run; infinity if a loss was not finite."""
    data = case.data(torch.Generator().manual_seed(DATA_SEED))
    torch.manual_seed(seed)
    model = case.model().train()
    optimizers = arm.make(model, rate)
    factor = (lambda step: 1 - step / STEPS) if arm.falls else (lambda step: 1.0)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in optimizers]
    draws = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        chosen = torch.randint(len(next(iter(data.values()))), (case.batch,), generator=draws)
        return model(**{name: values[chosen] for name, values in data.items()}).loss

    for _ in range(STEPS):
        loss = batch_loss()
        if not math.isfinite(loss.item()):
            return math.inf
        loss.backward()
        for each, schedule in zip(optimizers, schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()
    for each in optimizers:
        if hasattr(each, "eval"):
            each.eval()
    with torch.no_grad():
        found = fmean(batch_loss().item() for _ in range(LAST))
    return found if math.isfinite(found) else math.inf


def means(rows: list[dict[str, Any]], model: str, arm: str) -> dict[float, float]:
    """Rate -> the mean loss over the seeds, of the rates that ran with the most seeds."""
    losses: dict[float, list[float]] = {}
    for row in rows:
        if (row["model"], row["arm"]) == (model, arm):
            losses.setdefault(row["rate"], []).append(math.inf if row["loss"] is None else row["loss"])
    most = max(map(len, losses.values()), default=0)
    return {rate: fmean(found) for rate, found in sorted(losses.items()) if len(found) == most}


def rates(rows: list[dict[str, Any]], model: str, name: str) -> list[float]:
    """The rates of an arm: its own, those that ran, and a further one if the best lies at the edge."""
    own, found = ARMS[name].rates, means(rows, model, name)
    tried = {*own, *found}
    if len(own) > 1 and found.keys() == tried and len(tried) < MOST:
        best = min(found, key=found.__getitem__)
        tried |= {best / 3} if best == min(tried) else {best * 3} if best == max(tried) else set()
    return sorted(tried)


def missing(rows: list[dict[str, Any]], seeds: list[int], model: str) -> Iterator[tuple[str, float, int]]:
    """Arm, rate and seed of every run of a model that no row has, as the rows are at the time."""
    for seed in seeds:
        for name in (name for name, arm in ARMS.items() if seed == SEEDS[0] or not arm.once):
            for rate in rates(rows, model, name):
                if not any((r["model"], r["arm"], r["rate"], r["seed"]) == (model, name, rate, seed) for r in rows):
                    yield name, rate, seed


def table(rows: list[dict[str, Any]]) -> str:
    """The mean loss of every arm at its best rate, and on how many models it is at most that of the peers' best."""
    lines = ["| model | " + " | ".join(ARMS) + " |", "|---" * (len(ARMS) + 1) + "|"]
    ahead = dict.fromkeys(ARMS, 0)
    for model in MODELS:
        best = {name: min(means(rows, model, name).values(), default=math.nan) for name in ARMS}
        lines.append(f"| {model} | " + " | ".join(f"{loss:.3g}" for loss in best.values()) + " |")
        for name in ARMS:
            ahead[name] += best[name] <= best[PEERS[0]]
    lines.append(f"| at most {PEERS[0]} | " + " | ".join(map(str, ahead.values())) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what has no row yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds that run")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.public_defaults", steps=STEPS)
    for seed in seeds:
        for model, case in cases().items():
            while cell := next(missing(stored.rows, [seed], model), None):
                name, rate, _ = cell
                loss = train(case, ARMS[name], rate, seed)
                found = {"seed": seed, "loss": round(loss, 10) if math.isfinite(loss) else None}
                stored.add({"model": model, "arm": name, "rate": rate} | found | stored.commit)
    print(table(stored.rows))


if __name__ == "__main__":
    main()
