"""Training runs of language models, on characters or tokens, on one process or many."""

import hashlib
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.constraints as constraints
from wellnormed.certificates.observing import observed
from wellnormed.data.corpus import Corpus
from wellnormed.data.stream import RandomWindows, TokenStream
from wellnormed.models.files import Model, build, load_weights
from wellnormed.optim import ConditionalGradient
from wellnormed.parallel.layout import local, whole
from wellnormed.train.config import TrainConfig
from wellnormed.train.optimizer import build_optimizer
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import built, named_generators
from wellnormed.train.task import DivergedError, Schedule, Task

TOKENS_AT_ONCE = 8192
"""The tokens that an evaluation computes at once: enough to keep a machine busy, and few enough for a small memory."""
VALIDATION_WINDOWS = 128
"""Windows of the validation split that a checkpoint evaluates, unless the config states a number of tokens."""


class LanguageTask(Task[Model]):
    """Prediction of next tokens in the windows of a stream, by a model from integers `(B, T)` to logits `(B, T, V)`.

    Every rank has a copy of the model, or parts of its weights, as the config states. Any number of ranks can continue
    from its `state`.

    Args:
        config: The config of the run. The vocabulary of its model must contain that of the corpus.
        corpus: The tokens and their tokenizer.
        ranks: The processes of the run.
        optimizer_of: Makes the optimizer and the constraints from the model, the config and the group of processes with
            copies of the weights, if there is one.
        schedule: Makes the scheduler of the learning rates; by default that of the config.
    """

    config_type: ClassVar[type[TrainConfig]] = TrainConfig
    """The type of the config of such a run."""
    command: ClassVar[str] = "wellnormed.cli"
    """The module that continues such a run as a command."""
    notes: tuple[str, ...] = ()
    """Remarks that are printed when the run begins, beside its size and its data."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        ranks: Ranks,
        optimizer_of: "OptimizerOf | None" = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.config, self.corpus, self.ranks, self.device = config, corpus, ranks, ranks.device
        self.generators = named_generators(config.seed)
        part = (corpus.train, config.batch, config.model.length, ranks.rank, ranks.world)
        if corpus.symbols is None:
            self.stream: TokenStream | RandomWindows = TokenStream(*part, seed=config.seed if config.shuffle else None)
        else:
            self.stream = RandomWindows(*part, generator=self.generators["order of the data"])
        if len(corpus.validation) <= config.model.length:
            raise ValueError(
                f"the validation split of {corpus.name} has {len(corpus.validation)} tokens, fewer than a window of "
                f"{config.model.length} and its target; use a longer text or a smaller --model.length"
            )
        read = corpus.validation.read(0, self.validation_tokens)
        corpus.validation.check(read[None], [0])  # checked before hours of training
        prepared = None if type(self).prepared is LanguageTask.prepared else self.prepared
        model, self.runner, group = built(config, self.generators["initial weights"], ranks, prepared)
        optimizer, held_by = (optimizer_of or build_optimizer)(model, config, group)
        super().__init__(model, optimizer, held_by, config.steps, self.generators["order of the data"], schedule)

    def prepared(self, model: Model) -> Model:
        """The module to train instead of this freshly initialised model; subclasses override it."""
        return model

    def batch_loss(self) -> Tensor:
        """Cross entropy of this rank's next windows, in nats a token."""
        return self._loss(next(self.stream))

    def advance(self) -> float:
        """One step of all ranks; see `Task.advance`."""
        # a model's random draws depend on the step alone, so that a run continues as if it had never stopped
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
        """Compute the gradient of the mean over all ranks' windows, accumulated over micro-batches."""
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
        """A context in which gradients are averaged over the ranks only if it is that of the last micro-batch."""
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
        """The model's logits, in the precision of the run; "auto" is float32 for a task without a run."""
        half = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return self.runner(tokens)

    def rate_factor(self, step: int) -> float:
        """The factor of the config's schedule."""
        return self.config.rate_factor(step)

    @property
    def validation_tokens(self) -> int:
        """The number of tokens from which all validation windows are taken: the split, or the first tokens of it."""
        return min(len(self.corpus.validation), self.config.validation_tokens or sys.maxsize)

    def _validation_starts(self, count: int) -> Tensor:
        """The starts of `count` windows, spread evenly over the validation tokens."""
        length = self.config.model.length
        return torch.arange(count) * ((self.validation_tokens - 1) // length) // count * length

    def validation_windows(self, tokens: int) -> Tensor:
        """Windows with at most so many tokens, or one window, spread evenly over the validation tokens, `(B, T)`."""
        length = self.config.model.length
        count = max(1, min(tokens, self.validation_tokens - 1) // length)
        return self.corpus.validation.windows(self._validation_starts(count), length)

    @torch.no_grad()
    def evaluate(self, last: bool = False) -> dict[str, float]:
        """Loss and accuracy on the validation tokens, each but the first predicted once; a collective call.

        If the config has no `validation_tokens`, the `last` evaluation of a run takes the whole split, whose last
        window is shorter, and earlier ones take 128 windows spread over it. If the tokenizer is available, the result
        has the bits per byte of text as well.
        """
        length, tokens, world = self.config.model.length, self.corpus.validation, self.ranks.world
        whole, predicted = self.config.validation_tokens is None, self.validation_tokens - 1
        count = min(predicted // length, VALIDATION_WINDOWS if whole and not last else sys.maxsize)
        starts = self._validation_starts(count).tolist()
        at_once = self.config.micro_batch or max(1, TOKENS_AT_ONCE // length // world)
        rounds = -(-count // (at_once * world))  # the same on every rank, for each is a collective call
        token_bytes = self._token_bytes
        loss = correct = seen = text = 0.0

        def add(rows: list[np.ndarray], count_here: int) -> None:
            nonlocal loss, correct, seen, text
            windows = torch.from_numpy(np.stack(rows).astype(np.int64)).to(self.device)
            logits = self.logits(windows[:, :-1]).float()
            logits, targets = logits[:count_here].flatten(0, 1), windows[:count_here, 1:].flatten()
            loss += float(F.cross_entropy(logits, targets, reduction="sum").double())
            correct += int((logits.argmax(-1) == targets).sum())
            seen += len(targets)
            text += 0 if token_bytes is None else int(token_bytes[targets.cpu()].sum())

        self.model.eval()
        for number in range(rounds):
            first = (number * world + self.ranks.rank) * at_once
            here = starts[first : first + at_once]
            add([tokens.read(start, length + 1) for start in here or starts[:1]], len(here))
        if last and whole and (rest := predicted - count * length):  # all call the model; the first rank counts
            add([tokens.read(count * length, rest + 1)], int(self.ranks.first))
        self.model.train()
        loss, correct, seen, text = self.ranks.sum(loss, correct, seen, text)
        scores = {"validation_loss": loss / seen, "validation_accuracy": correct / seen}
        if text:
            scores["bits_per_byte"] = loss / text / torch.log(torch.tensor(2.0)).item()
        return scores

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """The number of bytes of every token; None if a rank lacks the tokenizer."""
        lengths: Tensor | None = None
        with suppress(ValueError):
            lengths = torch.from_numpy(self.corpus.require_tokenizer().token_bytes)
        return lengths if all(self.ranks.gather(lengths is not None)) else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors that the next step depends on, whole or in parts, and all other facts that it depends on."""
        weights, moments = self._content()
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        for name, entries in moments.items():
            tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entries.items()}
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values()), "optimizer state is made of tensors"
        if self.constraints is not None:
            tensors |= {f"constraints.{name}": tensor for name, tensor in self.constraints.state_dict().items()}
        if isinstance(self.stream, RandomWindows):
            tensors["generator.order"] = self.generator.get_state()
        groups = [group.get("steps", 0) for group in self.optimizer.param_groups]
        facts = {"step": self.step, "groups": groups, "stream": self.stream.state_dict()}
        return tensors, facts | {
            "schedule": type(self.scheduler).__name__,
            "rates": _plain(self.scheduler.state_dict()),
        }

    def restore_state(self, read: Callable[[dict[str, Tensor]], dict[str, Any]]) -> None:
        """Continue from a `state`: `read` fills its tensors in place, and returns its facts."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        tensors, _ = self.state()
        facts = read(tensors)
        weights, moments = self._content()
        restored: dict[str, Any] = {name: tensors[f"model.{name}"] for name in weights}
        moments = {name: {key: tensors[f"optimizer.{name}.{key}"] for key in keys} for name, keys in moments.items()}
        content: Any = {"state": moments, "param_groups": self._groups}
        set_state_dict(self.model, self.optimizer, model_state_dict=restored, optim_state_dict=content)
        if self.constraints is not None:
            prefix = "constraints."
            state = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            self.constraints.load_state_dict(state)
        for group, steps in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            group["steps"] = steps
        self.stream.load_state_dict(facts["stream"])
        if isinstance(self.stream, RandomWindows):
            self.generator.set_state(tensors["generator.order"])
        if (name := type(self.scheduler).__name__) != facts["schedule"]:
            raise ValueError(
                f"the run has the schedule {facts['schedule']}, not {name}; pass the one it began with to "
                "`wellnormed.train.resume(folder, schedule=...)`"
            )
        self.scheduler.load_state_dict(facts["rates"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self.step = facts["step"]
        if isinstance(self.runner, nn.parallel.DistributedDataParallel):
            # DDP adds gradients in another order in its first step, so this one is thrown away
            self._loss(torch.zeros(1, self.config.model.length + 1, dtype=torch.long)).backward()
            self.model.zero_grad()

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights, and the optimizer's tensors by the names of weights, which do not depend on the number of ranks."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, content = get_state_dict(self.model, self.optimizer)
        self._groups: Any = content["param_groups"]
        moments: Any = content["state"]
        return weights, moments

    def whole_weights(self) -> dict[str, Tensor]:
        """Every weight, assembled on the CPU of the first rank, and nothing on the others; a collective call."""
        weights = {}
        for name, tensor in self.model.state_dict().items():
            assembled = whole(tensor)
            if self.ranks.first:
                weights[name] = assembled.cpu()
        return weights

    def require_equal_copies(self) -> None:
        """Refuse ranks whose copies of a weight differ in a bit; a collective call."""
        if self.ranks.world == 1 or self.config.parallel != "ddp":
            return
        digests = {
            name: hashlib.sha256(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()
            for name, tensor in self.model.named_parameters()
        }
        remedy = "go on from a checkpoint, and if it happens again look for a faulty device or report this run"
        self.ranks.require_equal(f"weight in step {self.step}", digests, remedy)

    def copy(self, weights: dict[str, Tensor]) -> Model:
        """The model with these `whole_weights`, on the CPU and in eval mode."""
        model = build(self.config.model, torch.Generator().manual_seed(0))
        load_weights(model, weights, "the trained model")
        return model.eval()

    def observe(self) -> dict[str, float]:
        """The largest entries and attention logits on validation windows, by the names of `observed`.

        There are as many windows as in a step, shared among the ranks; a collective call.
        """
        share = self.config.batch // self.ranks.world
        starts = self._validation_starts(self.config.batch)[self.ranks.rank * share :][:share]
        windows = self.corpus.validation.windows(starts, self.config.model.length)
        parts = windows.split(self.config.micro_batch or share)

        def call() -> None:
            for part in parts:
                self.logits(part.to(self.device))

        self.model.eval()
        # compiled blocks know nothing of hooks
        with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
            seen = self.ranks.gather(observed(self.model, call))
        self.model.train()
        return {name: max(own[name] for own in seen) for name in seen[0]}


OptimizerOf = Callable[[Model, TrainConfig, Any], tuple[torch.optim.Optimizer, constraints.Constraints | None]]


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a scheduler's state that JSON can hold; the schedule makes its functions again."""
    return {key: value for key, value in sorted(state.items()) if isinstance(value, int | float | str | list | None)}
