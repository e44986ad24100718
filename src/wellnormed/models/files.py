"""Models on disk: `config.json` beside safetensors, in a run folder or an exported one. Never unpickles."""

import dataclasses
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from wellnormed._files import parse_dataclass, read_json, write_atomically, write_json
from wellnormed.models.config import GPTConfig
from wellnormed.models.gpt import GPT

FORMAT = 1
_REMEDY = "pass a run folder of `wellnormed train` or a folder that `wellnormed.models.export` wrote"


def load(folder: str | Path) -> GPT:
    """Load a model, in eval mode on the CPU.

    Args:
        folder: A run folder, finished (`model.safetensors`) or not (newest checkpoint), or an exported model.

    Raises:
        ValueError: Folder, config or weights are missing or damaged, or do not fit each other.

    Example:
        >>> load("runs/nowhere")
        Traceback (most recent call last):
        ValueError: runs/nowhere is no folder; pass a run folder of `wellnormed train` or ...
    """
    model = GPT(model_config(folder), torch.Generator().manual_seed(0))
    path = weights_path(folder)
    load_weights(model, read_tensors(path), str(path))
    return model.eval()


def export(model: GPT, folder: str | Path, symbols: str | None = None) -> Path:
    """Write a model so that `load` and every command can read it.

    Args:
        model: What to write.
        folder: Made if needed.
        symbols: The characters that the tokens stand for; `wellnormed sample` needs them.

    Returns:
        The folder.

    Raises:
        ValueError: The folder already holds a model, or the symbols are not as many as the vocabulary.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} already holds a config.json; choose a new folder")
    size = model.config.vocabulary_size
    if symbols is not None and len(symbols) != size:
        raise ValueError(f"{len(symbols)} symbols do not fit a vocabulary of {size}; pass one for each token, in order")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", tensor_bytes(model.state_dict()))
    text = {} if symbols is None else {"text": {"symbols": symbols}}
    write_json(folder / "config.json", {"format": FORMAT, "model": dataclasses.asdict(model.config), **text})
    return folder


def model_config(folder: str | Path) -> GPTConfig:
    """The `model` section of a folder's config."""
    content = _config(folder)
    if "model" not in content:
        raise ValueError(f"{Path(folder) / 'config.json'} has no 'model' section; {_REMEDY}")
    return parse_dataclass(GPTConfig, content["model"], f"{Path(folder) / 'config.json'}: model")


def model_symbols(folder: str | Path) -> str:
    """The characters that a folder's tokens stand for."""
    text = _config(folder).get("text")
    symbols = text.get("symbols") if isinstance(text, dict) else None
    if not isinstance(symbols, str):
        raise ValueError(
            f"{Path(folder) / 'config.json'} does not say which characters the tokens are; export "
            "again with symbols=..."
        )
    return symbols


def weights_path(folder: str | Path) -> Path:
    """The final weights of a folder, else those of its newest checkpoint."""
    folder = Path(folder)
    final = folder / "model.safetensors"
    if final.exists():
        return final
    checkpoints = sorted((folder / "checkpoints").glob("step-*/weights.safetensors"))
    if not checkpoints:
        raise ValueError(f"{folder} holds neither model.safetensors nor a checkpoint; {_REMEDY}")
    return checkpoints[-1]


def tensor_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Tensors in the safetensors format; each is copied, since the format refuses shared memory."""
    return save_tensors({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ValueError: It is truncated or no safetensors file.
    """
    try:
        return load_tensors(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); restore it, or train again") from None


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model, names, shapes and dtypes being exactly the model's.

    Raises:
        ValueError: Names the first tensor that is missing, unknown, or does not fit.
    """
    own = model.state_dict()
    for what, names in (
        ("lacks", own.keys() - weights.keys()),
        ("holds the unknown", weights.keys() - own.keys()),
    ):
        if names:
            raise ValueError(f"{where} {what} tensor {min(names)!r}; config and weights are of different models")
    for name, tensor in own.items():
        given = weights[name]
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise ValueError(
                f"{where}: {name!r} is {given.dtype} of shape {tuple(given.shape)}, but the config "
                f"asks for {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}; config and weights are of different models"
            )
        tensor.copy_(given)


def _config(folder: str | Path) -> dict[str, object]:
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; {_REMEDY}")
    content = read_json(folder / "config.json", _REMEDY)
    if content.get("format") != FORMAT:
        raise ValueError(f"{folder / 'config.json'}: format {content.get('format')!r} is not {FORMAT}; {_REMEDY}")
    return content
