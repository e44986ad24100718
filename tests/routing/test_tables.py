"""Repeated blocks print as one row, which stands for exactly the rows that it replaces."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from tests.routing.modules import made
from wellnormed.routing.tables import grouped


def expanded(name: str) -> list[str]:
    """All names that a grouped one stands for, by reading its braces."""
    parts = []
    for part in re.split(r"\.(?![^{]*\})", name):
        if not part.startswith("{"):
            parts.append([part])
            continue
        ends = [run.split("..") for run in part[1:-1].split(",")]
        parts.append([str(i) for run in ends for i in range(int(run[0]), int(run[-1]) + 1)])
    return [".".join(name) for name in itertools.product(*parts)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["h.0.a", "h.1.a", "h.2.a", "h.10.a", "h.01.a", "h.1.e.0.w", "h.1.e.1.w", "h.0.e.1.w", "0"]
            ),
            st.sampled_from(["x", "y"]),
        ),
        unique_by=lambda row: row[0],
    )
)
def test_groups_stand_for_all_rows_and_for_no_other(rows):
    groups = grouped(rows)
    again = [(name, cell) for _, (shown, cell) in groups for name in expanded(shown)]
    assert sorted(again) == sorted(rows)
    assert [count for count, _ in groups] == [len(expanded(shown)) for _, (shown, _) in groups]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["h.0.w", "h.1.w", "h.2.w"], ["h.{0..2}.w"]),
        (["h.0.w", "h.1.w"], ["h.{0,1}.w"]),
        (["h.0.w", "g.0.w"], ["h.0.w", "g.0.w"]),
        (["h.3.w", "h.0.w", "h.1.w", "h.2.w", "h.7.w"], ["h.{0..3,7}.w"]),
        ([f"h.{i}.e.{j}.w" for i in range(3) for j in range(4)], ["h.{0..2}.e.{0..3}.w"]),
        (["h.0.e.0.w", "h.0.e.1.w", "h.1.e.1.w"], ["h.0.e.{0,1}.w", "h.1.e.1.w"]),
        (["conv1.w", "conv2.w"], ["conv1.w", "conv2.w"]),  # the numbers are part of a word
    ],
)
def test_numbers_that_are_whole_parts_of_names_are_grouped(names, shown):
    assert [name for _, (name, _) in grouped([(name, "") for name in names])] == shown


def test_an_optimizer_prints_repeated_blocks_once_with_exact_totals():
    pairs = ({"norm": nn.LayerNorm(4, bias=False), "up": nn.Linear(4, 8, bias=False)} for _ in range(12))
    model = made(embed=nn.Embedding(7, 4), blocks=nn.ModuleList(map(nn.ModuleDict, pairs)))
    model.blocks[5]["up"].requires_grad_(False)
    model.blocks[6]["up"].requires_grad_(False)
    optimizer = wn.Scion(model, lr=0.5, lr_factors={"blocks.3.up": 0.5}, overrides={"blocks.9.up": wn.Sign()})
    rows = [re.split(r"\s{2,}", line.strip()) for line in str(optimizer).splitlines()[1:]]
    assert rows == [
        ["parameter", "shape", "norm", "radius", "lr", "why"],
        ["embed.weight", "(7, 4)", "ColNorm(16)", "1", "0.5", "nn.Embedding"],
        ["blocks.{0..11}.norm.weight", "12 x (4,)", "Gain", "0.25", "0.5", "gain of a norm layer"],
        ["blocks.{0..2,4,7,8,10,11}.up.weight", "8 x (8, 4)", "Spectral", "1", "0.5", "nn.Linear"],
        ["blocks.3.up.weight", "(8, 4)", "Spectral", "1", "0.25", "nn.Linear"],
        ["blocks.9.up.weight", "(8, 4)", "Sign", "1", "0.5", "override 'blocks.9.up'"],
        ["blocks.{5,6}.up.weight", "2 x", "frozen", "requires_grad is False"],
        ["28 entries in 1 x ColNorm(16)"],
        ["48 entries in 12 x Gain"],
        ["288 entries in 9 x Spectral"],
        ["32 entries in 1 x Sign"],
        ["radii below 1, in powers of 2: if a layer at the start maps RMS 1 to RMS s,"],
        ["a bias has s, a gain s/2, a vector max(s/4, own RMS), a table max(2s, own RMS)"],
    ]  # fmt: skip
    assert "radii below" not in str(wn.Scion(wn.initialize_(nn.Linear(4, 4))))
