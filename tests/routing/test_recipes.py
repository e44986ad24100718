"""Which norm every kind of layer gets, under every recipe."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import wellnormed as wn
from tests.routing.modules import made
from wellnormed.norms import BiasRMS, Gain, Norm, SpectralConv, Split

SPECTRAL = wn.Spectral()
LOGITS = wn.Sign(normalized=True)
IMAGE = wn.Spectral(units="pixels")
PATCHES = SpectralConv(mode="patches")
DEPTHWISE, TRANSPOSED = replace(PATCHES, groups=8), replace(PATCHES, transposed=True)


def norms(model: nn.Module, recipe: str) -> dict[str, Norm | None]:
    return {a.name: a.norm for a in wn.assign_norms(model, recipe)}


def gpt2(tied: bool) -> nn.Module:
    """One block, its attention's three projections fused in one linear layer."""
    attention = {"ln_1": nn.LayerNorm(4), "c_attn": nn.Linear(4, 12), "c_proj": nn.Linear(4, 4)}
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    block = made("Block", **attention, ln_2=nn.LayerNorm(4, bias=False), mlp=mlp)
    tables = {"wte": nn.Embedding(11, 4), "wpe": nn.Embedding(6, 4)}
    last = {"ln_f": nn.LayerNorm(4), "lm_head": nn.Linear(4, 11, bias=False)}
    model = made("GPT2", **tables, h=nn.ModuleList([block]), **last)
    if tied:
        model.lm_head.weight = model.wte.weight
    return model


def small_cnn() -> nn.Module:
    kernels = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, stride=2)
    gains = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.PReLU()
    pairs = (layer for pair in zip(kernels, gains, strict=True) for layer in pair)
    return nn.Sequential(*pairs, nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 10))


@pytest.mark.parametrize(
    ("recipe", "embedding", "hidden", "head", "gain", "bias"),
    [
        ("modular", wn.ColNorm(0, 16), SPECTRAL, SPECTRAL, Gain(), BiasRMS()),
        ("language", wn.ColNorm(0), SPECTRAL, LOGITS, Gain(), BiasRMS()),
        ("sign-only", wn.Sign(), LOGITS, LOGITS, Gain(), wn.Sign(ndim=1)),
        ("muon", None, SPECTRAL, None, None, None),
    ],
)
def test_a_block_of_gpt_2(recipe, embedding, hidden, head, gain, bias):
    got = norms(gpt2(tied=False), recipe)
    assert got["wte.weight"] == got["wpe.weight"] == embedding
    assert got["h.0.mlp.2.weight"] == hidden
    assert got["h.0.c_attn.weight"] == (Split(3) if hidden == SPECTRAL else hidden)
    assert got["lm_head.weight"] == head
    assert got["h.0.ln_1.weight"] == got["ln_f.weight"] == gain
    assert got["h.0.ln_1.bias"] == got["h.0.c_attn.bias"] == bias


def test_weight_sharing_as_recommended():
    """Sign -> Spectral -> Sign (LMO recommendation 3.1 iii)."""
    got = norms(gpt2(tied=True), "scion-gpt")
    assert (got["wte.weight"], got["h.0.c_proj.weight"]) == (LOGITS, SPECTRAL)
    assert "lm_head.weight" not in got


CNN = {
    "modular": (SpectralConv(), SpectralConv(groups=8), SpectralConv(transposed=True), SPECTRAL, SPECTRAL),
    "image": (replace(PATCHES, inner=IMAGE), DEPTHWISE, TRANSPOSED, SPECTRAL, LOGITS),
    "sign-only": (*[replace(LOGITS, ndim=4)] * 2, replace(LOGITS, ndim=4, output_axis=1), LOGITS, LOGITS),
    "muon": (PATCHES, DEPTHWISE, TRANSPOSED, SPECTRAL, None),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "expected"), CNN.items())
def test_a_small_cnn(recipe, expected):
    got = norms(small_cnn(), recipe)
    assert tuple(got[f"{i}.weight"] for i in (0, 2, 4, 7, 8)) == expected
    gains = (None, None, None) if recipe == "muon" else (Gain(), Gain(), Gain())
    assert tuple(got[f"{i}.weight"] for i in (1, 3, 5)) == gains


def test_the_first_layer_of_an_image_model_is_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    first = next(iter(wn.assign_norms(model, "image")))
    assert first.norm == IMAGE
    assert first.reason == "first layer, nn.Linear"
    alone = next(iter(wn.assign_norms(nn.Linear(12, 2), "image")))  # first and last: its outputs are logits
    assert alone.norm == LOGITS


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_of_every_dimension(spatial):
    plain = getattr(nn, f"Conv{spatial}d")(4, 6, 3, groups=2)
    transposed = getattr(nn, f"ConvTranspose{spatial}d")(4, 6, 3, groups=2)
    assert norms(plain, "modular")["weight"] == SpectralConv(spatial, groups=2)
    assert norms(transposed, "modular")["weight"] == SpectralConv(spatial, groups=2, transposed=True)


def test_attention_with_a_fused_and_with_separate_projections():
    fused = norms(nn.MultiheadAttention(4, 2, add_bias_kv=True), "modular")
    assert fused["in_proj_weight"] == Split(3)
    assert fused["in_proj_bias"] == BiasRMS()
    assert fused["bias_k"] == BiasRMS(ndim=3)
    assert fused["out_proj.weight"] == SPECTRAL
    separate = norms(nn.MultiheadAttention(4, 2, kdim=6, vdim=5), "modular")
    assert separate["q_proj_weight"] == separate["k_proj_weight"] == separate["v_proj_weight"] == SPECTRAL
    assert norms(nn.MultiheadAttention(4, 2), "sign-only")["in_proj_weight"] == LOGITS


def test_a_last_linear_that_may_be_hidden_is_warned_about_by_name_and_repeated_ones_never_are_heads():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    got = norms(layer, "modular")
    assert (got["self_attn.in_proj_weight"], got["linear2.weight"]) == (Split(3), SPECTRAL)
    assert (got["norm1.weight"], got["norm2.bias"]) == (Gain(), BiasRMS())
    with pytest.warns(UserWarning, match=r"linear2.weight is taken for .*overrides=\{'linear2.weight': ...\}"):
        last = next(a for a in wn.assign_norms(layer, "language") if a.name == "linear2.weight")
    assert (last.norm, last.reason) == (LOGITS, "last nn.Linear")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert norms(encoder, "language")["layers.1.linear2.weight"] == SPECTRAL
    encoder.head = nn.Linear(4, 4)
    encoder.later = nn.Linear(4, 4)
    assert norms(encoder, "language")["head.weight"] == LOGITS
    assert norms(encoder, "language")["later.weight"] == SPECTRAL


def test_recurrent_layers_and_cells_have_one_slice_for_every_gate():
    for layer, cell, expected in (
        (nn.LSTM(3, 4, proj_size=2), nn.LSTMCell(3, 4), Split(4)),
        (nn.GRU(3, 4), nn.GRUCell(3, 4), Split(3)),
        (nn.RNN(3, 4), nn.RNNCell(3, 4), SPECTRAL),
    ):
        got = norms(layer, "modular")
        assert got["weight_ih_l0"] == got["weight_hh_l0"] == expected
        assert got["bias_ih_l0"] == BiasRMS()
        assert got.get("weight_hr_l0", SPECTRAL) == SPECTRAL
        got = norms(cell, "modular")
        assert (got["weight_ih"], got["weight_hh"], got["bias_ih"]) == (expected, expected, BiasRMS())


def test_gains_of_several_dimensions_of_other_libraries_and_of_one_number():
    llama = made("LlamaRMSNorm", weight=torch.ones(4))
    model = nn.Sequential(nn.LayerNorm((2, 3)), nn.RMSNorm(4), nn.InstanceNorm1d(4, affine=True), llama)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    got = norms(model, "modular")
    assert (got["0.weight"], got["0.bias"]) == (Gain(2), BiasRMS(2))
    assert got["1.weight"] == got["2.weight"] == got["3.weight"] == Gain()
    assert got["temperature"] == Gain(0)
    assert "gain of LlamaRMSNorm, by its name" in str(wn.assign_norms(model))


def test_low_rank_adapters_as_bare_parameters():
    layer = nn.Linear(4, 6).requires_grad_(False)
    layer.lora_A, layer.lora_B = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(6, 2))
    factors = {"lora_embedding_A": torch.zeros(2, 9), "lora_embedding_B": torch.zeros(4, 2)}
    embedding = made(**{name: nn.ParameterDict({"default": factor}) for name, factor in factors.items()})
    got = norms(nn.ModuleDict({"layer": layer, "embedding": embedding}), "language")
    assert got["layer.lora_A"] == got["layer.lora_B"] == SPECTRAL
    assert got["embedding.lora_embedding_A.default"] == wn.ColNorm()
    assert got["embedding.lora_embedding_B.default"] == SPECTRAL


@pytest.mark.parametrize(
    ("path", "shape", "reason"),
    [
        ("lora_magnitude_vector.default.weight", (6,), "magnitudes of DoRA"),  # of a linear layer
        ("lora_magnitude_vector.default.weight", (1, 4), "magnitudes of DoRA"),  # of a table
        ("lora_magnitude_vector.default.weight", (1, 6, 1, 1), "magnitudes of DoRA"),  # of a convolution
        ("lora_magnitude_vector.default", (6,), "magnitudes of DoRA"),  # of earlier releases
        ("ia3_l.default", (6, 1), "IA3's factors"),
        ("ia3_l.default", (1, 4), "IA3's factors"),  # on the inputs
    ],
)
def test_what_peft_s_adapters_multiply_by_is_a_gain(path, shape, reason):
    layer = nn.Linear(4, 6)
    holder, parts = layer, path.split(".")
    for part in parts[:-1]:
        holder.add_module(part, made("DoraLinearLayer"))
        holder = holder.get_submodule(part)
    holder.register_parameter(parts[-1], nn.Parameter(torch.ones(shape)))
    found = {a.name: a for a in wn.assign_norms(nn.Sequential(layer))}[f"0.{path}"]
    assert (found.norm, found.reason) == (Gain(len(shape)), reason)


@pytest.mark.parametrize("parametrize", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_the_original_of_a_parametrized_weight_has_the_norm_of_that_weight(parametrize):
    model = nn.Sequential(parametrize(nn.Linear(4, 4)), nn.Linear(4, 2))
    found = {a.name: a for a in wn.assign_norms(model, "language")}["0.parametrizations.weight.original"]
    assert found.norm == SPECTRAL
    assert found.reason == "the original of a parametrized nn.Linear"


class Difference(nn.Module):
    """A weight made of two."""

    def forward(self, one, other):
        return one - other

    def right_inverse(self, weight):
        return weight, torch.zeros_like(weight)


def test_a_parametrization_of_several_originals_is_refused_with_a_remedy():
    model = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(model, "weight", Difference())
    with pytest.raises(ValueError, match=r"(?s)original0.*remove_parametrizations.*original1"):  # both at once
        wn.assign_norms(model)
    overrides = {"parametrizations.weight.original0": wn.Sign(), "parametrizations.weight.original1": wn.Spectral()}
    assert len(wn.assign_norms(model, overrides=overrides)) == 3


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("weight_norm", "magnitudes", "directions"),
    [
        (parametrizations.weight_norm, "parametrizations.weight.original0", "parametrizations.weight.original1"),
        (nn.utils.weight_norm, "weight_g", "weight_v"),
    ],
)
def test_weight_norm_has_magnitudes_that_are_gains_and_directions_in_the_norm_of_the_weight(
    weight_norm, magnitudes, directions
):
    model = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Flatten(), weight_norm(nn.Conv1d(2, 3, 5, padding=2)))
    found = {a.name: a for a in wn.assign_norms(model)}
    assert found[f"0.{magnitudes}"].norm == Gain(2)
    assert found[f"0.{magnitudes}"].reason == "magnitudes of weight_norm"
    assert found[f"0.{directions}"].norm == SPECTRAL
    assert found[f"0.{directions}"].reason == "the original of a parametrized nn.Linear"
    assert (found[f"2.{magnitudes}"].norm, found[f"2.{directions}"].norm) == (Gain(3), SpectralConv(1))
    assert norms(nn.utils.spectral_norm(nn.Linear(4, 6)), "modular")["weight_orig"] == SPECTRAL  # by a hook
    recurrent = {a.name: a.norm for a in wn.assign_norms(nn.utils.weight_norm(nn.GRU(3, 4), "weight_hh_l0"))}
    assert (recurrent["weight_hh_l0_g"], recurrent["weight_hh_l0_v"]) == (Gain(2), Split(3))


def bare(name: str, *shape: int, of: str = "Module") -> nn.Module:
    """A module of a class of this name that holds one parameter."""
    return made(of, **{name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("model", "norm"),
    [
        (nn.EmbeddingBag(5, 4), wn.ColNorm(0, max_inflation=16)),
        (bare("pos", 7, 4), BiasRMS(2)),
        (bare("wpe", 7, 4), BiasRMS(2)),
        (bare("rel_pos_h", 7, 4), BiasRMS(2)),  # of SAM
        (bare("pos_bias_u", 7, 4), BiasRMS(2)),  # of Conformer
        (bare("A_log", 8, 3), BiasRMS(2)),  # of Mamba
        (bare("attention_biases", 2, 9), wn.Sign()),  # of LeViT
        (bare("latents", 7, 4), wn.ColNorm(0, max_inflation=16)),  # of Perceiver
        (bare("weight", 7, 4, of="QuantEmbedding"), wn.ColNorm(0, max_inflation=16)),
    ],
)
def test_bare_tables_are_known_by_the_names_that_libraries_give_them(model, norm):
    assert list(norms(model, "modular").values()) == [norm]


@pytest.mark.parametrize("shape", [(1, 3), (1, 4, 8), (1, 4, 2, 2)])
def test_what_is_repeated_for_every_sample_is_taken_for_vectors_with_a_warning(shape):
    with pytest.warns(UserWarning, match=r"registers may hold a matrix, .*overrides=\{'registers': ...\}") as told:
        assert norms(bare("registers", *shape), "modular") == {"registers": BiasRMS(len(shape))}
    assert told[0].filename == __file__


def test_a_tied_parameter_that_no_layer_explains_is_refused_as_such():
    model = nn.ModuleDict({"own": bare("table", 7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["own"].table
    with pytest.raises(ValueError, match=r"'own.table' of shape \(7, 4\) in Module has no norm.*\n.*Spectral\(\) for"):
        wn.assign_norms(model)


def test_a_sequence_before_the_last_convolution_may_not_hold_the_head():
    model = nn.ModuleDict({"time": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), "last": nn.Conv2d(8, 1, 1)})
    with pytest.warns(UserWarning, match=r"time.1.weight is taken for the model's head"):
        wn.assign_norms(model, "language")


def test_a_bilinear_layer_has_no_rule():
    with pytest.raises(ValueError, match=r"'weight' of shape \(4, 2, 3\) in Bilinear has no norm"):
        wn.assign_norms(nn.Bilinear(2, 3, 4))
