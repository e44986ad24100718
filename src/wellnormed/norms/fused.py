"""Several matrices in one weight: fused projections and experts, by their names, their sizes and the numbers of heads.

The numbers are read from the attributes of the modules around a weight, or of their `config`, the nearest first. What
cannot be told for certain is said in words, with the override that decides it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

_QKV = re.compile(r"c_attn|(to_|in_proj_|attn_|w_?)?qkv(_proj)?|q_?k_?v_proj")
_KV = re.compile(r"(to_|w_?)?kv(_proj)?")
_GATE_UP = re.compile(r"gate_up(_proj)?|w12|w13")
_DOWN = re.compile(r"down(_proj)?|w2|w_?out|out_proj|fc2")
_UP = re.compile(r"up(_proj)?|gate(_proj)?|w1|w3|w_?in|fc1")
_PERHAPS_FUSED = re.compile(r"query_key_value|(^|_)w?q?kv(_|$)")
_HEAD_BY_HEAD = {"gptbigcodeattention", "codegenattention", "disentangledselfattention"}  # classes of transformers
_GROUP_BY_GROUP = {"fusedqkvlinear"}  # torchtitan: queries of some heads, their key, their value
_STATE_SPACE, _OF_STATE_SPACE = re.compile(r"mamba|gateddeltanet|shortconv"), re.compile(r"in_proj(_qkvz|_ba)?|x_proj")

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "kv_heads")
_HEAD_SIZE = ("head_dim", "head_size", "attention_head_size", "d_head")
_EXPERTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")
_WIDTH = ("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "dim")


class Layout(NamedTuple):
    """How several matrices lie in one; the fields mean what they mean in `roles.Role`."""

    parts: int | tuple[int, ...] = 1
    transposed: bool = False
    doubt: str = ""


def projection(leaf: str, d_out: int, d_in: int, around: Sequence[nn.Module]) -> Layout:
    """The parts of a projection named `leaf` inside the modules `around` it, the nearest first."""
    leaf = leaf.lower()
    heads, kv_heads = _number(_HEADS, around), _number(_KV_HEADS, around)
    size = _number(_HEAD_SIZE, around) or (d_in // heads if heads else 0)
    kind = type(around[1]).__name__.lower() if around[1:] else ""
    head_by_head = kind in _GROUP_BY_GROUP or (d_out == 3 * d_in and kind in _HEAD_BY_HEAD)
    if _QKV.fullmatch(leaf) and not head_by_head:
        if heads and kv_heads and kv_heads != heads and size * (heads + 2 * kv_heads) == d_out:
            return Layout((heads * size, kv_heads * size, kv_heads * size))
        if d_out in (3 * d_in, 3 * (heads or 0) * size) and kv_heads in (None, heads):
            return Layout(3)
        if d_out == 2 * d_in:
            return Layout(2)  # GPT-2's cross-attention: keys and values
        return Layout(doubt="may hold queries, keys and values of unknown sizes; Split((queries, keys, values))")
    if (_KV.fullmatch(leaf) or _GATE_UP.fullmatch(leaf)) and d_out % 2 == 0:
        return Layout(2)
    if leaf == "wi" and d_out == 2 * (_number(("intermediate_size",), around) or 0):
        return Layout(2)  # ModernBERT's gated layer; T5 has a plain one of this name
    if (rank := _number(("kv_lora_rank",), around)) and leaf == "kv_a_proj_with_mqa":
        return Layout((rank, d_out - rank))  # DeepSeek's latent attention
    if _PERHAPS_FUSED.search(leaf) or head_by_head:
        size = d_out // heads if rank and heads else size
        parts = f"Split({d_out // size})" if size and d_out % size == 0 else "Split((...))"
        return Layout(
            doubt="may hold the queries, keys and values of every head, one after the other; "
            f"{parts}, which takes each alone"
        )
    if _OF_STATE_SPACE.fullmatch(leaf) and _STATE_SPACE.search(kind):
        return Layout(doubt="may hold several matrices of a state-space layer; Split((...)), one size for each")
    return Layout()


def experts(leaf: str, shape: Sequence[int], around: Sequence[nn.Module]) -> Layout | None:
    """The layout of the experts' matrices in a weight `(experts, m, n)`; None if it is none."""
    kind = type(around[0]).__name__.lower()
    if _number(_EXPERTS, around) != shape[0] and "expert" not in f"{leaf.lower()} {kind}":
        return None
    leaf, width = leaf.lower(), _number(_WIDTH, around)
    fused = bool(_GATE_UP.fullmatch(leaf)) and kind != "gptossexperts"  # whose gates and values alternate
    down, up = _DOWN.fullmatch(leaf), _UP.fullmatch(leaf) or _GATE_UP.fullmatch(leaf)
    if width not in shape[1:] or shape[1] == shape[2] or not (down or up):
        outputs_first = "Experts() if the outputs come first, Experts(Spectral(input_axis=0)) if the inputs do"
        return Layout(2 if fused else 1, doubt=f"may have its outputs or its inputs first; {outputs_first}")
    return Layout(2 if fused else 1, transposed=(shape[1] == width) == bool(up))


def _number(names: Sequence[str], around: Sequence[nn.Module]) -> int | None:
    """The first of these attributes that a module around, or its `config`, has as a number."""
    holders = (holder for module in around for holder in (module, getattr(module, "config", None)))
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
