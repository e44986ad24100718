"""What is passed by mistake to a name of the root namespace is refused by a `ValueError` that names it."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import wellnormed as wn

NO_NUMBERS = ["0.1", [], nn.Linear, 1j, True, 10**400, torch.ones(2)]
NO_MAPPINGS = ["head", 1.0, [1], nn.Linear]


def network() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))


def scion(**settings) -> wn.Scion:
    return wn.Scion(network(), **{"lr": 0.1, **settings})


def constrained(value) -> object:
    return wn.constrain(scion(), value)


def complex_linear() -> nn.Module:
    return nn.Linear(2, 2, bias=False, dtype=torch.complex64)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Linear(4, 5), torch.zeros(1, 4))


def packed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 5)), {nn.Linear})


@torch.inference_mode()
def inferring() -> nn.Module:
    return network()


def broken() -> object:
    """A constraint on a weight of NaN."""
    model = network()
    nn.init.constant_(model[0].weight, math.nan)
    return wn.constrain(wn.Scion(model), {"0": wn.ColumnCap(1.0)})


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lr", lambda value: scion(lr=value)),
        ("lr", lambda value: wn.Almond(network(), lr=value)),
        ("lr", lambda value: wn.Muon([{"params": (m := network()).parameters(), "lr": value}], norms=m)),
        ("momentum", lambda value: scion(momentum=value)),
        ("radius", lambda value: scion(radius=value)),
        ("weight_decay", lambda value: scion(weight_decay=value)),
        ("kept", wn.optim.directions.NorMuon),
        ("kept", wn.optim.directions.BoundedAdam),
        ("gain", wn.optim.directions.ClippedOracle),
        ("radii", lambda value: scion(radii={"1": value})),
        ("lr_factors", lambda value: scion(lr_factors={"1": value})),
        ("radii", lambda value: wn.initialize_(network(), radii={"1": value})),
        ("cap", wn.SoftCap),
        ("cap", wn.HardCap),
        ("cap", wn.ColumnCap),
        ("radius", lambda value: wn.certify(nn.Linear(2, 2), radius=value)),
        ("radius", lambda value: wn.lower_bound(nn.Linear(2, 2), radius=value)),
        ("max_inflation", lambda value: wn.ColNorm(max_inflation=value)),
        ("output_axis", lambda value: wn.Sign(output_axis=value)),
    ],
)
def test_what_is_no_number_is_refused(name, call, value):
    with pytest.raises(ValueError, match=rf"{name}.*pass a "):
        call(value)


@pytest.mark.parametrize("value", ["yes", 1, None, nn.Linear], ids=repr)
@pytest.mark.parametrize("name", ["nesterov", "maximize", "unconstrained"])
def test_what_is_no_flag_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.*pass True or False"):
        scion(**{name: value})


@pytest.mark.parametrize("value", NO_MAPPINGS, ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("radii", lambda value: scion(radii=value)),
        ("lr_factors", lambda value: scion(lr_factors=value)),
        ("overrides", lambda value: scion(overrides=value)),
        ("overrides", lambda value: wn.assign_norms(network(), overrides=value)),
        ("radii", lambda value: wn.initialize_(network(), radii=value)),
        ("constraints", constrained),
    ],
)
def test_what_is_no_mapping_is_refused(name, call, value):
    with pytest.raises(ValueError, match=rf"{name}=.*pass a dictionary of name patterns"):
        call(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wn.certify("model"), "certify: model is of type str; pass the model itself"),
        (lambda: wn.lower_bound(nn.Linear), "lower_bound: model is the class Linear; pass the model itself"),
        (lambda: wn.certify(scripted(), torch.zeros(1, 4)), "certify: model is TorchScript; pass the torch.nn.Module"),
        (lambda: wn.Scion(nn.Sequential(scripted())), "0 is TorchScript; use the torch.nn.Module"),
        (lambda: wn.Scion(inferring()), r"0.weight was made under torch.inference_mode.*; pass copy.deepcopy\(model\)"),
        (lambda: wn.certify(inferring(), torch.zeros(1, 2)), r"certify: 0.weight was made under torch.inference_mode"),
        (
            lambda: wn.certify(packed(), torch.zeros(1, 4)),
            r"0\._packed_params packs its weights.*; pass the model in floats",
        ),
        (lambda: wn.assign_norms(network(), []), r"recipe=\[\] is not one of"),
        (lambda: constrained({1: wn.HardCap(1.0)}), "a pattern must be a string, got 1"),
        (lambda: wn.Spectral(coefficients=[]), r"coefficients=\[\] is not a registered set"),
        (lambda: wn.initialize_(network(), generator=0), "generator must be a torch.Generator, got int; pass"),
        (lambda: scion(process_group="world"), "process_group='world' must be a ProcessGroup of torch.dis"),
        (lambda: scion().add_param_group({}), r"a parameter group must be a dictionary with params, got \{\}; pass"),
        (lambda: scion().add_param_group(None), "params must hold parameters, got None; pass"),
        (lambda: scion(momentum=None), "momentum=None is of type NoneType; pass a number"),
        (
            lambda: scion().load_state_dict({}),
            "load_state_dict: the state must be a dictionary of an optimizer, got dict; pass",
        ),
        (lambda: scion(lr=math.nan), "lr=nan must be finite"),
        (lambda: wn.assign_norms(complex_linear()), "parameter 'weight' must be real .* override it with None"),
        (lambda: broken(), "'0.weight' holds NaN or infinity.*; load other values"),
        (lambda: wn.Spectral(input_axis=torch.ones(2)), "Spectral: input_axis=tensor.* must be 1"),
        (lambda: wn.Sign(ndim=2.0), r"Sign: ndim=2.0 is of type float; pass a whole number"),
        (lambda: wn.constrain(network(), {"1": wn.HardCap(1.0)}), "is of type Sequential; pass the optimizer"),
        (lambda: scion(lr=1e308), "lr=1e.308 must be finite and not negative, in float32"),
        (lambda: scion(radius=1e308), "lr=0.1 times radius=1e.308 must be finite in float32"),
        (lambda: wn.ColumnCap(1e308), "ColumnCap: cap=1e.308 must be positive and finite, in float32"),
        (lambda: wn.initialize_(network(), radii={"1": math.nan}), r"radii\['1'\]=nan must be positive and finite"),
        (lambda: wn.certify(network()), "certify: Sequential has no method `example_input`; pass example_input="),
        (lambda: wn.lower_bound(network(), steps=1.5), "lower_bound: steps=1.5 is of type float; pass a whole number"),
        (lambda: wn.lower_bound(network(), batch=0), "lower_bound: batch=0 must be positive and finite"),
        (lambda: wn.lower_bound(network(), radius=math.inf), "lower_bound: radius=inf must be positive and finite"),
        (lambda: wn.lower_bound(network(), generator=0), "lower_bound: generator must be a torch.Generator"),
        (lambda: wn.verify("nowhere.json", {}), "not proved: .*nowhere.json"),
    ],
)
def test_other_mistakes_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)])
def test_numbers_of_numpy_are_numbers(number):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(1, 4)
    constraints = wn.constrain(wn.Scion(model), lipschitz=number, example_input=x)
    certificate = wn.certify(model, x, radius=number, within=constraints)
    assert 1.99 < certificate.lipschitz <= 2
    assert certificate.with_lower_bound(number / 2).lower_bound == 1
