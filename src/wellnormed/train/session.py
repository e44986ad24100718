"""One training run in memory: model, optimizer, constraints, order of the data; and its checkpoint."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.constraints as constraints
from wellnormed.data.characters import CharacterText
from wellnormed.models.files import Model, build, load_weights
from wellnormed.norms import assign_norms
from wellnormed.optim import NonFiniteGradientError, Scion
from wellnormed.train.config import SEED, TrainConfig
from wellnormed.train.run_folder import Checkpoint
from wellnormed.train.weights import rate_factors, weight_constraints


def named_generators(seed: int) -> dict[str, torch.Generator]:
    """One generator for each use, so that more draws for one never move another."""
    allowed, must = SEED
    if not allowed(seed):
        raise ValueError(f"seed={seed} must {must}; choose another (on the command line: --seed)")
    names = ("initial weights", "order of the data", "sample", "lower bound")
    return {name: torch.Generator().manual_seed(seed * len(names) + i) for i, name in enumerate(names)}


def build_optimizer(model: Model, config: TrainConfig) -> tuple[Scion, constraints.Constraints]:
    """The optimizer of a run, with the constraints that hold after each of its steps."""
    optimizer = Scion(
        assign_norms(model, recipe="modular"),
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=True,
        lr_factors=rate_factors(model, config),
    )
    return optimizer, constraints.constrain(optimizer, weight_constraints(model, config))


class TrainingSession:
    """Everything that one step changes, built from a config; a checkpoint then moves it to any step.

    The order of the data is drawn on the CPU, so it is the same on every device.
    """

    def __init__(self, config: TrainConfig, text: CharacterText, device: torch.device) -> None:
        self.config, self.text, self.device = config, text, device
        if min(len(text.train), len(text.validation)) <= config.model.length:
            raise ValueError(
                f"the text {text.source!r} has {len(text.train)} characters to train on and {len(text.validation)} for "
                f"validation, but model.length={config.model.length} needs more of each; use a longer text "
                "or a smaller length (on the command line: --model.length)"
            )
        self.generators = named_generators(config.seed)
        self.order = self.generators["order of the data"]
        self.model = build(config.model, self.generators["initial weights"]).to(device)
        self.optimizer, self.constraints = build_optimizer(self.model, config)
        self.step = 0
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def rate(self) -> float:
        """The learning rate of the coming step: linear decay to 0."""
        return self.config.learning_rate * (1 - self.step / self.config.steps)

    def advance(self) -> float:
        """Take one step, and return the loss before it. A loss or gradient that is not finite is a `ValueError`."""
        length = self.config.model.length
        starts = torch.randint(len(self.text.train) - length, (self.config.batch,), generator=self.order)
        windows = self.text.train[starts[:, None] + torch.arange(length + 1)].to(self.device)
        loss = F.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"step {self.step + 1}: the loss is {value}; {_first_not_finite(self.model)}. No weight was changed; "
                f"lower --learning-rate (now {self.rate:.4g})"
            )
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * (1 - self.step / self.config.steps)
        try:
            self.optimizer.step()
        except NonFiniteGradientError as error:
            raise ValueError(f"step {self.step + 1}: {error}") from error
        self.step += 1
        return value

    def require_caps(self) -> float:
        """Prove every norm, and return the largest over its cap; one above its cap is a `ValueError`."""
        ratios = self.constraints.proved_ratios()
        worst = max(ratios, key=lambda name: ratios[name])
        if not ratios[worst] <= 1:
            raise ValueError(
                f"step {self.step}: the norm of {worst!r} may be {ratios[worst]:.9f} times its cap, so "
                "its constraint broke its promise; please report this run"
            )
        return ratios[worst]

    def checkpoint(self) -> Checkpoint:
        """Everything that the next step depends on."""
        content = self.optimizer.state_dict()
        state = {f"optimizer.{i}.{key}": t for i, entries in content["state"].items() for key, t in entries.items()}
        assert all(isinstance(value, Tensor) for value in state.values()), "optimizer state is made of tensors"
        state["optimizer.steps"] = torch.tensor([group.get("steps", 0) for group in content["param_groups"]])
        state |= {f"constraints.{name}": tensor for name, tensor in self.constraints.state_dict().items()}
        state["generator.order"] = self.order.get_state()
        return Checkpoint(self.step, dict(self.model.state_dict()), state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same config; tensors that do not fit are a `ValueError`."""
        load_weights(self.model, checkpoint.weights, f"the checkpoint of step {checkpoint.step}")
        state, content = dict(checkpoint.state), self.optimizer.state_dict()
        self.order.set_state(state.pop("generator.order"))
        for group, steps in zip(content["param_groups"], state.pop("optimizer.steps").tolist(), strict=True):
            group["steps"] = steps
        entries: dict[int, dict[str, Tensor]] = {}
        remembered: dict[str, Tensor] = {}
        for name, tensor in state.items():
            match name.split("."):
                case "optimizer", index, key:
                    entries.setdefault(int(index), {})[key] = tensor
                case _:
                    remembered[name.removeprefix("constraints.")] = tensor
        self.optimizer.load_state_dict({"state": entries, "param_groups": content["param_groups"]})
        self.constraints.load_state_dict(remembered)
        self.step = checkpoint.step


def _first_not_finite(model: nn.Module) -> str:
    named = list(model.named_parameters())
    for what, tensors in (("parameter", named), ("gradient of", [(name, p.grad) for name, p in named])):
        for name, tensor in tensors:
            if tensor is not None and not bool(tensor.isfinite().all()):
                return f"the {what} {name!r} holds NaN or infinity"
    return "all gradients are finite"
