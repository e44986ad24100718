"""Certificates of all weights that keep the promises of constraints: sound for each, and blind to their entries."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from wellnormed.certificates import CheckError, UncertifiableError, number_formats, verify
from wellnormed.certificates.promising import promise_of
from wellnormed.constraints import EntryCap
from wellnormed.models import GPTConfig, build
from wellnormed.norms import BiasRMS, Norm, PerHead, RowNorm, Split
from wellnormed.proof import Proof

from .adversary import Net

NORMS: dict[str, tuple[Norm, tuple[int, ...]]] = {
    "spectral": (wn.Spectral(), (12, 5)), "pixels": (wn.Spectral(units="pixels"), (12, 19)),
    "heads": (PerHead(3), (12, 5)), "unequal parts": (Split((6, 2, 4)), (12, 5)),
    "parts of inputs": (Split(2, dim=1), (12, 6)), "columns": (wn.ColNorm(), (12, 5)),
    "embedding": (wn.ColNorm(input_axis=0), (12, 5)), "rows": (RowNorm(), (12, 5)),
    "largest entry": (wn.Sign(), (12, 6)), "scaled entries": (wn.Sign(normalized=True), (12, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31 - 1), scale=st.sampled_from([1e-6, 1.0, 1e6]), peaked=st.booleans())
def test_a_ball_claims_no_less_than_any_weight_in_it(name, seed, scale, peaked):
    norm, shape = NORMS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = norm.initialize_(torch.empty(shape, dtype=torch.float64), generator)
    if peaked:  # all of a part's size in few entries
        weight *= torch.rand(shape, generator=generator, dtype=torch.float64) < 0.2
        weight /= norm.norm(weight).clamp(min=1e-12)
    weight *= scale * (1 - 1e-6)  # what proofs add to the norm of a matrix is less
    promise = promise_of("weight", norm, scale, shape)
    promise.require_kept_by(weight.numpy())
    transposed = {"spectral": [{"transposed": True}], "row_difference": [{"transposed": True}]}
    for measure in ("spectral", "row_norm", "diameter", "row_difference", "max_abs"):
        for constants in [{}, *transposed.get(measure, [])]:
            known = of_entries(measure, weight, **constants)
            assert all(a <= b * (1 + 1e-9) for a, b in zip(known, followed(measure, promise, **constants), strict=True))
    for parts in (1, 2, 3, 4):
        known = of_entries("spectral", weight, parts=parts)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(known, promise.spectral(parts), strict=True))
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    constants = {"pairs": [(0, 1), (1, 0)], "parts": (2, 2), "transposed": (False, False)}
    known = of_entries("product", weight, other, **constants)
    found = followed("product", promise, other, **constants)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(known, found, strict=True))


def of_entries(measure, *tensors, **constants):
    """What a proof derives of stored tensors."""
    proof = Proof({str(number): tensor.numpy() for number, tensor in enumerate(tensors)})
    return proof.claim(measure, *map(str, range(len(tensors))), **constants).values


def followed(measure, promise, other=None, **constants):
    """What a proof derives of a promised parameter."""
    proof = Proof({} if other is None else {"other": other.numpy()})
    proof.promise(promise)
    names = ("weight",) if other is None else ("weight", "other")
    return proof.claim(measure, *names, **constants).values


def test_promises_are_not_wider_than_their_norms():
    def promised(norm, cap, shape):
        return promise_of("weight", norm, cap, shape)

    assert promised(wn.Spectral(), 2.0, (8, 2)).spectral() == pytest.approx((4.0,))
    assert promised(PerHead(4), 2.0, (8, 2)).spectral(parts=4) == pytest.approx((2.0,) * 4)  # sqrt(2 / 2) each
    assert promised(PerHead(4), 2.0, (8, 2)).spectral() == pytest.approx((4.0,))  # four of them: sqrt(4) times
    assert followed("row_norm", promised(wn.ColNorm(input_axis=0), 3.0, (7, 4))) == pytest.approx((6.0,))
    assert followed("group_norm", promised(BiasRMS(), 3.0, (4,)), parts=2) == pytest.approx((6.0, 6.0))


def capped(model, cap=1.5):
    optimizer = wn.Scion(model, lr=0.3)
    return optimizer, wn.constrain(optimizer, {"*": wn.HardCap(cap)})


def push(model, optimizer, x, steps):
    """Steps that make the result longer."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().neg().backward()
        optimizer.step()


def perceptron():
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 4, bias=False))


def test_the_bound_is_known_before_training_and_true_after_every_step():
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(5, 6)
    optimizer, constraints = capped(model)
    before = wn.certify(model, x, within=constraints)
    assert before.rms_lipschitz == pytest.approx(1.5**2, rel=1e-6)
    assert before.each_sample
    for step in range(10):
        push(model, optimizer, torch.randn(5, 6), 1)
        if step % 3 == 0:
            now = wn.certify(model, x)
            assert now.lipschitz <= before.lipschitz
    assert now.lipschitz > 0.9 * before.lipschitz  # the caps were reached
    after = wn.certify(model, x, within=constraints)
    assert [row.claims for row in after.rows] == [row.claims for row in before.rows]
    assert after.lipschitz.log10 == before.lipschitz.log10


def test_a_gpt_within_its_caps_and_its_float8_ranges():
    config = GPTConfig(
        vocabulary_size=11, width=8, heads=2, blocks=1, length=6, rotary=True, relative_bias=False, biases=False
    )
    model = build(config, torch.Generator().manual_seed(0)).eval()
    optimizer = wn.Scion(model, lr=0.1)
    caps = {"embedding": wn.ColumnCap(1.0), "layers": wn.HardCap(1.0), "head": wn.HardCap(1.0)}
    constraints = wn.constrain(optimizer, caps)
    promised = wn.certify(model, radius=1 + 1e-6, within=constraints)
    ranges = number_formats(promised, weights=model.state_dict()).inputs
    for each in optimizer.assignment:  # weights of norm 1, which the model did not start with
        each.norm.initialize_(each.parameter.data, torch.Generator().manual_seed(0)).mul_(1 - 1e-6)
    own = wn.certify(model)
    assert own.lipschitz.log10 <= promised.lipschitz.log10
    for layer, largest in number_formats(own, weights=model.state_dict()).inputs.items():
        assert largest <= ranges[layer] * (1 + 1e-5)  # which holds the errors of float32


OF_ENTRIES = {
    "sign": lambda x, a, b: x @ a.sign() @ b, "mask": lambda x, a, b: torch.where(a[0] > 0, x, 0.0) @ a @ b,
    "mask of -infinity": lambda x, a, b: (x @ a + torch.where(a > 0, -torch.inf, 0.0)).softmax(-1) @ b,
    "float mask": lambda x, a, b: torch.where(a.bool(), x @ a @ b, 0.0),
    "repaired": lambda x, a, b: x @ a.nan_to_num() @ b, "turned, then scaled": lambda x, a, b: x @ (2 * a.T) @ b,
    "rounded, then scaled": lambda x, a, b: x @ (2 * a.half()).float() @ b,
    "turned around": lambda x, a, b: x @ -a @ b, "shifted": lambda x, a, b: x @ (a + 1) @ b,
    "of logits, and of no mask": lambda x, a, b: (x @ a).softmax(-1) + b.exp(),
    "normalized": lambda x, a, b: x @ (a / a.norm()) @ b, "divided": lambda x, a, b: (x @ a) / b,
    "folded": lambda x, a, b: x @ (a @ b), "chosen": lambda x, a, b: x @ b if a.argmax() < 18 else x @ a,
    "equal": lambda x, a, b: x @ (a == a).float() @ b, "decomposed": lambda x, a, b: x @ torch.linalg.svd(a).U @ b,
    "strided": lambda x, a, b: x @ a.as_strided((6, 6), (6, 1)) @ b,
}  # fmt: skip


def two(use):
    """Two matrices, used as a function says."""
    first, second = (nn.Parameter(torch.randn(6, 6) / 6) for _ in range(2))
    model = Net(lambda s, x: use(x, s.first, s.second), first=first, second=second).eval()
    norms = wn.assign_norms(model, overrides={"*": wn.Spectral()})
    return model, wn.constrain(wn.Scion(norms, lr=0.1), {"*": wn.HardCap(2.0)})


@pytest.mark.parametrize("name", OF_ENTRIES)
def test_what_needs_the_entries_is_refused(name):
    model, constraints = two(OF_ENTRIES[name])
    with pytest.raises(UncertifiableError, match=r"within|is not captured|depends on|does not cover these arg"):
        wn.certify(model, torch.randn(6, 6), within=constraints)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a, b: F.linear(x, a) @ b,
        lambda x, a, b: x @ a.T @ b.t(),
        lambda x, a, b: x @ a.transpose(0, 1) @ b.permute(1, 0),
        lambda x, a, b: torch.addmm(x, x @ a, b) - x,
        lambda x, a, b: x @ a @ a @ b / 2,
    ],
)
def test_matrices_may_be_used_as_they_are_or_transposed(use):
    model, constraints = two(use)
    found = wn.certify(model, torch.randn(3, 6), within=constraints)
    assert found.rms_lipschitz in (pytest.approx(4.0, rel=1e-6), pytest.approx(6.0, rel=1e-6))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a, b: x @ (2 * a) @ b,
        lambda x, a, b: F.linear(x @ a, b * 0.5),
        lambda x, a, b: x @ a + 3 * b[2],
        lambda x, a, b: F.scaled_dot_product_attention(x[None], x[None], x[None] @ a, b[[5, 0, 1]][:, :3]),
    ],
)
def test_a_multiple_of_a_weight_and_a_learned_bias_of_logits_are_bounded(use):
    model, constraints = two(use)
    x = torch.randn(3, 6)
    always = wn.certify(model, x, within=constraints)
    for scale in (2.0, -2.0):
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(nn.init.orthogonal_(each) * scale * (1 - 1e-6))
        now = wn.certify(model, x)
        found = wn.lower_bound(model, x, steps=20, generator=torch.Generator().manual_seed(0)).value
        assert found <= now.lipschitz <= always.lipschitz < math.inf
        assert now.activation_rms <= always.activation_rms * (1 + 1e-9)


def test_a_rounded_multiple_of_a_weight_is_listed():
    model, constraints = two(lambda x, a, b: x @ a + (2 * b)[:3].half())
    assert wn.certify(model, torch.randn(3, 6), within=constraints).rounds == {"float16": ("to",)}


def test_what_is_added_before_a_softmax_is_no_mask():
    model, constraints = two(lambda x, a, b: (x @ a + b).softmax(-1))
    found = wn.certify(model, torch.randn(6, 6), within=constraints).lipschitz
    assert found == pytest.approx(1.0, rel=1e-6)  # half of the cap


def half_capped():
    """Two matrices, of which the first has a cap."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return model, wn.constrain(wn.Scion(model, lr=0.1), {"0": wn.HardCap(1.0)})


def test_a_weight_that_is_trained_without_a_promise_is_refused_and_a_frozen_one_is_as_it_is():
    torch.manual_seed(0)
    model, constraints = half_capped()
    with pytest.raises(
        UncertifiableError,
        match=r"entries of 1\.weight, .* by wn\.constrain\(optimizer, \{'1\.weight': wn\.constraints\.SoftCap\(1\.0\)",
    ):
        wn.certify(model, torch.randn(2, 4), within=constraints)
    model[1].weight.requires_grad_(False)
    found = wn.certify(model, torch.randn(2, 4), within=constraints)
    assert found.lipschitz == pytest.approx(float(torch.linalg.matrix_norm(model[1].weight, 2)), rel=1e-6)


def test_all_biases_without_a_promise_are_named_with_what_serves_them():
    model, example = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(3.0)})
    cap = r"wn\.constraints\.ColumnCap\(1\.0\)"
    words = rf"constrain\(optimizer, {{'0\.bias': {cap}, '2\.bias': {cap}}}\)"
    with pytest.raises(UncertifiableError, match=words):
        wn.certify(model, example, within=constraints)
    constraints.remove()
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(3.0), "*bias": wn.ColumnCap(1.0)})
    assert wn.certify(model, example, within=constraints).rms_lipschitz == pytest.approx(9, rel=1e-6)


SHARES = {
    "frozen": lambda layer, w: setattr(layer, "weight", nn.Parameter(w, requires_grad=False)),
    "buffer": lambda layer, w: layer.register_buffer("weight", w),
    "buffer that is not saved": lambda layer, w: layer.register_buffer("weight", w, persistent=False),
    "attribute": lambda layer, w: setattr(layer, "weight", w),
    "part of an array": lambda layer, w: layer.register_buffer(
        "weight", torch.from_numpy(w.numpy().reshape(-1)[4:8])[None]
    ),
    "trained attribute": lambda layer, w: setattr(layer, "weight", torch.ones(4, 4, requires_grad=True)),
    "trained buffer": lambda layer, w: layer.register_buffer("weight", torch.ones(4, 4, requires_grad=True)),
}


@pytest.mark.parametrize("name", SHARES)
def test_what_shares_the_memory_of_a_trained_weight_or_is_trained_without_being_a_parameter_is_refused(name):
    model, constraints = half_capped()
    del model[1].weight
    SHARES[name](model[1], model[0].weight.detach())
    with pytest.raises(UncertifiableError, match=r"the bound needs entries of 1\.weight"):
        wn.certify(model, torch.randn(2, 4), within=constraints)


def test_a_frozen_parameter_whose_constraint_promises_nothing_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    caps = {"0": wn.HardCap(1.0), "1": wn.constraints.FixedNorm()}
    constraints = wn.constrain(wn.Scion(model, lr=0.1), caps)
    model.requires_grad_(False)
    with pytest.raises(UncertifiableError, match=r"the bound needs entries of 1\.weight"):
        wn.certify(model, torch.randn(2, 4), within=constraints)


def test_a_computed_tensor_is_not_the_parameter_whose_name_it_has():
    """What is computed is named after its operation, and `mul` is a name that a parameter may have."""
    tensors = {"mul": nn.Parameter(torch.eye(4)), "base": 50 * torch.eye(4)}
    model, x = Net(lambda s, x: F.linear(F.linear(x, s.mul), s.base * 2.0), **tensors), torch.randn(2, 4)
    norms = wn.assign_norms(model, overrides={"mul": wn.Spectral()})
    held = wn.constrain(wn.Scion(norms, lr=0.1), {"*": wn.HardCap(1.0)})
    found = wn.certify(model, x, within=held)
    assert found.lipschitz == pytest.approx(100.0)
    wn.certificates.require_same_model(found, model, x, within=held)


@pytest.mark.parametrize(
    ("norm", "cap"), [(wn.Sign(), EntryCap(1.0)), (RowNorm(), wn.ColumnCap(1.0)), (wn.Spectral(), wn.HardCap(1.0))]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_margins_are_of_the_columns_of_a_matrix_that_is_stored_by_inputs(norm, cap, transposed):
    weight = nn.Parameter(torch.zeros((64, 4) if transposed else (4, 64)))
    use = (lambda s, x: x @ s.weight) if transposed else (lambda s, x: F.linear(x, s.weight))
    model, x = Net(use, weight=weight), torch.zeros(2, 64)
    held = wn.constrain(wn.Scion(wn.assign_norms(model, overrides={"*": norm}), lr=0.1), {"*": cap})
    always = wn.certify(model, x, within=held, margins=True).margin
    with torch.no_grad():  # two logits as far apart as the cap allows
        rows = torch.tensor([[1.0], [-1.0], [0.0], [0.0]]).expand(4, 64)
        model.weight.copy_(rows.mT if transposed else rows)
        model.weight.mul_((1 - 1e-5) / norm.norm(model.weight))
    assert wn.certify(model, x, margins=True).margin <= always


def placed(self, x):
    """Tokens with learned positions, a norm layer that is spelled out, and a sum with a chosen row."""
    x = x + self.positions(torch.arange(x.shape[1], device=x.device)) + self.token.view(1, 1, -1)
    x = x + self.positions.weight[2]
    return self.head(self.gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)))


def by_rows(self, x):
    """Linear maps by rows of one matrix."""
    a, b = self.f.weight.split(6), self.f.bias.split(6)
    turned = F.linear(x, a[1][[2, 0, 1]], b[1][[2, 0, 1]])
    return torch.cat([F.linear(x, a[0], b[0]).relu(), turned, x @ a[1][3:].T], -1)


def across(self, x):
    """Attention from tokens to other ones, whose module splits its weight."""
    others = x.flip(1) / 2
    return self.f(x, others, others, need_weights=False)[0]


POSITIONS = {"positions": nn.Embedding(7, 6), "token": nn.Parameter(torch.zeros(6)),
             "gain": nn.Parameter(torch.ones(6)), "head": nn.Linear(6, 3)}  # fmt: skip
NUMBERS = {"gain": nn.Parameter(torch.ones(())), "shift": nn.Parameter(torch.zeros(())), "f": nn.Linear(6, 6)}
"""A number in front of a branch, and one that is added."""
NORMALIZED = {
    "layer norm": (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, eps=0.1), nn.Linear(8, 3)), (4, 6)),
    "norm layer alone": (nn.Sequential(nn.LayerNorm(6, eps=0.1)), (4, 6)),
    "rms norm": (nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8, eps=0.1), nn.Linear(8, 3)), (2, 5, 6)),
    "batch norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)), (2, 3, 5, 5)),
    "batch norm of vectors": (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), (3, 6)),
    "group norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, eps=0.1), nn.Conv2d(4, 2, 1)), (2, 3, 5, 5)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), (2, 3, 5, 5)),
    "positions": (Net(placed, **POSITIONS), (2, 5, 6)),
    "numbers": (Net(lambda s, x: x + s.gain * s.f(x).relu() + s.shift, **NUMBERS), (2, 6)),
    "rows of a matrix": (Net(by_rows, f=nn.Linear(6, 12)), (2, 6)),
    "cross-attention": (Net(across, f=nn.MultiheadAttention(6, 2, batch_first=True)), (2, 5, 6)),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_gains_biases_and_positions_within_caps(name, tmp_path):
    model, shape = NORMALIZED[name]
    torch.manual_seed(0)
    model, x = model.eval(), torch.randn(shape)
    optimizer = wn.Scion(model, lr=0.3)
    caps = {}
    for each in optimizer.assignment:
        if isinstance(each.norm, wn.norms.Gain):
            caps[each.name] = EntryCap(1.25)
        elif each.parameter.ndim < 2 or "positions" in each.name:
            caps[each.name] = wn.ColumnCap(0.5)
        else:
            caps[each.name] = wn.HardCap(1.5)
    constraints = wn.constrain(optimizer, caps)
    always = wn.certify(model, x, within=constraints)
    always.save(tmp_path / "certificate.json")
    report = verify(tmp_path / "certificate.json", model.state_dict())
    assert float(report.lipschitz) == pytest.approx(always.lipschitz)
    without = {key: tensor for key, tensor in model.state_dict().items() if key != always.promises[0].name}
    with pytest.raises(CheckError, match="of which a cap is promised"):
        verify(always, without)
    push(model, optimizer, x, 2)
    now = wn.certify(model, x)
    assert now.lipschitz <= always.lipschitz * (1 + 1e-9)
    assert now.activation_rms <= always.activation_rms * (1 + 1e-9)


def test_a_shift_counts_by_vectors_where_groups_have_whole_ones():
    for size, bound in ((4, 2.0 + 0.5), (1, 2.0 + 0.5)):  # an RMS of 0.5: a vector of length 1, or four entries of 0.5
        model = Net(lambda s, x: x + s.shift, shift=nn.Parameter(torch.zeros(size)))
        norms = wn.assign_norms(model, overrides={"*": wn.norms.BiasRMS()})
        held = wn.constrain(wn.Scion(norms, lr=0.1), {"*": wn.ColumnCap(0.5)})
        found = wn.certify(model, torch.zeros(3, 4), radius=2.0, within=held)
        assert float(found.activation_rms) == pytest.approx(bound)
        assert found.lipschitz == pytest.approx(1.0)


def test_wrong_arguments_are_named():
    model, x = perceptron(), torch.randn(2, 6)
    _, constraints = capped(model)
    with pytest.raises(ValueError, match="must be what `constrain` returned"):
        wn.certify(model, x, within={"*": wn.HardCap(1.0)})
    with pytest.raises(ValueError, match="promises no bound for all steps on any parameter"):
        wn.certify(perceptron(), x, within=constraints)
    with torch.no_grad():
        model[0].weight.mul_(3)
    with pytest.raises(ValueError, match=r"0\.weight has norm .* and 1\.5 is promised"):
        wn.certify(model, x, within=constraints)


@pytest.mark.parametrize("mode", ["positions", "patches"])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_within_caps(mode, groups):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, groups=groups)
    ).eval()
    x = torch.randn(2, 4, 6, 6)
    kernel = wn.norms.SpectralConv(groups=groups, mode=mode)
    turned = wn.norms.SpectralConv(groups=groups, mode=mode, transposed=True)
    norms = wn.assign_norms(model, overrides={"0.weight": kernel, "2.weight": turned})
    optimizer = wn.Scion(norms, lr=0.3)
    constraints = wn.constrain(optimizer, {"*.weight": wn.HardCap(1.5), "*.bias": wn.ColumnCap(0.5)})
    always = wn.certify(model, x, within=constraints)
    for _ in range(2):
        push(model, optimizer, x, 1)
        assert wn.certify(model, x).lipschitz <= always.lipschitz
    assert wn.certify(model, x, within=constraints).lipschitz == always.lipschitz


def test_a_promise_that_does_not_serve_is_not_asked_for_again() -> None:
    """Of a layer by the squares of its weights, of which their norm is no bound that is known here."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    model[0].forward = lambda x: F.linear(x, model[0].weight.square())
    constraints = wn.constrain(wn.Scion(model, lr=0.01), {"*weight*": wn.HardCap(1.0)})
    with pytest.raises(UncertifiableError, match=r"entries of 0\.weight, .*; that norm does not bound .* freeze it"):
        wn.certify(model.eval(), torch.zeros(1, 3), within=constraints)
