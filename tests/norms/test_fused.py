"""Fused projections, experts and wrapped names are recognised, or warned about by name."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.norms import Experts, SpectralConv, Split

GQA = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=16, head_dim=2)
TRANSPOSED = wn.Spectral(input_axis=0)


def alone(name: str, layer: nn.Module, **attributes) -> nn.Module:
    """A module `attention` that holds one projection of this name, and numbers about it."""
    attention = nn.Module()
    attention.add_module(name, layer)
    for key, value in attributes.items():
        setattr(attention, key, value)
    model = nn.Module()
    model.attention = attention
    return model


def norm_of(model: nn.Module, recipe="modular") -> wn.norms.Norm:
    return next(a.norm for a in wn.assign_norms(model, recipe) if a.name.endswith(("weight", "_proj")))


def conv1d(d_in: int, d_out: int) -> nn.Module:
    """GPT-2's layer, whose weight has its inputs first."""

    class Conv1D(nn.Module):
        __module__ = "transformers.pytorch_utils"

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d_in, d_out))

    return Conv1D()


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
        (alone("kv_proj", linear(16, 8)), Split(2)),
        (alone("kv_a_proj_with_mqa", linear(16, 10), config=SimpleNamespace(kv_lora_rank=8)), Split((8, 2))),
        (alone("qkv", nn.Conv1d(16, 48, 1, bias=False)), Split(3, SpectralConv(1))),  # of diffusion models
        (alone("qkv", nn.Conv2d(16, 48, 3, bias=False)), SpectralConv(2)),
        (alone("gate_up_proj", linear(16, 40)), Split(2)),
        (alone("Wi", linear(16, 48), config=SimpleNamespace(intermediate_size=24)), Split(2)),
        (alone("Wi", linear(16, 48)), wn.Spectral()),
        (alone("q_proj", linear(16, 48)), wn.Spectral()),
        (nn.ModuleDict({"module": alone("c_attn", linear(16, 48))}), Split(3)),
        (nn.ModuleDict({"_orig_mod": alone("c_attn", conv1d(16, 48))}), Split(3, TRANSPOSED, dim=1)),
    ],
)
def test_fused_projections_are_split_by_name_size_and_heads(model, norm):
    assert norm_of(model) == norm


@pytest.mark.parametrize(
    ("layer", "attributes", "message"),
    [
        ("query_key_value", {"num_heads": 4}, r"attention.query_key_value.weight may hold.*with Split\(12\)"),
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
    ("attention", "layer", "d_out", "message"),
    [
        ("GPTBigCodeAttention", "c_attn", 48, r"Split\(12\)"),  # (query, key, value) of a head, then of the next
        ("CodeGenAttention", "qkv_proj", 48, r"Split\(12\)"),
        ("DisentangledSelfAttention", "in_proj", 48, r"Split\(12\)"),  # DeBERTa
        ("FusedQKVLinear", "wqkv", 48, r"Split\(12\)"),  # torchtitan
        ("FusedQKVLinear", "wqkv", 32, r"Split\(8\)"),  # two queries, a key and a value, twice
        ("FalconAttention", "query_key_value", 24, r"Split\(6\)"),  # four heads of queries, one of keys, one of values
        ("DeepseekV3Attention", "kv_b_proj", 48, r"Split\(4\)"),  # keys and values of a head, then of the next
        ("Lfm2ShortConv", "in_proj", 48, r"Split\(\(...\)\)"),
        ("MambaMixer", "in_proj", 64, r"Split\(\(...\)\)"),
    ],
)
def test_projections_that_a_class_interleaves_are_warned_about(attention, layer, d_out, message):
    model = alone(layer, linear(16, d_out), num_heads=4, **({"kv_lora_rank": 16} if layer == "kv_b_proj" else {}))
    model.attention.__class__ = type(attention, (nn.Module,), {})
    with pytest.warns(UserWarning, match=rf"attention.{layer}.weight may hold.*{message}"):
        assert norm_of(model) == wn.Spectral()


def test_multi_query_attention_of_big_code_is_split_by_the_sizes():
    model = alone("c_attn", linear(16, 24), num_heads=4, kv_heads=1)
    model.attention.__class__ = type("GPTBigCodeAttention", (nn.Module,), {})
    assert norm_of(model) == Split((16, 4, 4))


def expert_layer(shape: tuple[int, ...], name: str, **attributes) -> nn.Module:
    layer = nn.Module()
    layer.register_parameter(name, nn.Parameter(torch.ones(shape)))
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer


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
    layer = expert_layer(shape, name, num_experts=3, hidden_size=16)
    assert norm_of(layer) == norm
    assert norm_of(layer, "muon") == norm
    assert float(norm.norm(layer.get_parameter(name).detach())) > 0


def test_experts_of_unknown_orientation_are_warned_about():
    layer = expert_layer((3, 16, 16), "down_proj", num_experts=3, hidden_size=16)
    with pytest.warns(UserWarning, match=r"down_proj may have its outputs or its inputs first.*Experts\("):
        assert norm_of(layer) == Experts()
    with pytest.raises(
        ValueError, match=r"parameter 'down_proj' .* has no norm under recipe 'sign-only'\nPass overrides"
    ):
        wn.assign_norms(layer, "sign-only")


def test_a_parameter_with_one_dimension_longer_than_one_is_a_vector():
    model = nn.Module()
    model.mask_emb, model.logit_scale = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(2, 1, 1))
    assert {a.norm for a in wn.assign_norms(model)} == {wn.norms.BiasRMS(3)}


def test_class_tokens_positions_and_layer_scales_are_known_by_name():
    model = nn.Module()
    model.cls_token, model.pos_embed = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 9, 4))
    model.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
    model.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
    norms = {a.name: a.norm for a in wn.assign_norms(model)}
    assert norms == {
        "cls_token": wn.norms.BiasRMS(3),
        "pos_embed": wn.norms.BiasRMS(3),
        "layer_scale": wn.norms.Gain(3),
        "relative_position_bias_table": wn.Sign(),
    }
