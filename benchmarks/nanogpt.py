"""The unconstrained peer: nanoGPT's documented CPU run on the same text, split and evaluation as our `cpu` preset.

Four pre-norm blocks of width 128 with 4 heads, context 64, batches of 12, 2,000 steps of AdamW (learning rate 1e-3
with 100 steps of warm-up and cosine decay to 1e-4, betas 0.9 and 0.99, weight decay 0.1 on matrices, clipping at
1.0), no dropout, no biases, tied embedding: the settings of nanoGPT's README, built from torch's own layers.

    python -m benchmarks.nanogpt --output results/nanogpt.json
"""

import argparse
import time
from pathlib import Path

import torch

from papers._nanogpt import NanoGPTTask, PlainGPT
from papers.characters import validation_loss
from papers.header import header, write_result
from wellnormed.data import load_shakespeare
from wellnormed.train.task import fit

LENGTH, WIDTH, HEADS, BLOCKS, BATCH, STEPS = 64, 128, 4, 4, 12, 2000


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
    model = PlainGPT(len(text.symbols), LENGTH, WIDTH, HEADS, BLOCKS)
    task = NanoGPTTask(model, text, steps=STEPS, length=LENGTH, batch=BATCH, seed=options.seed)
    described = header(f"python -m benchmarks.nanogpt --seed {options.seed}", options.seed)
    start = time.perf_counter()

    def watch(task: NanoGPTTask, loss: float) -> None:
        if task.step % 250 == 1:
            print(f"step {task.step - 1:5}  loss {loss:.4f}  {time.perf_counter() - start:6.1f} s", flush=True)

    fit(task, watch)
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
