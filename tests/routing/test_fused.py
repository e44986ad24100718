"""Fused projections, experts and wrapped names are recognised, or warned about by name."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.routing.modules import made
from wellnormed.certificates.promising import promise_of
from wellnormed.norms import Experts, PerHead, SpectralConv, Split

GQA = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=16, head_dim=2)
TRANSPOSED = wn.Spectral(input_axis=0)
HEAD = wn.Spectral(units="l2")


def alone(name: str, layer: nn.Module, kind="Module", **attributes) -> nn.Module:
    """A module `attention` that holds one projection of this name, and numbers about it."""
    return made(attention=made(kind, **{name: layer}, **attributes))


def norm_of(model: nn.Module, recipe="modular") -> wn.norms.Norm:
    return next(a.norm for a in wn.assign_norms(model, recipe) if a.name.endswith(("weight", "_proj")))


def conv1d(d_in: int, d_out: int) -> nn.Module:
    """GPT-2's layer, whose weight has its inputs first."""
    layer = made("Conv1D", weight=torch.ones(d_in, d_out))
    type(layer).__module__ = "transformers.pytorch_utils"
    return layer


def linear(d_in: int, d_out: int) -> nn.Module:
    return nn.Linear(d_in, d_out, bias=False)


@pytest.mark.parametrize(
    ("model", "norm"),
    [
        (alone("c_attn", linear(16, 48)), Split(3)),
        (alone("c_attn", conv1d(16, 48)), Split(3, TRANSPOSED, dim=1)),
        (alone("c_attn", conv1d(16, 32)), Split(2, TRANSPOSED, dim=1)),  # cross-attention: keys and values
        (alone("qkv", linear(16, 48), num_heads=4), Split(3)),
        (alone("Wqkv", linear(16, 48)), Split(3)),
        (alone("qkv_proj", linear(16, 24), config=GQA), Split((16, 4, 4))),
        (alone("qkv_proj", linear(16, 24), num_heads=8, num_kv_heads=2, head_dim=2), Split((16, 4, 4))),
        (alone("c_attn", linear(16, 20), num_heads=8, kv_heads=1), Split((16, 2, 2))),
        (alone("qkv_proj", linear(16, 12), num_heads=2, head_dim=2), Split(3)),  # heads narrower than the stream
        (alone("qkv_proj", linear(16, 48), num_heads=2, head_dim=5), Split(3)),  # the length is of something else
        (alone("kv_proj", linear(16, 8)), Split(2)),
        (alone("kv_a_proj_with_mqa", linear(16, 10), config=SimpleNamespace(kv_lora_rank=8)), Split((8, 2))),
        (alone("qkv", nn.Conv1d(16, 48, 1, bias=False)), Split(3, SpectralConv(1))),  # of diffusion models
        (alone("qkv", nn.Conv2d(16, 48, 3, bias=False)), SpectralConv(2)),
        (alone("gate_up_proj", linear(16, 40)), Split(2)),
        (alone("Wi", linear(16, 48), config=SimpleNamespace(intermediate_size=24)), Split(2)),
        (alone("Wi", linear(16, 48)), wn.Spectral()),
        (alone("q_proj", linear(16, 48)), wn.Spectral()),
        (alone("wqkv", linear(16, 32), n_heads=4, n_kv_heads=2, head_dim=4), PerHead(8, HEAD)),  # of InternLM2, or not
        (alone("wqkv", linear(16, 48), n_heads=4), Split(3)),
        (alone("W_pack", linear(16, 48), num_heads=4), Split(3)),
        (alone("att_proj", linear(16, 32), config=SimpleNamespace(n_heads=4, n_kv_heads=2)), Split((16, 8, 8))),
        (alone("to_q_k_v", linear(16, 48)), Split(3)),
        (alone("in_proj", linear(16, 48), num_heads=4), Split(3)),
        (alone("in_proj", linear(16, 48)), wn.Spectral()),
        (nn.ModuleDict({"module": alone("c_attn", linear(16, 48))}), Split(3)),
        (nn.ModuleDict({"_orig_mod": alone("c_attn", conv1d(16, 48))}), Split(3, TRANSPOSED, dim=1)),
    ],
)
def test_fused_projections_are_split_by_name_size_and_heads(model, norm):
    assert norm_of(model) == norm


def test_signs_of_a_matrix_with_its_inputs_first_count_its_inputs():
    assert norm_of(conv1d(4, 12), "sign-only") == wn.Sign(normalized=True, output_axis=1)


@pytest.mark.parametrize(
    ("layer", "attributes", "message"),
    [
        ("query_key_value", {}, r"attention.query_key_value.weight may hold.*with Split\(\(queries, keys, values\)\)"),
        ("fused_qkv_a", {}, r"overrides=\{'attention.fused_qkv_a.weight': ...\}"),
        ("qkv_proj", {"num_heads": 5, "num_kv_heads": 3}, r"unknown sizes.*Split\(\(queries, keys, values\)\)"),
    ],
)
def test_doubtful_projections_are_warned_about_with_the_override(layer, attributes, message):
    model = alone(layer, linear(16, 48), **attributes)
    with pytest.warns(UserWarning, match=message):
        assert norm_of(model) == wn.Spectral()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wn.assign_norms(model, overrides={f"attention.{layer}": Split(12)})


@pytest.mark.parametrize(
    ("attention", "layer", "d_out", "attributes", "heads"),
    [
        ("GPTNeoXAttention", "query_key_value", 48, {}, 12),
        ("GPTBigCodeAttention", "c_attn", 48, {}, 12),  # (query, key, value) of a head, then of the next
        ("GPTBigCodeAttention", "c_attn", 24, {"kv_heads": 1}, 6),
        ("CodeGenAttention", "qkv_proj", 48, {}, 12),
        ("DisentangledSelfAttention", "in_proj", 48, {}, 12),  # DeBERTa
        ("FusedQKVLinear", "wqkv", 48, {}, 12),  # torchtitan
        ("FusedQKVLinear", "wqkv", 32, {"n_kv_heads": 2}, 8),  # two queries, a key and a value, twice
        ("FalconAttention", "query_key_value", 24, {"num_kv_heads": 1}, 6),
    ],
)
def test_heads_that_a_class_interleaves_are_cut_apart_because_nothing_else_can_be(
    attention, layer, d_out, attributes, heads
):
    model = alone(layer, linear(16, d_out), attention, num_heads=4, **attributes)
    [entry] = wn.assign_norms(model)
    assert entry.norm == PerHead(heads, HEAD)
    assert entry.reason == "nn.Linear, fused, by heads"


@pytest.mark.parametrize(
    ("layer", "sizes", "norm"),
    [
        ("kv_b_proj", (4, 4), PerHead(4, Split(2, HEAD))),
        ("kv_b_proj", (4, 8), PerHead(4, Split((4, 8), HEAD))),  # GLM-5 has unequal sizes
        ("wkv_b", (4, 8), PerHead(4, Split((4, 8), HEAD))),  # torchtitan
    ],
)
def test_latent_attention_has_the_keys_and_values_of_every_head(layer, sizes, norm):
    known = {"num_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": sizes[0], "v_head_dim": sizes[1], "head_dim": 2}
    assert norm_of(alone(layer, linear(6, 4 * sum(sizes)), **known)) == norm
    with pytest.warns(UserWarning, match=r"may hold several matrices, such as keys and values: .*Split\(\(...\)\)"):
        norm_of(alone(layer, linear(6, 4 * sum(sizes) + 4), **known))


@pytest.mark.parametrize(
    ("attention", "layer", "d_out"), [("Lfm2ShortConv", "in_proj", 48), ("MambaMixer", "in_proj", 64)]
)
def test_projections_of_state_space_layers_are_warned_about(attention, layer, d_out):
    model = alone(layer, linear(16, d_out), attention, num_heads=4)
    with pytest.warns(UserWarning, match=rf"attention.{layer}.weight may hold.*Split\(\(...\)\)"):
        assert norm_of(model) == wn.Spectral()


T5 = {"n_heads": 4, "key_value_proj_dim": 8}
GATED = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("model", "norm"),
    [
        (alone("c_attn", linear(16, 48), n_head=4), PerHead(12, HEAD)),  # nanoGPT
        (alone("c_attn", conv1d(16, 48), num_heads=4), PerHead(12, wn.Spectral(units="l2", input_axis=0), dim=1)),
        (alone("c_attn", conv1d(16, 32), num_heads=4), PerHead(8, wn.Spectral(units="l2", input_axis=0), dim=1)),
        (alone("qkv_proj", linear(16, 24), config=GQA), PerHead(12, HEAD)),
        (alone("q_proj", linear(16, 16), config=GQA), PerHead(8, HEAD)),
        (alone("k_proj", linear(16, 4), config=GQA), PerHead(2, HEAD)),
        (alone("k_proj", linear(16, 4), num_heads=8, head_dim=2), PerHead(2, HEAD)),
        (alone("query", linear(16, 16), num_attention_heads=4), PerHead(4, HEAD)),  # BERT
        (alone("v_lin", linear(16, 16), n_heads=2), PerHead(2, HEAD)),  # DistilBERT
        (alone("q", linear(16, 32), **T5), PerHead(4, HEAD)),
        (alone("q_proj", linear(16, 64), config=GATED), PerHead(8, HEAD)),  # Qwen3-Next: a query and its gate
        (alone("q_b_proj", linear(16, 48), num_heads=4, kv_lora_rank=8, head_dim=4), PerHead(4, HEAD)),
        (alone("to_kv", linear(16, 32), heads=4), PerHead(8, HEAD)),
        (alone("qkv", nn.Conv1d(16, 48, 1, bias=False), num_heads=4), PerHead(12, SpectralConv(1, inner=HEAD))),
    ],
)
def test_on_request_heads_have_norms_of_their_own_wherever_their_number_is_known(model, norm):
    [entry] = wn.assign_norms(model, per_head=True)
    assert entry.norm == norm
    assert entry.reason.endswith(", by heads")
    [entry] = wn.Muon(model, 0.1, per_head=True, adjust_lr_fn="match_rms_adamw").assignment
    assert entry.norm == norm.with_settings(coefficients="jordan-5", units="match-rms-adamw")
    [entry] = wn.assign_norms(model, "sign-only", per_head=True)  # which has no norm of matrices
    assert isinstance(entry.norm, wn.Sign)
    assert not entry.reason.endswith(", by heads")


@pytest.mark.parametrize(
    "model",
    [
        alone("q_proj", linear(16, 16)),  # nothing says how many heads there are
        alone("q_proj", linear(16, 18), num_heads=4),  # they do not divide the outputs
        alone("k_proj", linear(16, 16), num_key_value_heads=4),
        alone("o_proj", linear(16, 16), num_heads=4),
        alone("wk", linear(16, 4), n_heads=2, head_dim=4, config=GQA),  # one key for all heads of GLM-5's indexer
        alone("key", linear(16, 16), num_heads=True),
        alone("key", linear(16, 16), num_heads=0),
    ],
)
def test_without_a_number_of_heads_that_fits_a_projection_is_one_matrix(model):
    [entry] = wn.assign_norms(model, per_head=True)
    assert (entry.norm, entry.reason) == (wn.Spectral(), "nn.Linear")


@pytest.mark.parametrize("optimizer", [wn.optim.Signum, wn.optim.ModularDescent])
def test_optimizers_that_choose_their_norms_otherwise_refuse_per_head(optimizer):
    with pytest.raises(ValueError, match="per_head"):
        optimizer(nn.Sequential(nn.Linear(2, 2)), per_head=True)
    with pytest.raises(ValueError, match="per_head='yes'"):
        wn.Scion(nn.Linear(2, 2), per_head="yes")


def test_the_heads_of_torchs_own_attention_are_known():
    norms = {a.name: a.norm for a in wn.assign_norms(nn.MultiheadAttention(8, 4), per_head=True)}
    assert norms["in_proj_weight"] == PerHead(12, HEAD)
    assert norms["out_proj.weight"] == wn.Spectral()
    norms = {a.name: a.norm for a in wn.assign_norms(nn.MultiheadAttention(8, 4, kdim=6), per_head=True)}
    assert norms["q_proj_weight"] == norms["k_proj_weight"] == PerHead(4, HEAD)


def test_the_number_of_heads_is_that_of_the_nearest_module_that_knows_it():
    """Grouped keys of a language model around an image encoder are not those of the encoder."""
    model = alone("k_proj", linear(16, 16), num_heads=4)
    model.config = GQA
    assert next(iter(wn.assign_norms(model, per_head=True))).norm == PerHead(4, HEAD)


def test_a_step_by_heads_is_as_long_as_the_heads_share_of_a_step_of_the_projection():
    """For gradients whose singular values are all alike, both steps are the same, whatever the number of heads."""
    gradient = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))[0]
    exact = wn.Spectral(method="svd")
    whole = exact.dualize(gradient)
    for heads in (2, 3, 6):
        by_head = PerHead(heads, wn.Spectral(method="svd", units="l2")).dualize(gradient)
        torch.testing.assert_close(by_head, whole)
        torch.testing.assert_close(PerHead(heads, exact).dualize(gradient), whole / heads**0.5)


def test_a_cap_promises_every_head_as_much_alone_as_on_the_whole_projection():
    """So bounds on attention from the same cap are the same, and a head need not share it with the others."""
    for cap in (0.5, 2.0):
        alone, whole = (promise_of("w", norm, cap, (64, 64)) for norm in (PerHead(8, HEAD), wn.Spectral()))
        assert alone.spectral(parts=8) == pytest.approx(whole.spectral(parts=8))
        assert alone.spectral(parts=8) == pytest.approx((cap,) * 8)


@pytest.mark.parametrize(
    ("shape", "name", "norm"),
    [
        ((3, 48, 16), "gate_up_proj", Experts(Split(2))),
        ((3, 16, 48), "gate_up_proj", Experts(Split(2, TRANSPOSED, dim=1))),
        ((3, 16, 24), "down_proj", Experts()),
        ((3, 24, 16), "down_proj", Experts(TRANSPOSED)),
        ((3, 24, 16), "up_proj", Experts()),
        ((3, 16, 24), "up_proj", Experts(TRANSPOSED)),
    ],
)
def test_the_experts_of_one_weight_have_their_own_norms(shape, name, norm):
    layer = made(**{name: torch.ones(shape)}, num_experts=3, hidden_size=16)
    assert norm_of(layer) == norm
    assert norm_of(layer, "muon") == norm
    assert float(norm.norm(layer.get_parameter(name).detach())) > 0


def test_experts_of_unknown_orientation_are_warned_about():
    layer = made(down_proj=torch.ones(3, 16, 16), num_experts=3, hidden_size=16)
    with pytest.warns(UserWarning, match=r"down_proj may have its outputs or its inputs first.*Experts\("):
        assert norm_of(layer) == Experts()
    with pytest.raises(ValueError, match=r"'down_proj' .* has no norm under recipe 'sign-only'\nPass overrides"):
        wn.assign_norms(layer, "sign-only")


def test_a_parameter_with_one_dimension_longer_than_one_is_a_vector():
    model = made(mask_emb=torch.zeros(1, 1, 4), logit_scale=torch.zeros(2, 1, 1))
    assert {a.norm for a in wn.assign_norms(model)} == {wn.norms.BiasRMS(3)}


def test_class_tokens_positions_and_layer_scales_are_known_by_name():
    tokens = {"cls_token": torch.zeros(1, 1, 4), "pos_embed": torch.zeros(1, 9, 4)}
    model = made(**tokens, layer_scale=torch.ones(4, 1, 1), relative_position_bias_table=torch.zeros(9, 2))
    norms = {a.name: a.norm for a in wn.assign_norms(model)}
    assert norms == {
        "cls_token": wn.norms.BiasRMS(3),
        "pos_embed": wn.norms.BiasRMS(3),
        "layer_scale": wn.norms.Gain(3),
        "relative_position_bias_table": wn.Sign(),
    }


def pair(first: nn.Module, second: nn.Module, names: tuple[str, str] = ("fc1", "fc2"), **more: nn.Module) -> nn.Module:
    return nn.ModuleDict({names[0]: first, names[1]: second, **more})


@pytest.mark.parametrize(
    ("model", "norms"),
    [
        (pair(linear(64, 256), linear(128, 64)), [Split(2), wn.Spectral()]),
        (pair(linear(64, 256), linear(256, 64)), [wn.Spectral(), wn.Spectral()]),
        (pair(linear(64, 256), linear(128, 64), ("linear_fc1", "linear_fc2")), [Split(2), wn.Spectral()]),
        (pair(linear(64, 256), linear(128, 64), ("dense_h_to_4h", "dense_4h_to_h")), [Split(2), wn.Spectral()]),
        (pair(linear(64, 256), linear(128, 64), ("ff_proj", "ff_out")), [Split(2), wn.Spectral()]),
        (pair(linear(64, 256), linear(128, 64), ("any", "name")), [Split(2), wn.Spectral()]),
        (nn.Sequential(linear(64, 256), nn.GLU(), linear(128, 64)), [Split(2), wn.Spectral()]),
        (pair(linear(64, 256), linear(256, 64), more=linear(128, 64)), [wn.Spectral()] * 3),  # one reads it whole
        (pair(linear(64, 128), linear(64, 128), ("q", "k"), v=linear(64, 64), o=linear(64, 64)), [wn.Spectral()] * 4),
        (nn.Sequential(linear(1, 64), nn.ReLU(), linear(64, 2)), [wn.Spectral()] * 2),  # what reads half comes before
        (alone("gate_and_up_proj", linear(16, 40)), [Split(2)]),
        # a gated layer as diffusion models have it; what reads its result stands elsewhere
        (nn.ModuleDict({"net": made("GEGLU", proj=linear(16, 40)), "out": linear(20, 16)}), [Split(2), wn.Spectral()]),
    ],
)
def test_a_gate_and_a_value_in_one_weight_are_told_by_the_sizes_around(model, norms):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.ModuleDict({"block": model, "head": linear(7, 3)})  # so that none is the last layer
        assert [a.norm for a in wn.assign_norms(model)][:-1] == norms


def test_a_layer_whose_half_is_read_but_not_brought_back_is_warned_about():
    model = nn.ModuleDict({"block": pair(linear(64, 256), linear(128, 32)), "head": linear(7, 3)})
    with pytest.warns(UserWarning, match=r"block.fc1.weight may hold a gate and a value: .*Split\(2\)"):
        wn.assign_norms(model)


def test_parametrized_layers_beside_one_count_too():
    model = nn.ModuleDict({"block": pair(linear(64, 256), linear(256, 64)), "head": linear(7, 3)})
    nn.utils.parametrizations.spectral_norm(model["block"]["fc2"])
    assert next(iter(wn.assign_norms(model))).norm == wn.Spectral()


@pytest.mark.parametrize(("recipe", "norm"), [("muon", None), ("language", wn.Sign(normalized=True))])
def test_a_head_that_is_no_linear_of_torchs_is_the_last_layer(recipe, norm):
    head = made("ColumnParallelLinear", weight=torch.ones(7, 4))
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "hidden": linear(4, 4), "lm_head": head})
    assigned = {a.name: a for a in wn.assign_norms(model, recipe)}
    assert assigned["lm_head.weight"].norm == norm
    assert assigned["lm_head.weight"].reason == "last ColumnParallelLinear, by its name"


def test_matrices_that_are_flattened_into_one_dimension_are_warned_about():
    layer = made("Linear", weight=torch.ones(64 * 64 + 32 * 32))
    with pytest.warns(UserWarning, match=r"0.weight may hold matrices in one .* None, which leaves it to AdamW"):
        wn.assign_norms(nn.Sequential(layer))
