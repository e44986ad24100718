"""The promises when groups, rates, memory and gradients change at unusual moments."""

import copy

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.constraints import Orthogonal, Stiefel, WeightDecay

LATE = [wn.HardCap(1.0), wn.HardCap(1.0, every=8), wn.SoftCap(1.0), WeightDecay(1.0)]


def norm(weight):
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2)) * (weight.shape[1] / weight.shape[0]) ** 0.5


def outward(weight):
    """A gradient whose step raises every singular value."""
    u, _, vh = torch.linalg.svd(weight.detach(), full_matrices=False)
    return -(u @ vh)


def held(constraint, lr=0.001, size=32):
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    optimizer = wn.Scion(layer, lr=lr)
    return layer.weight, optimizer, wn.constrain(optimizer, {"*": constraint})


@pytest.mark.parametrize("constraint", LATE, ids=repr)
def test_a_rate_raised_by_the_closure_or_by_a_later_hook(constraint):
    """Both come after the step's bound was read."""
    weight, optimizer, _ = held(constraint)
    raised = []

    def closure():
        weight.grad = outward(weight)
        if raised:
            optimizer.param_groups[0]["lr"] = 0.5
        return 0.0

    for step in range(8):
        if step == 3:
            raised.append(True)
        optimizer.param_groups[0]["lr"] = 0.001
        optimizer.step(closure)
        assert norm(weight) <= 1

    weight, optimizer, _ = held(constraint)
    optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(lr=0.5))
    for _ in range(4):
        optimizer.param_groups[0]["lr"] = 0.001
        weight.grad = outward(weight)
        optimizer.step()
        assert norm(weight) <= 1


@pytest.mark.parametrize("constraint", LATE, ids=repr)
def test_groups_that_are_replaced_are_those_that_count(constraint):
    weight, optimizer, _ = held(constraint)
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    assert optimizer.update_norm("weight") > 0.5
    for _ in range(4):
        weight.grad = outward(weight)
        optimizer.step()
        assert norm(weight) <= 1


def test_a_parameter_that_moves_to_a_faster_group_is_bounded_by_that():
    model = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(16, 32, bias=False)])
    slow, fast = model.parameters()
    optimizer = wn.Scion([{"params": [slow], "lr": 0.001}, {"params": [fast], "lr": 0.5}], norms=model)
    wn.constrain(optimizer, {"*": wn.HardCap(1.0, every=8)})
    for key in ("params", "param_names"):
        optimizer.param_groups[1][key].append(optimizer.param_groups[0][key].pop())
    for _ in range(6):
        slow.grad, fast.grad = outward(slow), outward(fast)
        optimizer.step()
        assert norm(slow) <= 1


class RandomSearch(torch.optim.Optimizer):
    """Moves weights without ever making a gradient."""

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(group["lr"] * torch.ones_like(parameter))


def test_what_moves_without_a_gradient_is_held():
    layer = nn.Linear(16, 16, bias=False)
    optimizer = RandomSearch(layer.parameters(), lr=0.1)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, norms=wn.assign_norms(layer))
    for _ in range(10):
        optimizer.step()
        assert constraints.proved_ratios()["weight"] <= 1

    weight, optimizer, _ = held(wn.HardCap(1.0), lr=0.1)
    optimizer.register_step_post_hook(lambda own, *_: own.zero_grad())  # runs after that of the constraints
    for hook in (optimizer._optimizer_step_post_hooks,):
        hook.move_to_end(next(reversed(hook)), last=False)  # and here before it

    def closure():
        weight.grad = outward(weight)
        return 0.0

    for _ in range(10):
        optimizer.step(closure)
        assert norm(weight) <= 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("constraint", [*LATE, Orthogonal(1.0)], ids=repr)
def test_a_copy_still_knows_that_a_weight_was_changed(constraint, copied):
    weight, optimizer, _ = held(constraint)
    weight.grad = outward(weight)
    optimizer.step()
    with torch.no_grad():
        weight.mul_(10)
    optimizer, weight = copied((optimizer, weight)) if copied is copy.deepcopy else (copied(optimizer), weight)
    for _ in range(3):
        weight.grad = outward(weight)
        optimizer.step()
        assert norm(weight) <= 1


@pytest.mark.parametrize("constraint", [*LATE, Orthogonal(1.0)], ids=repr)
def test_a_state_loaded_beside_weights_that_break_its_promise_brings_them_back(constraint):
    weight, optimizer, constraints = held(constraint)
    with torch.no_grad():
        weight.mul_(8 / norm(weight))
    constraints.load_state_dict(constraints.state_dict())
    assert norm(weight) <= 1
    for _ in range(3):
        weight.grad = outward(weight)
        optimizer.step()
        assert norm(weight) <= 1


def test_a_reach_below_the_norm_is_not_believed():
    weight, optimizer, constraints = held(wn.HardCap(1.0, every=2), lr=0.1)
    constraints.load_state_dict({"weight.reach": torch.tensor(-5.0)})
    for _ in range(20):
        weight.grad = outward(weight)
        optimizer.step()
        assert norm(weight) <= 1
    for wrong in (None, [], {"weight.reach": 1.0}, {3: torch.ones(())}):
        with pytest.raises(ValueError, match="must be a dictionary of names and tensors"):
            constraints.load_state_dict(wrong)


def test_parameters_on_one_memory_are_refused():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    with pytest.raises(ValueError, match=r"'a.weight' and 'b.weight' share memory"):
        wn.constrain(wn.Scion(model, lr=0.1), {"a": wn.HardCap(1.0)})


@pytest.mark.parametrize(("constraint", "lr"), [(Orthogonal(1.0), 1e-4), (Stiefel(1.0), 0.9), (wn.SoftCap(1.0), 0.3)])
def test_a_step_inside_autocast_has_its_own_precision(constraint, lr):
    weight, optimizer, _ = held(constraint, lr, size=64)
    for step in range(10):
        weight.grad = torch.randn_like(weight) if step % 2 else outward(weight)
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step()
        assert norm(weight) <= 1


def test_weights_that_a_step_ruined_are_named():
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, norms=wn.assign_norms(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"after the step 1\.weight hold NaN or infinity.*last good weights"):
        optimizer.step()


def test_a_parameter_that_was_replaced_is_missed():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, norms=wn.assign_norms(layer))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match="no longer has the constrained parameter weight"):
        optimizer.step()
    optimizer = wn.Scion(layer, lr=0.1)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match="'weight' is not the one that this optimizer was made with"):
        optimizer.step()


def test_a_decay_that_rounding_loses_is_warned_of():
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = wn.Scion(layer, lr=1e-3, unconstrained=False)
    with pytest.warns(
        UserWarning, match="takes 0.001 of a weight in a step, which is less than half a rounding of bfloat16"
    ) as told:
        optimizer.step()
    assert told[0].filename == __file__
    optimizer.step()  # once is enough


def test_a_copy_doubts_its_weights_when_an_optimizer_state_is_loaded():
    """Values written past torch's count, as a sharded checkpoint writes them, are proved again after the load."""
    _, optimizer, _ = held(wn.HardCap(1.0, every=8), lr=0.01)
    copied = copy.deepcopy(optimizer)
    (weight,) = copied.param_groups[0]["params"]
    weight.grad = outward(weight)
    copied.step()
    weight.data.mul_(10)
    copied.load_state_dict(copied.state_dict())
    weight.grad = outward(weight)
    copied.step()
    assert norm(weight) <= 1


def test_parameters_that_overlap_are_refused_and_those_between_each_other_s_rows_are_not():
    flat = torch.randn(24)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))
    optimizer = wn.Scion(model, lr=0.1, overrides={"*": wn.Spectral()})
    with pytest.raises(ValueError, match=r"'a' and 'b' share memory"):
        wn.constrain(optimizer, {"*": wn.HardCap(1.0)})
    whole = torch.randn(4, 8)
    model.a, model.b = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    constraints = wn.constrain(wn.Scion(model, lr=0.1, overrides={"*": wn.Spectral()}), {"*": wn.HardCap(1.0)})
    assert max(constraints.proved_ratios().values()) <= 1


class Nested(nn.Module):
    """Its names `weight` and `module.weight` differ by what a wrapper would add."""

    def __init__(self):
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6, bias=False)


def test_names_that_differ_by_the_prefix_of_a_wrapper_are_two():
    torch.manual_seed(0)

    def begun():
        model = Nested()
        optimizer = wn.Scion(model, lr=0.1, overrides={"*": wn.Spectral()})
        return model, optimizer, wn.constrain(optimizer, {"*": wn.HardCap(1.0, every=4)})

    def train(model, optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p) + p.detach()
        optimizer.step()

    model, optimizer, constraints = begun()
    train(model, optimizer)
    other, resumed, others = begun()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch copies none of its tensors
    others.load_state_dict(constraints.state_dict())
    for _ in range(3):
        train(model, optimizer)
        train(other, resumed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    each = {"weight": wn.HardCap(1.0), "module.weight": wn.SoftCap(1.0)}
    shown = str(wn.constrain(wn.Scion(Nested(), lr=0.1, overrides={"*": wn.Spectral()}), each))
    assert [line.split()[1][:7] for line in shown.splitlines()] == ["HardCap", "SoftCap"]


def test_names_like_those_of_wrappers_are_found_in_a_compiled_model_and_back():
    model = Nested()
    each = {"weight": wn.constraints.ClippedWeightDecay(2.0, 0.5), "module.weight": wn.constraints.Hammer(1.0)}

    def begun(wrapped):
        optimizer = wn.Scion(wrapped, lr=0.1, overrides={"*": wn.Spectral()})
        for p in wrapped.parameters():
            p.grad = torch.ones_like(p)
        constraints = wn.constrain(optimizer, each)
        optimizer.step()
        return optimizer, constraints

    plain, compiled = begun(model), begun(torch.compile(Nested(), backend="eager"))
    for own, other in ((plain, compiled), (compiled, plain)):
        for here, there in zip(own, other, strict=True):
            here.load_state_dict(copy.deepcopy(there.state_dict()))


def test_a_weight_of_zeros_has_ratios_below_a_clipped_decay():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(layer.weight)
    constraints = wn.constrain(wn.Scion(layer, lr=0.1), {"weight": wn.constraints.ClippedWeightDecay(1.0, 0.5)})
    assert constraints.proved_ratios() == constraints.norm_ratios() == {"weight": 0.0}


def test_a_constraint_of_one_s_own_that_cannot_share_a_batch_is_refused():
    class Ball(wn.HardCap):
        __hash__ = None

    with pytest.raises(ValueError, match="cannot be hashed, and what is equal shares a batch"):
        wn.constrain(wn.Scion(nn.Linear(4, 4, bias=False), lr=0.1), {"weight": Ball(1.0)})
