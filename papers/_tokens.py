"""Language models on tokens, for the experiments: their texts, and the results of a trained one."""

import lzma
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers import as_published
from papers._resumed import fit_resumed
from papers.lipsformer import LipsFormer, lipsformer_bound_as_published
from wellnormed.certificates import Certificate
from wellnormed.certificates.observing import summary
from wellnormed.data._download import places
from wellnormed.data.corpus import Corpus, load_corpus
from wellnormed.data.shards import Tokens
from wellnormed.data.tokenizers import tokenizer_of
from wellnormed.models.gpt import GPT
from wellnormed.train.config import TrainConfig
from wellnormed.train.finish import certificate_of
from wellnormed.train.language import LanguageTask
from wellnormed.train.presets import Size, token_preset
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import blocks, with_vocabulary
from wellnormed.train.task import DivergedError, fit

BOOKS = {"train": "books/train100.txt.xz", "validation": "books/val.txt.xz"}
"""In `$WELLNORMED_DATA` or the cache: English books, between which a line `<|endoftext|>` stands."""
MOST_BYTES = 32 * 2**20
"""Bytes of the books that are read: no run on a CPU gets further."""


@cache
def byte_corpus() -> Corpus:
    """Bytes of the books where they are, else of Shakespeare."""
    paths = {part: next((p for p in places(name) if p.exists()), None) for part, name in BOOKS.items()}
    found = {part: path for part, path in paths.items() if path is not None}
    if found.keys() != paths.keys():
        return load_corpus()
    tokens = {}
    for part, path in found.items():
        with lzma.open(path) as file:
            content = file.read(MOST_BYTES).replace(b"\n<|endoftext|>\n", b"\0")
        tokens[part] = Tokens([np.frombuffer(content, np.uint8)], [str(path)])
    return Corpus("books as bytes", "bytes", tokenizer_of("bytes").vocabulary, tokens["train"], tokens["validation"])


def corpus_of(size: Size) -> Corpus:
    """Bytes for the smallest models, GPT-2's tokens of FineWeb for the others."""
    return byte_corpus() if size == "1m" else load_corpus(token_preset(size).data)


def byte_text(cell: Any) -> str:
    """The name of `byte_corpus`, which a cell reads."""
    return byte_corpus().name


def token_task(config: TrainConfig, corpus: Corpus, device: torch.device) -> LanguageTask:
    """The training of a run, in this process alone."""
    return LanguageTask(with_vocabulary(config, corpus), corpus, Ranks(0, 1, device))


@torch.no_grad()
def activations(task: LanguageTask) -> dict[str, float | None]:
    """The largest entry and attention logit that `LanguageTask.observe` sees, and what LT's code records there.

    That is of the residual stream and the logits alone: the largest entry with its sign, and the largest RMS.
    """
    largest, sizes = [], []

    def keep(_module: torch.nn.Module, _inputs: Any, x: torch.Tensor) -> None:
        largest.append(float(x.max()))
        sizes.append(float(x.float().square().mean(-1).amax().sqrt()))

    hooks = [part.register_forward_hook(keep) for part in (*blocks(task.model), task.model)]
    try:
        seen = summary(task.observe())
    finally:
        for hook in hooks:
            hook.remove()
    return {"largest_logit": None} | seen | {"largest_of_stream": max(largest), "largest_rms_of_stream": max(sizes)}


def results(config: TrainConfig, corpus: Corpus, device: torch.device, folder: Path | None = None) -> dict[str, Any]:
    """Loss, accuracy, bounds and the largest activations of a trained model; the step at which it diverged if it did.

    Products are in the precision of the config until the model is trained, and then in float32. With a folder, a run
    that was stopped goes on from what it left there.
    """
    task = token_task(config, corpus, device)
    try:
        fit(task) if folder is None else fit_resumed(task, folder)
        task.config = replace(task.config, precision="float32")
        found: dict[str, Any] = task.evaluate()
    except DivergedError as error:
        return {"diverged_at": task.step, "why": str(error)}
    if not math.isfinite(found["validation_loss"]):
        return {"diverged_at": task.step, "why": "the validation loss is not finite"}
    found |= activations(task)
    model = task.copy(task.whole_weights())
    certificate = certificate_of(model, config.attack_steps, task)
    if isinstance(certificate, Certificate):
        found["log10_lipschitz"] = certificate.rms_lipschitz.log10
        if (gain := certificate.rms_lower_bound) is not None:
            found["lower_bound"] = gain
    else:
        found["refused"] = certificate
    if isinstance(model, GPT):
        norms = found["norms"] = as_published.whole_norms(model)
        for key, whether in (("log10_as_published", False), ("log10_with_equation_20", True)):
            found[key] = as_published.transformer(model, whether, norms) + math.log10(model.config.logit_scale)
    elif isinstance(model, LipsFormer):
        found["log10_as_published"] = lipsformer_bound_as_published(model)
    return found
