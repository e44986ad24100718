"""The unconstrained peer: nanoGPT's documented CPU run on the same text, split and evaluation as our `cpu` preset.

Four pre-norm blocks of width 128 with 4 heads, context 64, batches of 12, 2,000 steps of AdamW (learning rate 1e-3
with 100 steps of warm-up and cosine decay to 1e-4, betas 0.9 and 0.99, weight decay 0.1 on matrices, clipping at
1.0), no dropout, no biases, tied embedding: the settings of nanoGPT's README, built from torch's own layers.

    python benchmarks/nanogpt.py --output results/nanogpt.json
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellnormed.data import load_shakespeare
from wellnormed.experiments._header import header, write_result
from wellnormed.train.evaluate import validation_loss

LENGTH, WIDTH, HEADS, BLOCKS, BATCH, STEPS = 64, 128, 4, 4, 12, 2000


class PlainGPT(nn.Module):
    """A decoder-only transformer with layer norms, as nanoGPT has it."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, nn.LayerNorm(WIDTH, bias=False), enable_nested_tensor=False)
        self.apply(self._initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "linear2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * BLOCKS))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.positions.weight[:length]
        return F.linear(self.blocks(x, mask=mask, is_causal=True), self.tokens.weight)


def learning_rate(step: int) -> float:
    """Warm-up, then cosine decay."""
    if step < 100:
        return 1e-3 * (step + 1) / 101
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / (STEPS - 100))) * 9e-4


def main() -> None:
    """Train, evaluate, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    text = load_shakespeare()
    model = PlainGPT(len(text.symbols))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.99),
    )
    generator = torch.Generator().manual_seed(options.seed)
    described = header(f"python benchmarks/nanogpt.py --seed {options.seed}", options.seed)
    start = time.perf_counter()
    for step in range(STEPS):
        starts = torch.randint(len(text.train) - LENGTH, (BATCH,), generator=generator)
        windows = text.train[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        if step % 250 == 0:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - start:6.1f} s", flush=True)
    seconds = time.perf_counter() - start
    results = {
        **described,
        "runs": 1,
        "source": text.source,
        "steps": STEPS,
        "training_tokens": STEPS * BATCH * LENGTH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation_loss": validation_loss(model.eval(), text.validation, LENGTH),
        "training_seconds": seconds,
    }
    print(f"validation loss {results['validation_loss']:.4f}, {seconds:.0f} s")
    if options.output:
        write_result(options.output, results)


if __name__ == "__main__":
    main()
