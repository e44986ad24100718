"""The parts of a language run before its first step: random generators, vocabulary, and the model on the ranks."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellnormed.data.corpus import Corpus
from wellnormed.matrix.msign import multiplies_bfloat16
from wellnormed.models.files import BUILDERS, Model, build
from wellnormed.models.nanogpt import NanoGPT
from wellnormed.nn.starting import Fill, own_seed
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import cut_of, local
from wellnormed.train.config import SEED, TrainConfig
from wellnormed.train.ranks import Ranks

MULTIPLE = 64
"""Vocabularies of tokens are rounded up to a multiple of this, which makes products on GPUs fast."""


def named_generators(seed: int) -> dict[str, torch.Generator]:
    """One generator for each use, so that more draws for one never move another."""
    if not SEED.holds(seed):
        raise ValueError(f"seed={seed} must {SEED.must} (on the command line: --seed)")
    names = ("initial weights", "order of the data", "sample", "lower bound")
    return {name: torch.Generator().manual_seed(seed * len(names) + i) for i, name in enumerate(names)}


def built(
    config: TrainConfig, generator: torch.Generator, ranks: Ranks, prepared: Callable[[Model], Model] | None
) -> tuple[Model, nn.Module, Any]:
    """The model on the ranks, the module to call for a loss, and the group of ranks with copies.

    A model whose weights are cut is never whole on any rank, if it has `starts` and no `prepared` that reads its first
    weights: it is made without values and cut, and then its weights are filled one after the other.
    """
    says_starts = hasattr(BUILDERS[type(config.model)], "starts")
    in_parts = ranks.world > 1 and config.parallel == "fsdp" and prepared is None and says_starts
    with torch.device("meta") if in_parts else nullcontext():
        model = build(config.model, None if in_parts else generator)
    if in_parts and (buffers := [name for name, _ in model.named_buffers()]):  # `to_empty` does not fill them
        raise ValueError(
            f"{type(model).__name__} has the buffer {buffers[0]!r}, which `starts` does not fill; compute it in "
            "`forward`, or leave `starts` out so that every process makes the whole model"
        )
    if not in_parts:
        model = (prepared(model) if prepared else model).to(ranks.device)
    runner, group = over_ranks(model, config, ranks)
    if in_parts:
        model.to_empty(device=ranks.device)
        start_in_parts(model, generator, ranks.world)
    return model, runner, group


@torch.no_grad()
def start_in_parts(model: Any, generator: torch.Generator, world: int) -> None:
    """Fill a model that is cut over processes as `start_` fills a whole one; a collective call.

    Every process draws all small weights, one after the other, and keeps its parts. Each large weight has an owner,
    which fills one weight at a time.
    """
    small: set[Tensor] = set()
    jobs: list[tuple[Tensor, Job]] = []
    for parameter, fill in model.starts():
        if (seed := own_seed(parameter, generator)) is None:
            whole, cut = torch.empty(parameter.shape, dtype=parameter.dtype), cut_of(parameter, "a weight")
            fill(whole, generator)
            assert cut is not None  # fully_shard cuts every parameter
            local(parameter).copy_(cut.parts(whole)[cut.group.rank()])
            small.add(parameter)
        else:
            jobs.append((parameter, Job(([parameter],), partial(_filled, fill, seed))))
    assert {*small, *(parameter for parameter, _ in jobs)} == set(model.parameters()), "every weight has a start"
    placement = Placement(dict(model.named_parameters()))
    for first in range(0, len(jobs), world):
        some = jobs[first : first + world]
        for (parameter, _), ([part],) in zip(some, placement.run(job for _, job in some), strict=True):
            local(parameter).copy_(local(part))


def _filled(fill: Fill, seed: int, weights: Tensor) -> tuple[Tensor]:
    """A batch of one weight, filled."""
    fill(weights[0], torch.Generator().manual_seed(seed))
    return (weights,)


def over_ranks(model: Model, config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Any]:
    """Spread a model over the ranks; return the module to call for a loss, and the group of copies, if there is one."""
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
    """The repeated layers of a model, which have most of its weights."""
    all_layers: Any = model.blocks if isinstance(model, NanoGPT) else model.layers
    return (layer for layer in all_layers if any(True for _ in layer.parameters()))


def with_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """The config with the vocabulary of the data, rounded up for tokens; another stated vocabulary is refused."""
    multiple = MULTIPLE if corpus.symbols is None else 1
    size = -(-corpus.vocabulary // multiple) * multiple
    if (asked := config.model.vocabulary_size) not in (size, type(config.model)().vocabulary_size):
        raise ValueError(
            f"model.vocabulary_size={asked} cannot be chosen, for the data has {corpus.vocabulary} tokens, which are "
            f"rounded up to {size}; leave it out (on the command line: --model.vocabulary-size)"
        )
    return replace(config, model=replace(config.model, vocabulary_size=size))


def with_precision(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The config with "auto" replaced by a precision: bfloat16 only if all ranks multiply it natively."""
    native = all(ranks.gather(multiplies_bfloat16(ranks.device.type)))
    return replace(config, precision="bfloat16" if native else "float32") if config.precision == "auto" else config


def _recomputed(forward: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Activation checkpointing in a function of this package, since torch.compile skips functions of torch itself."""
    return cast(Tensor, checkpoint(forward, *arguments, use_reentrant=False))
