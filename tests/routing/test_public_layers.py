"""Layers of public models with a structure of their own: adaptive norms, adapters, tables of attention biases."""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.norms import Split
from wellnormed.routing.attributes import attention_heads, number, stored


def norms(model: nn.Module, **settings: Any) -> dict[str, wn.norms.Norm | None]:
    return {a.name: a.norm for a in wn.assign_norms(model, **settings)}


def of_class(name: str, **children: nn.Module) -> nn.Module:
    """A module of a class of this name that holds these."""
    model = type(name, (nn.Module,), {})()
    for key, child in children.items():
        model.add_module(key, child)
    return model


def plain_norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


class DiTBlock(nn.Module):
    """A block of the first DiT: six outputs of one linear map shift, scale and gate attention and MLP."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = plain_norm(width), plain_norm(width)
        self.attn = nn.Module()
        self.attn.num_heads, self.attn.qkv = heads, nn.Linear(width, 3 * width)
        self.attn.q_norm = nn.LayerNorm(width // heads)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))


class DiT(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(2))
        self.final_layer = of_class(
            "FinalLayer",
            norm_final=plain_norm(width),
            linear=nn.Linear(width, 5),
            adaLN_modulation=nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width)),
        )


def test_a_dit_has_six_parts_in_a_block_and_two_at_the_end():
    text = str(wn.assign_norms(DiT()))
    assert "blocks.{0,1}.adaLN_modulation.1.weight  2 x (48, 8)  Split(6)" in text
    assert " ".join(text.split()).count("nn.Linear, shifts, scales, gates") == 2  # the blocks, and the end
    found = norms(DiT(), recipe="language")
    assert found["final_layer.adaLN_modulation.1.weight"] == Split(2)
    assert found["final_layer.linear.weight"] == wn.Spectral()
    assert norms(DiT(), recipe="muon")["blocks.0.adaLN_modulation.1.weight"] == Split(6)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        # of diffusers: DiT and SD3; SD3.5; Flux's single blocks; PixArt; the last norm; CogVideoX, whose conditioning
        # is narrower than its stream; Lumina 2, with an RMS norm that only has a weight
        (of_class("AdaLayerNormZero", linear=nn.Linear(8, 48), norm=plain_norm(8)), 6),
        (of_class("SD35AdaLayerNormZeroX", linear=nn.Linear(8, 72), norm=plain_norm(8)), 9),
        (of_class("AdaLayerNormZeroSingle", linear=nn.Linear(8, 24), norm=plain_norm(8)), 3),
        (of_class("AdaLayerNormSingle", linear=nn.Linear(8, 48)), 6),
        (of_class("AdaLayerNormContinuous", linear=nn.Linear(8, 16), norm=plain_norm(8)), 2),
        (of_class("CogVideoXLayerNormZero", linear=nn.Linear(4, 48), norm=nn.LayerNorm(8)), 6),
        (of_class("LuminaRMSNormZero", linear=nn.Linear(4, 32), norm=nn.RMSNorm(8)), 4),
        (of_class("Modulation", lin=nn.Linear(8, 24)), 3),  # of Flux as published
        (of_class("Block", img_mod=nn.Sequential(nn.SiLU(), nn.Linear(8, 48)), img_norm1=plain_norm(8)), 6),  # Qwen
        (of_class("Block", ada_lin=nn.Sequential(nn.SiLU(), nn.Linear(8, 48))), 6),  # VAR
        (of_class("DiTTransformer2DModel", proj_out_1=nn.Linear(8, 16), norm_out=plain_norm(8)), 2),
        (of_class("Block", adaLN_modulation=nn.Linear(16, 48), norm=plain_norm(8)), 6),
        (of_class("Block", adaLN_modulation=nn.Linear(8, 8), norm=plain_norm(8)), 1),
    ],
)
def test_adaptive_norms_are_split_by_the_width_of_the_norm_that_they_serve(model, parts):
    model.append_head = nn.Linear(2, 2)
    found = next(a for a in wn.assign_norms(model) if a.parameter.ndim == 2)
    assert found.norm == (Split(parts) if parts > 1 else wn.Spectral())
    assert found.reason == ("nn.Linear, shifts, scales, gates" if parts > 1 else "nn.Linear")


def test_an_adaptive_norm_of_unknown_width_is_warned_about_and_other_modulations_are_not():
    model = of_class("AdaGroupNorm", linear=nn.Linear(16, 24))
    with pytest.warns(UserWarning, match=r"linear.weight may hold shifts, scales and gates .*with Split\(parts\)"):
        assert norms(model)["linear.weight"] == wn.Spectral()
    focal = of_class("FocalNetModulation", projection_in=nn.Linear(8, 19), projection_out=nn.Linear(8, 8))
    assert set(norms(focal).values()) == {wn.Spectral(), wn.norms.BiasRMS()}


def test_the_modulation_of_a_kernel_is_not_one_of_a_norm_layer_elsewhere():
    """As StyleGAN 2 has it: a scale for every input channel, in a model whose head has a narrower norm layer."""
    kernel = of_class("ModulatedConv2d", modulation=nn.Linear(16, 16), conv=nn.Conv2d(16, 16, 3))
    blocks = nn.ModuleList([of_class("Block", body=nn.Sequential(of_class("Styled", inner=kernel)))])
    model = of_class("Generator", blocks=blocks, norm=nn.LayerNorm(4))
    assert norms(model)["blocks.0.body.0.inner.modulation.weight"] == wn.Spectral()


@pytest.mark.parametrize("shape", [(6, 8), (1, 6, 8)])
@pytest.mark.parametrize("name", ["scale_shift_table", "modulation"])
def test_tables_of_shifts_and_scales_are_vectors(name, shape):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert norms(model) == {name: wn.norms.BiasRMS(len(shape))}


@pytest.mark.parametrize(
    ("name", "table", "attributes"),
    [
        ("relative_attention_bias", nn.Embedding(32, 4), {"n_heads": 4}),  # T5, MPNet
        ("relative_attention_bias", nn.Embedding(32, 4), {}),  # the heads may stand elsewhere
        ("rel_attn_embed", nn.Embedding(32, 4), {"num_heads": 4}),  # WavLM
        ("position_bias", nn.Embedding(32, 4), {"config": SimpleNamespace(num_attention_heads=4)}),
    ],
)
def test_a_table_with_a_number_for_each_head_is_one_of_attention_biases(name, table, attributes):
    model = of_class("Attention", **{name: table})
    vars(model).update(attributes)
    [entry] = wn.assign_norms(model)
    assert entry.norm == wn.Sign()
    assert entry.reason == "nn.Embedding, a number for each head"


def test_a_table_with_a_vector_for_each_distance_is_an_embedding():
    model = of_class("Encoder", rel_embeddings=nn.Embedding(32, 8))  # of DeBERTa
    model.num_heads = 4
    assert norms(model) == {"rel_embeddings.weight": wn.ColNorm(0, max_inflation=16)}


class LoRA(nn.Module):
    """As peft makes it: the frozen layer, and a dictionary for each of the factors, B at zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)


class Saved(nn.Module):
    """As peft wraps a layer that is trained as a whole."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(layer.in_features, layer.out_features)})


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(
        nn.ModuleDict({"c_attn": LoRA(nn.Linear(4, 12)), "up_proj": LoRA(nn.Linear(4, 6))}) for _ in range(2)
    )
    model.lm_head = Saved(nn.Linear(4, 9))
    return model


def test_adapters_are_printed_as_what_they_are_beside_the_frozen_layers():
    rows = [" ".join(line.split()) for line in str(wn.assign_norms(adapted(), "language")).splitlines()]
    spectral = wn.Spectral().label
    assert rows[:11] == [
        f"blocks.{{0,1}}.c_attn.lora_A.default.weight 2 x (2, 4) {spectral} LoRA's A",
        "blocks.{0,1}.c_attn.lora_B.default.weight 2 x (12, 2) Split(3) LoRA's B",
        f"blocks.{{0,1}}.up_proj.lora_A.default.weight 2 x (2, 4) {spectral} LoRA's A",
        f"blocks.{{0,1}}.up_proj.lora_B.default.weight 2 x (6, 2) {spectral} LoRA's B",
        "lm_head.modules_to_save.default.weight (9, 4) Sign(normalized) last nn.Linear",
        "lm_head.modules_to_save.default.bias (9,) BiasRMS bias",
        "blocks.{0,1}.c_attn.base_layer.weight 2 x frozen requires_grad is False",
        "blocks.{0,1}.c_attn.base_layer.bias 2 x frozen requires_grad is False",
        "blocks.{0,1}.up_proj.base_layer.weight 2 x frozen requires_grad is False",
        "blocks.{0,1}.up_proj.base_layer.bias 2 x frozen requires_grad is False",
        "lm_head.original_module.weight frozen requires_grad is False",
    ]


def test_adapters_are_matrices_under_every_recipe_and_a_layer_below_is_known_by_its_own_name():
    for recipe in ("modular", "image", "muon"):
        up = {name: norm for name, norm in norms(adapted(), recipe=recipe).items() if "up_proj.lora" in name}
        assert set(up.values()) == {wn.Spectral()}
    model = adapted().requires_grad_(True)
    assert norms(model)["blocks.0.c_attn.base_layer.weight"] == Split(3)


def test_the_b_of_a_layer_that_is_packed_in_4_bits_is_one_matrix():
    model = adapted()
    layer = model.blocks[0]["c_attn"]
    layer.num_heads, layer.num_key_value_heads = 2, 1
    assert norms(model)["blocks.0.c_attn.lora_B.default.weight"] == Split((6, 3, 3))
    layer.base_layer.weight = nn.Parameter(torch.zeros(24, 1, dtype=torch.uint8), requires_grad=False)
    assert norms(model)["blocks.0.c_attn.lora_B.default.weight"] == wn.Spectral()


@pytest.mark.parametrize("width", [32, 128])
def test_the_entries_of_adapters_move_as_the_width_asks(width):
    """By 1 / width in A and by as much at any width in B (Hayou et al., LoRA+, 2024)."""
    layer = LoRA(nn.Linear(width, width), 4)
    for name, norm in norms(layer).items():
        shape = layer.get_parameter(name).shape
        step = norm.with_settings(method="svd").dualize(torch.randn(shape))
        expected = 4**0.5 / width if "lora_A" in name else 4**-0.5
        assert float(step.square().mean().sqrt()) == pytest.approx(expected, rel=1e-4)  # float32


class Loud(nn.Module):
    """A module that warns of, logs, or fails at every attribute that it does not have, as public libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        if name in ("num_attention_heads", "num_heads", "n_head", "hidden_size", "config"):
            warnings.warn(f"{name} is deprecated", FutureWarning, stacklevel=2)
            logging.getLogger("foreign").warning("%s is deprecated", name)
            raise RuntimeError(f"{name} is gone")
        return super().__getattr__(name)

    @property
    def heads(self) -> int:
        raise RuntimeError("called")


class LoudConfig:
    """A config with a deprecated name, and with the attribute map of `transformers`."""

    attribute_map = {"num_attention_heads": "encoder_attention_heads"}  # noqa: RUF012 (as transformers has it)

    def __init__(self) -> None:
        self.encoder_attention_heads = 2

    def __getattribute__(self, name: str) -> Any:
        if name == "num_attention_heads":
            warnings.warn("use encoder_attention_heads", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, name)

    @property
    def n_head(self) -> int:
        logging.getLogger("foreign").warning("n_head is deprecated")
        return 2


@pytest.fixture
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not caplog.records


@pytest.mark.usefixtures("silence")
def test_reading_modules_and_configs_runs_none_of_their_code():
    assert norms(Loud(), per_head=True)["q_proj.weight"] == wn.Spectral()
    known = Loud()
    known.config = LoudConfig()
    assert norms(known, per_head=True)["q_proj.weight"] == wn.norms.PerHead(2, wn.Spectral(units="l2"))


@dataclass(slots=True)
class Slots:
    n_head: int


class Fields(NamedTuple):
    n_head: int


@pytest.mark.parametrize("config", [Slots(2), Fields(2), {"n_head": 2}, SimpleNamespace(n_head=2), LoudConfig()])
def test_numbers_are_read_from_every_kind_of_config(config):
    module = nn.Module()
    module.config = config
    assert attention_heads([nn.Linear(2, 2), module]) == (2, 2, None)
    assert number(("n_head", "num_attention_heads"), [module]) == 2


def test_a_slot_that_is_not_set_holds_nothing():
    assert stored(object.__new__(Slots), "n_head") is None
