"""A run on disk: config, environment, metrics, checkpoints, results. Survives `kill -9`; no pickle.

Nothing here is trusted unread: JSON objects state their own digest, and a folder of tensors counts once its manifest of
checksums is there, which is written last. Every file appears whole, by one rename; only metrics.jsonl grows in place,
and a checkpoint holds a copy of it.
"""

import dataclasses
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellnormed._files import (
    MANIFEST,
    json_text,
    parse_dataclass,
    parse_json,
    read_bytes,
    read_files,
    write_files,
    write_json,
    writing,
)
from wellnormed.certificates.certificate import Certificate
from wellnormed.models.files import FORMAT, WEIGHTS, read_config, read_tensors, tensor_bytes
from wellnormed.train.config import TrainConfig
from wellnormed.train.lock import LOCK

KEPT = 2
"""Checkpoints that are kept: the newest may be lost to a bad disk, the one before it is the way back."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that the next step depends on, and the rows of metrics up to it."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    metrics: bytes = b""


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
        self.weights_file = self.path / WEIGHTS
        self.certificate_file = self.path / "certificate.json"
        self.results_file = self.path / "results.json"
        self.sample_file = self.path / "sample.txt"
        self.manifest_file = self.path / MANIFEST
        self.report_file = self.path / "report.html"
        self.resume_command = f"`wellnormed train --resume {shlex.quote(str(self.path))}`"

    def require_new(self) -> None:
        """Refuse a folder that holds anything but what a run leaves that was killed before its config was written.

        Raises:
            ValueError: It does.
        """
        if self.config_file.exists():
            raise ValueError(f"{self.path} exists; continue it with {self.resume_command} or choose another --name")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is no folder; choose another --name")
        found = [each.name for each in self.path.glob("*") if each.name != LOCK and each not in self._leftovers()]
        if found:
            raise ValueError(f"{self.path} holds {min(found)!r} but no config.json; choose another --name")

    def create(self, config: TrainConfig, text: dict[str, str]) -> None:
        """Write the config, with which the run begins to exist.

        Args:
            config: The run, its model's vocabulary size being that of the text.
            text: `source`, `sha256` and `symbols` of the text.

        Raises:
            ValueError: The folder is not new.
        """
        self.require_new()
        self.remove_leftovers()
        settings = dataclasses.asdict(config)
        model = settings.pop("model")
        content = {"format": FORMAT, "model": model, "train": settings, "text": text}
        write_json(self.config_file, content, sealed=True)

    def read_config(self) -> tuple[TrainConfig, dict[str, str]]:
        """The config and the description of the text.

        Raises:
            ValueError: The folder or its config is missing, damaged, or of another format.
        """
        if self.path.is_dir() and not self.config_file.exists():
            raise ValueError(
                f"{self.config_file} is missing: {self.path} is no run, or was killed before it began; pass the folder "
                f"of a run, or begin this one with `wellnormed train --name {self.path.name}`"
            )
        content = read_config(self.path)
        if "train" not in content:
            raise ValueError(f"{self.path} is an exported model, which cannot be continued; pass the folder of a run")
        settings = {"model": content["model"], **content["train"]}
        return parse_dataclass(TrainConfig, settings, str(self.config_file)), content["text"]

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row of metrics."""
        with writing(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json_text(row, sealed=True))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows; an unfinished last line, which a kill can leave, is not one.

        Raises:
            ValueError: A line within the file is damaged.
        """
        if not self.metrics_file.exists():
            return []
        remedy = f"{self.resume_command} writes it again"
        if self.manifest_file.exists():
            content = read_files(self.path, remedy, only=self.metrics_file.name)[1][self.metrics_file.name]
        else:
            content = read_bytes(self.metrics_file, remedy)
        return [
            parse_json(line, f"{self.metrics_file}, line {number},", remedy, sealed=True)
            for number, line in enumerate(content.split(b"\n")[:-1], start=1)
        ]

    def checkpoint_folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(manifest.parent for manifest in self.checkpoints.glob(f"step-[0-9]*/{MANIFEST}"))

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint that counts whole or not at all, then remove all but the newest."""
        folder = self.checkpoints / f"step-{checkpoint.step:08d}"
        files: dict[str, bytes | str] = {
            "weights.safetensors": tensor_bytes(checkpoint.weights),
            "state.safetensors": tensor_bytes(checkpoint.state),
            "metrics.jsonl": checkpoint.metrics,
        }
        write_files(folder, files, {"format": FORMAT, "step": checkpoint.step})
        self.remove_leftovers()
        return folder

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint; None if the run was killed before its first.

        Raises:
            ValueError: It is damaged: never silently skipped, since that would lose work unnoticed.
        """
        folders = self.checkpoint_folders()
        if not folders:
            return None
        remedy = f"remove {folders[-1]} to resume from " + (folders[-2].name if len(folders) > 1 else "the beginning")
        manifest, files = read_files(folders[-1], remedy)
        weights, state = (
            read_tensors(files[name], str(folders[-1] / name)) for name in ("weights.safetensors", "state.safetensors")
        )
        return Checkpoint(manifest["step"], weights, state, files["metrics.jsonl"])

    def save_results(self, weights: dict[str, Tensor], results: dict[str, Any]) -> None:
        """Write what a finished run leaves beside its certificate, and last the manifest, with which it is finished."""
        files: dict[str, bytes | str] = {
            WEIGHTS: tensor_bytes(weights),
            self.metrics_file.name: read_bytes(self.metrics_file, "run again"),
            self.sample_file.name: results["sample"],
            self.results_file.name: json_text(results, sealed=True, indent=2),
        }
        write_files(self.path, files, {"format": FORMAT})

    def unfinished(self) -> str | None:
        """What keeps this from being a finished run with all its files intact, in words; None if nothing does."""
        remedy = "the end of the run is made again"
        try:
            read_files(self.path, remedy)
            Certificate.load(self.certificate_file)
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def remove_leftovers(self) -> None:
        """Remove old checkpoints and what killed processes left unfinished; only under the lock."""
        for path in self._leftovers():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _leftovers(self) -> list[Path]:
        kept = self.checkpoint_folders()[-KEPT:]
        others = [folder for folder in self.checkpoints.glob("step-[0-9]*") if folder not in kept]
        return others + list(self.path.glob(".*.[0-9]*.tmp"))


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
