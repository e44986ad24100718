"""The file and its proof: what was tampered with does not pass. The checker's own rules are tested beside it."""

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wellnormed.certificates import Certificate, CheckError, capture, certify, lower_bound, require_same_model, verify
from wellnormed.cli import main
from wellnormed.models import GPT, GPTConfig, export
from wellnormed.nn import HeadProjection, Rotary
from wellnormed.program import Program
from wellnormed.proof import check


@cache
def small() -> tuple[nn.Module, Certificate]:
    config = GPTConfig(vocabulary_size=5, length=4, width=4, heads=2, blocks=1, expansion=2)
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model, certify(model, radius=2.0)


@cache
def matrix() -> tuple[nn.Module, Certificate]:
    model = nn.Linear(3, 3)
    return model, certify(model, torch.zeros(3))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model, certificate = small()
    certificate.save(tmp_path / "certificate.json")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "certificate.json", tmp_path / "model.safetensors"


def test_a_certificate_passes_with_its_weights(files: tuple[Path, Path]) -> None:
    model, certificate = small()
    report = verify(*files)
    assert report.lipschitz == certificate.lipschitz.exact > 0
    assert report.lipschitz == certificate.lipschitz.exact
    assert report.attention_logits == certificate.attention_logits
    assert report.rows == len(certificate.rows)
    assert report.unused == ("layers.1.block.attend.bias_HT", "position.weight")
    assert verify(certificate, model.state_dict()) == report


@pytest.mark.parametrize("part", [False, True], ids=["the model", "a layer"])
def test_names_of_a_compiled_model_and_of_its_own_are_one(part: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3)
    compiled = copy.deepcopy(model) if part else torch.compile(model, backend="eager")
    if part:
        compiled[0] = torch.compile(compiled[0], backend="eager")
    file, state = tmp_path / "compiled.safetensors", compiled.state_dict()
    assert state.keys() != model.state_dict().keys()
    save_file(state, file)
    for certified in (model, compiled):
        certificate = certify(certified, x)
        for weights in (model.state_dict(), state, file):
            assert verify(certificate, weights).unused == ()
        for code in (model, compiled) if not part else ():
            require_same_model(certificate, code, x)
        with pytest.raises(CheckError, match="is not the certified tensor"):
            verify(certificate, {name: tensor + 1 for name, tensor in state.items()})


def test_save_and_load(tmp_path: Path) -> None:
    certificate = small()[1].with_lower_bound(0.01)
    certificate.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert loaded == certificate == copy.deepcopy(certificate) != small()[1]
    assert str(loaded) == str(certificate)
    assert loaded.computed.keys() == certificate.computed.keys() != set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.json", "certificate.safetensors"]
    computed = {name: tensor + 1 for name, tensor in certificate.computed.items()}
    assert dataclasses.replace(certificate, computed=computed) != certificate
    matrix()[1].save(tmp_path / "certificate.json")  # which has no computed tensors
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_and_numpy_weights_pass(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU("tanh"), nn.LayerNorm(5), nn.SiLU()).to(dtype)
    certificate = certify(model, torch.zeros(3, dtype=dtype))
    weights = model.state_dict()
    if dtype == torch.float64:
        weights = {name: weight.numpy() for name, weight in weights.items()}
    assert verify(certificate, weights).lipschitz == certificate.lipschitz.exact > 0


def test_a_number_that_stands_for_a_vector_is_a_tensor_as_others() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("factor", torch.tensor(2.0).expand(1))
    model.forward = lambda x: nn.functional.linear(x, model.weight) * model.factor
    assert verify(certify(model, torch.zeros(1, 3)), model.state_dict()).lipschitz > 0


def test_rotary_tables_are_in_the_file_and_may_differ_by_rounding() -> None:
    model, example = nn.Sequential(HeadProjection(4, 2), Rotary(2)), torch.zeros(1, 3, 4)
    certificate = certify(model, example)
    assert verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz.exact > 0
    name, table = next((n, t) for n, t in certificate.computed.items() if t.is_floating_point() and t.abs().sum() > 0)

    def with_table(factor: float) -> Certificate:
        return dataclasses.replace(certificate, computed={**certificate.computed, name: factor * table})

    require_same_model(with_table(1 + 1e-7), model, example)
    with pytest.raises(CheckError, match="which the model computes, is another tensor"):
        require_same_model(with_table(1.01), model, example)


def test_a_changed_tensor_from_which_another_is_computed_fails() -> None:
    model, certificate = small()
    with pytest.raises(CheckError):
        verify(certificate, {**model.state_dict(), "position.weight": 9 * model.position.weight})


def test_every_changed_byte_of_the_certificate_fails(files: tuple[Path, Path]) -> None:
    for path in (files[0], files[0].with_suffix(".safetensors")):
        content = path.read_bytes()
        for index in range(0, len(content), max(11, len(content) // 200)):
            path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            with pytest.raises(ValueError, match="not an intact certificate"):
                Certificate.load(files[0])
        for changed in (content + b"\n", content[:-1], b"\xef\xbb\xbf" + content, b"", b"{}", b"[" * 100000):
            path.write_bytes(changed)
            with pytest.raises(CheckError, match="not proved"):
                verify(*files)
        path.write_bytes(content)
    files[0].with_suffix(".safetensors").unlink()
    with pytest.raises(CheckError, match="not proved"):
        verify(*files)


@pytest.mark.parametrize("promise", [{"arithmetic": "float32"}, {"fixed": ("input.mask",)}, {"attention_logits": {}}])
def test_a_larger_promise_fails(promise: dict[str, object]) -> None:
    model, certificate = small()
    with pytest.raises(CheckError):
        verify(dataclasses.replace(certificate, **promise), model.state_dict())


def test_missing_and_changed_tensors_fail_and_added_ones_are_left_out() -> None:
    model, certificate = matrix()
    with pytest.raises(CheckError, match="no stored tensor 'bias'"):
        verify(certificate, {"weight": model.weight})
    with pytest.raises(CheckError, match="weight is not the certified tensor: its SHA-256 differs"):
        verify(certificate, {"weight": model.weight * 0.5, "bias": model.bias})
    verify(certificate, {**model.state_dict(), "more": torch.zeros(1)})
    with pytest.raises(CheckError, match=r"weights must be a path or state dict, got int; pass model\.state_dict"):
        verify(certificate, 3)


@pytest.mark.parametrize("left_out", ["0.weight", "1.weight"])
def test_a_file_may_have_a_tied_tensor_under_one_of_its_names(left_out: str, tmp_path: Path) -> None:
    model, tokens = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), torch.zeros(1, 3, dtype=torch.long)
    model[1].weight = model[0].weight
    certificate, file = certify(model, tokens), tmp_path / "model.safetensors"
    certificate.save(tmp_path / "certificate.json")
    (tmp_path / "config.json").write_text('{"model_type": "of another library"}')
    state = {name: tensor for name, tensor in model.state_dict().items() if name != left_out}

    def checks() -> tuple[Callable[[], object], ...]:
        save_file(state, file)
        return lambda: verify(certificate, state), lambda: verify(certificate, file), lambda: check(tmp_path)

    for each in checks():
        assert each() == verify(certificate, model.state_dict())
    assert main(["verify", str(tmp_path)]) == 0
    state |= {name: tensor + 1 for name, tensor in state.items() if name.endswith("weight")}
    for each in checks():
        with pytest.raises(CheckError, match=r"there is no stored tensor '.\.weight', nor one of its digest|SHA-256"):
            each()
    assert main(["verify", str(tmp_path)]) == 1


def test_a_certificate_is_of_one_model() -> None:
    model, certificate = matrix()
    require_same_model(certificate, model, torch.zeros(3))
    for other, message in (
        (nn.Sequential(model), "differ in the name of operation '0.linear': '0.linear' and"),
        (nn.Linear(3, 3, bias=False), "differ in the claims of operation 'linear'"),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "differ in the number of operations: 4 and 3"),
    ):
        with pytest.raises(CheckError, match=message):
            require_same_model(certificate, other, torch.zeros(3))


def test_weights_of_equal_norm_are_other_tensors() -> None:
    model, certificate = matrix()
    require_same_model(certificate, capture(model, torch.zeros(3)))
    other = copy.deepcopy(model)
    other.weight.data.neg_()
    for each in (other, capture(other, torch.zeros(3))):
        with pytest.raises(CheckError, match="weight is another tensor in the model than in the certificate"):
            require_same_model(certificate, each, None if isinstance(each, Program) else torch.zeros(3))


def test_a_program_has_its_example() -> None:
    program = capture(nn.Linear(3, 2), torch.zeros(1, 3))
    for call in (
        lambda: certify(program, torch.zeros(1, 3)),
        lambda: lower_bound(program, torch.zeros(1, 3)),
        lambda: export(program, "none", torch.zeros(1, 3)),
    ):
        with pytest.raises(ValueError, match=r"a program has its example and its output, got .* example_input="):
            call()
