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
from tests.routing.modules import made
from wellnormed.norms import Split
from wellnormed.routing.attributes import attention_heads, number, stored


def norms(model: nn.Module, **settings: Any) -> dict[str, wn.norms.Norm | None]:
    return {a.name: a.norm for a in wn.assign_norms(model, **settings)}


def plain_norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


def modulation(parts: int) -> nn.Module:
    return nn.Sequential(nn.SiLU(), nn.Linear(8, parts * 8))


def dit() -> nn.Module:
    """The first DiT: six outputs of one linear map shift, scale and gate attention and MLP of a block."""
    attention = [made(num_heads=2, qkv=nn.Linear(8, 24), q_norm=nn.LayerNorm(4)) for _ in range(2)]
    blocks = (
        made("DiTBlock", norm1=plain_norm(8), norm2=plain_norm(8), attn=each, adaLN_modulation=modulation(6))
        for each in attention
    )
    last = made("FinalLayer", norm_final=plain_norm(8), linear=nn.Linear(8, 5), adaLN_modulation=modulation(2))
    return made("DiT", blocks=nn.ModuleList(blocks), final_layer=last)


def test_a_dit_has_six_parts_in_a_block_and_two_at_the_end():
    text = str(wn.assign_norms(dit()))
    assert "blocks.{0,1}.adaLN_modulation.1.weight  2 x (48, 8)  Split(6)" in text
    assert " ".join(text.split()).count("nn.Linear, shifts, scales, gates") == 2  # the blocks, and the end
    found = norms(dit(), recipe="language")
    assert found["final_layer.adaLN_modulation.1.weight"] == Split(2)
    assert found["final_layer.linear.weight"] == wn.Spectral()
    assert norms(dit(), recipe="muon")["blocks.0.adaLN_modulation.1.weight"] == Split(6)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        # of diffusers: DiT and SD3; SD3.5; Flux's single blocks; PixArt; the last norm; CogVideoX, whose conditioning
        # is narrower than its stream; Lumina 2, with an RMS norm that only has a weight
        (made("AdaLayerNormZero", linear=nn.Linear(8, 48), norm=plain_norm(8)), 6),
        (made("SD35AdaLayerNormZeroX", linear=nn.Linear(8, 72), norm=plain_norm(8)), 9),
        (made("AdaLayerNormZeroSingle", linear=nn.Linear(8, 24), norm=plain_norm(8)), 3),
        (made("AdaLayerNormSingle", linear=nn.Linear(8, 48)), 6),
        (made("AdaLayerNormContinuous", linear=nn.Linear(8, 16), norm=plain_norm(8)), 2),
        (made("CogVideoXLayerNormZero", linear=nn.Linear(4, 48), norm=nn.LayerNorm(8)), 6),
        (made("LuminaRMSNormZero", linear=nn.Linear(4, 32), norm=nn.RMSNorm(8)), 4),
        (made("Modulation", lin=nn.Linear(8, 24)), 3),  # of Flux as published
        (made("Block", img_mod=nn.Sequential(nn.SiLU(), nn.Linear(8, 48)), img_norm1=plain_norm(8)), 6),  # Qwen
        (made("Block", ada_lin=nn.Sequential(nn.SiLU(), nn.Linear(8, 48))), 6),  # VAR
        (made("DiTTransformer2DModel", proj_out_1=nn.Linear(8, 16), norm_out=plain_norm(8)), 2),
        (made("Block", adaLN_modulation=nn.Linear(16, 48), norm=plain_norm(8)), 6),
        (made("Block", adaLN_modulation=nn.Linear(8, 8), norm=plain_norm(8)), 1),
    ],
)
def test_adaptive_norms_are_split_by_the_width_of_the_norm_that_they_serve(model, parts):
    model.append_head = nn.Linear(2, 2)
    found = next(a for a in wn.assign_norms(model) if a.parameter.ndim == 2)
    assert found.norm == (Split(parts) if parts > 1 else wn.Spectral())
    assert found.reason == ("nn.Linear, shifts, scales, gates" if parts > 1 else "nn.Linear")


def test_an_adaptive_norm_of_unknown_width_is_warned_about_and_other_modulations_are_not():
    model = made("AdaGroupNorm", linear=nn.Linear(16, 24))
    with pytest.warns(UserWarning, match=r"linear.weight may hold shifts, scales and gates .*with Split\(parts\)"):
        assert norms(model)["linear.weight"] == wn.Spectral()
    focal = made("FocalNetModulation", projection_in=nn.Linear(8, 19), projection_out=nn.Linear(8, 8))
    assert set(norms(focal).values()) == {wn.Spectral(), wn.norms.BiasRMS()}


def test_the_modulation_of_a_kernel_is_not_one_of_a_norm_layer_elsewhere():
    """As StyleGAN 2 has it: a scale for every input channel, in a model whose head has a narrower norm layer."""
    kernel = made("ModulatedConv2d", modulation=nn.Linear(16, 16), conv=nn.Conv2d(16, 16, 3))
    blocks = nn.ModuleList([made("Block", body=nn.Sequential(made("Styled", inner=kernel)))])
    model = made("Generator", blocks=blocks, norm=nn.LayerNorm(4))
    assert norms(model)["blocks.0.body.0.inner.modulation.weight"] == wn.Spectral()


@pytest.mark.parametrize("shape", [(6, 8), (1, 6, 8)])
@pytest.mark.parametrize("name", ["scale_shift_table", "modulation"])
def test_tables_of_shifts_and_scales_are_vectors(name, shape):
    assert norms(made(**{name: torch.zeros(shape)})) == {name: wn.norms.BiasRMS(len(shape))}


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
    [entry] = wn.assign_norms(made("Attention", **{name: table}, **attributes))
    assert entry.norm == wn.Sign()
    assert entry.reason == "nn.Embedding, a number for each head"


def test_a_table_with_a_vector_for_each_distance_is_an_embedding():
    model = made("Encoder", rel_embeddings=nn.Embedding(32, 8), num_heads=4)  # of DeBERTa
    assert norms(model) == {"rel_embeddings.weight": wn.ColNorm(0, max_inflation=16)}


def lora(d_in: int, d_out: int, rank: int = 2) -> nn.Module:
    """As peft makes it: the frozen layer, and a dictionary for each of the factors, B at zero."""
    a, b = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
    nn.init.zeros_(b.weight)
    factors = {"lora_A": nn.ModuleDict({"default": a}), "lora_B": nn.ModuleDict({"default": b})}
    return made("LoRA", base_layer=nn.Linear(d_in, d_out).requires_grad_(False), **factors)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.ModuleDict({"c_attn": lora(4, 12), "up_proj": lora(4, 6)}) for _ in range(2))
    # as peft wraps a layer that is trained as a whole
    saved = {"modules_to_save": nn.ModuleDict({"default": nn.Linear(4, 9)})}
    head = made("Saved", original_module=nn.Linear(4, 9).requires_grad_(False), **saved)
    return made(blocks=nn.ModuleList(blocks), lm_head=head)


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
    layer = lora(width, width, 4)
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
    module = made(config=config)
    assert attention_heads([nn.Linear(2, 2), module]) == (2, 2, None)
    assert number(("n_head", "num_attention_heads"), [module]) == 2


def test_a_slot_that_is_not_set_holds_nothing():
    assert stored(object.__new__(Slots), "n_head") is None
