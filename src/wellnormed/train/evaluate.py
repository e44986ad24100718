"""The evaluation of a trained model: its loss over a split, and text that it writes."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.data.characters import decode, encode
from wellnormed.data.tokenizers import tokenizer_of
from wellnormed.models.files import Model, read_config
from wellnormed.propagation.capture import capture
from wellnormed.propagation.program import program_of

TOKENS_AT_ONCE = 8192
"""Enough to keep a machine busy, little enough for the memory of a small one."""


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, length: int) -> float:
    """Mean cross entropy, in nats a token, over the non-overlapping windows of `length` tokens of a split (int64).

    Every token but the first is predicted once, the last window being shorter. The model maps integers `(B, T)` to
    logits `(B, T, symbols)`; call `eval` where modes differ.
    """
    if len(tokens) < 2:
        raise ValueError(f"the split has {len(tokens)} tokens, but one prediction needs 2; use a longer text")
    device = next(model.parameters()).device
    count = len(tokens) - 1
    whole = count // length * length
    at_once = length * max(1, TOKENS_AT_ONCE // length)
    total = 0.0
    # whole windows, so many at once, and what is left
    for start, stop in pairwise(sorted({*range(0, whole, at_once), whole, count})):
        logits = model(tokens[start:stop].reshape(-1, min(length, stop - start)).to(device))
        targets = tokens[start + 1 : stop + 1].to(device)
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"))
    return total / count


@torch.no_grad()
def sample(
    model: Model, prompt: Tensor, count: int, generator: torch.Generator | None = None, temperature: float = 1.0
) -> Tensor:
    """A prompt of at least one token (int64) and `count` more; the model sees the last `config.length` tokens.

    The captured program, which a certificate is of, runs at its own length; a shorter prompt stands at the
    beginning, since no token sees those behind it. The generator, on the CPU, decides the draws. The temperature
    divides the logits; 0 takes the likeliest token.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one character")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and not negative; 0 takes the likeliest token")
    if not count:
        return prompt
    device, length = next(model.parameters()).device, model.config.length
    program = program_of(capture(model, torch.zeros(1, length, dtype=torch.long, device=device)))
    for _ in range(count):
        seen = prompt[-length:]
        tokens = nn.functional.pad(seen, (0, length - len(seen)))
        logits = program(tokens[None].to(device))[0, len(seen) - 1].float().cpu()
        if temperature == 0:
            drawn = logits.argmax()[None]
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        prompt = torch.cat([prompt, drawn])
    return prompt


def text_coder(folder: str | Path) -> tuple[Callable[[str], Tensor], Callable[[Tensor], str]]:
    """From texts to tokens of a folder's model, int64, and back; a `ValueError` if the folder does not say how."""
    text = read_config(folder).get("text", {})
    if "tokenizer" in text:
        tokenizer = tokenizer_of(text["tokenizer"], text.get("symbols"))
        return (
            lambda prompt: torch.from_numpy(tokenizer.encode(prompt).astype(np.int64)),
            lambda tokens: tokenizer.decode(tokens.tolist()),
        )
    if (symbols := text.get("symbols")) is None:
        raise ValueError(
            f"{Path(folder) / 'config.json'} does not say which characters the tokens are; export it with symbols=..."
        )
    return lambda prompt: encode(prompt, symbols), lambda tokens: decode(tokens, symbols)
