"""Input domains: balls, boxes, every finite input, and tokens that are replaced. Fixed inputs."""

import copy
import itertools
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellnormed.certificates import Certificate, CheckError, capture, certify, lower_bound, require_same_model, verify
from wellnormed.models import GPT, GPTConfig
from wellnormed.nn import BallProjection
from wellnormed.program import Program
from wellnormed.program.domain import DTYPES
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof import check

from .adversary import Net, drawn, random_weights


def attention(self: Any, x: Tensor) -> Tensor:
    return x + nn.functional.scaled_dot_product_attention(self.q(x), x, self.v(x), is_causal=True)


MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "product": (Net(lambda self, x: x * x * self.a(x), a=nn.Linear(3, 3)), torch.zeros(1, 3)),
    "gate": (Net(lambda self, x: nn.functional.silu(self.a(x)) * self.b(x), a=nn.Linear(3, 4), b=nn.Linear(3, 4)),
             torch.zeros(1, 3)),
    "image": (nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(48, 2)),
              torch.zeros(1, 2, 4, 4)),
    "attention": (Net(attention, q=nn.Linear(3, 3), v=nn.Linear(3, 3)), torch.zeros(1, 4, 3)),
}  # fmt: skip


NORMED = {
    "layer norm": nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "ball": nn.Sequential(BallProjection(1.0), Net(attention, q=nn.Linear(3, 3), v=nn.Linear(3, 3))),
    "bounded": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Net(lambda self, x: x * x)),
}


@cache
def captured(name: str) -> Program:
    """The program of a model with random weights in float32, which is captured once."""
    model, example = MODELS[name] if name in MODELS else (NORMED[name], torch.zeros(1, 2, 3))
    return capture(random_weights(copy.deepcopy(model)), example)


@pytest.mark.parametrize("box", [(0.0, 1.0), (-3.0, -2.5)])
@pytest.mark.parametrize("name", MODELS)
def test_no_gain_in_a_box_exceeds_its_bound(name: str, box: tuple[float, float]) -> None:
    program = captured(name)
    certificate = certify(program, box=box)
    found = lower_bound(program, box=box, steps=6, generator=drawn())
    for each in found.inputs.values():
        assert box[0] <= float(each.min()) <= float(each.max()) <= box[1]
    assert 0 < found.value <= certificate.lipschitz
    assert certificate.lipschitz <= certify(program, radius=max(map(abs, box))).lipschitz * (1 + 1e-12)


def test_products_in_a_box_are_bounded_tightly() -> None:
    square = Net(lambda self, x: x * x)
    assert certify(square, torch.zeros(1, 16), box=(-3, 2)).lipschitz == pytest.approx(6)
    assert certify(square, torch.zeros(1, 16), 3.0).lipschitz == pytest.approx(24)  # one entry may be 12
    assert lower_bound(square, torch.zeros(1, 16), box=(-3, 2), generator=drawn()).value == pytest.approx(6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in NORMED),
        *(("layer norm", dtype) for dtype in DTYPES.values() if dtype != torch.float32),
    ],
)
def test_behind_norms_the_whole_space_costs_nothing(name: str, dtype: torch.dtype) -> None:
    model, example = random_weights(copy.deepcopy(NORMED[name])).to(dtype), torch.zeros(1, 2, 3, dtype=dtype)
    whole = certify(model, example, math.inf)
    assert whole.lipschitz == pytest.approx(certify(whole.program, radius=1e3).lipschitz)
    assert f"all finite {str(dtype).removeprefix('torch.')} `input.x`" in whole.domain.replace("input.input", "input.x")
    assert "any finite entries" in str(verify(whole, model.state_dict()))
    require_same_model(whole, model, example)


@pytest.mark.parametrize("name", [*NORMED, *MODELS])
def test_no_gain_far_out_exceeds_the_bound(name: str) -> None:
    program = captured(name)
    far = certify(program, radius=1e36)
    assert far.lipschitz <= certify(program, radius=math.inf).lipschitz * (1 + 1e-12)
    for radius in (1e3, 1e36):
        assert lower_bound(program, radius=radius, steps=3, generator=drawn()).value <= far.lipschitz


def test_bounds_that_grow_with_the_input_are_huge_and_proved() -> None:
    model, example = random_weights(MODELS["attention"][0]).double(), MODELS["attention"][1].double()
    whole = certify(model, example, math.inf)
    assert whole.lipschitz == math.inf
    assert 615 < whole.lipschitz.log10 < 625  # as the square of the largest number
    assert verify(whole, model.state_dict()).lipschitz == whole.lipschitz.exact
    assert "inf" not in re.split(r"\W+", str(whole).lower())


def test_a_limit_on_one_side_is_none_on_the_other() -> None:
    for limited in (lambda self, x: x.clamp(min=-1) * x, lambda self, x: x.clamp(max=1) * x):
        certificate = certify(Net(limited), torch.zeros(1, 1, dtype=torch.float64), math.inf)
        assert certificate.lipschitz.exact >= 2 * int(torch.finfo(torch.float64).max)
        verify(certificate, {})


# tokens


@pytest.mark.parametrize("seed", range(2))
def test_no_replaced_tokens_change_a_result_by_more(seed: int) -> None:
    generator = drawn(seed)
    model = GPT(GPTConfig(vocabulary_size=5, length=3, width=4, heads=2, blocks=1))
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    certificate = certify(model.eval(), torch.zeros(1, 3, dtype=torch.long), radius=2.0)
    texts = torch.tensor(list(itertools.product(range(5), repeat=3)))
    with torch.no_grad():
        results = model.double()(texts)
    changes = (results[:, None] - results[None]).square().sum(-1).sqrt().amax(-1)
    assert 0 < float(changes.max()) <= certificate.substitution
    assert certificate.substitution <= certificate.lipschitz * certificate.token_distance * (1 + 1e-12)
    proved = verify(certificate, model.float().state_dict())
    assert float(proved.substitution) == pytest.approx(certificate.substitution)
    assert "replacing any tokens" in str(proved)
    assert "replacing any tokens" in str(certificate)


def test_a_table_alone_changes_by_its_largest_distance() -> None:
    table = nn.Embedding(2, 4)
    table.weight.data = torch.tensor([[3.0, 0, 0, 0], [0, 4.0, 0, 0]])
    certificate = certify(table, torch.tensor([[0, 1]]), 2.5)
    assert certificate.token_distance == pytest.approx(5)
    assert certificate.substitution == pytest.approx(5)
    assert certify(nn.Linear(2, 2), torch.zeros(1, 2)).substitution is None


class Encoder(Net):
    """Tokens, a mask that is an argument, and a decoder's tokens from the same table."""

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        x, y = self.table(tokens)[:, None], self.other(targets)[:, None]
        x = nn.functional.scaled_dot_product_attention(y, x, x, attn_mask=mask[:, None, None, :].bool())
        return self.result((x + y)[:, 0])


def encoder() -> tuple[Encoder, dict[str, Tensor]]:
    layers = {"table": nn.Embedding(7, 4), "other": nn.Embedding(5, 4), "result": nn.Linear(4, 3)}
    model = random_weights(Encoder(None, **layers), 0.3)
    tokens = torch.tensor([[1, 2, 3, 0]])
    return model, {"tokens": tokens, "mask": (tokens != 0).long(), "targets": torch.tensor([[4, 1]])}


def test_inputs_that_are_fixed_are_named_and_kept(tmp_path: Path) -> None:
    model, example = encoder()
    certificate = certify(model, example, 2.0)
    assert certificate.fixed == ("input.mask",)
    assert certificate.domain.endswith("; `input.mask` as in the example, lookups apart")
    assert "the rows of `table.weight` among them" in certificate.domain
    certificate.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert torch.equal(loaded.computed["input.mask"], example["mask"])
    report = verify(loaded, model.state_dict())
    assert "input.mask as stored, lookups apart" in str(report)
    assert not report.unused
    require_same_model(loaded, model, example)
    with pytest.raises(CheckError, match=r"input.mask, which the example fixes, is another"):
        require_same_model(loaded, model, example | {"mask": torch.ones(1, 4, dtype=torch.long)})
    rows = [row for row in loaded.rows if row.operation == "input"]
    distances = [row.claims[1].values[0] for row in rows]
    assert certificate.token_distance == pytest.approx(max(distances))


def test_a_model_that_changes_course_by_what_it_computes_is_refused() -> None:
    looking = Net(lambda s, t: x if bool((x := s.table(t)).sum() > 0) else -x, table=nn.Embedding(7, 4))
    with pytest.raises(UncertifiableError):
        certify(random_weights(looking, 0.3), torch.tensor([[1, 2, 3, 0]]), 2.0)


def test_features_that_are_integers_are_no_variable() -> None:
    with pytest.raises(UncertifiableError, match="not computed from the certified input"):
        certify(Net(lambda _, counts: counts.float() * 2), torch.tensor([[1, 2, 3, 0]]))


# files


CALLS: dict[str, dict[str, Any]] = {
    "ball": {"radius": 2.5}, "box": {"box": (-2.5, 3)}, "whole": {"radius": math.inf}, "margins": {"margins": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_files_keep_the_domain(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, example = random_weights(nn.Linear(3, 2)).to(dtype), torch.zeros(1, 3, dtype=dtype)
    certificate = certify(model, example, **CALLS[name])
    certificate.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert (loaded.domain, loaded.input_domain) == (certificate.domain, certificate.input_domain)
    assert verify(loaded, model.state_dict()).lipschitz == certificate.lipschitz.exact
    require_same_model(loaded, model, example)
    with pytest.raises(CheckError, match="constants"):
        require_same_model(loaded, model.double() if dtype == torch.float32 else model.float(), example.to(
            torch.float64 if dtype == torch.float32 else torch.float32
        ))  # fmt: skip


def test_another_output_is_another_model() -> None:
    model, example = Net(lambda self, x: (x, 2 * x)), torch.zeros(1, 3)
    require_same_model(certify(model, example, output=1), model, example, output=1)
    with pytest.raises(CheckError):
        require_same_model(certify(model, example, output=1), model, example, output=0)


def test_the_words_of_a_dtype_are_those_of_its_numbers() -> None:
    model, example = random_weights(nn.Linear(3, 2)), torch.zeros(1, 3)
    certificate = certify(model, example, math.inf)
    document = json.loads(json.dumps(certificate.document()))
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    document["rows"][0]["constants"]["dtype"] = "float64"
    assert "float64 input.input of shape (1, 3) with entries from -3.4" in check(document, tensors).inputs[0]
    document["rows"][0]["constants"].update(dtype="float32", low=-(2.0**127))
    assert "with entries from -1.7014118346046923e+38 to 3.4028" in check(document, tensors).inputs[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"radius": 2.0, "box": (0, 1)}, r"radius=2.0 and box=\(0, 1\) are two domains; pass one"),
        ({"box": (1, 0)}, r"box=\(1, 0\) must be two finite numbers, the smaller one first"),
        ({"box": (0, math.inf)}, r"box=\(0, inf\) must be two finite numbers"),
        ({"box": (0, math.nan)}, r"box=\(0, nan\) must be two finite numbers"),
        ({"box": (0, 1, 2)}, r"must be two numbers, such as \(0, 1\)"),
        ({"box": 1.0}, r"box=1.0 must be two numbers, such as \(0, 1\)"),
        ({"box": ("0", 1)}, "low='0' is of type str"),
        ({"radius": math.nan}, "radius=nan must be positive"),
        ({"radius": 0}, "radius=0 must be positive; math.inf is every finite input"),
    ],
)
def test_wrong_domains_are_said(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certify(nn.Linear(2, 2), torch.zeros(1, 2), **call)


def test_a_box_is_widened_to_the_rows_of_a_table() -> None:
    table = nn.Embedding(2, 2, _weight=torch.tensor([[0.5, 2.0], [0.0, -1.0]]))
    assert "entries from -2.0 to 2.0, the rows of `weight`" in certify(table, torch.tensor([[0, 1]]), box=(0, 1)).domain
