"""Promises in the place of entries: what follows from them, for which weights, and what is refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates import require_same_model
from wellnormed.proof import Promise, Proof, Row, check
from wellnormed.proof.promises import Parts
from wellnormed.proof.reading import CheckError


def proof_of(*parts, shape=(4, 3)):
    proof = Proof()
    proof.promise(Promise("w", shape, parts))
    proof.add(Row("x", "input", (), (1, 3), {"dtype": "float32", "radius": 1.0}, axes=(1,)))
    return proof


def linear(claim):
    return Row("y", "linear", ("x",), (1, 4), {"parts": 1}, (claim,), reads=((1,),), axes=(1,))


def test_a_part_far_smaller_than_another_has_its_own_bound():
    """The square of its size, relative to the largest one, is below all floats."""
    uneven = proof_of(Parts((1, 2, 3), 1.0, 0, (0, 3, 1)), Parts((1, 2, 3), 1e-170, 6, (0, 3, 1)))
    assert min(uneven.claim("spectral", "w", **{"parts": 2}).values) >= 1e-170


def test_parts_that_are_no_blocks_of_the_matrix_have_no_spectral_norm():
    """The entries of a part in another order are another matrix, of another norm."""
    scrambled = proof_of(Parts((1, 4, 3), 2.0, 0, (0, [0, 3, 6, 9], [0, 1, 2])))
    assert scrambled.claim("spectral", "w").values is not None
    with pytest.raises(CheckError, match="do not lie in rows and columns"):
        proof_of(Parts((1, 3, 4), 2.0, 0, (0, 4, 1))).claim("spectral", "w")
    vectors = proof_of(Parts((1, 12, 1), 2.0, 0, (0, 1, 0)))  # a vector of all entries bounds the matrix in any order
    assert vectors.claim("spectral", "w").values == pytest.approx((2.0,))


def test_a_certificate_within_caps_is_of_later_weights_and_of_no_larger_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 4, bias=False))
    optimizer = wn.Scion(model, lr=0.3)
    certificate = wn.certify(model, torch.randn(2, 6), within=wn.constrain(optimizer, {"*": wn.HardCap(1.5)}))
    model(torch.randn(5, 6)).square().sum().neg().backward()
    optimizer.step()
    report = wn.verify(certificate, model.state_dict())
    assert "for every weight within these caps: no singular value of 0.weight beyond 1.83711" in str(report)
    model[0].weight.data *= 4
    with pytest.raises(CheckError, match=r"0\.weight is not proved to keep its promise"):
        wn.verify(certificate, model.state_dict())
    assert wn.verify(certificate, {}).lipschitz == report.lipschitz  # without weights it speaks of the caps alone
    document = json.loads(json.dumps(certificate.document()))
    for change in ({"size": 10.0}, {"shape": [1, 9, 5]}, {"tables": [0, 6, 2]}):
        forged = copy.deepcopy(document)
        forged["promises"][0]["parts"][0] |= change
        with pytest.raises(CheckError):
            check(forged, {})
    del document["promises"][0]
    with pytest.raises(CheckError, match="no stored tensor"):
        check(document, {})


def test_a_matrix_of_scattered_entries_bounds_no_row_no_tap_and_no_vector():
    """The singular values of a matrix say little of the same entries in another order."""
    scattered = Parts((1, 3, 4), 2.0, 0, (0, 4, 1))
    for shape, measure, settings in (
        ((12,), "group_norm", {}),  # a vector of 3 x 4 entries may be 3 ** 0.5 times as long as a part's singular value
        ((12,), "row_norm", {}),
        ((4, 3), "row_norm", {}),
        ((4, 3), "row_difference", {}),
        ((2, 2, 3), "taps", {"groups": 1}),
        ((2, 2, 3), "convolution", {"size": [5], "stride": [1], "dilation": [1], "groups": 1}),
    ):
        with pytest.raises(CheckError, match="do not lie in rows and columns"):
            proof_of(scattered, shape=shape).claim(measure, "w", **settings)


def test_another_cap_is_another_certificate():
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    example, optimizer = torch.zeros(1, 3), wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(1.5)})
    certificate = wn.certify(model, example, within=constraints)
    require_same_model(certificate, model, example, within=constraints)
    forged = replace(certificate.promises[0], parts=tuple(replace(p, size=1.0) for p in certificate.promises[0].parts))
    with pytest.raises(CheckError, match="promises"):
        require_same_model(replace(certificate, promises=(forged,)), model, example, within=constraints)
