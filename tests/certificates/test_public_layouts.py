"""Layouts of public networks, written small: GCN and GAT as PyTorch Geometric has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn

from .adversary import drawn, random_weights

EDGES = torch.tensor([[0, 1, 1, 3, 2, 3, 4, 4, 0, 5, 2], [1, 0, 2, 3, 1, 4, 3, 0, 4, 2, 5]])
"""One of them is a loop, which the layers find by its integers."""


def scatter(x: Tensor, index: Tensor, size: int, reduce: str) -> Tensor:
    """As `torch_geometric.utils.scatter` along the first axis."""
    index = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    zeros = x.new_zeros((size, *x.shape[1:]))
    if reduce == "sum":
        return zeros.scatter_add_(0, index, x)
    return zeros.scatter_reduce_(0, index, x, reduce=f"a{reduce}", include_self=False)


def softmax(x: Tensor, index: Tensor, size: int) -> Tensor:
    """As `torch_geometric.utils.softmax`."""
    out = (x - scatter(x.detach(), index, size, "max").index_select(0, index)).exp()
    return out / (scatter(out, index, size, "sum") + 1e-16).index_select(0, index)


def with_loops(edges: Tensor, count: int) -> Tensor:
    """As `remove_self_loops` and `add_self_loops`."""
    return torch.cat([edges[:, edges[0] != edges[1]], torch.arange(count).expand(2, -1)], 1)


def with_remaining_loops(edges: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `add_remaining_self_loops`: loops keep their weights."""
    mask, weights = edges[0] != edges[1], torch.ones(count)
    weights[edges[0][~mask]] = weight[~mask]
    return with_loops(edges, count), torch.cat([weight[mask], weights])


class GCNConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        (row, col), weight = with_remaining_loops(edges, torch.ones(edges.shape[1]), len(x))
        root = scatter(weight, col, len(x), "sum").pow_(-0.5)
        root.masked_fill_(root == float("inf"), 0)
        weight = root[row] * weight * root[col]
        x = self.lin(x)
        return scatter(weight.view(-1, 1) * x.index_select(0, row), col, len(x), "sum") + self.bias


class GATConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.outputs = heads, outputs
        self.lin = nn.Linear(inputs, heads * outputs, bias=False)
        self.att_src, self.att_dst = (nn.Parameter(torch.zeros(1, heads, outputs)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = with_loops(edges, len(x))
        h = self.lin(x).view(-1, self.heads, self.outputs)
        a, b = (h * self.att_src).sum(-1), (h * self.att_dst).sum(-1)
        logits = F.leaky_relu(a.index_select(0, source) + b.index_select(0, target), 0.2)
        alpha = F.dropout(softmax(logits, target, len(x)), 0.6, self.training)
        out = scatter(alpha.unsqueeze(-1) * h.index_select(0, source), target, len(x), "sum")
        return out.view(-1, self.heads * self.outputs) + self.bias


@pytest.mark.parametrize(
    ("layout", "share"), [(lambda: GCNConv(4, 8), 0.5), (lambda: GATConv(4, 3, 2), 0.1)], ids=["GCN", "GAT"]
)
def test_a_layout_is_certified_and_verified_and_no_search_exceeds_its_bound(layout, share):
    torch.manual_seed(0)
    model, example = random_weights(layout()), (torch.randn(6, 4, generator=drawn()), EDGES)
    certificate = wn.certify(model, example)
    assert wn.verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz.exact
    found = wn.lower_bound(certificate.program, steps=20, generator=drawn()).value
    assert share * certificate.lipschitz <= found <= certificate.lipschitz
