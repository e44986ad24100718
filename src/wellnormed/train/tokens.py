"""Training runs of language models on tokens, on one process or many."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import wellnormed.constraints as constraints
from wellnormed.data import TokenStream
from wellnormed.data.corpus import Corpus
from wellnormed.models.files import TokenModel, build, load_weights
from wellnormed.models.gpt import GPT
from wellnormed.models.nanogpt import NanoGPT
from wellnormed.norms import assign_norms
from wellnormed.optim import AdamWSettings, ConditionalGradient, Muon, Scion
from wellnormed.parallel.layout import local, whole
from wellnormed.train.characters import named_generators
from wellnormed.train.observe import Observed, largest_of, observed
from wellnormed.train.ranks import Ranks
from wellnormed.train.task import DivergedError, Task
from wellnormed.train.token_config import TokenTrainConfig
from wellnormed.train.weights import rate_factors, weight_constraints

MULTIPLE = 64
"""Vocabularies are rounded up to a multiple of it, which products on GPUs are fast for."""


class TokenTask(Task[TokenModel]):
    """Next tokens of the windows of a stream, for a model of integers `(B, T)` to logits `(B, T, V)`.

    The model is the same on every rank: a copy of it, or parts of its weights, as the config says. Its state is
    `state`, from which any number of ranks goes on.

    Args:
        config: The run. The vocabulary of its model must hold that of the corpus.
        corpus: What is read.
        ranks: The processes. One that is alone is a group of one.
        optimizer_of: Makes what moves and holds the weights, from the model, the config and the group of processes that
            hold copies of the weights, if there is one.
    """

    config_type: ClassVar[type[TokenTrainConfig]] = TokenTrainConfig
    """What the config of such a run is read as."""
    command: ClassVar[str] = "wellnormed.cli"
    """The module that continues such a run as a command."""
    notes: tuple[str, ...] = ()
    """What is said of the run when it begins, beside its size and its data."""

    def __init__(
        self, config: TokenTrainConfig, corpus: Corpus, ranks: Ranks, optimizer_of: "OptimizerOf | None" = None
    ) -> None:
        self.config, self.corpus, self.ranks, self.device = config, corpus, ranks, ranks.device
        self.generators = named_generators(config.seed)
        self.stream = TokenStream(
            corpus.train, config.batch, config.model.length, ranks.rank, ranks.world,
            seed=config.seed if config.shuffle else None,
        )  # fmt: skip
        if len(corpus.validation) <= config.model.length:
            raise ValueError(
                f"the validation split of {corpus.name} has {len(corpus.validation)} tokens, fewer than a window of "
                f"{config.model.length} and its target; use a longer text or a smaller --model.length"
            )
        read = min(len(corpus.validation), config.validation_tokens)
        corpus.validation.check(corpus.validation.read(0, read)[None], [0])  # now, and not after hours of training
        model = build(config.model, self.generators["initial weights"])
        self.flops_per_token = _flops(model, config.model.length)
        self.runner, group = self._spread(model := self.prepared(model).to(ranks.device))
        optimizer, held = (optimizer_of or build_optimizer)(model, config, group)
        super().__init__(model, optimizer, held, config.steps, self.generators["order of the data"])
        self.update_seconds: float | None = None
        """Of the optimizer's last step and its constraints, if it was `timed`."""
        self.timed = False
        optimizer.register_step_pre_hook(lambda *_: self._clock(begin=True))
        optimizer.register_step_post_hook(lambda *_: self._clock(begin=False))

    def prepared(self, model: TokenModel) -> TokenModel:
        """What is trained in the place of a model with its first weights; for subclasses."""
        return model

    def _spread(self, model: TokenModel) -> tuple[nn.Module, Any]:
        """The model over the ranks: what is called for a loss, and the group that holds copies, if any does."""
        config, blocks = self.config, list(blocks_of(model))
        if config.recompute:
            for block in blocks:
                block.forward = partial(_recomputed, block.forward)
        if config.compile:
            for block in blocks:
                block.compile()
        if self.ranks.world == 1:
            return model, None
        if config.parallel == "ddp":
            ids = [self.device.index] if self.device.type == "cuda" else None
            runner = nn.parallel.DistributedDataParallel(model, device_ids=ids)
            return runner, torch.distributed.group.WORLD
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = torch.bfloat16 if config.precision == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for part in (*blocks, model):
            fully_shard(part, mp_policy=policy)
        return model, None

    def batch_loss(self) -> Tensor:
        """Cross entropy of this rank's next windows, in nats a token."""
        return self._loss(next(self.stream))

    def advance(self) -> float:
        """One step of all ranks; see `Task.advance`."""
        # what a model draws depends on the step alone, so that a run goes on as if it had never stopped
        place = (self.config.seed * self.steps + self.step) * self.ranks.world + self.ranks.rank
        torch.manual_seed(place % 2**64)  # torch takes no larger seeds
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = self.config.momentum_at(self.step)
        try:
            return super().advance()
        except DivergedError as error:  # on all ranks at once, which share the loss and the sizes of gradients
            raise DivergedError(self.ranks.gather(str(error))[0]) from error

    def backward(self) -> float:
        """The gradient of the mean over all ranks' windows, of which so many are computed at once."""
        self.optimizer.zero_grad()
        windows = next(self.stream)
        parts = windows.split(self.config.micro_batch or len(windows))
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            with self._sending(number == len(parts) - 1):
                loss = self._loss(part) * (len(part) / len(windows))
                loss.backward()
            total += loss.detach()
        spoilt = torch.zeros(())
        if not isinstance(self.optimizer, ConditionalGradient):  # which refuses gradients by itself
            gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
            spoilt = sum((~gradient.isfinite()).sum() for gradient in gradients)
        loss, entries, *self.requests.agreed = self.ranks.sum(total, spoilt, *self.requests.own())
        if entries and math.isfinite(loss):
            raise DivergedError(
                f"step {self.step + 1}: a gradient holds NaN or infinity. No weight was changed; lower the learning "
                "rate (on the command line: --learning-rate)"
            )
        return loss / self.ranks.world

    def _sending(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged over the ranks with those of the last part, not before."""
        if self.ranks.world == 1:
            return nullcontext()
        if isinstance(self.runner, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else self.runner.no_sync()
        self.runner.set_requires_gradient_sync(last)  # pyrefly: ignore: fully_shard makes it an FSDPModule
        return nullcontext()

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.device)
        logits = self.logits(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """The model's answer, in the precision of the run."""
        half = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return self.runner(tokens)

    def rate_factor(self, step: int) -> float:
        """As the config's schedule says."""
        return self.config.rate_factor(step)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the first validation tokens, every one but the first predicted once; a collective call.

        Bits a byte of text as well, if the tokenizer can be had.
        """
        length, tokens = self.config.model.length, self.corpus.validation
        count = (min(len(tokens), self.config.validation_tokens) - 1) // length
        at_once = self.config.micro_batch or max(1, self.config.batch // self.ranks.world)
        rounds = -(-count // (at_once * self.ranks.world))  # the same on every rank, for each is a collective call
        stream = TokenStream(tokens, at_once * self.ranks.world, length, self.ranks.rank, self.ranks.world)
        token_bytes = self._token_bytes
        loss = correct = seen = text = 0.0
        self.model.eval()
        for number in range(rounds):
            first = (number * self.ranks.world + self.ranks.rank) * at_once
            windows = next(stream).to(self.device)
            logits = self.logits(windows[:, :-1]).float()
            own = max(0, min(at_once, count - first))  # the others fill the batch up
            logits, targets = logits[:own].flatten(0, 1), windows[:own, 1:].flatten()
            loss += float(F.cross_entropy(logits, targets, reduction="sum").double())
            correct += int((logits.argmax(-1) == targets).sum())
            seen += len(targets)
            text += 0 if token_bytes is None else int(token_bytes[targets.cpu()].sum())
        self.model.train()
        loss, correct, seen, text = self.ranks.sum(loss, correct, seen, text)
        found = {"validation_loss": loss / seen, "validation_accuracy": correct / seen}
        if text:
            found["bits_per_byte"] = loss / text / torch.log(torch.tensor(2.0)).item()
        return found

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """The length of every token; None, so that losses are in nats alone, if a rank lacks the tokenizer."""
        found: Tensor | None = None
        with suppress(ValueError):
            found = torch.from_numpy(self.corpus.require_tokenizer().token_bytes)
        return found if all(self.ranks.gather(found is not None)) else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every tensor that the next step depends on, whole or in parts, and what else it depends on."""
        weights, moments = self._content()
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        for name, entries in moments.items():
            tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entries.items()}
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values()), "optimizer state is made of tensors"
        if self.constraints is not None:
            tensors |= {f"constraints.{name}": tensor for name, tensor in self.constraints.state_dict().items()}
        groups = [group.get("steps", 0) for group in self.optimizer.param_groups]
        return tensors, {"step": self.step, "groups": groups, "stream": self.stream.state_dict()}

    def restore_state(self, read: Callable[[dict[str, Tensor]], dict[str, Any]]) -> None:
        """Continue from a `state`, whose tensors `read` fills in and whose other part it returns."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        tensors, _ = self.state()
        facts = read(tensors)
        weights, moments = self._content()
        own: dict[str, Any] = {name: tensors[f"model.{name}"] for name in weights}
        moments = {name: {key: tensors[f"optimizer.{name}.{key}"] for key in own} for name, own in moments.items()}
        content: Any = {"state": moments, "param_groups": self._groups}
        set_state_dict(self.model, self.optimizer, model_state_dict=own, optim_state_dict=content)
        if self.constraints is not None:
            prefix = "constraints."
            held = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            self.constraints.load_state_dict(held)
        for group, steps in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            group["steps"] = steps
        self.stream.load_state_dict(facts["stream"])
        self.step = facts["step"]
        if isinstance(self.runner, nn.parallel.DistributedDataParallel):
            # DDP adds gradients in another order from its second step on, which this is not to be the first of
            self._loss(torch.zeros(1, self.config.model.length + 1, dtype=torch.long)).backward()
            self.model.zero_grad()

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights, and the optimizer's tensors by the names of weights, as torch names them on any number of ranks."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, content = get_state_dict(self.model, self.optimizer)
        self._groups: Any = content["param_groups"]
        moments: Any = content["state"]
        return weights, moments

    def whole_weights(self) -> dict[str, Tensor]:
        """Every weight, assembled on the CPU of the first rank, and nothing on the others; a collective call."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            assembled = whole(tensor)
            if self.ranks.first:
                found[name] = assembled.cpu()
        return found

    def require_equal_copies(self) -> None:
        """Refuse ranks whose copies of a weight differ in a bit; a collective call."""
        if self.ranks.world == 1 or self.config.parallel != "ddp":
            return
        digests = {
            name: hashlib.sha256(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()
            for name, tensor in self.model.named_parameters()
        }
        others = self.ranks.gather(digests)
        for rank, other in enumerate(others):
            for name, digest in other.items():
                if digest != others[0][name]:
                    raise ValueError(
                        f"step {self.step}: {name!r} on rank {rank} is no longer what it is on rank 0; go on from a "
                        "checkpoint, and if it happens again look for a faulty device or report this run"
                    )

    def copy(self, weights: dict[str, Tensor]) -> TokenModel:
        """The model with these `whole_weights`, on the CPU and in eval mode."""
        model = build(self.config.model, torch.Generator().manual_seed(0))
        load_weights(model, weights, "the trained model")
        return model.eval()

    def observe(self) -> Observed:
        """The largest entries of every layer's result, and attention logits, on the first validation windows.

        As many windows as a step has, whatever the number of ranks, each of which looks at its part; a collective call.
        """
        length, tokens = self.config.model.length, self.corpus.validation
        share = self.config.batch // self.ranks.world
        numbers = (self.ranks.rank * share + torch.arange(share)) % ((len(tokens) - 1) // length)
        parts = tokens.windows(numbers * length, length).split(self.config.micro_batch or share)

        def call() -> None:
            for part in parts:
                self.logits(part.to(self.device))

        # compiled blocks know nothing of hooks
        with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
            return largest_of(self.ranks.gather(observed(self.model, call)))

    def _clock(self, begin: bool) -> None:
        if not self.timed:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.update_seconds = -now if begin else now + (self.update_seconds or 0.0)


OptimizerOf = Callable[
    [TokenModel, TokenTrainConfig, Any], tuple[torch.optim.Optimizer, constraints.Constraints | None]
]


def blocks_of(model: TokenModel) -> Iterator[nn.Module]:
    """The layers of a model that are alike and hold most of its weights."""
    layers = model.blocks if isinstance(model, NanoGPT) else model.layers
    return (layer for layer in layers if any(True for _ in layer.parameters()))


def build_optimizer(
    model: TokenModel, config: TokenTrainConfig, group: Any = None
) -> tuple[torch.optim.Optimizer, constraints.Constraints | None]:
    """The optimizer of a run, and the constraints that hold after each of its steps, if there are any.

    `group` is the processes that hold copies of the weights.
    """
    betas = (0.9, config.adamw_average)
    if config.optimizer == "adamw":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas)
    else:
        shared: dict[str, Any] = {
            "momentum": config.momentum, "nesterov": True, "weight_decay": config.weight_decay, "process_group": group,
        }  # fmt: skip
        if config.optimizer == "scion":
            factors = rate_factors(model, config) if isinstance(model, GPT) else {}
            norms = assign_norms(model, recipe="modular")
            optimizer = Scion(norms, config.learning_rate, radius=1.0, lr_factors=factors, **shared)
        else:
            adamw = AdamWSettings(lr=config.adamw_rate, betas=betas)
            optimizer = Muon(model, config.learning_rate, recipe="muon", adamw=adamw, **shared)
    if config.constraint == "none" or not isinstance(model, GPT):
        return optimizer, None
    norms = optimizer.assignment if isinstance(optimizer, Scion) else assign_norms(model, recipe="modular")
    return optimizer, constraints.constrain(optimizer, weight_constraints(model, config), norms)


def with_vocabulary(config: TokenTrainConfig, vocabulary: int) -> TokenTrainConfig:
    """The run with a model for so many tokens, and some more that never occur; refuses one that asks for others."""
    size = -(-vocabulary // MULTIPLE) * MULTIPLE
    if (asked := config.model.vocabulary_size) not in (size, type(config.model)().vocabulary_size):
        raise ValueError(
            f"model.vocabulary_size={asked} cannot be chosen, for the data has {vocabulary} tokens, which are rounded "
            f"up to {size}; leave it out (on the command line: --model.vocabulary-size)"
        )
    return replace(config, model=replace(config.model, vocabulary_size=size))


def _recomputed(forward: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Activation checkpointing in a function of this package: torch.compile enters none that begins in torch's own."""
    return cast(Tensor, checkpoint(forward, *arguments, use_reentrant=False))


def _flops(model: TokenModel, length: int) -> int:
    """Floating-point operations of products, forward and backward, for one token of a window."""
    device = next(model.parameters()).device
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):  # which is made of products that are counted
        model(torch.zeros(1, length, dtype=torch.long, device=device))
    return 3 * counter.get_total_flops() // length
