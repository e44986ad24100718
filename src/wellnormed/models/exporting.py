"""`export`: write any model as the program that its certificate is about."""

import contextlib
import dataclasses
import importlib.util
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from wellnormed._files import json_text, read_files, write_files
from wellnormed.certificates import certify
from wellnormed.certificates.arguments import example_of, require_model_or_program
from wellnormed.models.files import (
    BUILDERS,
    FORMAT,
    WEIGHTS,
    config_sha256,
    load,
    read_config,
    read_tensors,
    tensor_bytes,
    weights_path,
)
from wellnormed.program.capturing import capture, capture_batched, quiet
from wellnormed.program.comparing import compare
from wellnormed.program.drawing import draw
from wellnormed.program.places import first_line, shown
from wellnormed.program.program import Example, Program, tensors_of
from wellnormed.program.shaking import Shaken

_AGAIN = "export the model again"
PROGRAM, PROGRAM_WEIGHTS, BATCHED, ONNX = "program.pt2", "weights.safetensors", "batched.pt2", "model.onnx"
_MOST_BYTES_IN_ONE = 2**31
"""The largest ONNX file, by its format; the weights of a larger model stand in a file beside it."""


def export(
    model: nn.Module | Program,
    folder: str | Path,
    example_input: Any = None,
    radius: float = 1.0,
    *,
    output: str | int | None = None,
    certificate: bool = True,
    onnx: bool | None = None,
) -> Path:
    """Write a model as a plain program that needs torch or ONNX alone, and return the folder, which is made.

    The folder holds:

    - `program.pt2`, for `torch.export.load`: it takes the tensors of one sample of the example, with a first axis of
      size 1, and returns one tensor. It is the graph that the certificate is about, with its tensors;
    - `weights.safetensors`, its tensors by name;
    - `batched.pt2`, which takes a batch of any size, if torch can export the model's code for that. It is compared with
      the program on batches of 2 and 7 samples, and not proved; `manifest.json` says so;
    - `model.onnx`, if the packages `onnx` and `onnxscript` are installed (the extra `onnx`). If there is a
      `batched.pt2`, it takes a batch of any size, else one sample, as `program.pt2`. By `onnx.reference` it is executed
      and compared with the program, and not proved;
    - `certificate.json`, which `wellnormed-proof FOLDER` proves;
    - for a model of `wellnormed.models` also `config.json` and `model.safetensors`, its weights. `models.load` and all
      commands but `sample`, which needs a run's characters, read the folder.

    Args:
        model: Any module that can be captured, in evaluation mode; or a captured program, which has its example and its
            output.
        folder: A new or empty folder.
        example_input: The example input, as for `certify`: a tensor, a tuple, or a dictionary of keywords.
        radius: The largest RMS of an input vector, token or sample, as for `certify`.
        output: The tensor that the program returns, if the model returns several: a key, an attribute, or a position.
        certificate: Whether to certify the program. If False, a model that has no bound can be exported, too.
        onnx: Whether to write `model.onnx`; None means if the packages are installed.

    Raises:
        UncertifiableError: The model cannot be captured, or an operation has no bound; see `certify`.
        ValueError: The folder holds something, or ONNX cannot be written or compared, or would compute something else.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> folder = export(model, tempfile.mkdtemp(), torch.zeros(1, 4), onnx=False)
        >>> sorted(path.name for path in folder.iterdir())
        ['batched.pt2', 'certificate.json', 'manifest.json', 'program.pt2', 'weights.safetensors']
        >>> torch.export.load(folder / "program.pt2").module()(torch.ones(1, 4)).shape
        torch.Size([1, 2])
        >>> torch.export.load(folder / "batched.pt2").module()(torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """
    require_model_or_program("export", model, example_input=example_input, output=output)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose a new folder")
    packages = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if onnx and packages:
        raise ValueError(
            f"onnx=True needs {' and '.join(packages)}; in a clone type pip install '.[onnx]', or leave onnx out"
        )
    files: dict[str, bytes | str] = {}
    facts: dict[str, Any] = {"format": FORMAT}
    if not isinstance(model, Program) and type(getattr(model, "config", None)) in BUILDERS:
        config = _config(model, example_input)
        files = {WEIGHTS: tensor_bytes(model.state_dict()), "config.json": json_text(config, sealed=True, indent=2)}
        facts["config_sha256"] = config_sha256(config)

    example = None if isinstance(model, Program) else example_of(model, example_input, "export")
    proved = certify(model, example, radius, output=output) if certificate else None
    if proved is not None:
        assert proved.program is not None  # it was just made
        program, facts["lipschitz"] = proved.program, proved.lipschitz
    elif isinstance(model, Program):
        program = model
    else:
        program = capture(model, example, output)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        exported = _as_file(program.module, program, tensors_of(program.example), any_size=False)
        torch.export.save(exported, place / PROGRAM)
        if (batched := _batched(model, program)) is not None:
            torch.export.save(batched, place / BATCHED)
            facts["compared, not proved"] = [BATCHED]
        if onnx or (onnx is None and not packages):
            _write_onnx(batched or exported, program, place / ONNX, 1 if batched is None else 2)
            facts["compared, not proved"] = [*facts.get("compared, not proved", []), ONNX]
        files |= {path.name: path.read_bytes() for path in place.iterdir()}
    files[PROGRAM_WEIGHTS] = tensor_bytes(program.module.state_dict())
    if proved is not None:
        proved.save(folder / "certificate.json")
    write_files(folder, files, facts)
    return folder


def certified(folder: str | Path) -> tuple[nn.Module, Any, Path]:
    """The model of a folder, the example of its certificate, and the path of its weights: a file, or a folder of parts.

    A file of an export that differs from the manifest is a `ValueError`. `program.pt2` and `model.onnx` are checked by
    the manifest alone, since reading a program may run its code. Weights of the program that differ from the model's
    are a `ValueError`, too.
    """
    model, shape = load(folder), read_config(folder).get("example_shape")
    if shape is None:
        return model, None, weights_path(folder)
    for name in (PROGRAM, BATCHED, ONNX):
        if name == PROGRAM or (Path(folder) / name).exists():
            read_files(Path(folder), _AGAIN, only=name)
    weights = Path(folder) / PROGRAM_WEIGHTS
    stored = read_tensors(read_files(Path(folder), _AGAIN, only=PROGRAM_WEIGHTS)[1][PROGRAM_WEIGHTS], str(weights))
    for name, tensor in model.state_dict().items():
        if name in stored and not torch.equal(stored[name], tensor):
            raise ValueError(f"{weights}: {name} is not that of {WEIGHTS}; {_AGAIN}")
    return model, torch.zeros(shape, dtype=torch.long), weights_path(folder)


def _config(model: Any, example: Any) -> dict[str, Any]:
    """The config from which `load` makes the model, beside its weights."""
    shape = list((model.example_input() if example is None else example).shape)
    return {"format": FORMAT, "model": dataclasses.asdict(model.config), "example_shape": shape}


def _as_file(module: fx.GraphModule, program: Program, batch: Sequence[Tensor], any_size: bool) -> Any:
    """A module in torch's file format; it is called like the model, but with tensors only."""
    count = len(tensors_of(program.example.arguments))
    arguments, keywords = tuple(batch[:count]), dict(zip(program.arguments[count:], batch[count:], strict=True))
    sizes = None
    if any_size:
        axes = [{0: torch.export.Dim.DYNAMIC} if own else None for own in program.batched]
        sizes = dict(zip(program.arguments, axes, strict=True))
    with torch.no_grad(), quiet():
        exported = torch.export.export(module, arguments, keywords, dynamic_shapes=sizes, strict=False)
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
        stack = node.meta.get("nn_module_stack", {}).items()
        node.meta["nn_module_stack"] = {key: (shown(path), kind) for key, (path, kind) in stack if path}
    return exported


def _batched(model: nn.Module | Program, program: Program) -> torch.export.ExportedProgram | None:
    """The model's program for a batch of any size; None if there is none that computes the same as the program.

    If only the program is given, it is the program's graph, provided that this takes several samples.
    """
    if not program.each_sample:
        return None
    sample = tensors_of(program.example)
    flat = replace(program, example=Example(tuple(sample), {}), output=None, size=1, given=tuple(sample))
    with contextlib.suppress(Exception):  # whatever the exporter raises, the model has no such program
        own = (program.module, flat) if isinstance(model, Program) else (model, program)
        module = capture_batched(*own)
        compare(flat, module, sizes=(2, 7))
        return _as_file(module, program, program.batch([sample, sample]), any_size=True)
    return None


def _write_onnx(exported: torch.export.ExportedProgram, program: Program, path: Path, samples: int) -> None:
    """Write a program as ONNX, which takes so many samples of the captured program."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in exported.state_dict.values())
    names: dict[str, Any] = {"input_names": program.arguments, "output_names": ["output"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            written = torch.onnx.export(exported, dynamo=True, verbose=False, **names)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"the program cannot be written as ONNX ({reason}); pass onnx=False") from error
        assert written is not None  # the older exporter returns nothing
        _require_same(written.model_proto, program, samples)
        written.save(path, external_data=size >= _MOST_BYTES_IN_ONE)


def _require_same(model: Any, program: Program, count: int) -> None:
    """Refuse an ONNX model whose result, as ONNX defines its operations, differs from the program's."""
    from onnx.reference import ReferenceEvaluator  # pyrefly: ignore[missing-import]

    samples = draw(program, 1.0, count)
    tensors = program.batch(samples) if program.each_sample else samples[0]
    with torch.no_grad():
        result = program.run(tensors)
        wanted, moved = result.double().cpu(), (program.run(tensors, Shaken(program)).double() - result).cpu()
    inputs = dict(zip(program.arguments, map(_array, tensors), strict=True))
    try:
        arrays: Any = ReferenceEvaluator(model).run(None, inputs)
    except Exception as error:  # it lacks some operations, and raises anything
        raise ValueError(
            f"the ONNX file is not written, since onnx.reference cannot execute it, and so it cannot be compared: "
            f"{first_line(error)}; pass onnx=False"
        ) from error
    found = torch.from_numpy(arrays[0].astype(float))
    size, spread = (each.nan_to_num(0, 0, 0).abs().max() for each in (wanted, moved))
    short = result.dtype in (torch.float16, torch.bfloat16)  # and attributes of ONNX are float32
    explained = torch.finfo(result.dtype if short else torch.float32).eps ** 0.5 * size + 16 * spread
    if found.shape != wanted.shape or not bool(((found - wanted).abs() <= explained)[wanted.isfinite()].all()):
        raise ValueError(
            "the ONNX file computes something else than the program, since torch translates an operation wrongly; "
            "pass onnx=False"
        )


def _array(tensor: Tensor) -> Any:
    """The array of a tensor; of bfloat16 by the package that onnx needs for it."""
    if tensor.dtype != torch.bfloat16:
        return tensor.cpu().numpy()
    import ml_dtypes  # pyrefly: ignore[missing-import]

    return tensor.cpu().float().numpy().astype(ml_dtypes.bfloat16)
