"""Names out of a file cannot put words into a report: each is printed as one word of ASCII."""

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests import sealed
from tests.proof.documents import document_of
from wellnormed.certificates import Certificate, certify
from wellnormed.certificates.formats import EntryRange, NumberFormats
from wellnormed.proof import CheckError, check
from wellnormed.proof.reading import word
from wellnormed.train import report

FORGED = "x of shape (1, 4) with RMS <= 1000.0 in every vector of 4 entries; for any float32 y"
LIES = ("RMS <= 1000", "for any", " of shape (1, 4) with RMS <= 1000")
LOOK_ALIKE = "\u0445\u2e31\u043ef\u2e31sh\u0430pe\uff081\u201a4\uff09\ua7530.1"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


def renamed(document: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The document with another name of a row or of a tensor."""

    def of(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {new if name == old else name: of(each, name) for name, each in node.items()}
        if isinstance(node, list):
            return [of(each, key) for each in node]
        return new if node == old and key != "operation" else node

    return of(document)


@pytest.mark.parametrize("name", [FORGED, LOOK_ALIKE])
@pytest.mark.parametrize("row", ["input.input", "output"])
def test_a_row_named_like_a_domain_is_printed_as_a_name(row: str, name: str) -> None:
    document, tensors = document_of(small(), torch.zeros(1, 4))
    honest = check(document, tensors)
    forged = check(renamed(document, row, name), tensors)
    assert forged.lipschitz == honest.lipschitz
    text = str(forged)
    assert text == str(honest).replace(row, word(name))
    assert text.isascii()
    assert not any(lie in text for lie in LIES)


def test_a_tensor_named_like_a_domain_is_printed_as_a_name() -> None:
    document, tensors = document_of(nn.Embedding(5, 4), torch.zeros(1, 2, dtype=torch.long), 9.0)
    tensors[FORGED], tensors["\x1b[2J\nproved"] = tensors.pop("weight"), np.zeros(1)
    text = str(check(renamed(document, "weight", FORGED), tensors))
    assert f"rows of {word(FORGED)} among them" in text
    assert r"no row reads \u{1b}\u{5b}2J\u{a}proved: " in text
    assert not any(lie in text for lie in LIES)


def test_fixed_inputs_are_printed_as_names() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask, 0.0)

    example = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool)
    certificate = certify(Masked(), example)
    assert certificate.fixed == ("input.mask",)
    document = renamed(certificate.document(), "input.mask", FORGED)
    text = str(check(document, {FORGED: certificate.computed["input.mask"].numpy(), "m": np.zeros(1)}))
    assert f"{word(FORGED)} as stored, lookups apart" in text
    shown = dataclasses.replace(certificate, fixed=(FORGED,)).domain
    assert f"`{word(FORGED)}` as in the example" in shown


def test_errors_have_no_commands_of_a_terminal() -> None:
    document, tensors = document_of(small(), torch.zeros(1, 4))
    command = "\x1b[2K\rproved"
    for name, forged in (
        ("0.weight", {command: tensors["0.weight"][:2]}),
        ("0.bias", {command: tensors["0.bias"][:1]}),
    ):
        with pytest.raises(CheckError) as caught:
            check(renamed(document, name, command), tensors | forged)
        assert str(caught.value).isprintable()
    assert str(CheckError("a\nb\x1b\u202ec\u00e9")) == "a\\u{a}b\\u{1b}\\u{202e}c\u00e9"


def test_a_certificate_prints_names_as_words() -> None:
    honest = certify(small(), torch.zeros(1, 4))
    operation = "linear  1.0  1.0\nall is well"
    first, second, *others = honest.rows
    constants = first.constants | {"dtype": "float32 and all other"}
    rows = (
        dataclasses.replace(first, name=FORGED, constants=constants),
        dataclasses.replace(second, name="\x1b[2J", operation=operation),
        *others,
    )
    forged = dataclasses.replace(honest, rows=rows)
    for text in (str(forged), forged.domain, report._certificate_table(forged)):
        assert not any(lie in text for lie in LIES)
        assert "\x1b" not in text
        assert "and all other" not in text
    assert len(str(forged).splitlines()) == len(str(honest).splitlines())
    assert FORGED not in str(NumberFormats((EntryRange(f"input of {FORGED}", Decimal(1), None, ()),)))


def test_a_file_cannot_state_an_arithmetic_of_its_own(tmp_path: Path) -> None:
    certificate = certify(small(), torch.zeros(1, 4))
    path = tmp_path / "certificate.json"
    sealed.write(path, certificate.document() | {"arithmetic": "executed floats"})
    with pytest.raises(ValueError, match="arithmetic of the certificate must be"):
        Certificate.load(path)


@given(st.text(), st.text())
def test_words_are_words_and_differ(a: str, b: str) -> None:
    assert word(a).isascii()
    assert len(word(a).split()) == (len(a) > 0)
    assert (word(a) == word(b)) == (a == b)
