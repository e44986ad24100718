"""The environment of a run: versions, commit, machine kind. Never anything that identifies a person or a machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from wellnormed._files import read_json, write_json

PACKAGES = ("wellnormed", "torch", "numpy", "safetensors")


def record_environment(path: Path, device: torch.device, start: int) -> None:
    """Append this session, which begins after the step `start`, to the sessions in the file."""
    sessions = []
    if path.exists():
        sessions = read_json(path, "remove it, for the run does not need it", sealed=True)["sessions"]
    write_json(path, {"sessions": [*sessions, describe(device, start)]}, sealed=True)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Give torch this number of threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(device: torch.device, start: int) -> dict[str, Any]:
    """Describe one session of a run: its first step, its time, its packages and its machine."""
    return {
        "from_step": start,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": versions(),
        "commit": _commit(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }


def versions() -> dict[str, str | None]:
    """The versions of the packages that a run depends on; None for a source tree that is not installed."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def device_of(name: str) -> torch.device:
    """The device that a name of torch's means, or "auto", a GPU if there is one.

    Raises:
        ValueError: If there is no such device.
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch finds no CUDA device; use --device cpu")
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or auto, got {name!r}") from None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None if it is installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", root, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no commit yet
