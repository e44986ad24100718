"""The layout of weights that hold several matrices, from their names, sizes and numbers of heads.

If the layout is uncertain, `Layout.doubt` says so in words, with the override that decides it.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from wellnormed.routing.attributes import Heads, attention_heads, norm_width, number

_QUERY = re.compile(
    r"(w_?|to_|add_|linear_)?(q|query)(_b)?(_proj(ection)?|_lin(ear)?|_attn|_global|_proj_weight)?|wq_b"
)
_KEY_OR_VALUE = re.compile(
    r"(w_?|to_|add_|linear_)?(k|v|key|value)(_proj(ection)?|_lin(ear)?|_attn|_global|_proj_weight)?"
)
_QKV = re.compile(r"c_attn|((?!linear_)\w+_|w)?qkv(_proj|_linear)?|(to_)?q_?k_?v(_proj)?|w_pack|att_proj")
_KV = re.compile(r"(to_|w_?)?kv(_proj)?")
_GATE_UP = re.compile(r"gate_(and_)?up(_proj)?|w12|w13")
_GATED, _HIDDEN = re.compile(r"\w*glu"), re.compile(r"(linear_)?fc_?1|dense_h_to_4h|ff_proj|w_?in|wi|proj_in|c_fc")
_DOWN = re.compile(r"down(_proj)?|w2|w_?out|out_proj|fc2")
_UP = re.compile(r"up(_proj)?|gate(_proj)?|w1|w3|w_?in|fc1")
_LATENT_A, _LATENT_B = re.compile(r"kv_a_proj_with_mqa|wkv_a"), re.compile(r"kv_b_proj|wkv_b")  # DeepSeek, torchtitan
_HEAD_BY_HEAD = re.compile(r"query_key_value|linear_qkv")  # a head's query, key and value, then those of the next
_EITHER = "wqkv"  # of InternLM2 by groups of heads, of others queries first: heads apart are right for both
_OF_CLASSES_HEAD_BY_HEAD = {"gptbigcodeattention", "codegenattention", "disentangledselfattention", "fusedqkvlinear"}
_PERHAPS_FUSED = re.compile(r"(^|_)w?q?kv(_|$)")
_STATE_SPACE = re.compile(r"mamba|gateddeltanet|shortconv")
_OF_STATE_SPACE = re.compile(r"in_proj(_qkvz?|_ba)?|x_proj")
_MODULATION = re.compile(r"ada_?ln\w*|ada_?lin|(\w+_)?mod(ulation)?|t_block|time_proj|(\w+_)?mod_proj|proj_out_1")
_ADAPTIVE, _IN_ADAPTIVE = re.compile(r"ada\w*norm|normzero|^modulation"), re.compile(r"lin(ear)?(_2)?|proj|fc")

_EXPERTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")
_WIDTH = ("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "dim")


class Layout(NamedTuple):
    """The layout of several matrices in one weight; the fields are those of `roles.Role`."""

    parts: int | tuple[int, ...] = 1
    heads: int = 1
    by_head: bool = False
    transposed: bool = False
    what: str = "fused"
    doubt: str = ""


def projection(leaf: str, d_out: int, d_in: int, around: Sequence[nn.Module]) -> Layout:
    """The parts of a projection named `leaf` inside the modules `around` it, the nearest first."""
    leaf, kind = leaf.lower(), type(around[1]).__name__.lower() if around[1:] else ""
    if _OF_STATE_SPACE.fullmatch(leaf) and _STATE_SPACE.search(kind):
        return Layout(doubt="may hold several matrices of a state-space layer; Split((...)), one size for each")
    if _MODULATION.fullmatch(leaf) or (_ADAPTIVE.search(kind) and _IN_ADAPTIVE.fullmatch(leaf)):
        return _modulation(d_out, d_in, around, certain="ada" in leaf + kind)
    if (_GATE_UP.fullmatch(leaf) and d_out % 2 == 0) or (
        leaf == "wi" and d_out == 2 * (number(("intermediate_size",), around) or 0)
    ):
        return Layout(2)  # `Wi` is ModernBERT's gated layer; T5 has a plain one of this name
    layout = _of_attention(leaf, kind, d_out, d_in, around)
    return _gate_and_value(leaf, kind, d_out, d_in, around) if layout == Layout() else layout


def _gate_and_value(leaf: str, kind: str, d_out: int, d_in: int, around: Sequence[nn.Module]) -> Layout:
    """Recognise a gate and a value in one weight: a later sibling reads half of its outputs, and none reads all."""
    beside = [m for module in around[1:2] for m in module.children()]
    shapes, later = _matrices(beside), _matrices(itertools.dropwhile(lambda m: m is not around[0], beside))
    read, alike = {n for _, n in shapes}, [m for m, _ in shapes].count(d_out)
    if d_out % 2 or d_out in read or alike > 1:  # two layers of one width are probably queries and keys
        return Layout()
    if (d_in, d_out // 2) in later or (_GATED.fullmatch(kind) and leaf == "proj" and len(shapes) == 1):
        return Layout(2, what="a gate and a value")
    doubtful = d_out // 2 in read and _HIDDEN.fullmatch(leaf)
    return Layout(doubt="may hold a gate and a value; Split(2)" if doubtful else "")


def _matrices(modules: Iterable[nn.Module]) -> list[tuple[int, ...]]:
    """The shapes of the matrices of modules without submodules, in order."""
    layers = [m for m in modules if not m._modules.keys() - {"parametrizations"}]
    return [tuple(p.shape) for m in layers for p in m.parameters() if not is_lazy(p) and p.ndim == 2]


def _modulation(d_out: int, d_in: int, around: Sequence[nn.Module], certain: bool) -> Layout:
    """Shifts, scales and gates of adaptive norms (DiT, section 3.2), each as wide as the norm layer that they serve."""
    for width in (norm_width(around[1:4]), d_in):  # norm layers outside of its block serve other layers
        if width and d_out % width == 0:
            return Layout(d_out // width, what="shifts, scales, gates")
    doubt = "may hold shifts, scales and gates of unknown width; Split(parts), with their number"
    return Layout(doubt=doubt if certain else "")


def _of_attention(leaf: str, kind: str, d_out: int, d_in: int, around: Sequence[nn.Module]) -> Layout:
    known, rank = attention_heads(around), number(("kv_lora_rank",), around)
    if rank and _LATENT_A.fullmatch(leaf):
        return Layout((rank, d_out - rank))  # the latent vector of keys and values, and the rotated keys
    if rank and known and _LATENT_B.fullmatch(leaf):
        key, value = number(("qk_nope_head_dim",), around), number(("v_head_dim",), around)
        if key and value and known.count * (key + value) == d_out:
            return Layout(2 if key == value else (key, value), known.count, by_head=True)
    if known and _QUERY.fullmatch(leaf):
        gated = known.size and d_out == 2 * known.count * known.size  # a query and its gate, as in Qwen3-Next
        return Layout(heads=_dividing(2 * known.count if gated else known.count, d_out))
    if known and _KEY_OR_VALUE.fullmatch(leaf):
        by_size = d_out // known.size if known.size and d_out % known.size == 0 else 0
        fits = 0 < by_size <= known.of_keys and known.count % by_size == 0
        return Layout(heads=_dividing(by_size if fits else known.of_keys, d_out))
    together = _QKV.fullmatch(leaf) or (known and leaf == "in_proj" and d_out == 3 * d_in)
    head_by_head = (
        _HEAD_BY_HEAD.fullmatch(leaf)
        or (kind in _OF_CLASSES_HEAD_BY_HEAD and (together or d_out == 3 * d_in))
        or (leaf == _EITHER and known and known.of_keys != known.count)
    )
    if together or head_by_head:
        return _queries_keys_values(d_out, d_in, known, bool(head_by_head))
    if _KV.fullmatch(leaf) and d_out % 2 == 0:
        return Layout(2, _dividing(2 * known.of_keys, d_out) if known else 1)
    if _PERHAPS_FUSED.search(leaf):
        return Layout(doubt="may hold several matrices, such as keys and values; Split((...)), one size for each")
    return Layout()


def _queries_keys_values(d_out: int, d_in: int, known: Heads | None, head_by_head: bool) -> Layout:
    if known:
        queries, keys = known.count, known.of_keys
        size = known.size or d_in // queries
        by_size = d_out // size if size and d_out % size == 0 else 0
        if by_size == 2 * keys and not head_by_head:
            return Layout(2, by_size)  # cross-attention of GPT-2: keys and values
        total = queries + 2 * keys
        if by_size == total or (not known.size and d_out % total == 0):
            size = d_out // total
            together = 3 if keys == queries else (queries * size, keys * size, keys * size)
            return Layout(1 if head_by_head else together, total, head_by_head)
    if not head_by_head and d_out in (2 * d_in, 3 * d_in) and not (known and known.of_keys != known.count):
        return Layout(d_out // d_in)
    return Layout(doubt="may hold queries, keys and values of unknown sizes; Split((queries, keys, values))")


def _dividing(count: int, d_out: int) -> int:
    return count if d_out % count == 0 else 1


def experts(leaf: str, shape: Sequence[int], around: Sequence[nn.Module]) -> Layout | None:
    """The layout of the experts' matrices in a weight `(experts, m, n)`; None if the weight holds no experts."""
    kind = type(around[0]).__name__.lower()
    if number(_EXPERTS, around) != shape[0] and "expert" not in f"{leaf.lower()} {kind}":
        return None
    leaf, width = leaf.lower(), number(_WIDTH, around)
    fused = bool(_GATE_UP.fullmatch(leaf)) and kind != "gptossexperts"  # whose gates and values alternate
    down, up = _DOWN.fullmatch(leaf), _UP.fullmatch(leaf) or _GATE_UP.fullmatch(leaf)
    if width not in shape[1:] or shape[1] == shape[2] or not (down or up):
        outputs_first = "Experts() if the outputs come first, Experts(Spectral(input_axis=0)) if the inputs do"
        return Layout(2 if fused else 1, doubt=f"may have its outputs or its inputs first; {outputs_first}")
    return Layout(2 if fused else 1, transposed=(shape[1] == width) == bool(up))
