"""A run on disk: config, environment, metrics, checkpoints, results. It survives `kill -9`, and has no pickles.

Everything is checked when it is read: JSON objects contain their digest, and a folder of tensors counts once its
manifest of checksums exists, which is written last. Every file appears whole, by one rename; only metrics.jsonl grows
in place, and checkpoints have a copy of it.
"""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wellnormed import _files
from wellnormed._files import MANIFEST, json_text
from wellnormed.certificates.certificate import Certificate
from wellnormed.models.files import FORMAT, WEIGHTS, config_sha256, read_config, tensor_bytes
from wellnormed.train.config import TrainConfig
from wellnormed.train.lock import require_new, resume_command

C = TypeVar("C", bound=TrainConfig)
METRICS = "metrics.jsonl"
KEPT = 2
"""The number of checkpoints that are kept: the older one is for the case that the disk damages the newest."""


class RunFolder:
    """The files of one run in the folder `path`, which `create` makes; damaged files are a `ValueError`.

    The command in `module` continues the run.
    """

    def __init__(self, path: str | Path, module: str = "wellnormed.cli") -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / METRICS
        self.checkpoints = self.path / "checkpoints"
        self.weights_file = self.path / WEIGHTS
        self.certificate_file = self.path / "certificate.json"
        self.results_file = self.path / "results.json"
        self.sample_file = self.path / "sample.txt"
        self.manifest_file = self.path / MANIFEST
        self.report_file = self.path / "report.html"
        self.resume_command = resume_command(self.path, module)

    def create(self, config: TrainConfig, text: dict[str, str]) -> None:
        """Write the config with a description of the text; from then on the run exists.

        `text` has the `source`, the `tokenizer`, the number of `tokens`, the `digest` and, for characters, the
        `symbols`.
        """
        require_new(self.path)
        self.remove_leftovers()
        settings = dataclasses.asdict(config)
        content = {"format": FORMAT, "model": settings.pop("model"), "train": settings, "text": text}
        _files.write_json(self.config_file, content, sealed=True)

    def read_config(self, kind: type[C]) -> tuple[C, dict[str, str]]:
        """The config and the description of the text, refused if missing, damaged, or of another format or kind."""
        if self.path.is_dir() and not self.config_file.exists():
            raise ValueError(
                f"{self.config_file} is missing: {self.path} is not a run, or the run was killed before "
                f"it began; pass the folder of a run, or begin this one with `wellnormed train --name {self.path.name}`"
            )
        content = read_config(self.path)
        if "train" not in content:
            raise ValueError(f"{self.path} is an exported model, which cannot be continued; pass the folder of a run")
        settings = {"model": content["model"], **content["train"]}
        return _files.parse_dataclass(kind, settings, str(self.config_file)), content["text"]

    def config_sha256(self) -> str:
        """The digest of the config, by which a checkpoint states its run."""
        return config_sha256(read_config(self.path))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row of metrics."""
        with _files.writing(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json_text(row, sealed=True))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows, without an unfinished last line, which a killed run can leave; damage to other lines is refused."""
        if not self.metrics_file.exists():
            return []
        remedy = f"{self.resume_command} writes it again"
        if self.manifest_file.exists():
            content = _files.read_files(self.path, remedy, only=self.metrics_file.name)[1][self.metrics_file.name]
        else:
            content = _files.read_bytes(self.metrics_file, remedy)
        return [
            _files.parse_json(line, f"{self.metrics_file}, line {number},", remedy, sealed=True)
            for number, line in enumerate(content.split(b"\n")[:-1], start=1)
        ]

    def checkpoint_folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(manifest.parent for manifest in self.checkpoints.glob(f"step-[0-9]*/{MANIFEST}"))

    def expected_of(self, folder: Path) -> dict[str, Any]:
        """The entries that the manifest of this run's checkpoint in a folder must have."""
        return {"step": int(folder.name.removeprefix("step-")), "config_sha256": self.config_sha256()}

    def save_results(self, weights: dict[str, Tensor], results: dict[str, Any]) -> None:
        """Write the results of a finished run, and last the manifest, which makes it a finished run."""
        files: dict[str, bytes | str] = {
            WEIGHTS: tensor_bytes(weights),
            self.metrics_file.name: _files.read_bytes(self.metrics_file, "run again"),
            self.sample_file.name: results["sample"],
            self.results_file.name: json_text(results, sealed=True, indent=2),
        }
        _files.write_files(self.path, files, {"format": FORMAT, "config_sha256": self.config_sha256()})

    def unfinished(self) -> str | None:
        """The reason why this is not a finished run with intact files, in words; None if it is one."""
        try:
            _, files = _files.read_files(self.path, "the end of the run is made again")
            results = _files.parse_json(files[self.results_file.name], str(self.results_file), "", sealed=True)
            if "log10_lipschitz" in results:
                Certificate.load(self.certificate_file)
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def remove_leftovers(self) -> None:
        """Remove old checkpoints and unfinished files of killed processes; only under the lock."""
        old = set(self.checkpoints.glob("step-[0-9]*")) - set(self.checkpoint_folders()[-KEPT:])
        for path in (*old, *self.path.glob(".*.[0-9]*.tmp")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def memory_explained() -> Iterator[None]:
    """Raise an error for full memory with a remedy, whichever error torch raises for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        first = next(iter(str(error).splitlines()), "no more is given")
        kinds = (torch.OutOfMemoryError, MemoryError)
        if not (isinstance(error, kinds) or "allocate memory" in str(error) or "calculation overflowed" in str(error)):
            raise
        raise ValueError(
            f"the memory is full ({first}); begin a new run of a smaller model or with a smaller --batch or, of a "
            "language model, with --micro-batch, --recompute or more ranks and --parallel fsdp"
        ) from error


@contextmanager
def explained(run: RunFolder) -> Iterator[None]:
    """Add to any error that stops a run its newest checkpoint and the command that continues it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        saved = run.checkpoint_folders()
        left = f"the newest checkpoint is {saved[-1].name}" if saved else "there is no checkpoint yet"
        interrupt.args = (f"; {left}; continue with {run.resume_command}",)
        raise
    except OSError as error:
        raise OSError(f"{error}, then continue with {run.resume_command}") from error
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistBackendError) or "gloo" in str(error):
            raise OSError(
                f"another rank has ended or does not answer ({str(error).splitlines()[0]}); "
                f"look what it has printed, then continue with {run.resume_command}"
            ) from error
        raise
    except ValueError as error:
        saved = run.checkpoint_folders()
        left = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise ValueError(f"{error}; {left}") from error
