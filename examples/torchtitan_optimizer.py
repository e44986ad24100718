"""Scion with capped weights in torchtitan: a container of optimizers, and torchtitan's Llama 3 debug model on a CPU.

    pip install . torchtitan==0.3.0 triton  # in a clone
    python examples/torchtitan_optimizer.py
    torchrun --nproc-per-node 2 examples/torchtitan_optimizer.py

torchtitan's `Trainer` needs an accelerator, the files of a tokenizer and a torch newer than 2.13, so `main` puts its
pieces together: the model, recomputed activations, FSDP2 (gloo), clipped gradients, the schedule and checkpoints are
all torchtitan's. Where the Trainer runs, its own command takes the configuration `llama3_scion` from this file, and
options for its fields, in the root of torchtitan's repository, whose tests hold the tokenizer and the text:

    export PYTHONPATH=/path/to/examples
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_optimizer --config llama3_scion
"""

import os
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import FusedQKVLinear, ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry, llama3_configs
from torchtitan.trainer import Trainer

import wellnormed as wn
from wellnormed.routing import Assignment


class ScionContainer(OptimizersContainer):
    """For every part of a model one Scion, whose steps keep the weights below their caps."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """What this library needs; of the fields of torchtitan's container none is read."""

        lr: float = 0.02
        """Step size in units of each parameter's norm."""

        momentum: float = 0.9
        """The fraction of the buffer that is kept."""

        caps: dict[str, float] = field(default_factory=dict)
        """Name pattern -> largest norm; a pattern must match in every part, as those of torchtitan's groups."""

        every: int = 1
        """Steps from one projection to the next; above 1 the constraints count them, and that is their state."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts, self.optimizers = model_parts, []
        self.constraints: list[wn.constraints.Constraints] = []
        self.loaded: dict[str, Any] = {}
        for part in model_parts:
            optimizer = wn.Scion(assign_norms(part), config.lr, momentum=config.momentum)
            caps = {pattern: wn.HardCap(cap, every=config.every) for pattern, cap in config.caps.items()}
            self.optimizers.append(optimizer)
            self.constraints.append(wn.constrain(optimizer, caps))
        parameters = [p for optimizer in self for group in optimizer.param_groups for p in group["params"]]
        self._validate_params(parameters)
        self._post_init(parameters)
        self.register_step_pre_hook(lambda *_: self._load_constraints())

    def state_dict(self) -> dict[str, Any]:
        """The flat state of torchtitan, and beside it `constraints.NAME.KEY` for what the constraints remember."""
        state = super().state_dict()
        for constraints in self.constraints:
            state |= {f"constraints.{key}": tensor for key, tensor in constraints.state_dict().items()}
        return state | self.loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The constraints' part waits for the next step: it belongs to weights that torchtitan loads after this."""
        super().load_state_dict(state_dict)
        self.loaded = {key: value for key, value in state_dict.items() if key.startswith("constraints.")}

    def _load_constraints(self) -> None:
        if self.loaded:
            for constraints in self.constraints:
                own = constraints.state_dict()
                constraints.load_state_dict({key: self.loaded[f"constraints.{key}"] for key in own})
            self.loaded = {}


def assign_norms(part: nn.Module) -> Assignment:
    """The norms of language models, under torchtitan's names.

    A fused projection holds the queries, the keys and the values of one head after the other; each is taken alone.
    """
    fused = {f"{name}.wqkv": module for name, module in part.named_modules() if isinstance(module, FusedQKVLinear)}
    heads = {name: wn.norms.Split(module.wqkv.out_features // module.head_dim) for name, module in fused.items()}
    norms = wn.assign_norms(part, "language", heads)
    return replace(norms, assigned=tuple(replace(a, name=canonical_fqn(a.name)) for a in norms))


def llama3_scion() -> Trainer.Config:
    """The configuration of torchtitan's Llama 3 debug model, but for the optimizer."""
    config = config_registry.llama3_debugmodel()
    config.optimizer = ScionContainer.Config(lr=0.02, caps={"layers.*.attention": 0.5, "layers.*.feed_forward": 0.5})
    return config


class Training:
    """What torchtitan's Trainer holds, on a CPU: a sharded model, optimizers, schedules and checkpoints."""

    def __init__(self, folder: str, steps: int) -> None:
        torch.manual_seed(0)
        config = llama3_configs["debugmodel"](attn_backend="flex")
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention needs a GPU
        self.model = config.build()
        self.model.init_weights()
        FullAC.Config().build().apply(self.model)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(self.model, mesh, torch.float32, torch.float32, pp_enabled=False)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.loss = CrossEntropyLoss.Config().build()
        caps = {"layers.*.attention": 0.5, "layers.*.feed_forward": 0.5}
        self.optimizers = ScionContainer.Config(lr=0.02, caps=caps, every=4).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5)
        self.schedules = schedule.build(optimizers=self.optimizers, training_steps=steps)
        self.checkpoints = CheckpointManager.Config(enable=True, interval=1).build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedules,
            states={}, sd_adapter=None, base_folder=folder,
        )  # fmt: skip

    def step(self) -> float:
        """One step on random tokens, the same every time, of which every process reads its rows; the mean loss."""
        tokens = torch.randint(2048, (4, 65), generator=torch.Generator().manual_seed(1))
        tokens = tokens[dist.get_rank() :: dist.get_world_size()]
        self.optimizers.zero_grad()
        loss, _ = self.loss(self.model(tokens[:, :-1]), tokens[:, 1:], global_valid_tokens=torch.tensor(4 * 64))
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step()
        self.schedules.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)


def main(steps: int = 12) -> tuple[list[float], list[float], float]:
    """Train, and again from a checkpoint at a third of the steps; return both losses, and the largest norm over cap."""
    alone = "RANK" not in os.environ  # not under torchrun
    dist.init_process_group("gloo", **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        training, saved = Training(folders[0], steps), steps // 3
        losses = [training.step() for _ in range(saved)]
        training.checkpoints.save(saved)
        losses += [training.step() for _ in range(saved, steps)]
        resumed = Training(folders[0], steps)
        resumed.checkpoints.load(saved)
        again = [resumed.step() for _ in range(saved, steps)]
        ratios = [r for constraints in training.optimizers.constraints for r in constraints.proved_ratios().values()]
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
        print(f"from the checkpoint at step {saved}:", *(f"{loss:.4f}" for loss in again))
        print(f"largest proved norm / cap {max(ratios)}")
    dist.destroy_process_group()
    return losses, again, max(ratios)


if __name__ == "__main__":
    main()
