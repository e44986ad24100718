"""What the default learning rates train: twelve public models and three of torch's default start, against AdamW.

The protocol was committed before the rule that it judges. Every model is a configuration of Hugging Face's
`transformers` with random weights, or a network of `torch.nn`, at the sizes written here. The data is synthetic,
fixed by a seed of its own, and learnable; batches are drawn from it with replacement. A run has 300 steps at a
constant rate, without clipping, in training mode, dropout included. What counts is the mean loss of the last five of
the first 40 steps, and of the last five of all 300. Every optimizer runs at a third of its default rate, at it, and at
three times it, with three seeds; a model's figure is the mean over the seeds.

The rule was chosen on the models of `HALF_A` and on those of `TORCH_START`; `HALF_B` is only reported. The bar: at the
default rate at most AdamW's loss at its default, and at the best of the three rates at most AdamW's best of three, on
ten of the twelve public models.

    python -m benchmarks.public_defaults              # runs what the results lack
    python -m benchmarks.public_defaults --table      # only writes the table of what is there

Every finished run is one line of `results/public_defaults/rows.jsonl`, with its model, optimizer, rate, seed, commit
and machine; a run that the file holds already is not repeated.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from papers.header import header

STEPS, EARLY, LAST = 300, 40, 5
SEEDS, FACTORS, DATA_SEED = (0, 1, 2), (1 / 3, 1.0, 3.0), 1234
ROWS = Path("results/public_defaults/rows.jsonl")

HALF_A = ("ViT, width 64", "ConvNeXt", "ResNet", "BERT", "GPT-2", "T5")
HALF_B = ("ViT, width 128", "Swin", "ConvNeXt V2", "Whisper", "Llama", "Mamba")
TORCH_START = ("PPO", "DQN", "convolutions")

OPTIMIZERS: dict[str, tuple[Callable[[nn.Module, float], torch.optim.Optimizer], float]] = {
    "AdamW": (lambda model, rate: torch.optim.AdamW(model.parameters(), lr=rate), 1e-3),
    "Scion, radius 1": (lambda model, rate: wn.Scion(model, lr=rate, radius=1.0), 0.02),
    "Scion": (lambda model, rate: wn.Scion(model, lr=rate), 0.02),
    "Muon": (lambda model, rate: wn.Muon(model, lr=rate), 0.02),
}
"""How each is made, and its default rate. With `radius=1.0` every vector moves by RMS 1 per unit of rate."""

Data = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data and the loss of a batch."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Data]
    loss: Callable[[nn.Module, Data], Tensor]
    batch: int = 32


def own_loss(model: nn.Module, batch: Data) -> Tensor:
    """The loss that a model of `transformers` returns when it is given labels."""
    return model(**batch).loss


def images(generator: torch.Generator, size: int = 32, classes: int = 10, count: int = 512) -> Data:
    """Images of ten classes: a smooth pattern of the class, of RMS 1, under noise of RMS 1."""
    patterns = F.interpolate(torch.randn(classes, 3, 4, 4, generator=generator), size, mode="bilinear")
    patterns = patterns / patterns.square().mean((1, 2, 3), keepdim=True).sqrt()
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return {"pixel_values": patterns[labels] + noise, "labels": labels}


def topics(generator: torch.Generator, classes: int = 4, symbols: int = 256, length: int = 32) -> Data:
    """Texts of four topics, each with frequencies of its own for the words."""
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


def rollout(generator: torch.Generator, count: int = 1024) -> Data:
    """Observations, actions, advantages and returns of a fixed policy, in a task with 8 sensors and 4 actions."""
    states = torch.randn(count, 8, generator=generator)
    best = states @ torch.randn(8, 4, generator=generator)
    actions = torch.randint(4, (count,), generator=generator)
    advantages = best.gather(1, actions[:, None])[:, 0]
    advantages = (advantages - advantages.mean()) / advantages.std()
    returns = (states @ torch.randn(8, 3, generator=generator)).tanh().sum(1) + 2
    return {"states": states, "actions": actions, "advantages": advantages, "returns": returns}


class ActorCritic(nn.Module):
    """Two networks of two hidden layers of 64, with `nn.Linear`'s own start."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = _perceptron(nn.Tanh, 8, 64, 64, 4)
        self.value = _perceptron(nn.Tanh, 8, 64, 64, 1)


def _perceptron(activation: type[nn.Module], *sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), activation()]
    return nn.Sequential(*layers[:-1])


def ppo_loss(model: nn.Module, batch: Data) -> Tensor:
    """PPO's clipped objective against the uniform policy that acted, with values and entropy (Schulman, 2017)."""
    logs = model.policy(batch["states"]).log_softmax(-1)
    ratio = (logs.gather(1, batch["actions"][:, None])[:, 0] + math.log(4)).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"]).mean()
    error = (model.value(batch["states"])[:, 0] - batch["returns"]).square().mean()
    return 0.5 * error - gain + 0.01 * (logs.exp() * logs).sum(-1).mean()


def transitions(generator: torch.Generator, count: int = 1024) -> Data:
    """Steps of a random linear system with 4 sensors and 2 actions: state, action, reward, next state."""
    states = torch.randn(count, 4, generator=generator)
    actions = torch.randint(2, (count,), generator=generator)
    pushed = states @ torch.randn(4, 4, generator=generator).mul(0.4)
    pushed = pushed + (actions[:, None] * 2 - 1) * torch.randn(4, generator=generator)
    return {"states": states, "actions": actions, "rewards": 1 - pushed.square().mean(1).tanh(), "next": pushed}


class QNetwork(nn.Module):
    """Two hidden layers of 128, with `nn.Linear`'s own start, and a copy from which the targets come."""

    def __init__(self) -> None:
        super().__init__()
        self.online = _perceptron(nn.ReLU, 4, 128, 128, 2)
        self.target = _perceptron(nn.ReLU, 4, 128, 128, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


def dqn_loss(model: nn.Module, batch: Data) -> Tensor:
    """Huber's loss of the temporal difference; the target network is renewed every 50 steps (Mnih et al., 2015)."""
    if int(model.calls) % 50 == 0:
        model.target.load_state_dict(model.online.state_dict())
    model.calls += 1
    wanted = batch["rewards"] + 0.95 * model.target(batch["next"]).amax(1)
    found = model.online(batch["states"]).gather(1, batch["actions"][:, None])[:, 0]
    return F.smooth_l1_loss(found, wanted)


def convolutions() -> nn.Module:
    """Three convolutions, each of which halves the side, and a linear map: torch's own start."""
    layers: list[nn.Module] = []
    for d_in, d_out in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(d_in, d_out, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


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
        "ViT, width 64": Case(vit(64, 2), images, own_loss),
        "ViT, width 128": Case(vit(128, 3), images, own_loss, batch=16),
        "ConvNeXt": Case(convnext("ConvNext"), images, own_loss),
        "ConvNeXt V2": Case(convnext("ConvNextV2"), images, own_loss),
        "Swin": Case(lambda: tf.SwinForImageClassification(swin), images, own_loss, batch=16),
        "ResNet": Case(lambda: tf.ResNetForImageClassification(residual), images, own_loss),
        "BERT": Case(lambda: tf.BertForSequenceClassification(bert), topics, own_loss, batch=16),
        "GPT-2": Case(lambda: tf.GPT2LMHeadModel(gpt2), chain, own_loss, batch=16),
        "Llama": Case(lambda: tf.LlamaForCausalLM(llama), chain, own_loss, batch=16),
        "Mamba": Case(lambda: tf.MambaForCausalLM(mamba), chain, own_loss, batch=8),
        "T5": Case(lambda: tf.T5ForConditionalGeneration(t5), reversal, own_loss),
        "Whisper": Case(lambda: tf.WhisperForConditionalGeneration(whisper), speech, own_loss),
        "PPO": Case(ActorCritic, rollout, ppo_loss, batch=64),
        "DQN": Case(QNetwork, transitions, dqn_loss, batch=64),
        "convolutions": Case(convolutions, images, lambda m, b: F.cross_entropy(m(b["pixel_values"]), b["labels"])),
    }


def train(case: Case, make: Callable[[nn.Module], torch.optim.Optimizer], seed: int, steps: int = STEPS) -> list[float]:
    """The losses of one run, one for every step; a run that leaves the numbers ends there, with infinity."""
    data = case.data(torch.Generator().manual_seed(DATA_SEED))
    torch.manual_seed(seed)
    model = case.model().train()
    optimizer = make(model)
    draws = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(steps):
        chosen = torch.randint(len(next(iter(data.values()))), (case.batch,), generator=draws)
        loss = case.loss(model, {name: values[chosen] for name, values in data.items()})
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return losses[:-1] + [math.inf] * (steps - len(losses) + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def rows() -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def todo(models: list[str], optimizers: list[str]) -> Iterator[dict[str, Any]]:
    """The cells of the protocol that no row has."""
    known = [{key: row[key] for key in ("model", "optimizer", "factor", "seed")} for row in rows()]
    for seed in SEEDS:
        for model in models:
            for optimizer in optimizers:
                for factor in FACTORS:
                    cell = {"model": model, "optimizer": optimizer, "factor": factor, "seed": seed}
                    if cell not in known:
                        yield cell


def run(models: list[str], optimizers: list[str]) -> None:
    """Train what the rows lack, and write every run as it ends."""
    every = cases()
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    for cell in todo(models, optimizers):
        make, rate = OPTIMIZERS[cell["optimizer"]]
        rate *= cell["factor"]
        losses = train(every[cell["model"]], lambda model: make(model, rate), cell["seed"])  # noqa: B023 (called here)
        found = {f"loss_{end}": statistics.fmean(losses[end - LAST : end]) for end in (EARLY, STEPS)}
        found = {key: value if math.isfinite(value) else None for key, value in found.items()}
        about = header("python -m benchmarks.public_defaults", cell["seed"])
        with ROWS.open("a") as file:
            file.write(json.dumps({**cell, "rate": rate, **found, **about}, allow_nan=False) + "\n")
        print(cell, found, flush=True)


Runs = dict[int, dict[float, float]]
"""Of one model and optimizer: seed -> factor -> loss."""


def complete(end: int) -> dict[tuple[str, str], Runs]:
    """Model and optimizer -> the loss after so many steps, of the seeds that have run at all three rates."""
    found: dict[tuple[str, str], Runs] = {}
    for row in rows():
        value = row[f"loss_{end}"]
        own = found.setdefault((row["model"], row["optimizer"]), {}).setdefault(row["seed"], {})
        own[row["factor"]] = math.inf if value is None else value
    return {key: {seed: own for seed, own in runs.items() if len(own) == len(FACTORS)} for key, runs in found.items()}


def summary(runs: Runs, seeds: set[int]) -> tuple[float, float]:
    """The loss at the default rate, and at the best of the three, each as a mean over these seeds."""
    means = {factor: statistics.fmean(runs[seed][factor] for seed in seeds) for factor in FACTORS}
    return means[1.0], min(means.values())


def table() -> str:
    """For every model and optimizer the loss at its default rate and at its best of three; who is ahead of AdamW.

    An optimizer is compared with AdamW on the seeds that both have; their number stands in brackets.
    """
    lines = [
        "# Default rates on public models",
        "",
        "Written by `python -m benchmarks.public_defaults --table` from [rows.jsonl](rows.jsonl); the protocol is in",
        "`benchmarks/public_defaults.py`. Loss at the default rate, loss at the best of three rates, number of seeds.",
        'The rule was chosen on half A and torch\'s own start. "Scion, radius 1" is the earlier rule.',
    ]
    for end in (EARLY, STEPS):
        found, counts = complete(end), []
        lines += ["", f"| {end} steps | " + " | ".join(OPTIMIZERS) + " |", "|---" * (len(OPTIMIZERS) + 1) + "|"]
        for title, half in (("Half A", HALF_A), ("Half B", HALF_B), ("torch's own start", TORCH_START)):
            lines += [
                f"| {model} | " + " | ".join(cell(found.get((model, name), {})) for name in OPTIMIZERS) + " |"
                for model in half
            ]
            counts += [f"- {title}, {name}: {ahead(found, half, name)}" for name in list(OPTIMIZERS)[1:]]
        lines += ["", f"At most AdamW's loss after {end} steps:", "", *counts]
    names = ("AdamW", "Scion")
    lines += ["", "Best of the three rates, by the mean over the seeds that ran at all of them:", ""]
    lines += ["| model | " + " | ".join(f"{name}, {end} steps" for name in names for end in (EARLY, STEPS)) + " |"]
    lines += ["|---" * 5 + "|"]
    losses = {end: complete(end) for end in (EARLY, STEPS)}
    for model in (*HALF_A, *HALF_B, *TORCH_START):
        best = [best_rate(losses[end].get((model, name), {}), name) for name in names for end in (EARLY, STEPS)]
        lines += [f"| {model} | " + " | ".join(best) + " |"]
    return "\n".join(lines) + "\n"


def best_rate(runs: Runs, name: str) -> str:
    """The rate of the lowest mean loss over the seeds; nothing without runs."""
    if not runs:
        return ""
    means = {factor: statistics.fmean(by_factor[factor] for by_factor in runs.values()) for factor in FACTORS}
    return f"{OPTIMIZERS[name][1] * min(means, key=means.__getitem__):.2g}"


def cell(runs: Runs) -> str:
    """What the table shows of one model and optimizer; nothing without a seed that has run at all rates."""
    if not runs:
        return ""
    default, best = summary(runs, set(runs))
    return f"{default:.3g}, {best:.3g} ({len(runs)})"


def ahead(found: dict[tuple[str, str], Runs], half: tuple[str, ...], name: str) -> str:
    """On how many models an optimizer is at most at AdamW's loss, on the seeds that both have."""
    default = best = count = 0
    for model in half:
        own, other = found.get((model, name), {}), found.get((model, "AdamW"), {})
        if seeds := own.keys() & other.keys():
            pairs = list(zip(summary(own, seeds), summary(other, seeds), strict=True))
            default += pairs[0][0] <= pairs[0][1]
            best += pairs[1][0] <= pairs[1][1]
            count += 1
    return f"{default} at the default rate, {best} at the best of three, of {count} models"


def main() -> None:
    """Run the protocol, or a part of it, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the table of the finished runs and end")
    parser.add_argument("--models", nargs="*", default=[*HALF_A, *TORCH_START, *HALF_B], help="names of models")
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), help="names of optimizers")
    options = parser.parse_args()
    if not options.table:
        run(options.models, options.optimizers)
    ROWS.with_name("table.md").write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
