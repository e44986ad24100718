"""Scion with capped weights under the Hugging Face Trainer: a tiny Llama on arithmetic text, two dozen steps.

pip install ".[integrations]"   # in a clone
python examples/huggingface_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import wellnormed as wn


class Sums(Dataset):
    """Sentences such as `3+4=7.`, one token per character."""

    characters = "0123456789+=. "

    def __init__(self, count: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pairs = torch.randint(50, (count, 2), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        a, b = self.pairs[index]
        tokens = torch.tensor([self.characters.index(c) for c in f"{a}+{b}={a + b}.".ljust(12)])
        return {"input_ids": tokens, "labels": tokens}


class Constrain(TrainerCallback):
    """Attach constraints once the Trainer has made the optimizer; they then run inside every `optimizer.step()`."""

    def __init__(self, constraints: dict[str, wn.constraints.Constraint]) -> None:
        self.constraints = constraints

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Called with the optimizer, wrapped by accelerate."""
        self.attached = wn.constrain(optimizer.optimizer, self.constraints)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Norms, norms over caps and others, whenever the Trainer logs, to all its reporters."""
        if control.should_log:
            self.trainer.log(wn.optim.scalars(optimizer))


def main(steps: int = 24) -> tuple[float, float]:
    """Train; print and return the last loss, and the largest proved norm over its cap."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(Sums.characters), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    norms = wn.assign_norms(model, recipe="language")
    print(norms)
    constrain = Constrain({"model.layers.*.self_attn": wn.HardCap(2.0), "model.layers.*.mlp": wn.SoftCap(2.0)})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, lr_scheduler_type="linear", report_to=[],
            use_cpu=True, save_strategy="no", logging_steps=8, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Sums(),
            optimizer_cls_and_kwargs=(wn.Scion, {"lr": 0.05, "norms": norms}),
            callbacks=[constrain],
        )
        constrain.trainer = trainer
        loss = trainer.train().training_loss
    ratio = max(constrain.attached.proved_ratios().values())
    print(f"mean training loss {loss:.3f}; largest proved norm / cap {ratio}")
    return loss, ratio


if __name__ == "__main__":
    main()
