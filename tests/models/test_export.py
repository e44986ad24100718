"""An exported program is the model: without this library, for one sample proved, for a batch compared."""

import importlib.util
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wellnormed as wn
from tests import sealed
from tests.certificates.adversary import Net
from wellnormed.certificates import Certificate, UncertifiableError, require_same_model
from wellnormed.models import GPT, GPTConfig, PotentialConfig, PotentialGPT, export, load
from wellnormed.models.exporting import certified
from wellnormed.models.files import config_sha256
from wellnormed.nn import Scale
from wellnormed.proof import CheckError, check
from wellnormed.routing import assign_norms

TOLERANCE = 1e-6
"""What is promised of outputs, of the largest."""


class Strided(nn.Sequential):
    """A CNN on bytes, with a normalized kernel and gains on channels."""

    def __init__(self) -> None:
        super().__init__(
            Scale(1 / 255), nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), Scale(0.7),
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, stride=2)), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, 4), Scale(3.0),
        )  # fmt: skip


def gpt(**settings):
    model = GPT(GPTConfig(length=16, width=16, blocks=1, heads=2, **settings), torch.Generator().manual_seed(0))
    return initialized(model)


def initialized(model):
    """Without zeros, which would hide a factor."""
    for assigned in assign_norms(model):
        if assigned.norm is not None and not bool(assigned.parameter.any()):
            nn.init.normal_(assigned.parameter, std=0.1)
    return model


MODELS = {
    "gpt": (lambda: gpt(output_factor=1 / 3), None),
    "potential": (lambda: initialized(PotentialGPT(PotentialConfig(length=16, blocks=1, hidden=32))), None),
    "cnn": (Strided, (1, 3, 12, 12)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (1, 5, 16)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name -> model, example and folder, exported once."""

    @cache
    def of(name):
        torch.manual_seed(0)
        make, shape = MODELS[name]
        model = make().eval()
        example = model.example_input() if shape is None else torch.randn(shape)
        return model, example, export(model, tmp_path_factory.mktemp("export") / "model", example)

    return of


@pytest.fixture(scope="module", params=MODELS)
def case(request, exported):
    return request.param, *exported(request.param)


def other(example):
    """A batch of three other inputs."""
    shape = (3, *example.shape[1:])
    return torch.randn(shape) if example.is_floating_point() else torch.randint(0, 65, shape)


def require_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, about its own code
def test_the_program_is_the_model(case):
    _, model, example, folder = case
    program = torch.export.load(folder / "program.pt2")
    require_close(program.module()(example[:1]), model(example[:1]))
    if isinstance(model, GPT):
        x, batched = other(example), torch.export.load(folder / "batched.pt2")
        require_close(torch.export.unflatten(batched)(x), model(x))  # a tree of modules, as the model was
    assert json.loads((folder / "manifest.json").read_bytes())["compared, not proved"][0] == "batched.pt2"
    stored = load_file(folder / "weights.safetensors")
    assert stored.keys() == program.state_dict.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in program.state_dict.items())


def test_the_certificate_is_of_the_program(case):
    _, model, example, folder = case
    certificate, before = Certificate.load(folder / "certificate.json"), wn.certify(model, example)
    assert certificate.lipschitz.exact == before.lipschitz.exact
    assert certificate.each_sample
    assert before.each_sample
    assert check(folder).claims
    assert any(row.name.startswith("layers.") for row in certificate.layers) or not isinstance(model, GPT)


WITHOUT = """
import sys, torch
sys.modules['wellnormed'] = None
for program, given, result in zip(*[iter(sys.argv[1:])] * 3):
    torch.save(torch.export.load(program).module()(torch.load(given)).detach(), result)
assert not any(name.startswith('wellnormed.') for name in sys.modules)
"""


def test_the_programs_run_without_this_library(exported, tmp_path):
    """In one process for all models, as starting torch takes longer than they do."""
    paths, cases = [], [exported(name) for name in MODELS]
    for name, (_, example, folder) in zip(MODELS, cases, strict=True):
        torch.save(other(example), tmp_path / f"{name}-input.pt")
        paths += [folder / "batched.pt2", tmp_path / f"{name}-input.pt", tmp_path / f"{name}-output.pt"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT, *map(str, paths)], check=True)
    for name, (model, _, folder) in zip(MODELS, cases, strict=True):
        require_close(torch.load(tmp_path / f"{name}-output.pt"), model(torch.load(tmp_path / f"{name}-input.pt")))
        assert not any(
            word in (folder / file).read_bytes()
            for file in ("program.pt2", "batched.pt2")
            for word in (b"site-packages", b".py")
        )


def test_onnx_gives_the_same(case):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    _, model, example, folder = case
    session = runtime.InferenceSession(folder / "model.onnx")
    for x in (example, other(example)):
        (found,) = session.run(["output"], {session.get_inputs()[0].name: x.numpy()})
        require_close(torch.from_numpy(found), model(x).detach())


def copied(exported, tmp_path):
    """The exported GPT, in a folder of its own that may be damaged."""
    model, _, folder = exported("gpt")
    return model, Path(shutil.copytree(folder, tmp_path / "m"))


def test_a_changed_byte_is_found(exported, tmp_path):
    model, folder = copied(exported, tmp_path)
    tokens = torch.arange(16)[None]
    assert torch.equal(load(folder)(tokens), model.eval()(tokens))
    certified(folder)
    for name in ("program.pt2", "weights.safetensors", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{name}.*truncated or changed"):
            certified(folder)
        (folder / name).write_bytes(content)
    for name in ("weights.safetensors", "model.safetensors"):  # in one file alone, and then in both
        save_file({key: 2 * tensor for key, tensor in load_file(folder / name).items()}, folder / name)
        with pytest.raises(CheckError, match=r"another tensor than elsewhere|is not the certified tensor"):
            check(folder)


def test_the_config_is_tied_to_the_weights_and_the_certificate(exported, tmp_path):
    """`logit_scale` times 1000 was verified with the bound of the model before."""
    _, folder = copied(exported, tmp_path)
    path, manifest = folder / "config.json", sealed.read(folder / "manifest.json")
    config = sealed.read(path)
    for factor in (1000, 1 + 1e-4):
        changed = config | {"model": config["model"] | {"logit_scale": factor * config["model"]["logit_scale"]}}
        sealed.write(path, changed)
        sealed.write(folder / "manifest.json", manifest)
        for read in (load, certified):
            with pytest.raises(ValueError, match=r"config.json is another config than .*model.safetensors"):
                read(folder)
    # whoever also writes a fitting manifest has a model, but not that of the certificate
    sealed.write(folder / "manifest.json", manifest | {"config_sha256": config_sha256(changed)})
    model, example, _ = certified(folder)
    certificate = Certificate.load(folder / "certificate.json")
    with pytest.raises(CheckError, match="differ in the constants of operation"):
        require_same_model(certificate, model, example)
    sealed.write(path, config)
    sealed.write(folder / "manifest.json", manifest)
    model, example, _ = certified(folder)
    require_same_model(Certificate.load(folder / "certificate.json"), model, example)


def linear():
    return nn.Sequential(nn.Linear(3, 2))


@pytest.mark.parametrize("certificate", [True, False])
def test_a_program_is_exported_as_its_model_is(tmp_path, certificate):
    """Also for a batch, where its own graph takes several samples, as that of a reshape to one sample does not."""
    model, x = linear(), torch.randn(5, 3)
    program = wn.capture(model, torch.zeros(2, 3))
    folder = export(program, tmp_path / "program", certificate=certificate, onnx=False)
    assert (folder / "certificate.json").exists() is certificate
    torch.testing.assert_close(torch.export.load(folder / "program.pt2").module()(x[:1]), model(x[:1]))
    torch.testing.assert_close(torch.export.load(folder / "batched.pt2").module()(x), model(x))
    shaped = wn.capture(Net(lambda _, x: x.view(x.shape[0], 3)), torch.zeros(1, 3))
    assert not (export(shaped, tmp_path / "shaped", certificate=False, onnx=False) / "batched.pt2").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; choose a new folder"):
        export(linear(), tmp_path, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="is not empty"):
        export(linear(), tmp_path / "notes.txt", torch.zeros(1, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_onnx_without_its_packages_is_refused(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    with pytest.raises(
        ValueError, match=r"onnx=True needs onnx and onnxscript; in a clone type pip install '\.\[onnx\]'"
    ):
        export(linear(), tmp_path / "m", torch.zeros(1, 3), onnx=True)
    assert not (export(linear(), tmp_path / "m", torch.zeros(1, 3)) / "model.onnx").exists()


def test_onnx_that_computes_something_else_or_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    """Torch's translation makes use of the root of a factor on attention's logits."""

    def attending(scale):
        return Net(lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x, scale=scale))

    pytest.importorskip("onnxscript")
    x = torch.randn(1, 1, 3, 2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert (export(attending(0.5), tmp_path / str(dtype), x.to(dtype), onnx=True) / "model.onnx").exists()
    with pytest.raises(ValueError, match=r"the ONNX file computes something else than the program.*; pass onnx=False"):
        export(attending(-0.5), tmp_path / "m", x, onnx=True)
    monkeypatch.setattr("onnx.reference.ReferenceEvaluator.run", lambda *_: [][0])  # as for an operation that it lacks
    with pytest.raises(ValueError, match="cannot be compared: IndexError: list index out of range; pass onnx=False"):
        export(attending(0.5), tmp_path / "m", x, onnx=True)
    assert not (tmp_path / "m").exists()


def test_a_model_without_a_bound_needs_that_said(tmp_path):
    unbounded = Net(lambda _, x: x.erfinv())
    with pytest.raises(UncertifiableError, match="erfinv"):
        export(unbounded, tmp_path / "m", torch.zeros(1, 3))
    assert not (tmp_path / "m").exists()
    folder = export(unbounded, tmp_path / "m", torch.rand(1, 3), certificate=False, onnx=False)
    names = ["batched.pt2", "manifest.json", "program.pt2", "weights.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    with pytest.raises(UncertifiableError, match=r"random|call `model.eval\(\)`"):
        export(nn.Dropout(), tmp_path / "n", torch.rand(1, 3), certificate=False)


class Named(nn.Module):
    """Keywords, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, first, second=None, loud=False):
        hidden = (self.up(first) + second).tanh() * (2.0 if loud else 1.0)
        return {"hidden": hidden, "logits": self.down(hidden)}


def test_keywords_stay_keywords_and_one_result_is_chosen(tmp_path):
    example = {"first": torch.randn(2, 4), "second": torch.randn(2, 6), "loud": True}
    model = Named()
    folder = export(model, tmp_path / "m", example, output="logits")
    program = torch.export.load(folder / "batched.pt2").module()
    inputs = {"first": torch.randn(5, 4), "second": torch.randn(5, 6)}
    require_close(program(**inputs), model(**inputs, loud=True)["logits"])
    assert check(folder).claims


def test_a_model_of_one_batch_is_a_program_of_one_batch(tmp_path):
    model = Net(lambda s, x: 2 * s.layer(x).reshape(2, -1), layer=nn.Linear(4, 4))
    folder = export(model, tmp_path / "m", torch.zeros(2, 4))
    program = torch.export.load(folder / "program.pt2").module()
    x = torch.randn(2, 4)
    require_close(program(x), model(x))
    assert not Certificate.load(folder / "certificate.json").each_sample
    assert not (folder / "batched.pt2").exists()
    with pytest.raises((AssertionError, RuntimeError)):
        program(torch.randn(4, 4))
