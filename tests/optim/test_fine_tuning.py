"""Adapters beside frozen weights: LoRA pairs train, and quantised weights stay or are refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import wellnormed as wn


class Codes(Tensor):
    """Like the classes of torchao: it can be copied and multiplied with, and does no other arithmetic."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, requires_grad=False)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(arguments[0].codes, arguments[0].scale)
        if function in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            arguments = tree_map(lambda x: x.codes * x.scale if isinstance(x, Codes) else x, arguments)
            return function(*arguments, **(keywords or {}))
        raise NotImplementedError(f"{cls.__name__} dispatch: {function}")


def quantized(layer):
    scale = layer.weight.detach().abs().max() / 127
    layer.weight = nn.Parameter(Codes((layer.weight.detach() / scale).round(), scale), requires_grad=False)
    return layer


class Adapted(nn.Module):
    """A layer with a low-rank adapter, with peft's names."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def train(model, optimizer, steps=30):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_an_adapter_beside_quantised_weights_trains_and_they_stay():
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(quantized(nn.Linear(8, 16))), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    codes = model[0].base_layer.weight.codes.clone()
    losses = train(model, wn.Scion(model, lr=0.02))
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(model[0].base_layer.weight.codes, codes)


def test_a_quantised_weight_that_is_to_move_is_refused_by_name():
    model = nn.Sequential(nn.Linear(8, 8), quantized(nn.Linear(8, 8)))
    model[1].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'1\.weight' holds quantised codes \(Codes\).*train an adapter"):
        wn.Scion(model, lr=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'1\.weight' holds quantised codes"):
        wn.constrain(optimizer, {"1.weight": wn.HardCap(1.0)}, wn.assign_norms(model))


@pytest.mark.filterwarnings("default")  # the libraries' own warnings are not ours to fix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_s_adapters_train_beside_a_frozen_llama(dtype):
    transformers = pytest.importorskip("transformers", reason="needs the extra `integrations`")
    peft = pytest.importorskip("peft", reason="needs the extra `integrations`")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).to(dtype)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)  # adapters of the base's dtype
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = wn.Scion(model, lr=0.05)
    constraints = wn.constrain(optimizer, {"*.lora_A.default": wn.HardCap(2.0), "*.lora_B.default": wn.HardCap(1.0)})
    assert {a.reason for a in optimizer.assignment} == {"LoRA's A", "LoRA's B"}
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert max(constraints.proved_ratios().values()) <= 1
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)
