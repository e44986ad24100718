"""Callbacks that log the `scalars` of an optimizer in other people's training loops, each imported when it is made."""

from typing import Any, Protocol

from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.scalars import engine_of, scalars


class Writer(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is needed here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number of one step."""


def write_scalars(writer: Writer, optimizer: ConditionalGradient, step: int) -> None:
    """Write the `scalars` of an optimizer as those of a step, with TensorBoard's `SummaryWriter` or one like it."""
    for name, value in scalars(optimizer).items():
        writer.add_scalar(name, value, step)


def hugging_face(trainer: Any) -> Any:
    """A callback for Hugging Face's Trainer that logs the `scalars` whenever the Trainer logs, to all its reporters.

    `trainer.add_callback(hugging_face(trainer))` adds it.
    """
    from transformers import TrainerCallback  # pyrefly: ignore[missing-import]

    class LogScalars(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            if control.should_log and engine_of(optimizer):
                trainer.log(scalars(optimizer))

    return LogScalars()


def lightning() -> Any:
    """A callback for Lightning's Trainer that logs the `scalars` every `log_every_n_steps` steps, to all its loggers.

    `Trainer(callbacks=[lightning()])` adds it.
    """
    from lightning.pytorch import Callback  # pyrefly: ignore[missing-import]

    class LogScalars(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step % trainer.log_every_n_steps:
                return
            for optimizer in trainer.optimizers:
                if engine_of(optimizer):
                    figures = scalars(optimizer)  # a collective call, on every rank
                    for logger in trainer.loggers:
                        logger.log_metrics(figures, step=trainer.global_step)

    return LogScalars()
