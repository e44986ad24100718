"""`export`: write any model as a plain program, its scales folded into its weights, with a certificate of its own."""

import dataclasses
import importlib.util
import tempfile
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from wellnormed._files import json_text, read_files, write_files
from wellnormed._inputs import require_module
from wellnormed.certificates import certify
from wellnormed.certificates.certifying import domain_from, example_of
from wellnormed.certificates.verifying import close
from wellnormed.models.files import (
    FORMAT,
    WEIGHTS,
    Model,
    config_sha256,
    load,
    read_config,
    read_tensors,
    tensor_bytes,
    weights_path,
)
from wellnormed.propagation.capture import Captured, capture, capture_any_batch, functional, tensors_of
from wellnormed.propagation.confirmation import confirm
from wellnormed.propagation.domain import Domain
from wellnormed.propagation.drawing import Drawing
from wellnormed.propagation.folding import argument_name, fold, plain
from wellnormed.propagation.in_double import run_in_double
from wellnormed.propagation.places import shown

_AGAIN = "export the model again"
PROGRAM, PROGRAM_WEIGHTS, ONNX = "program.pt2", "weights.safetensors", "model.onnx"
OUTPUT_TOLERANCE = 1e-6
"""Largest difference of outputs, over the largest output."""
LIPSCHITZ_TOLERANCE = Decimal("1e-5")
"""By how much the bound may grow, as a share of it: weights are rounded once when factors are folded into them."""
_MOST_BYTES_IN_ONE = 2**31
"""Of an ONNX file, a limit of its format; weights of a larger one stand beside it."""


def export(
    model: nn.Module,
    folder: str | Path,
    example_input: Any = None,
    radius: float = 1.0,
    *,
    output: str | int | None = None,
    certificate: bool = True,
    onnx: bool | None = None,
    symbols: str | None = None,
) -> Path:
    """Write a model as a plain program that needs torch or ONNX alone, and return the folder, which is made.

    The program is what the model executes on the example, for a batch of any size if the model's code allows it. Its
    constant factors are folded into the weights beside them, and weights that are computed, such as normalized ones,
    are stored. What is left is what no weight can take: a factor on a residual stream, on a tied weight, on an
    embedding's vectors, or inside of attention. Factors are multiplied in float64 and every weight is rounded once.

    The folder holds:

    - `program.pt2`, for `torch.export.load`: it takes the tensors of the example, and returns one tensor;
    - `weights.safetensors`, its tensors by name; those that folding changed end in `_folded`;
    - `model.onnx`, if the packages `onnx` and `onnxscript` are installed (the extra `onnx`);
    - `certificate.json`, of the folded program: its rows are those of `program.pt2`, its tensors those of
      `weights.safetensors`, so that `python -m wellnormed.proof FOLDER` proves it;
    - of a model of `wellnormed.models` also `config.json` and `model.safetensors`, its own weights, so that
      `models.load` and every command read the folder.

    Nothing is written unless the program's outputs in float64 are those of the model within 1e-6 of the largest, at the
    example and at inputs drawn from the domain, and its bound is at most 1 + 1e-5 times the model's.

    Args:
        model: Any module that can be captured, in evaluation mode.
        folder: New or empty.
        example_input: As for `certify`: a tensor, a tuple, or a dictionary of keywords.
        radius: As for `certify`: largest RMS of an input vector, token or sample.
        output: Which tensor the program returns, if the model returns several: a key, an attribute, or a position.
        certificate: Whether the program must be certified. Without it a model that has no bound can be exported too.
        onnx: Whether to write `model.onnx`; None means if the packages are installed.
        symbols: The characters that the tokens of a character model stand for, one for each; `wellnormed sample` needs
            them.

    Raises:
        UncertifiableError: The model cannot be captured, or an operation has no bound; see `certify`.
        ValueError: The folder holds something, the symbols do not fit, the folded program differs from the model, or
            ONNX is asked for and cannot be written.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> folder = export(model, tempfile.mkdtemp(), torch.zeros(1, 4), onnx=False)
        >>> sorted(path.name for path in folder.iterdir())
        ['certificate.json', 'manifest.json', 'program.pt2', 'weights.safetensors']
        >>> program = torch.export.load(folder / "program.pt2").module()
        >>> program(torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """
    require_module("export", model)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose a new folder")
    packages = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if onnx and packages:
        raise ValueError(f"onnx=True needs {' and '.join(packages)}; install `wellnormed[onnx]`, or leave onnx out")
    files: dict[str, bytes | str] = {}
    facts: dict[str, Any] = {"format": FORMAT}
    if isinstance(model, Model):
        config = _config(model, example_input, symbols)
        files = {WEIGHTS: tensor_bytes(model.state_dict()), "config.json": json_text(config, sealed=True, indent=2)}
        facts["config_sha256"] = config_sha256(config)
    elif symbols is not None:
        raise ValueError("symbols are for models of `wellnormed.models`, which the commands read; leave them out")

    example, domain = example_of(model, example_input, "export"), domain_from("export", radius, None)
    before = certify(model, example, radius, output=output) if certificate else None
    captured = functional(capture(model, example, output))
    if before is None:
        confirm(model, captured, None, output)
    folded, any_batch = _folded(model, captured, output)
    facts |= {"largest_difference": _require_same_outputs(captured, folded, domain)}
    after = None
    if before is not None:
        after = certify(folded, _example(captured), radius)
        if after.exact_lipschitz > before.exact_lipschitz * (1 + LIPSCHITZ_TOLERANCE):
            raise ValueError(
                f"the folded program is certified with {after.lipschitz}, the model with {before.lipschitz}: more than "
                f"{1 + LIPSCHITZ_TOLERANCE} times as much; please report it, and pass certificate=False until then"
            )
        facts |= {"lipschitz": after.lipschitz, "lipschitz_before_folding": before.lipschitz}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        program = _program(folded, any_batch or captured, dynamic=any_batch is not None)
        torch.export.save(program, place / PROGRAM)
        if onnx or (onnx is None and not packages):
            _write_onnx(program, list(_inputs(captured)), place / ONNX)
        files |= {path.name: path.read_bytes() for path in place.iterdir()}
    files[PROGRAM_WEIGHTS] = tensor_bytes(folded.state_dict())
    if after is not None:
        after.save(folder / "certificate.json")
    write_files(folder, files, facts)
    return folder


def certified(folder: str | Path) -> tuple[nn.Module, Any, Path]:
    """What the certificate of a folder is of: a model, its example, and where its weights are: a file, or parts.

    Of a run it is the model, and of an export the folded program, folded again from the config and the model's own
    weights. Weights of the program that differ from those of this folding, by more than the rounding that machines
    differ by, are a `ValueError`; so are files that are not those of the manifest, by which alone `program.pt2` and
    `model.onnx` are known here, since reading a program may run what it holds.
    """
    model, shape = load(folder), read_config(folder).get("example_shape")
    if shape is None:
        return model, None, weights_path(folder)
    for name in (PROGRAM, ONNX):
        if name != ONNX or (Path(folder) / name).exists():
            read_files(Path(folder), _AGAIN, only=name)
    captured = functional(capture(model, torch.zeros(shape, dtype=torch.long)))
    folded, _ = _folded(model, captured)
    weights, made = Path(folder) / PROGRAM_WEIGHTS, folded.state_dict()
    found = read_tensors(read_files(Path(folder), _AGAIN, only=PROGRAM_WEIGHTS)[1][PROGRAM_WEIGHTS], str(weights))
    for name in sorted(made.keys() | found.keys()):
        if name not in made or name not in found or not close(made[name], found[name]):
            raise ValueError(f"{weights}: {name} is not what config.json and {WEIGHTS} make of it; {_AGAIN}")
    return folded, _example(captured), weights


def _folded(model: nn.Module, captured: Captured, output: Any = None) -> tuple[fx.GraphModule, Captured | None]:
    """The folded program, and its capture for any batch, if there is one."""
    any_batch = capture_any_batch(model, captured, output)
    return fold(captured if any_batch is None else functional(any_batch)), any_batch


def _config(model: Model, example: Any, symbols: str | None) -> dict[str, Any]:
    """What `load` makes a model of, beside its weights."""
    size = model.config.vocabulary_size
    if symbols is not None and len(symbols) != size:
        raise ValueError(f"{len(symbols)} symbols do not fit a vocabulary of {size}; pass one for each token, in order")
    text = {} if symbols is None else {"text": {"symbols": symbols}}
    shape = list((model.example_input() if example is None else example).shape)
    return {"format": FORMAT, "model": dataclasses.asdict(model.config), "example_shape": shape, **text}


def _inputs(captured: Captured) -> dict[str, Tensor]:
    """The example's tensors by the names of the program's arguments."""
    return {argument_name(name): tensor for name, tensor in captured.inputs.values()}


def _call(captured: Captured) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """How the program is called: as the model, with the tensors alone."""
    inputs = list(_inputs(captured).items())
    count = sum(isinstance(each, Tensor) for each in torch.utils._pytree.tree_leaves(captured.example[0]))
    return tuple(tensor for _, tensor in inputs[:count]), dict(inputs[count:])


def _example(captured: Captured) -> Any:
    arguments, keywords = _call(captured)
    return keywords or arguments


def _program(folded: fx.GraphModule, captured: Captured, dynamic: bool) -> torch.export.ExportedProgram:
    arguments, keywords = _call(captured)
    sizes = {name: {0: torch.export.Dim.DYNAMIC} for name in _inputs(captured)} if dynamic else None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        program = torch.export.export(folded, arguments, keywords, dynamic_shapes=sizes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
        stack = node.meta.get("nn_module_stack", {}).items()
        node.meta["nn_module_stack"] = {key: (shown(path), kind) for key, (path, kind) in stack if path}
    return program


def _write_onnx(program: torch.export.ExportedProgram, names: list[str], path: Path) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            written = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names, output_names=["output"])
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"the program cannot be written as ONNX ({reason}); pass onnx=False") from error
        assert written is not None  # the older exporter returns nothing
        written.save(path, external_data=size >= _MOST_BYTES_IN_ONE)


def _require_same_outputs(captured: Captured, folded: fx.GraphModule, domain: Domain) -> float:
    """The largest difference of outputs in float64, over the largest output; refused if it exceeds the tolerance."""
    original, largest = plain(captured), 0.0
    for inputs in (captured.example, *Drawing(captured, domain).scaled()):
        expected, found = (_run(program, tensors_of(inputs)) for program in (original, folded))
        finite = expected.isfinite()
        size = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
        difference = float((found - expected)[finite].abs().max()) if bool(finite.any()) else 0.0
        if not torch.equal(finite, found.isfinite()) or not difference <= OUTPUT_TOLERANCE * size:
            dtypes = {str(t.dtype) for t in folded.state_dict().values() if t.is_floating_point()}
            raise ValueError(
                f"the folded program's outputs differ by {difference:.3g} from the model's, of which the largest is "
                f"{size:.3g}; that is more than {OUTPUT_TOLERANCE} of it. Keep the weights, which are of "
                f"{', '.join(sorted(dtypes))}, in float32 or float64"
            )
        largest = max(largest, difference / size if size else 0.0)
    return largest


def _run(program: nn.Module, inputs: list[Tensor]) -> Tensor:
    """The result in float64, or in its own digits where float64 cannot follow."""
    with torch.no_grad():
        result = run_in_double(lambda: program(*inputs), inputs)
        return program(*inputs).double() if result is None else result
