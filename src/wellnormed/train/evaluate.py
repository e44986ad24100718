"""Sampling of text from a trained model."""

from pathlib import Path

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE
from wellnormed.certificates import capture
from wellnormed.data.tokenizers import Tokenizer, tokenizer_of
from wellnormed.models.files import Model, read_config


@torch.no_grad()
def sample(
    model: Model, prompt: Tensor, count: int, generator: torch.Generator | None = None, temperature: float = 1.0
) -> Tensor:
    """Continue a prompt of at least one token (int64) by `count` tokens; the model sees the last `config.length`.

    The captured program, which a certificate is about, runs at its full length; a shorter prompt is padded at the end,
    which is allowed since no token sees later ones. The generator, on the CPU, decides the draws. The temperature
    divides the logits; 0 takes the likeliest token.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one character")
    require_numbers("", {"temperature": temperature}, NOT_NEGATIVE, "0 takes the likeliest token")
    if not count:
        return prompt
    device, length = next(model.parameters()).device, model.config.length
    program = capture(model, torch.zeros(1, length, dtype=torch.long, device=device))
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


def tokenizer_of_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a run's model; a `ValueError` for an exported model, whose folder has none."""
    text = read_config(folder).get("text")
    if text is None:
        raise ValueError(f"{folder} is an exported model, which does not store its characters; sample its run")
    return tokenizer_of(text.get("tokenizer", "characters"), text.get("symbols"))
