"""Predictions that no machine can change: a model of a proved constant beside a GPT-2 with LayerNorms.

Both train on Tiny Shakespeare as `wellnormed train` does: 2,000 steps of 12 windows of 64 characters, here in float32.
The first is that command's preset cpu at a proved 10. The second is GPT-2 of Hugging Face at about its size, by
`wn.Scion` at its default rate; it is measured as it is, and with floors under its LayerNorms (`wn.calibrate`). Weights
are kept in `runs/settled`.

Of 600 windows of the validation split it is counted which predictions are settled (`Certificate.settled`), and which
are those of the real function (`against="real"`); and which differ from those in float64: in bfloat16, in float32, and
in float32 with one window at a time on two threads. The recipe is a forward in float32, and one in float64 of the
windows with a prediction that may not be the real one: `forwards` is the processor time of both over the first's.

    python -m benchmarks.settled
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellnormed as wn
from papers.header import Stored
from wellnormed.certificates import Arithmetic, Certificate
from wellnormed.certificates.orders import most_lanes
from wellnormed.data.corpus import load_corpus
from wellnormed.train.environment import threads
from wellnormed.train.language import LanguageTask
from wellnormed.train.presets import PRESETS
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import with_vocabulary
from wellnormed.train.task import fit

OUTPUT, KEPT = Path("results/settled.json"), Path("runs/settled")
TOKENS, AT_ONCE, SEED = 38_400, 64, 0
PROVED, TWIN, CALIBRATED = "a proved constant of 10", "GPT-2 with LayerNorms", "GPT-2 with LayerNorms, calibrated"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
STATED = "float32, partial sums"
OTHERWISE = "float32, one window at a time, two threads"


class GPT2(nn.Module):
    """GPT-2 of Hugging Face, from tokens `(B, T)` to logits `(B, T, V)`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False}
        drop = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        self.gpt = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **size, **drop))
        self.layers = self.gpt.transformer.h

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        return self.gpt(input_ids=tokens).logits


class OfTwin(LanguageTask):
    """The training of the GPT-2, on the windows of the other model."""

    def prepared(self, model: Any) -> Any:
        """GPT-2 in the place of the preset's model."""
        torch.manual_seed(SEED)
        return GPT2(self.config.model.vocabulary_size)


def task_of(name: str) -> LanguageTask:
    """The run of a model, before its first step."""
    config = replace(PRESETS["cpu"], precision="float32", seed=SEED)
    corpus = load_corpus(config.data, "tiny-shakespeare")
    alone = Ranks(0, 1, torch.device("cpu"))
    kind, optimizer_of = (LanguageTask, None) if name == PROVED else (OfTwin, lambda model, *_: (wn.Scion(model), None))
    return kind(with_vocabulary(config, corpus), corpus, alone, optimizer_of)


def trained(name: str) -> LanguageTask:
    """The run of a model after its last step, which is done once."""
    task, path = task_of(name), KEPT / f"{'proved' if name == PROVED else 'twin'}.pt"
    if not path.exists():
        fit(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(task.model.state_dict(), path)
    task.model.load_state_dict(torch.load(path))
    if name == CALIBRATED:
        wn.calibrate(task.model, task.corpus.train.windows(torch.arange(300) * 3000, task.config.model.length))
    return task


def executions(
    single: nn.Module, example: Tensor, **settings: Any
) -> Iterator[tuple[str, nn.Module, Tensor, Certificate]]:
    """The model in three dtypes, with an example and its certificate for sums in any order.

    Then in float32 with the order in which this machine adds up all linear maps, if it keeps one that can be stated.
    """
    for dtype, kind in DTYPES.items():
        model = copy.deepcopy(single).to(kind)
        x = example.to(kind) if example.is_floating_point() else example
        yield dtype, model, x, wn.certify(model, x, **settings)
    certificate = wn.certify(single, example, **settings)
    shapes = {name: each.shape for name, each in [*single.state_dict().items(), *certificate.computed.items()]}
    lanes, _ = most_lanes(certificate.rows, shapes.__getitem__)
    if lanes > 1:
        stated = Arithmetic(lanes=lanes)
        yield STATED, single, example, wn.certify(single, example, arithmetic=stated, **settings)


@torch.no_grad()
def logits_of(model: nn.Module, windows: Tensor, at_once: int = AT_ONCE, on: int = 1) -> Tensor:
    """The logits of windows, so many at a time, on so many threads."""
    with threads(on):
        return torch.cat([model(part) for part in windows.split(at_once)])


def seconds(call: Callable[[], object]) -> float:
    """The least processor time of five calls."""
    taken = []
    for _ in range(5):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def measure(name: str) -> dict[str, Any]:
    """Loss, bounds of rounding, shares of settled and of changed predictions, and what the recipe proves and takes."""
    task = trained(name)
    loss, single = task.evaluate(last=True)["validation_loss"], task.model.eval()
    windows = task.validation_windows(TOKENS)
    found: dict[str, dict[str, Any]] = {each: {} for each in ("forward_error", "no_bound_at", "settled", "real")}
    logits, masks, taken = {}, {}, {}
    for execution, model, _, certificate in executions(single, windows[:1], margins=True):
        logits[execution] = logits_of(model, windows)
        taken[execution] = seconds(partial(logits_of, model, windows[:AT_ONCE]))
        error = found["forward_error"][execution] = certificate.forward_error
        found["no_bound_at"][execution] = certificate.unbounded_at
        for key, against in (("settled", "machines"), ("real", "real")):
            nothing = torch.zeros(windows.shape, dtype=torch.bool)
            masks[execution] = nothing if error is None else certificate.settled(logits[execution], against)
            found[key][execution] = float(masks[execution].double().mean())
    logits[OTHERWISE] = logits_of(single, windows, at_once=1, on=2)
    true = logits["float64"].argmax(-1)
    changed = {each: of.argmax(-1) != true for each, of in logits.items() if each != "float64"}
    for each, mask in masks.items():
        if each.startswith("float32") and bool((mask & changed[each]).any()):
            raise ValueError(f"{name}: a settled prediction changed in {each}; please report it")
    moved = {each: (of.double() - logits["float64"]).norm(dim=-1).max() for each, of in logits.items()}
    again = ~masks["float32"].all(1)
    return {
        "parameters": sum(p.numel() for p in single.parameters()),
        "validation_loss": loss,
        **found,
        "changed": {each: float(where.double().mean()) for each, where in changed.items()},
        "error_found": {each: float(most) for each, most in moved.items()},
        "again": float(again.double().mean()),
        "proved": float((masks["float32"] | masks["float64"]).double().mean()),
        "forwards": 1 + float(again.double().mean()) * taken["float64"] / taken["float32"],
    }


def main() -> None:
    """Measure what has no row yet."""
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.settled", tokens=TOKENS)
    for name in (PROVED, TWIN, CALIBRATED):
        if not stored.has(model=name):
            stored.add({"model": name, **measure(name)} | stored.commit)


if __name__ == "__main__":
    main()
