"""Scion with capped weights under Lightning's automatic optimization: a small regression, with a scheduler.

pip install ".[integrations]"   # in a clone
python examples/lightning_module.py
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wellnormed as wn


class Regression(lightning.LightningModule):
    """Three layers; what is ours is in `configure_optimizers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """Norms, norms over caps and others, to all loggers."""
        if self.global_step % self.trainer.log_every_n_steps == 0:
            self.log_dict(wn.optim.scalars(self.optimizers()))

    def configure_optimizers(self) -> dict:
        """The norms, the optimizer, the constraints; Lightning steps the scheduler."""
        optimizer = wn.Scion(wn.assign_norms(self, overrides={"layers.4.weight": wn.norms.RowNorm()}), lr=0.1)
        self.constraints = wn.constrain(optimizer, {"layers.[02]": wn.HardCap(2.0)})
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(steps: int = 64) -> tuple[float, float]:
    """Train; print and return the last loss, and the largest proved norm over its cap."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, x.abs().sum(1, keepdim=True)), batch_size=64, shuffle=True)
    model = Regression()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=10.0,
    )  # fmt: skip
    trainer.fit(model, data)
    loss, ratio = float(trainer.callback_metrics["loss"]), max(model.constraints.proved_ratios().values())
    print(f"last loss {loss:.4f}; largest proved norm / cap {ratio}")
    return loss, ratio


if __name__ == "__main__":
    main()
