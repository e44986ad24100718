"""The figures of a logger, and the callbacks that log them."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.optim import callbacks, scalars


@pytest.fixture
def optimizer():
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 8), nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12)]
    model = nn.Sequential(*layers)
    optimizer = wn.Scion(model, lr=0.1, overrides={"3.weight": wn.norms.Split(3), "2.bias": None})
    wn.constrain(optimizer, {"1.weight": wn.HardCap(2.0), "0": wn.ColumnCap(1.5)})
    return optimizer


def test_figures_are_their_definitions(optimizer):
    found = scalars(optimizer)
    for entry in optimizer.assignment:
        name, weight, norm = entry.name, entry.parameter.detach(), entry.norm
        if norm is None:
            assert not any(key.endswith(f"/{name}") for key in found)
            continue
        size = float(norm.norm(weight))
        assert found[f"norm/{name}"] == pytest.approx(size)
        step = optimizer.update_norm(name)
        assert found.get(f"update_over_weight/{name}") == (None if size == 0 else pytest.approx(step / size))
        parts = {"3.weight": weight.chunk(3)}.get(name, [weight])
        if name in ("1.weight", "2.weight", "3.weight"):
            values = [torch.linalg.svdvals(part.double()) for part in parts]
            ranks = [float(v.square().sum() / v[0].square()) for v in values]
            assert found[f"stable_rank/{name}"] == pytest.approx(sum(ranks) / len(ranks), rel=1e-5)  # of float32 norms
        else:
            assert f"stable_rank/{name}" not in found
    over = {key: value for key, value in found.items() if key.startswith("norm_over_cap/")}
    assert over == {
        "norm_over_cap/1.weight": pytest.approx(found["norm/1.weight"] / 2.0),
        "norm_over_cap/0.weight": pytest.approx(found["norm/0.weight"] / 1.5),
    }


def test_all_numbers_come_in_one_transfer(optimizer, monkeypatch):
    lists, transfer = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: lists.append(x.shape) or transfer(x))
    scalars(optimizer)
    assert lists == [(len([a for a in optimizer.assignment if a.norm is not None]), 2)]


def test_weights_of_zeros_and_an_optimizer_of_none():
    layer = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(layer.weight)
    assert scalars(wn.Scion(layer, lr=0.1)) == {"norm/weight": 0.0}
    assert scalars(wn.Scion(layer, lr=0.1, overrides={"weight": None})) == {}


def test_an_optimizer_of_another_library_is_refused():
    with pytest.raises(ValueError, match=r"AdamW has no norms; .*`constraints.norms\(\)`"):
        scalars(torch.optim.AdamW(nn.Linear(2, 2).parameters()))


def test_a_writer_gets_every_figure(optimizer):
    writer = Mock()
    callbacks.write_scalars(writer, optimizer, 7)
    written = {call.args for call in writer.add_scalar.call_args_list}
    assert written == {(name, value, 7) for name, value in scalars(optimizer).items()}


@pytest.mark.filterwarnings("default")  # the library's own warnings are not ours to fix
def test_hugging_face_s_trainer_logs_them(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra `integrations`")

    class Regression(nn.Linear):
        def forward(self, x, labels):
            return {"loss": (super().forward(x) - labels).square().mean()}

    model = Regression(3, 1)
    data = [{"x": torch.randn(3), "labels": torch.randn(1)} for _ in range(16)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_strategy="no", logging_steps=2, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(wn.Scion, {"lr": 0.1, "norms": model})
    )
    trainer.add_callback(callbacks.hugging_face(trainer))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "norm/weight" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert "stable_rank/weight" in logged[0]


@pytest.mark.filterwarnings("default")  # the library's own warnings are not ours to fix
def test_lightning_s_trainer_logs_them(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="needs the extra `integrations`")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch):
            return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self):
            return wn.Scion(self, lr=0.1)

    logger, rows = CSVLogger(tmp_path), []
    monkeypatch.setattr(logger, "log_metrics", lambda metrics, step: rows.append((step, metrics)))
    trainer = Trainer(
        max_steps=4, logger=logger, log_every_n_steps=2, callbacks=[callbacks.lightning()], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(torch.randn(16, 3), batch_size=4))
    assert [step for step, metrics in rows if "norm/layer.weight" in metrics] == [2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_are_the_largest_ratios_since_the_last_call_and_below_the_norm(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = wn.Scion(model, overrides={"3.weight": wn.Spectral(units="l2")})
    gains = wn.optim.Gains(model, optimizer)
    assert not any(name.startswith("gain") for name in scalars(optimizer, gains))
    inputs = [torch.randn(3, 5, 6, dtype=dtype), torch.randn(3, 5, 6, dtype=dtype)]
    model(inputs[0])
    model[3](model[2](model[1](model[0](input=inputs[1]))))
    found = scalars(optimizer, gains)
    expected = []
    for x in inputs:
        dx = x.reshape(15, 6).double().diff(dim=0)
        dy = dx @ model[0].weight.detach().double().T
        expected.append(float((dy.square().mean(1) / dx.square().mean(1)).amax().sqrt()))
    assert found["gain/0.weight"] == pytest.approx(max(expected), rel=1e-5 if dtype == torch.float32 else 3e-2)
    assert found["gain_over_norm/0.weight"] == found["gain/0.weight"] / found["norm/0.weight"]
    assert 0 < found["gain_over_norm/2.weight"] <= (1.0 if dtype == torch.float32 else 1.05)  # of rounded outputs
    assert "gain/3.weight" not in found
    assert not any(name.startswith("gain") for name in scalars(optimizer, gains))
    model(inputs[0][:1, :1])  # one vector has no neighbour
    model(torch.zeros(3, 6, dtype=dtype))
    assert not any(name.startswith("gain") for name in scalars(optimizer, gains))
    gains.remove()
    model(inputs[0])
    assert gains.read() == {}
