"""The parts of a language run before its first step: random generators, vocabulary, and the model on the ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from wellnormed.data.corpus import Corpus
from wellnormed.matrix.msign import multiplies_bfloat16
from wellnormed.models.files import Model
from wellnormed.models.nanogpt import NanoGPT
from wellnormed.train.config import SEED, TrainConfig
from wellnormed.train.ranks import Ranks

MULTIPLE = 64
"""Vocabularies of tokens are rounded up to a multiple of it, for which products on GPUs are fast."""


def named_generators(seed: int) -> dict[str, torch.Generator]:
    """One generator for each use, so that more draws for one never move another."""
    allowed, must = SEED
    if not allowed(seed):
        raise ValueError(f"seed={seed} must {must}; choose another (on the command line: --seed)")
    names = ("initial weights", "order of the data", "sample", "lower bound")
    return {name: torch.Generator().manual_seed(seed * len(names) + i) for i, name in enumerate(names)}


def over_ranks(model: Model, config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Any]:
    """Spread a model over the ranks; return the module to call for a loss, and the group that holds copies, if any."""
    layers = list(blocks(model))
    if config.recompute:
        for block in layers:
            block.forward = partial(_recomputed, block.forward)
    if config.compile:
        for block in layers:
            block.compile()
    if ranks.world == 1:
        return model, None
    if config.parallel == "ddp":
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids), torch.distributed.group.WORLD
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16 if config.precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for part in (*layers, model):
        fully_shard(part, mp_policy=policy)
    return model, None


def blocks(model: Model) -> Iterator[nn.Module]:
    """The layers of a model that are alike and hold most of its weights."""
    all_layers: Any = model.blocks if isinstance(model, NanoGPT) else model.layers
    return (layer for layer in all_layers if any(True for _ in layer.parameters()))


def with_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """The run with a model for the tokens of the data, and some more that never occur; refuses one for others."""
    multiple = MULTIPLE if corpus.symbols is None else 1
    size = -(-corpus.vocabulary // multiple) * multiple
    if (asked := config.model.vocabulary_size) not in (size, type(config.model)().vocabulary_size):
        raise ValueError(
            f"model.vocabulary_size={asked} cannot be chosen, for the data has {corpus.vocabulary} tokens, which are "
            f"rounded up to {size}; leave it out (on the command line: --model.vocabulary-size)"
        )
    return replace(config, model=replace(config.model, vocabulary_size=size))


def with_precision(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The run with the precision that "auto" means on these ranks: bfloat16 only where all multiply it natively."""
    native = all(ranks.gather(multiplies_bfloat16(ranks.device.type)))
    return replace(config, precision="bfloat16" if native else "float32") if config.precision == "auto" else config


def _recomputed(forward: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Activation checkpointing in a function of this package: torch.compile enters none that begins in torch's own."""
    return cast(Tensor, checkpoint(forward, *arguments, use_reentrant=False))


def flops_per_token(model: Model, length: int) -> int:
    """Floating-point operations of products, forward and backward, for one token of a window."""
    device = next(model.parameters()).device
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):  # which is made of products that are counted
        model(torch.zeros(1, length, dtype=torch.long, device=device))
    return 3 * counter.get_total_flops() // length
