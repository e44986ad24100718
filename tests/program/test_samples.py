"""A program is of one sample, and a batch is that program applied to each sample: nothing about batches is believed."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from tests.program.models import Model
from wellnormed.certificates import UncertifiableError, capture, certify
from wellnormed.lowering.walk import Walk

FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "a polynomial": (lambda m, x: x * ((x.shape[0] - 1) * (x.shape[0] - 2)), False),
    "a single sample": (lambda m, x: x * (100.0 if x.shape[0] == 1 else 1.0), False),
    "seven samples": (lambda m, x: x * (100.0 if x.shape[0] == 7 else 1.0), False),
    "a roll by twelve": (lambda m, x: 2 * x - x.roll(12, 0), False),
    "a constant made of nothing": (lambda m, x: x * (1 + 9 * (torch.empty_like(x).fill_(1.0).cumsum(0) > 8)), True),
    "features that are overwritten": (lambda m, x: _overwritten(x, slice(None)), True),
    "samples that are overwritten": (lambda m, x: _overwritten(x, slice(1, None)), False),
    "interleaved and back": (lambda m, x: x.T.reshape(4 * x.shape[0]).view(4, x.shape[0]).T * 3, True),
    "shapes": (lambda m, x: (x.view(x.shape[0] * 2, 2) @ m.weight[:2, :2]).view(x.shape[0], 4), True),
    "each sample's own": (lambda m, x: x * _of(x.new_full(x.shape, 0.1).cumsum(1), _numbers(x)), True),
    "the numbers of others": (lambda m, x: x * _of(x.new_full(x.shape, 0.1).cumsum(0), _numbers(x)), False),
    "a row for each sample": (lambda m, x: x * m.weight.repeat(9, 1)[_numbers(x)], False),
}


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def _of(x: Tensor, samples: Tensor) -> Tensor:
    return x[samples[:, None], torch.arange(3, -1, -1)]


def _overwritten(x: Tensor, samples: slice) -> Tensor:
    result = torch.empty_like(x)
    result[...] = x
    result[samples, ::2] = 3.0
    return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_certificate_is_true_of_its_program_whatever_the_code_does_with_batches(name: str) -> None:
    """Of the program of one sample, or of the whole batch where a batch is not that of its samples."""
    function, each = FUNCTIONS[name]
    model = Model(function)
    certificate = certify(model, torch.ones(2, 4))
    assert certificate.each_sample is each
    assert certificate.domain.startswith("each sample of any batch" if each else "the whole batch as one sample")
    assert certificate.program is not None
    assert wn.lower_bound(certificate.program, steps=3, batch=1).value <= certificate.lipschitz
    for size in (2, 7) if each else ():
        x = torch.randn(size, 4)
        alone = torch.cat([certificate.program.module(y[None]) for y in x])
        torch.testing.assert_close(model(x), alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(certificate.program(x), alone)


MIXED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "divided by the number of rows": (lambda m, x: x @ m.weight / len(x), (torch.randn(4, 4),)),
    "a sum over rows": (lambda m, x: (x @ m.weight).sum(0), (torch.randn(4, 4),)),
    "messages between rows": (
        lambda m, x, edges: torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] @ m.weight),
        (torch.randn(4, 4), torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_every_program_of_a_model_that_mixes_rows_is_of_the_whole_batch(name: str) -> None:
    """Capture and search took one row, where the certificate was of all."""
    function, example = MIXED[name]
    model = Model(function)
    program, certificate = wn.capture(model, example), certify(model, example)
    assert (program.each_sample, certificate.each_sample) == (False, False)
    torch.testing.assert_close(program(*example), model(*example))
    assert wn.lower_bound(model, example, steps=5).value <= certificate.lipschitz
    assert certify(program).lipschitz == certificate.lipschitz
    assert wn.certificates.require_same_model(certificate, model, example) is None


DESERVING: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a padding mask expanded over the batch": (
        lambda m, x, mask: F.scaled_dot_product_attention(x, x, x, mask[:, None, :].expand(x.shape[0], 3, 3) > 0),
        (torch.ones(4, 3, 4), torch.ones(4, 3, dtype=torch.long)),
    ),
    "the last token": (
        lambda m, x, lengths: x[torch.arange(x.shape[0]), lengths - 1],
        (torch.ones(4, 3, 4), torch.full((4,), 2)),
    ),
    "a class of each sample": (lambda m, x, label: x * F.one_hot(label, 4), (torch.ones(4, 4), torch.full((4,), 2))),
    "a triangle with a batch axis": (lambda m, x: x @ torch.ones(x.shape[0], 4, 4).triu(), (torch.ones(2, 3, 4),)),
    "a mask that all samples share": (
        lambda m, x, mask: x.masked_fill(mask, 0.0),
        (torch.ones(5, 3, 4), torch.eye(3, 4, dtype=torch.bool)),
    ),
    "a padded maximum": (lambda m, x: F.max_pool2d(x, 3, 1, 1), (torch.ones(2, 1, 4, 4),)),
}


@pytest.mark.parametrize("name", DESERVING)
def test_models_that_treat_samples_alike_are_certified_for_each(name: str) -> None:
    function, example = DESERVING[name]
    certificate = certify(Model(function), example)
    assert certificate.each_sample
    fixed = [f"input.{n}" for n in ("1",) if len(example) > 1]
    assert list(certificate.fixed) == fixed


def test_a_batch_of_samples_that_are_masked_differently_is_one_sample() -> None:
    """A certificate holds for the example's masks, and here every sample has its own."""
    model = Model(lambda m, x, mask: x * mask)
    x = torch.ones(2, 4)
    certificate = certify(model, (x, torch.tensor([[1, 1, 0, 0], [0, 9, 0, 0]])))
    assert not certificate.each_sample
    assert certificate.lipschitz >= 9
    assert certify(model, (x, torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]))).each_sample


FIXED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], bool]] = {
    "a factor on ones": (lambda m, x, n: x * (torch.ones_like(x) * n), (torch.ones(2, 4), torch.tensor(1)), True),
    "a number to fill": (lambda m, x, n: x * torch.zeros_like(x).fill_(n), (torch.ones(2, 4), torch.tensor(1)), True),
    "a written number": (lambda m, x, n: x * torch.zeros(4).copy_(n), (torch.ones(2, 4), torch.tensor(1)), True),
    "a table": (lambda m, x, n: x * (n.float() @ m.weight), (torch.ones(2, 4), torch.ones(2, 4).long()), True),
    "a position": (lambda m, x, n: x.gather(1, n), (torch.ones(2, 4), torch.zeros(2, 2).long()), True),
    "a mask of tokens": (
        lambda m, t: m.weight[t] * (t == 0)[..., None],
        (torch.zeros(2, 3, dtype=torch.long),),
        True,
    ),
    "tokens": (lambda m, t: m.weight[t], (torch.zeros(2, 3, dtype=torch.long),), False),
    "shifted tokens": (lambda m, t: F.embedding((t + 1) % 4, m.weight), (torch.zeros(2, 3, dtype=torch.long),), False),
    "the shape of a mask": (lambda m, x, n: x * torch.ones_like(n), (torch.ones(2, 4), torch.ones(2, 4).long()), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_integers_are_fixed_if_a_path_leads_to_the_result(name: str) -> None:
    """Any path, but for the index of a lookup in a table and the shape of a constant."""
    function, example, fixed = FIXED[name]
    program = capture(Model(function), example)
    assert bool(program.fixed) is fixed
    assert bool(certify(Model(function), example, radius=2.0).fixed) is fixed


def test_attention_that_is_spelled_out_names_the_tokens_that_mask_it() -> None:
    def masked(m: Any, ids: Tensor) -> Tensor:
        x = m.weight[ids]
        return (x @ x.mT / 2).masked_fill((ids == 0)[:, None, :], float("-inf")).softmax(-1) @ x

    certificate = certify(Model(masked), torch.tensor([[1, 2, 0]]), radius=2.0)
    assert certificate.fixed == ("input.inputs",)


def test_an_entry_of_noise_does_not_hide_the_others() -> None:
    """The tolerance of an entry is from that entry alone: here the first is a difference that rounds."""

    def function(m: Any, x: Tensor) -> Tensor:
        noise = (x[:, :1] * 1e6 + x.sum(1, keepdim=True)) - x[:, :1] * 1e6
        return torch.cat([noise, (1.0 if torch.compiler.is_exporting() else 5.0) * x], 1)

    with pytest.raises(UncertifiableError, match="does not compute what was captured"):
        capture(Model(function), torch.ones(2, 4))


@pytest.mark.parametrize("zeros", [0, 20])
def test_entries_that_are_zero_are_not_typical(zeros: int) -> None:
    """Behind a ReLU most are: the first may round here by as much as the others' size explains, with and without."""

    def function(m: Any, x: Tensor) -> Tensor:
        small = 1e-3 * x[:, :1] + (0.0 if torch.compiler.is_exporting() else 1e-8)
        return torch.cat([small, x, x.new_zeros(x.shape[0], zeros)], 1)

    assert capture(Model(function), torch.ones(2, 4)).each_sample


def test_what_rounding_hides_is_not_said_to_be_compared() -> None:
    def shifted(x: Tensor) -> Tensor:  # by as much as rounding explains
        return x + (1e7 if torch.compiler.is_exporting() else 1e7 + 1)

    certificate = certify(Model(lambda m, x: torch.cat([x, shifted(x)], 1)), torch.ones(2, 4))
    assert certificate.comparison.hidden == 4
    assert "but for 4 entries" in certificate.compared
    program = capture(Model(lambda m, x: shifted(x)), torch.ones(2, 4))
    assert (program.each_sample, program.comparison.hidden) == (False, 8)  # of no sample alone, which nothing shows


def test_a_program_is_a_value() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    program = wn.capture(model, torch.zeros(3, 4))
    x = torch.randn(5, 4)
    torch.testing.assert_close(program(x), model(x))
    assert wn.certify(program).lipschitz.exact == wn.certify(model, torch.zeros(3, 4)).lipschitz.exact
    for wrong in ((), (x, x)):
        with pytest.raises(ValueError, match="the program takes the tensors input"):
            program(*wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([[1.0, 2.0, 3.0, 4.0]], r"got a list; pass torch.as_tensor\(input, dtype=torch.float32\)"),
        (np.ones((1, 4), dtype=np.float32), "got a ndarray; pass torch.as_tensor"),
        (torch.zeros(2, 4).double(), r"got torch.float64 and shape \(2, 4\) on cpu; pass input.to\(torch.float32\)"),
        (torch.zeros(2, 4).long(), r"pass input.to\(torch.float32\)"),
        (torch.zeros(2, 4, device="meta"), r"pass input.to\(cpu\)"),
        (torch.zeros(3, 5), r"shape \(3, 5\) on cpu; pass that shape"),
        (torch.zeros(4), "pass that shape"),
        (torch.zeros(0, 4), "pass that shape"),
        (torch.tensor(1.0), "pass that shape"),
    ],
)
def test_what_is_no_tensor_like_the_examples_is_refused_with_its_remedy(wrong: Any, words: str) -> None:
    program = wn.capture(nn.Linear(4, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"must be a tensor of torch.float32 and shape \(batch, 4\) on cpu.*" + words):
        program(wrong)


def test_inputs_with_different_numbers_of_samples_are_refused() -> None:
    program = wn.capture(Model(lambda m, x, y: x + y), (torch.zeros(3, 4), torch.zeros(3, 4)))
    with pytest.raises(ValueError, match=r"one number of samples, got {.*: 2, .*: 1}; pass a batch of one size"):
        program(torch.zeros(2, 4), torch.zeros(1, 4))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 3, batch_first=True)])
def test_layers_without_a_rule_for_several_samples_run_one_by_one(layer: nn.Module) -> None:
    program = capture(layer, torch.zeros(1, 3, 4), output=0)
    x = torch.randn(4, 3, 4)
    torch.testing.assert_close(program(x), layer(x)[0])


@pytest.mark.parametrize("ids", [torch.tensor([[1, 2, 3], [3, 0, 1]]), torch.tensor([[1, 2, 3]])])
@pytest.mark.parametrize(
    "index",
    [
        lambda m, t: F.embedding((t + 1) % 4, m.weight),
        lambda m, t: m.weight[(t + torch.tensor([0, 2, 3])) % 4],
        lambda m, t: m.weight[t] * (t != 0)[..., None],
    ],
)
def test_samples_whose_integers_are_alike_prove_nothing_of_a_batch(
    index: Callable[[Any, Tensor], Tensor], ids: Tensor
) -> None:
    """Copies of one sample cannot show that samples are mixed."""
    assert not certify(Model(lambda m, t: (y := index(m, t)) - y.roll(1, 0)), ids, radius=2.0).each_sample


def _attention(x: Tensor, hidden: Tensor) -> Tensor:
    return (x @ x.mT / 2).masked_fill(hidden, -1e9).softmax(-1) @ x


def _shown(tokens: Tensor) -> Tensor:
    return (tokens != 0)[..., None]


_PADDED = torch.tensor([[1, 2, 0], [3, 1, 0]])
_POSITIONS = 4 * torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.1, 0.0, 0.1, 0.0], [0.2, 0.1, 0.0, 0.1], [0.1, 0.1, 0.1, 0.1]])
TOKENS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], bool]] = {
    "a mask of the tokens": (lambda m, t: _attention(m.weight[t], (t == 0)[:, None]), (_PADDED,), True),
    "a single sample": (lambda m, t: _attention(m.weight[t], (t == 0)[:, None]), (_PADDED[:1],), True),
    "equal samples": (lambda m, t: _attention(m.weight[t], (t == 0)[:, None]), (torch.ones(2, 3).long(),), True),
    "every second token hidden": (lambda m, t: m.weight[t] * _shown(t), (torch.tensor([[1, 0, 3, 0]]),), True),
    "positions that the mask says": (
        lambda m, t: _attention(m.weight[t] + _POSITIONS[(t != 0).long().cumsum(1) * (t != 0)], (t == 0)[:, None]),
        (_PADDED,),
        True,
    ),
    "the place of the largest": (
        lambda m, t: m.weight[t][torch.arange(len(t)), t.argmax(1)],
        (torch.tensor([[1, 3, 0], [0, 3, 1]]),),
        True,
    ),
    "a table of one row": (lambda m, t, n: m.weight[t] + F.embedding(n, m.weight[:1]), (_PADDED, 0 * _PADDED), True),
    "other masks": (lambda m, t: m.weight[t] * _shown(t), (torch.tensor([[1, 0, 3, 0], [1, 1, 1, 1]]),), False),
    "mixed rows": (lambda m, t: m.weight[t].roll(1, 0) * _shown(t), (_PADDED,), False),
    "mixed, floats": (lambda m, t, x: x + m.weight[t].roll(1, 0) * _shown(t), (_PADDED, torch.ones(2, 3, 4)), False),
    "mixed rows of another table": (
        lambda m, t: m.weight[t] + F.embedding((t == 3).long(), m.weight[:2] / 2).roll(1, 0),
        (torch.ones(2, 3).long(),),
        False,
    ),
    "tokens that look up nothing else": (lambda m, t: m.weight[t] * t[..., None], (_PADDED[:1],), False),
}  # fmt: skip
"""Models of tokens from which constants are made, too; and whether a batch is that of its samples."""


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_vary_as_far_as_the_constants_that_are_made_of_them_stay(name: str) -> None:
    function, example, each = TOKENS[name]
    certificate = certify(Model(function), example, radius=2.0)
    assert certificate.each_sample is each
    assert wn.lower_bound(certificate.program, radius=2.0, steps=3, batch=1).value <= certificate.lipschitz


SHARED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[bool, ...]]] = {
    "a mask of as many tokens": (
        lambda m, x, k: _attention(x, k),
        (torch.ones(3, 3, 4), torch.ones(3, 3).triu(1).bool()),
        (True, False),
    ),
    "padding of as many tokens": (
        lambda m, x, k: _attention(x, k[:, None]),
        (torch.ones(3, 3, 4), torch.tensor([[False, False, True]] * 3)),
        (True, True),
    ),
    "two tables": (
        lambda m, x, a, b: x * a + b,
        (torch.ones(3, 3, 4), torch.ones(3, 4), torch.ones(3, 4)),
        (True, False, False),
    ),
    "floats": (lambda m, x, a: x + a, (torch.ones(2, 3, 4), torch.ones(3, 4)), (True, False)),
}


@pytest.mark.parametrize("name", SHARED)
def test_which_inputs_have_samples_is_tried(name: str) -> None:
    function, example, batched = SHARED[name]
    certificate = certify(Model(function), example)
    assert certificate.program is not None
    assert certificate.each_sample
    assert certificate.program.batched == batched


def test_a_vector_that_is_looked_up_twice_is_one_variable() -> None:
    """The search took it for two, and its gain of 2 was above the bound."""
    certificate = certify(Model(lambda m, t: m.weight[t] - m.weight[t].mean(1, keepdim=True)), _PADDED)
    assert wn.lower_bound(certificate.program, steps=5).value <= certificate.lipschitz < 2


def test_a_graph_that_is_the_whole_batch_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = Walk.run
    monkeypatch.setattr(Walk, "run", lambda self, *rest: runs.append(self) or run(self, *rest))
    certificate = certify(Model(lambda m, x: x * len(x)), torch.ones(1, 4))
    assert (len(runs), certificate.each_sample, certificate.program.each_sample) == (1, False, False)


def test_a_model_is_compared_at_its_example_too() -> None:
    """The drawn integers are those that it looks up; only the example has the number that the code asks for."""
    model = Model(lambda m, x, n: x * (1.0 if torch.compiler.is_exporting() or x.abs().max() < 50 else 3.0))
    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(model, (torch.full((1, 4), 60.0), torch.tensor(3)))


def test_certificates_and_programs_are_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    certificate = certify(model, torch.ones(2, 4))
    x = torch.randn(3, 4)
    for again in (copy.deepcopy(certificate), pickle.loads(pickle.dumps(certificate))):
        assert again.lipschitz.exact == certificate.lipschitz.exact
        torch.testing.assert_close(again.program(x), model(x))
    with pytest.raises(ValueError, match="unpickled program can be run, and no more; capture the model again"):
        certify(again.program)


@pytest.mark.parametrize(
    "constant", [lambda w: w.chunk(2)[0].mT, lambda w: w.split(2)[1].mT, lambda w: torch.stack(w.unbind(0)[:2]).mT]
)
def test_constants_that_are_taken_apart_are_constants(constant: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda m, x: x @ constant(m.weight))
    assert certify(model, torch.randn(2, 4)).lipschitz == pytest.approx(0.5, rel=1e-6)
