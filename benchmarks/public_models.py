"""Certificates of public models with random weights: each gets a constant, or is refused with one reason.

Models of Hugging Face's `transformers` with at most 4 layers and a width of at most 256, GPT-2 small as a whole, an
LSTM, and nanoGPT's `model.py`, whose path is an argument. Every certificate is proved again by the checker.

    python -m benchmarks.public_models nanoGPT/model.py
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import wellnormed as wn
from papers.header import header, write_result
from wellnormed.certificates import UncertifiableError

SEED = 0
OUTPUT = Path("results/public-models.json")
LEAST, MOST_SECONDS = 11, 60.0
"""Models that must end with a finite constant, and what each may take."""
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
Case = tuple[nn.Module, Any, str | None, float]


class LSTMClassifier(nn.Module):
    """Embedding, two bidirectional layers, mean over time, linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(256, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From integers `(batch, tokens)` to logits."""
        return self.output(self.lstm(self.embedding(tokens))[0].mean(1))


def nanogpt(path: Path) -> ModuleType:
    """The module `model.py`."""
    specification = importlib.util.spec_from_file_location("nanogpt_model", path)
    if specification is None or specification.loader is None:
        raise ValueError(f"{path} is not a Python file; pass nanoGPT's model.py")
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def cases(nanogpt_model: Path | None) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Name, and what makes a model, its example, the output to certify and the radius of the input."""
    import transformers as tf

    tokens = {"input_ids": torch.randint(0, 1000, (1, 16))}
    images = {"pixel_values": torch.randn(1, 3, 64, 64)}
    text = SIZES | {"vocab_size": 1000}

    def language(kind: str, **settings: Any) -> Callable[[], Case]:
        config = getattr(tf, f"{kind}Config")(**(text | {"use_cache": False} | settings))
        return lambda: (getattr(tf, f"{kind}ForCausalLM")(config), tokens, "logits", 1.0)

    def nano() -> Case:
        if nanogpt_model is None:
            raise ValueError("pass the path of nanoGPT's model.py")
        module = nanogpt(nanogpt_model)
        config = module.GPTConfig(block_size=64, vocab_size=1000, n_layer=4, n_head=4, n_embd=256, dropout=0.0)
        return module.GPT(config), tokens["input_ids"], 0, 1.0

    small = tf.GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=1000, use_cache=False)
    whole = tf.GPT2Config(use_cache=False)
    t5 = tf.T5Config(d_model=256, d_kv=32, d_ff=512, num_layers=4, num_heads=8, vocab_size=1000, use_cache=False)
    residual = tf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")
    convnext = tf.ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[1, 1, 1], num_stages=3)
    vision = tf.ViTConfig(**SIZES, image_size=64, patch_size=8)
    yield "nanoGPT", nano
    yield "GPT-2", lambda: (tf.GPT2LMHeadModel(small), tokens, "logits", 1.0)
    yield "GPT-2 small, whole", lambda: (tf.GPT2LMHeadModel(whole), tokens, "logits", 1.0)
    yield "Llama", language("Llama", num_key_value_heads=4)
    yield "BERT", lambda: (tf.BertModel(tf.BertConfig(**text)), tokens, "last_hidden_state", 1.0)
    decoder = {"decoder_input_ids": torch.randint(0, 1000, (1, 8))}
    yield "T5", lambda: (tf.T5Model(t5), tokens | decoder, "last_hidden_state", 2.0)
    yield "Phi-3", language("Phi3", pad_token_id=0)
    yield "Qwen3", language("Qwen3", num_key_value_heads=4, head_dim=32)
    yield "ViT", lambda: (tf.ViTModel(vision), images, "last_hidden_state", 1.0)
    yield "ResNet", lambda: (tf.ResNetForImageClassification(residual), images, "logits", 1.0)
    yield "ConvNeXt", lambda: (tf.ConvNextForImageClassification(convnext), images, "logits", 1.0)
    yield "LSTM classifier", lambda: (LSTMClassifier(), tokens["input_ids"], None, 2.0)
    yield "Mixtral", language("Mixtral", num_key_value_heads=4, num_local_experts=4)
    yield "Mamba", language("Mamba")


def measure(make: Callable[[], Case]) -> dict[str, Any]:
    """The constant of a model, or the reason of its refusal, with the time taken."""
    torch.manual_seed(SEED)
    model, example, output, radius = make()
    start = time.perf_counter()
    try:
        certificate = wn.certify(model.eval(), example, radius, output=output)
    except UncertifiableError as error:
        return {"refused": _without_paths(str(error)), "seconds": time.perf_counter() - start}
    certified = time.perf_counter()
    proved = wn.verify(certificate, model.state_dict())
    return {
        "log10_lipschitz": certificate.rms_lipschitz.log10,
        "radius": radius,
        "largest_logit": certificate.largest_logit,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": proved.rows,
        "seconds": certified - start,
        "seconds_of_the_checker": time.perf_counter() - certified,
    }


def _without_paths(message: str) -> str:
    """A refusal with file names in the place of paths, which differ between machines."""
    return " ".join(os.path.basename(word) if os.sep in word and ":" in word else word for word in message.split())


def main() -> None:
    """Certify all models, print a table, and fail if fewer than promised have a constant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", nargs="?", type=Path, help="nanoGPT's model.py; left out, that model is missing")
    parser.add_argument("--only", nargs="*", help="names of models")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, make in cases(options.nanogpt):
        if (options.only and name not in options.only) or (name == "nanoGPT" and options.nanogpt is None):
            continue
        results[name] = found = measure(make)
        shown = found.get("refused") or f"log10 L = {found['log10_lipschitz']:.2f}, {found['seconds']:.1f} s"
        print(f"{name}: {shown}", flush=True)
    certified = [name for name, found in results.items() if "refused" not in found]
    slow = [name for name, found in results.items() if found["seconds"] > MOST_SECONDS]
    print(f"{len(certified)} of {len(results)} models have a constant")
    if not options.only:
        command = "python -m benchmarks.public_models nanoGPT/model.py"
        write_result(OUTPUT, {**header(command, SEED), "runs": 1, "results": results})
        if len(certified) < LEAST or slow:
            raise SystemExit(f"{LEAST} models must have a constant, each in {MOST_SECONDS:.0f} s; too slow: {slow}")


if __name__ == "__main__":
    main()
