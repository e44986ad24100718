"""Layouts of public networks, written small: GCN and GAT as PyTorch Geometric has them, SqueezeNet and GoogLeNet."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn

from .adversary import drawn, random_weights

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 0, 5, 2], [1, 0, 2, 1, 4, 3, 0, 4, 2, 5]])


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
    return torch.cat([edges, torch.arange(count).expand(2, -1)], 1)


class GCNConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        row, col = with_loops(edges, len(x))
        root = scatter(torch.ones(len(row)), col, len(x), "sum").pow(-0.5)
        weight = root[row] * root[col]
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


class Two(nn.Module):
    """Two layers on a graph."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layers

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edges)), edges)


class Fire(nn.Module):
    """As in `torchvision.models.squeezenet`."""

    def __init__(self, inputs: int, squeezed: int, outputs: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1, self.expand3x3 = nn.Conv2d(squeezed, outputs, 1), nn.Conv2d(squeezed, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


def squeezenet() -> nn.Module:
    features = [nn.Conv2d(3, 4, 3, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(4, 2, 3)]
    classifier = [nn.Dropout(), nn.Conv2d(6, 5, 1), nn.ReLU(True), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()]
    return nn.Sequential(*features, nn.MaxPool2d(3, 2, ceil_mode=True), Fire(6, 2, 3), *classifier)


def normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=0.001), nn.ReLU(True))


class Inception(nn.Module):
    """As in `torchvision.models.googlenet`."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1 = normed(inputs, width, 1)
        self.branch2, self.branch3 = (nn.Sequential(normed(inputs, 2, 1), normed(2, width, 3)) for _ in range(2))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), normed(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


def googlenet() -> nn.Module:
    features = [normed(3, 3, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), Inception(3, 2)]
    ends = [nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 4)]
    return nn.Sequential(*features, nn.MaxPool2d(3, 2, ceil_mode=True), Inception(8, 2), *ends)


MODELS = {
    "gcn": (lambda: Two(GCNConv(4, 8), GCNConv(8, 3)), (torch.randn(6, 4, generator=drawn()), EDGES), 0.5),
    "gat": (lambda: GATConv(4, 3, 2), (torch.randn(6, 4, generator=drawn()), EDGES), 0.1),
    "gat, two": (lambda: Two(GATConv(4, 3, 2), GATConv(6, 2, 1)), (torch.randn(6, 4, generator=drawn()), EDGES), 1e-3),
    "squeezenet": (squeezenet, torch.rand(1, 3, 24, 20, generator=drawn()), 5e-3),
    "googlenet": (googlenet, torch.rand(1, 3, 28, 20, generator=drawn()), 0.01),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layout_is_certified_and_verified_and_no_search_exceeds_its_bound(name):
    layout, example, share = MODELS[name]
    torch.manual_seed(0)
    model = random_weights(layout()) if isinstance(example, tuple) else layout().eval()
    certificate = wn.certify(model, example)
    assert wn.verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz.exact
    found = wn.lower_bound(certificate.program, generator=drawn()).value
    print(name, certificate.lipschitz, found)
    assert share * certificate.lipschitz <= found <= certificate.lipschitz
