"""Models on disk: `config.json` beside safetensors, in a run folder or an exported one. Never unpickles."""

import functools
import hashlib
import operator
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from wellnormed._files import MANIFEST, is_there, json_text, parse_dataclass, read_files, read_json
from wellnormed.models.config import GPTConfig, ModelConfig, NanoGPTConfig, PotentialConfig
from wellnormed.models.gpt import GPT
from wellnormed.models.nanogpt import NanoGPT
from wellnormed.models.parts import PARTS, read_parts
from wellnormed.models.potential_gpt import PotentialGPT

FORMAT = 3
WEIGHTS = "model.safetensors"
_REMEDY = "pass a run folder of `wellnormed train` or a folder that `wellnormed.export` wrote"
Model = GPT | PotentialGPT | NanoGPT
BUILDERS: dict[type, Callable[[Any, torch.Generator | None], Any]] = {
    GPTConfig: GPT,
    PotentialConfig: PotentialGPT,
    NanoGPTConfig: NanoGPT,
}
"""The config of a model -> its class. Other packages may add configs, whose first field must be `architecture`."""


def build(config: ModelConfig, generator: torch.Generator | None = None) -> Model:
    """The model that a config describes, with fresh weights."""
    return BUILDERS[type(config)](config, generator)


def load(folder: str | Path) -> Model:
    """Load the model of an export or of a run (its newest checkpoint while unfinished), in eval mode on the CPU.

    A folder, config or weights that are missing, damaged, or do not fit each other are a `ValueError`. So is a config
    that differs from the one that the weights were written with, whose digest is in their manifest.

    Example:
        >>> load("runs/nowhere")
        Traceback (most recent call last):
        ValueError: runs/nowhere does not exist; pass a run folder of `wellnormed train` or a folder that ...
    """
    content, place = read_config(folder), Path(folder) / "config.json"
    config = parse_dataclass(functools.reduce(operator.or_, BUILDERS), content.get("model"), f"{place}: model")
    path = weights_path(folder)
    remedy = f"if this is a run, `wellnormed train --resume {folder}` writes it again; if not, export the model again"
    written = read_json(path.with_name(MANIFEST), remedy, sealed=True).get("config_sha256")
    if written != config_sha256(content):
        raise ValueError(
            f"{place} is another config than the one that {path} was written with: restore it, or make a new folder "
            "for the model that it describes"
        )
    if path.name == PARTS:
        weights = read_parts(path)
    else:
        weights = read_tensors(read_files(path.parent, remedy, only=path.name)[1][path.name], str(path))
    _require_sizes(config, weights, str(path))
    try:
        model = build(config, torch.Generator().manual_seed(0))
    except (RuntimeError, ArithmeticError, MemoryError) as error:  # torch's, of sizes that it cannot make
        raise ValueError(f"{path.parent}: no model has the sizes of its config ({error}); {_REMEDY}") from error
    load_weights(model, weights, str(path))
    return model.eval()


def _require_sizes(config: ModelConfig, weights: dict[str, Tensor], where: str) -> None:
    """Refuse sizes that do not fit the weights, before memory is allocated for a model of these sizes."""
    entries = sum(tensor.numel() for tensor in weights.values())
    for name, size in vars(config).items():
        most = len(weights) if "blocks" in name else entries
        if type(size) is int and not 0 <= size <= most:
            raise ValueError(
                f"{where}: {name}={size} does not fit its {len(weights)} tensors of {entries} entries; config and "
                "weights are of different models"
            )


def require_model(folder: str | Path) -> None:
    """Refuse every path but the folder of a run or of an exported model of `wellnormed.models`."""
    folder = Path(folder)
    if not (is_there(folder) and folder.is_dir()):
        near = get_close_matches(str(folder), [str(path.parent) for path in folder.parent.glob("*/config.json")], n=1)
        what = "is a file, which wn.verify proves if it is a certificate" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}{''.join(f' (did you mean {each}?)' for each in near)}; {_REMEDY}")
    # a finished run that has lost its config has weights of this name still
    if (folder / MANIFEST).exists() and not any((folder / name).exists() for name in ("config.json", WEIGHTS)):
        raise ValueError(
            f"{folder} must hold a model of wellnormed.models, and holds another; its certificate, if it was exported "
            f"with one, is proved by `wellnormed-proof {folder}`"
        )
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder / 'config.json'} is missing; {_REMEDY}. The code of a model of your own is in no folder: call "
            "wn.certify(model, x) in Python, or wn.export(model, folder, x), and `wellnormed verify` proves that folder"
        )


def holds_model(folder: Path) -> bool:
    """Whether a folder has a config of wellnormed, which states its format, and not none or one of another library."""
    path = folder / "config.json"
    return path.exists() and "format" in read_json(path, _REMEDY)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config of a run or export; a missing or damaged one, or another format, is a `ValueError`."""
    folder = Path(folder)
    require_model(folder)
    remedy = "restore it from a copy, for it is written once, when a run begins or a model is exported"
    content = read_json(folder / "config.json", remedy, sealed=True)
    if content.get("format") != FORMAT:
        raise ValueError(f"{folder / 'config.json'}: format {content.get('format')!r} is not {FORMAT}; {_REMEDY}")
    return content


def config_sha256(content: dict[str, Any]) -> str:
    """The digest of a config; the manifest of weights has it, to identify the config that they were written with."""
    return hashlib.sha256(json_text(content).encode()).hexdigest()


def weights_path(folder: str | Path) -> Path:
    """The path of a folder's final weights, or else of its newest complete checkpoint: a file, or a folder of parts."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return folder / WEIGHTS
    checkpoints = sorted((folder / "checkpoints").glob(f"step-[0-9]*/{MANIFEST}"))
    if not checkpoints:
        raise ValueError(
            f"{folder} holds no finished model and no checkpoint yet; if this is a run, wait for its first checkpoint "
            f"or continue it with `wellnormed train --resume {folder}`; if not, export the model again"
        )
    return checkpoints[-1].with_name(PARTS)


def tensor_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Tensors in the safetensors format; each is copied, since the format refuses shared memory."""
    return save_tensors({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()})


def read_tensors(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file; anything else is a `ValueError`."""
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise ValueError(
            f"{where} must be a safetensors file, but is another or truncated ({error}); restore it, or train again"
        ) from None


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model; the first that is missing, unknown, or of another shape or dtype is a `ValueError`."""
    wanted = model.state_dict()
    lacking, unknown = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    for what, names in (("lacks", lacking), ("holds the unknown", unknown)):
        if names:
            raise ValueError(f"{where} {what} tensor {min(names)!r}; config and weights are of different models")
    for name, tensor in wanted.items():
        stored = weights[name]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise ValueError(
                f"{where}: {name!r} is {stored.dtype} of shape {tuple(stored.shape)}, but the config asks for "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}; config and weights are of different models"
            )
        tensor.copy_(stored)
