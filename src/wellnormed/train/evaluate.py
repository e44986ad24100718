"""What a trained model is worth: loss over a split, and text."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.models.files import Model

TOKENS_AT_ONCE = 8192
"""Enough to keep a machine busy, little enough for the memory of a small one."""


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, length: int, windows: int | None = None) -> float:
    """Mean cross entropy, in nats a token, over non-overlapping windows.

    The windows cover the split: every token but the first is predicted once, the last window being shorter.

    Args:
        model: Integers `(B, T)` -> logits `(B, T, symbols)`; call `eval` where modes differ (ours do not).
        tokens: One split, int64, at least two tokens.
        length: Tokens of a window.
        windows: Only so many, from the start; None for all.
    """
    if len(tokens) < 2:
        raise ValueError(f"the split has {len(tokens)} tokens, but one prediction needs 2; use a longer text")
    batch = max(1, TOKENS_AT_ONCE // length)
    count = (len(tokens) - 1) // length
    if windows is not None:
        count = min(count, windows)
    inputs, targets = (tokens[start : start + count * length].view(-1, length) for start in (0, 1))
    pieces = list(zip(inputs.split(batch), targets.split(batch), strict=True)) if count else []
    rest = tokens[count * length :]
    if windows is None and len(rest) > 1:
        pieces.append((rest[None, :-1], rest[None, 1:]))
    return _mean_loss(model, pieces)


@torch.no_grad()
def loss_as_published(model: nn.Module, tokens: Tensor, length: int, windows: int = 1280) -> float:
    """The loss as LT's released code reads it: over windows that start one token apart, from the first token on.

    LT is Training Transformers with Enforced Lipschitz Bounds. Its 1,280 windows of 256 see the first 1,536 characters
    of the validation split and no others, so this is no estimate of the loss over the split.

    Args:
        model: As for `validation_loss`, which has the other arguments too.
        tokens: One split, of at least `windows + length` tokens.
        length: Tokens of a window.
        windows: How many.
    """
    parts = tokens[: windows + length].unfold(0, length + 1, 1).split(max(1, TOKENS_AT_ONCE // length))
    return _mean_loss(model, [(part[:, :-1], part[:, 1:]) for part in parts])


def _mean_loss(model: nn.Module, pieces: list[tuple[Tensor, Tensor]]) -> float:
    device = next(model.parameters()).device
    total, seen = 0.0, 0
    for x, y in pieces:
        logits = model(x.to(device))
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), y.to(device).flatten(), reduction="sum"))
        seen += y.numel()
    return total / seen


@torch.no_grad()
def sample(
    model: Model, prompt: Tensor, count: int, generator: torch.Generator | None = None, temperature: float = 1.0
) -> Tensor:
    """A prompt of at least one token (int64) and `count` more; the model sees the last `config.length` tokens.

    Args:
        model: The model.
        prompt: What to continue.
        count: How many tokens to add.
        generator: Source of the draws, on the CPU.
        temperature: Divides the logits; 0 takes the likeliest token.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one character")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and not negative; 0 takes the likeliest token")
    device = next(model.parameters()).device
    for _ in range(count):
        logits = model(prompt[None, -model.config.length :].to(device))[0, -1].float().cpu()
        if temperature == 0:
            drawn = logits.argmax()[None]
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        prompt = torch.cat([prompt, drawn])
    return prompt
