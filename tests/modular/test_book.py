"""Sensitivities of Modular Duality and certified constants: equal at radius 1 with weights of norm 1, layer by layer.

They differ where a layer leaves the unit ball, since a sensitivity is by definition that of unit inputs.
"""

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.modular import modular_tree
from wellnormed.nn import (
    BallProjection,
    CausalAttention,
    ConvexResidual,
    HeadProjection,
    MaxMin,
    MergeHeads,
    Residual,
    Scale,
    ScaledGELU,
)
from wellnormed.routing import assign_norms


class _Attention(nn.Module):
    """One head; queries and keys pass a function that is not linear, so that no joint bound applies."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (HeadProjection(4, 1) for _ in range(3))
        self.attend, self.merge, self.idle = CausalAttention(1, scale=1.0), MergeHeads(), nn.Hardtanh(-9.0, 9.0)

    def forward(self, x):
        return self.merge(self.attend(self.idle(self.query(x)), self.idle(self.key(x)), self.idle(self.value(x))))

    def modular_tree(self, builder):
        from wellnormed.modular.combinators import attention

        return attention(*(builder.child(name) for name in ("query", "key", "value")), self.attend.scale)


OPERATIONS = {
    "linear": nn.Linear(4, 6, bias=False),
    "relu": nn.ReLU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(), "silu": nn.SiLU(), "mish": nn.Mish(),
    "gelu": nn.GELU(), "gelu by tanh": nn.GELU("tanh"), "leaky relu": nn.LeakyReLU(-1.5), "elu": nn.ELU(2.0),
    "hardswish": nn.Hardswish(), "scale": Scale(-3.0), "scaled gelu": ScaledGELU(2.0), "ball": BallProjection(2.0),
    "max min": MaxMin(),
    "residual": ConvexResidual(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()), 0.25),
    "plain residual": Residual(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())),
    "composition": nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 2, bias=False)),
    "attention": _Attention(),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_sensitivity_is_the_certified_constant(name):
    model = OPERATIONS[name].eval().double()
    for assigned in assign_norms(model):
        assigned.norm.initialize_(assigned.parameter, torch.Generator().manual_seed(0))
    sensitivity = modular_tree(model).sensitivity
    # norms are proved with a slack of 1e-9 each
    program = wn.capture(model, torch.zeros(1, 3, 4, dtype=torch.float64))
    assert wn.certify(program).rms_lipschitz == pytest.approx(sensitivity, rel=1e-7)


def test_a_factor_before_attention_counts_once_as_sensitivity_and_with_the_square_of_the_radius_when_certified():
    model = nn.Sequential(Scale(2.0), _Attention()).eval().double()
    for assigned in assign_norms(model):
        assigned.norm.initialize_(assigned.parameter, torch.Generator().manual_seed(0))
    assert modular_tree(model).sensitivity == 2 * (1 + 1 + 1)  # value, query and key on unit inputs
    certified = wn.certify(model, torch.zeros(1, 3, 4, dtype=torch.float64)).rms_lipschitz
    # of queries, keys and values with RMS 2; norms are proved with a slack of 1e-9 each
    assert certified == pytest.approx(2 * (1 + 2 * 2 * (1 + 1)), rel=1e-7)
