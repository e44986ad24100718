"""`certify(model, input_ids=...)`: keywords are inputs of the model, unless they are settings, or misspelt ones."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellnormed.certificates import Certificate, UncertifiableError, certify, lower_bound


class Masked(nn.Module):
    """Named inputs alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return scale * (x if mask is None else x * mask)


class Open(nn.Module):
    """Takes any keyword, as the models of transformers do."""

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return x * others.get("mask", 1.0) * others.get("radius", 1.0) * others.get("bbox", 1.0)


class Named(nn.Module):
    """Its input has the name of a setting."""

    def forward(self, radius: Tensor, output: Tensor | float = 1.0) -> Tensor:
        return 3 * radius * output


X, MASK = torch.rand(2, 3), torch.full((2, 3), 2.0)


def bound(certificate: Certificate) -> float:
    return round(certificate.lipschitz, 9)


def test_keywords_are_inputs_of_the_model() -> None:
    assert bound(certify(Masked(), x=X)) == 1
    assert bound(certify(Masked(), X, scale=3.0)) == 3
    assert bound(certify(Masked(), X, 2.0, scale=3.0)) == 3
    assert bound(certify(Masked(), (X,), mask=MASK > 1, scale=5.0)) == 5
    assert bound(certify(Masked(), {"x": X}, scale=3.0, radius=2.0)) == 3
    assert bound(certify(Open(), X, mask=2.0)) == 2
    by_keyword, by_dictionary = certify(Masked(), x=X, scale=3.0), certify(Masked(), {"x": X, "scale": 3.0})
    assert by_keyword.text() == by_dictionary.text()


def test_settings_stay_settings() -> None:
    certificate = certify(Open(), X, radius=7.0)
    assert "RMS <= 7.0" in certificate.domain
    assert bound(certificate) == 1


def test_an_input_with_the_name_of_a_setting_goes_by_the_dictionary() -> None:
    assert bound(certify(Named(), {"radius": X})) == 3
    assert "RMS <= 2.0" in certify(Named(), {"radius": X}, radius=2.0).domain
    assert bound(certify(Open(), {"x": X, "radius": 4.0})) == 4
    with pytest.raises(ValueError, match=r"in the place of the setting radius; .*an input of that name by"):
        certify(Named(), radius=X)
    with pytest.raises(ValueError, match=r"pass a tuple of several inputs, certify\(model, \(x, mask\)\)"):
        certify(Named(), X, X)
    with pytest.raises(ValueError, match=re.escape("example_input={'output': ...}")):
        certify(Named(), X, output=X)


@pytest.mark.parametrize(
    ("keywords", "meant"),
    [
        ({"raduis": 2.0}, "radius"), ({"radii": 2.0}, "radius"), ({"margin": True}, "margins"),
        ({"outputs": "y"}, "output"), ({"boxes": (0, 1)}, "box"),
        ({"wihtin": None}, "within"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [Masked(), Open()])
def test_a_misspelt_setting_is_refused(model: nn.Module, keywords: dict[str, Any], meant: str) -> None:
    with pytest.raises(ValueError, match=f"certify: .*; did you mean {meant}?"):
        certify(model, X, **keywords)
    with pytest.raises(ValueError, match=f"certify: .*; did you mean {meant}?"):
        certify(model, x=X, **keywords)


def test_what_is_like_a_setting_may_be_an_input() -> None:
    assert bound(certify(Open(), X, bbox=torch.full((1, 3), 2))) == 2  # it is a tensor
    assert bound(certify(Open(), {"x": X, "bbox": 3.0})) == 3
    with pytest.raises(ValueError, match=re.escape("is an input of Open, pass it by example_input={'bbox': ...}")):
        certify(Open(), X, bbox=3.0)


def test_other_wrong_keywords_are_refused() -> None:
    with pytest.raises(ValueError, match=r"maks is neither a setting nor an input of Masked.forward; did you mean"):
        certify(Masked(), X, maks=MASK)
    with pytest.raises(ValueError, match=re.escape("certify: x is given twice, in example_input and by keyword")):
        certify(Masked(), {"x": X}, x=X)
    with pytest.raises(UncertifiableError, match=r"Masked itself fails .* multiple values for argument 'x'"):
        certify(Masked(), X, x=X)
    with pytest.raises(UncertifiableError, match=r"Masked itself fails .* missing 1 required positional argument: 'x'"):
        certify(Masked(), mask=MASK)


def test_a_search_takes_the_inputs_that_a_certificate_takes() -> None:
    found = lower_bound(Open(), x=X, steps=2)
    assert found.value == pytest.approx(lower_bound(Open(), {"x": X}, steps=2).value)
    with pytest.raises(ValueError, match=r"lower_bound: y is neither a setting nor|lower_bound: .* is given twice"):
        lower_bound(Open(), {"x": X}, x=X)
    program = certify(Open(), X).program
    assert program is not None
    with pytest.raises(ValueError, match="lower_bound: a program has its example"):
        lower_bound(program, x=X)
