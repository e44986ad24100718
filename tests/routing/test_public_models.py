"""Models of public packages, where these are installed, as their own classes and configs describe them."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.norms import PerHead, Split

HEAD = wn.Spectral(units="l2")
TURNED = wn.Spectral(units="l2", input_axis=0)
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, {"attn.c_attn": PerHead(12, TURNED, 1)}),
    (
        "Llama",
        TEXT | {"num_key_value_heads": 2},
        {"q_proj": PerHead(4, HEAD), "k_proj": PerHead(2, HEAD), "v_proj": PerHead(2, HEAD), "o_proj": wn.Spectral()},
    ),
    ("GPTNeoX", TEXT, {"query_key_value": PerHead(12, HEAD)}),
    ("Falcon", TEXT, {"query_key_value": PerHead(6, HEAD)}),  # one head of keys and of values
    (
        "DeepseekV3",
        TEXT | LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        {
            "q_b_proj": PerHead(4, HEAD),
            "kv_a_proj_with_mqa": Split((8, 4)),
            "kv_b_proj": PerHead(4, Split((8, 12), HEAD)),
        },
    ),
    (
        "T5",
        {"d_model": 32, "d_kv": 4, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 50},
        {"relative_attention_bias": wn.Sign(), "SelfAttention.q": PerHead(4, HEAD)},
    ),
    ("Bert", TEXT, {"self.query": PerHead(4, HEAD), "self.value": PerHead(4, HEAD)}),
]


@pytest.mark.parametrize(("kind", "settings", "expected"), CASES, ids=[kind for kind, *_ in CASES])
def test_transformers_say_how_many_heads_they_have(kind, settings, expected):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))
    assignment = wn.assign_norms(model, per_head=True)  # a warning of anybody would be an error here
    for layer, norm in expected.items():
        found = [a for a in assignment if a.name.endswith(f"{layer}.weight")]
        assert found
        assert {a.norm for a in found} == {norm}


def test_a_dit_of_diffusers_is_read_without_its_warnings():
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assignment = wn.assign_norms(model, per_head=True)
    norms = {a.name: a.norm for a in assignment}
    assert norms["transformer_blocks.0.norm1.linear.weight"] == Split(6)
    assert norms["proj_out_1.weight"] == Split(2)
    assert norms["transformer_blocks.1.attn1.to_k.weight"] == PerHead(2, HEAD)
    assert "transformer_blocks.{0,1}.norm1.linear.weight" in str(assignment)


def test_adapters_of_peft_are_routed_and_the_rest_is_frozen():
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"body": nn.Linear(4, 12), "head": nn.Linear(12, 3)})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"]))
    assignment = wn.assign_norms(adapted, "language")
    assert [(a.norm, a.reason) for a in assignment if a.parameter.ndim == 2] == [
        (wn.Spectral(), "LoRA's A"), (wn.Spectral(), "LoRA's B"), (wn.Sign(normalized=True), "last nn.Linear"),
    ]  # fmt: skip
    assert [name.removeprefix("base_model.model.") for name in assignment.frozen] == [
        "body.base_layer.weight", "body.base_layer.bias", "head.original_module.weight", "head.original_module.bias",
    ]  # fmt: skip
