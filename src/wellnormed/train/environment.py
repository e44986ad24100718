"""What a run ran on: versions, commit, machine kind. Never anything that identifies a person or a machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from wellnormed._files import read_json, write_json

PACKAGES = ("wellnormed", "torch", "numpy", "safetensors")


def record_environment(path: Path, device: torch.device, start: int) -> None:
    """Add this session, which begins after the step `start`, to those in the file."""
    sessions = []
    if path.exists():
        sessions = read_json(path, "remove it, for the run does not need it", sealed=True)["sessions"]
    write_json(path, {"sessions": [*sessions, describe(device, start)]}, sealed=True)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads for torch; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(device: torch.device, start: int) -> dict[str, Any]:
    """One session of a run: from which step it ran, when, and on what."""
    return {
        "from_step": start,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a source tree that is not installed


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """The commit of the source tree that this package is run from, if it is one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", root, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no commit yet
