"""Published optimizers against their own code, or against their formulas."""

import copy
import math

import pytest
import torch
from torch import nn

import wellnormed as wn

EXACT = wn.Spectral(method="svd")


def block() -> nn.Module:
    """A language model in small: embedding, two hidden matrices with a norm layer, head."""
    torch.manual_seed(0)
    hidden = nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6, bias=False)
    return nn.Sequential(nn.Embedding(11, 6), *hidden, nn.Linear(6, 11))


def train(model, optimizers, steps=6):
    for seed in range(steps):
        tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(seed))
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11).backward()
        for optimizer in optimizers:
            optimizer.step()


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def torch_muon_in_float32(monkeypatch):
    """torch.optim.Muon casts to bfloat16 to iterate; without that cast both compute the same numbers."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_torch_muon_with_adamw_on_the_rest(
    torch_muon_in_float32, monkeypatch, adjust_lr_fn, nesterov, weight_decay
):
    ours, theirs = block(), block()
    muon = wn.Muon(
        wn.assign_norms(ours, recipe="muon"), lr=0.05, nesterov=nesterov, weight_decay=weight_decay,
        adjust_lr_fn=adjust_lr_fn, adamw=wn.optim.AdamWSettings(lr=0.01, betas=(0.9, 0.95), weight_decay=0.2),
    )  # fmt: skip
    hidden = [theirs[1].weight, theirs[4].weight]
    rest = [p for p in theirs.parameters() if all(p is not h for h in hidden)]
    rule = adjust_lr_fn
    if rule == "spectral_unclamped":  # of torch 2.14; here its formula, so that an older torch takes part
        monkeypatch.setattr("torch.optim._muon._adjust_lr", lambda lr, _, shape: lr * math.sqrt(shape[0] / shape[1]))
        rule = None
    peers = [
        torch.optim.Muon(hidden, lr=0.05, nesterov=nesterov, weight_decay=weight_decay, adjust_lr_fn=rule),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.2),
    ]
    train(ours, [muon])
    train(theirs, peers)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # six steps of five float32 iterations; hidden matrices are multiplied in another order
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_signum_and_normalized_sgd_take_any_parameter():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2))
    for make, norm in ((wn.optim.Signum, torch.inf), (wn.optim.NormalizedSGD, 2)):
        optimizer = make(model.parameters(), lr=0.25, momentum=0.0)
        before = parameters(model)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        optimizer.step()
        for a, b in zip(before, model.parameters(), strict=True):
            moved = torch.linalg.vector_norm(b.detach() - a, norm)
            torch.testing.assert_close(moved, torch.tensor(0.25))
    named = wn.optim.Signum(model.named_parameters(), lr=0.1)
    assert named.update_norm("0.weight") == 0.1
    assert wn.optim.Signum([{"params": [model[2].weight], "lr": 1.0}], lr=0.1).update_norm("0") == 1.0


def test_spectral_descent_is_the_sharp_operator():
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    before = model.weight.detach().clone()
    g = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.weight.grad = g.clone()
    wn.optim.SpectralDescent(wn.assign_norms(model, overrides={"weight": EXACT}), lr=0.1).step()
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    # in units where |W| = sqrt(d_in / d_out) sigma_max both the dual norm and the map carry sqrt(d_out / d_in)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * s.sum() * (3 / 4) * (u @ vh))


def test_modular_descent_is_modular_dualization():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False)
    )
    assignment = wn.assign_norms(model, overrides={"*": EXACT})
    tree = wn.modular.modular_tree(model, assignment).with_masses({"2": 3.0})
    optimizer = wn.optim.ModularDescent(model, lr=0.1, tree=tree, momentum=0.0)
    model(torch.randn(5, 4)).square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, update in tree.dualize(gradients).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.1 * update)
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    torch.testing.assert_close(tree.norm(moved), torch.tensor(0.1))


def test_steepest_descent_in_the_modular_norm_has_one_length_for_all_weights():
    """MD proposition 1 and LMO equation 6: the minimiser of <g, d> + |d|^2 / (2 lr), checked by its value.

    With each weight's own dual norm for its length, which "sharp" takes, the value is larger.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)).double()
    tree = wn.modular.modular_tree(model, wn.assign_norms(model, overrides={"*": EXACT}))
    model(torch.randn(5, 4).double()).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    lr, before = 0.3, {name: p.detach().clone() for name, p in model.named_parameters()}

    def value(moved):
        return sum((gradients[name] * moved[name]).sum() for name in moved) + tree.norm(moved) ** 2 / (2 * lr)

    optimizer = wn.optim.ModularDescent(model, lr=lr * float(tree.dual_norm(gradients)), tree=tree, momentum=0.0)
    optimizer.step()
    joint = value({name: p.detach() - before[name] for name, p in model.named_parameters()})
    torch.testing.assert_close(joint, -lr / 2 * tree.dual_norm(gradients) ** 2)
    factors = tree.lr_factors()
    own = {n: -lr * f * EXACT.dual_norm(gradients[n]) * EXACT.dualize(gradients[n]) for n, f in factors.items()}
    assert value(own) > joint
    with pytest.raises(ValueError, match=r"one for all.*optimizer\.tree\.dual_norm"):
        wn.optim.ModularDescent(model, lr=lr, tree=tree, step_rule="sharp")


def test_modular_descent_refuses_what_the_tree_does_not_hold():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    tree = wn.modular.Atom("0.weight", wn.Spectral())
    with pytest.raises(ValueError, match=r"lacks 1\.weight"):
        wn.optim.ModularDescent(model, lr=0.1, tree=tree)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable 0\.weight"):
        wn.optim.ModularDescent(model, lr=0.1, tree=wn.modular.Atom("1.weight", wn.Spectral()) @ tree)


@pytest.mark.parametrize("adjust_lr_fn", ["adamw", "spectral"])
def test_unknown_adjustments_are_refused(adjust_lr_fn):
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        wn.Muon(wn.assign_norms(block(), recipe="muon"), adjust_lr_fn=adjust_lr_fn)


def test_adjustments_reach_the_parts_of_fused_weights():
    model = nn.MultiheadAttention(8, 2)
    muon = wn.Muon(wn.assign_norms(model, recipe="muon"), adjust_lr_fn="match_rms_adamw")
    norm = next(a.norm for a in muon.assignment if a.name == "in_proj_weight")
    assert norm.inner.units == "match-rms-adamw"


def test_modular_descent_refuses_norms_that_do_not_fit():
    with pytest.raises(ValueError, match="2-dimensional"):
        wn.optim.ModularDescent(
            nn.Sequential(nn.Conv2d(2, 2, 3, bias=False)), 0.1, tree=wn.modular.Atom("0.weight", EXACT)
        )


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 16, 3), nn.Conv3d(4, 8, 3), nn.ConvTranspose2d(8, 4, 3)])
@pytest.mark.parametrize(
    ("rule", "length"),
    [
        ("match_rms_adamw", lambda ratio, longer: 0.2 * longer**0.5),
        ("original", lambda ratio, longer: max(1.0, ratio) ** 0.5),
        ("spectral_unclamped", lambda ratio, longer: ratio**0.5),
    ],
)
def test_named_rules_of_a_kernel_are_those_of_its_matrix(layer, rule, length):
    """Of `(outputs, inputs * positions)`, as libraries flatten it: all singular values of the step are the length."""
    layer = copy.deepcopy(layer)
    for p in layer.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    before = layer.weight.detach().clone()
    wn.Muon(layer, lr=1.0, momentum=0.0, nesterov=False, adjust_lr_fn=rule, coefficients="polar-express-8").step()
    step = layer.weight.detach() - before
    d_out = layer.out_channels
    d_in = step.numel() // d_out
    expected = length(d_out / d_in, max(d_out, d_in)) / max(d_out, d_in) ** 0.5
    assert float(step.square().mean().sqrt()) == pytest.approx(expected, rel=0.02)  # of the iteration


def test_kernels_keep_the_units_of_their_norm_without_a_named_rule():
    [kernel, _] = wn.Muon(nn.Conv2d(4, 4, 3)).assignment
    assert kernel.norm.mode == "positions"
