"""A run on disk: config, environment, metrics, checkpoints, results. Survives `kill -9`; no pickle."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from wellnormed._files import parse_dataclass, read_json, sync_folder, write_atomically, write_json
from wellnormed.models.files import FORMAT, tensor_bytes
from wellnormed.train.config import TrainConfig

KEPT = 2
"""Checkpoints that are kept: the newest may be lost to a bad disk, the one before it is the way back."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that the next step depends on."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; `create` makes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights_file = self.path / "model.safetensors"
        self.certificate_file = self.path / "certificate.json"
        self.results_file = self.path / "results.json"
        self.sample_file = self.path / "sample.txt"
        self.report_file = self.path / "report.html"

    def create(self, config: TrainConfig, text: dict[str, str]) -> None:
        """Make the folder with its config.

        Args:
            config: The run, its model's vocabulary size being that of the text.
            text: `source`, `sha256` and `symbols` of the text.

        Raises:
            ValueError: The folder exists and is not empty.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(
                f"{self.path} exists; continue it with `wellnormed train --resume {self.path}` or choose another --name"
            )
        self.checkpoints.mkdir(parents=True)
        settings = dataclasses.asdict(config)
        model = settings.pop("model")
        write_json(self.config_file, {"format": FORMAT, "model": model, "train": settings, "text": text})

    def read_config(self) -> tuple[TrainConfig, dict[str, str]]:
        """The config and the description of the text.

        Raises:
            ValueError: The folder or its config is missing, damaged, or of another format.
        """
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is no folder; pass the folder of a run, such as runs/NAME")
        remedy = "pass the folder of a run that `wellnormed train` made, or train again"
        content = read_json(self.config_file, remedy)
        if content.get("format") != FORMAT:
            raise ValueError(f"{self.config_file}: format {content.get('format')!r} is not {FORMAT}; {remedy}")
        if not isinstance(content.get("train"), dict):
            raise ValueError(
                f"{self.config_file} has no 'train' section, so this is an exported model, not a run; {remedy}"
            )
        config = parse_dataclass(
            TrainConfig, {"model": content.get("model"), **content["train"]}, str(self.config_file)
        )
        text = content.get("text")
        if not isinstance(text, dict) or not all(isinstance(text.get(k), str) for k in ("source", "sha256", "symbols")):
            raise ValueError(f"{self.config_file}: the section 'text' needs source, sha256 and symbols; {remedy}")
        return config, text

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row of metrics."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows; an unfinished last line, which a kill can leave, is not one.

        Raises:
            ValueError: A line within the file is damaged.
        """
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")
        rows = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.metrics_file}, line {number}, is damaged ({error}); remove that line"
                ) from None
        return rows

    def cut_metrics(self, step: int) -> None:
        """Forget the rows after a step, which the resumed run writes again."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    def checkpoint_folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.checkpoints.glob("step-*"))

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint that is there whole or not at all, then remove all but the newest."""
        if self.metrics_file.exists():  # rows up to this step must be as durable as the checkpoint
            with self.metrics_file.open("rb") as file:
                os.fsync(file.fileno())
        final = self.checkpoints / f"step-{checkpoint.step:08d}"
        temporary = self.checkpoints / f".step-{checkpoint.step:08d}.tmp"
        for leftover in (temporary, final):  # of a killed process; `final` only if it is being written again
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        sums = {}
        for name, tensors in (
            ("weights.safetensors", checkpoint.weights),
            ("state.safetensors", checkpoint.state),
        ):
            content = tensor_bytes(tensors)
            sums[name] = hashlib.sha256(content).hexdigest()
            write_atomically(temporary / name, content)
        write_json(temporary / "meta.json", {"format": FORMAT, "step": checkpoint.step, "sha256": sums})
        temporary.rename(final)
        sync_folder(self.checkpoints)
        for old in self.checkpoint_folders()[:-KEPT]:
            shutil.rmtree(old)
        return final

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint; None if the run was killed before its first.

        Raises:
            ValueError: It is damaged: never silently skipped, since that would lose work unnoticed.
        """
        folders = self.checkpoint_folders()
        if not folders:
            return None
        folder = folders[-1]
        remedy = f"remove {folder} to resume from " + (folders[-2].name if len(folders) > 1 else "the beginning")
        meta = read_json(folder / "meta.json", remedy)
        if meta.get("format") != FORMAT or not isinstance(meta.get("step"), int):
            raise ValueError(f"{folder / 'meta.json'} has no format {FORMAT} and step; {remedy}")
        tensors = []
        for name in ("weights.safetensors", "state.safetensors"):
            path = folder / name
            if not path.exists():
                raise ValueError(f"{path} is missing; {remedy}")
            content = path.read_bytes()
            expected = meta.get("sha256", {}).get(name)
            if hashlib.sha256(content).hexdigest() != expected:
                raise ValueError(
                    f"{path} ({len(content):,} bytes) is truncated or changed: its sha256 is not {expected}; {remedy}"
                )
            tensors.append(load_tensors(content))
        return Checkpoint(meta["step"], *tensors)

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """Write the final weights."""
        write_atomically(self.weights_file, tensor_bytes(weights))


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Per-parameter state as named tensors, `optimizer.INDEX.KEY`, and the count of steps of every group."""
    content = optimizer.state_dict()
    state = {
        f"optimizer.{index}.{key}": value
        for index, entries in content["state"].items()
        for key, value in entries.items()
    }
    assert all(isinstance(value, Tensor) for value in state.values()), "optimizer state is made of tensors"
    steps = [group.get("steps", 0) for group in content["param_groups"]]
    return state | {"optimizer.steps": torch.tensor(steps)}


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state`, for an optimizer built from the same config."""
    content = optimizer.state_dict()
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in _below(state, "optimizer."):
        if name == "steps":
            for group, steps in zip(content["param_groups"], value.tolist(), strict=True):
                group["steps"] = steps
        else:
            index, _, key = name.partition(".")
            entries.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": entries, "param_groups": content["param_groups"]})


def _below(state: dict[str, Tensor], prefix: str) -> Iterable[tuple[str, Tensor]]:
    return ((name[len(prefix) :], value) for name, value in state.items() if name.startswith(prefix))
