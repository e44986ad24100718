"""The search from below: known answers, all kinds of inputs, precision, and that what it found can be repeated."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellnormed.certificates import capture, certify
from wellnormed.certificates.continuous import Continuous
from wellnormed.certificates.search import LowerBound, lower_bound, rms
from wellnormed.models import GPT, GPTConfig, PotentialConfig, PotentialGPT
from wellnormed.nn import BallProjection
from wellnormed.program import Program
from wellnormed.program.errors import UncertifiableError

from .adversary import Net, random_weights


def search(model: nn.Module | Program, *arguments: object, seed: int = 0, **keywords: object) -> LowerBound:
    keywords = {"steps": 15, "generator": torch.Generator().manual_seed(seed), **keywords}
    return lower_bound(model.eval() if isinstance(model, nn.Module) else model, *arguments, **keywords)


def replay(found: LowerBound, function: Continuous, radius: float) -> None:
    """Both ends are in the ball, and as far apart as it says."""
    moved = {name: x + found.step * found.directions[name] for name, x in found.inputs.items()}
    for point in (found.inputs, moved):
        for name, x in point.items():
            assert tuple(x.shape) == function.shapes[name]
            assert float(rms(x, function.axes[name]).max()) <= radius * (1 + 1e-12)
    change = function(moved) - function(found.inputs)
    gain = float(rms(change, function.output_axes).max()) / found.step
    assert gain >= found.rms_value * (1 - 1e-6)
    lengths = [torch.linalg.vector_norm(d, dim=function.axes[name]).max() for name, d in found.directions.items()]
    longest = torch.linalg.vector_norm(change, dim=function.output_axes).max()
    assert float(longest / max(lengths)) / found.step >= found.value * (1 - 1e-6)


def of(function, *tensors: Tensor) -> nn.Module:
    """A model made of a function, which holds the tensors."""
    return Net(lambda s, *args, **named: function(*s.held, *args, **named), held=nn.ParameterList(tensors))


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("width", "outputs", "shape"), [(3, 7, ()), (7, 3, (2,)), (5, 5, (2, 3)), (4, 2, (1, 2, 3))])
def test_a_matrix_has_its_norm(width: int, outputs: int, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(width, outputs)
    if len(shape) == 3:  # the whole sample is one group, so its positions share the change
        layer = of(lambda w, x: x @ w, uniform(width, outputs))
    weight = next(layer.parameters()).detach().double()
    exact = float(torch.linalg.matrix_norm(weight, 2))
    found = search(layer, torch.zeros(*shape, width), steps=30)
    assert found.value == pytest.approx(exact, rel=1e-4)
    assert found.rms_value == pytest.approx(exact * math.sqrt(width / outputs), rel=1e-4)


def test_layer_norm_has_the_gain_of_its_floor_near_zero() -> None:
    model = nn.Sequential(BallProjection(0.5), nn.LayerNorm(4, eps=0.01))
    assert 0.9 * 10 < search(model, torch.zeros(1, 4), steps=30).value <= 10


def test_a_convolution_is_measured_over_samples_for_images_and_over_rows_else() -> None:
    image = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    image.weight.data = torch.tensor([[0.0, 0, 0], [1, 1, -1], [0, 0, 0]])[None, None]
    frequency = 2 * math.pi / 8 * torch.arange(8)
    response = (1 + torch.polar(torch.ones(8), frequency) - torch.polar(torch.ones(8), -frequency)).abs().max()
    found = search(image, torch.zeros(2, 1, 8, 8), steps=30)
    assert found.value == pytest.approx(float(response), rel=1e-4)
    # over pixels' own norms the same taps reach 3
    taps = of(lambda x: x + x.roll(1, -2) - x.roll(-1, -2))
    assert search(taps, torch.zeros(1, 8, 1)).value == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize("model", [
    GPT(GPTConfig(vocabulary_size=7, length=8, width=8, heads=2, blocks=1)),
    GPT(GPTConfig(vocabulary_size=7, length=8, width=8, heads=2, blocks=1, rotary=True, relative_bias=False)),
    PotentialGPT(PotentialConfig(vocabulary_size=5, length=6, token_width=4, mixing_heads=2, blocks=2, hidden=8)),
], ids=["gpt", "rotary", "potential"])  # fmt: skip
def test_a_token_model_is_searched_over_its_vectors(model: nn.Module) -> None:
    model = random_weights(model, seed=0)
    found = search(model, torch.zeros(1, 6, dtype=torch.long), radius=2.0, steps=6)
    assert found.value > 1
    if isinstance(model, GPT):
        replay(found, Continuous(capture(model, torch.zeros(1, 6, dtype=torch.long)).double()), radius=2.0)


def test_tuples_and_dictionaries_of_inputs() -> None:
    weight = uniform(3, 4)
    model = of(lambda w, x, y: x @ w.mT + 2 * y, weight)
    norm = float(torch.linalg.matrix_norm(weight.double(), 2))
    x, y = torch.zeros(2, 4), torch.zeros(2, 3)
    for example in ((x, y), {"x": x, "y": y}):
        found = search(model, example, steps=30)
        # where both change by an RMS of 1, x has the length 2, and y the root of 3
        assert found.rms_value == pytest.approx(norm * math.sqrt(4 / 3) + 2, rel=1e-4)
        assert found.value == pytest.approx(norm + math.sqrt(3), rel=1e-4)
        certificate = certify(model, example)
        assert found.rms_value <= certificate.rms_lipschitz
        assert norm + 2 <= certificate.lipschitz <= norm * math.sqrt(4 / 3) + 2.0001
    assert set(found.inputs) == {"x", "y"}
    several = of(lambda x: {"first": x, "second": (3 * x).sum(-1)})
    assert search(several, x, output="first").value == pytest.approx(1)
    assert search(several, x, output=1).value == pytest.approx(6, rel=1e-6)  # the length of (3, 3, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fewer_digits_inside_change_nothing(dtype: torch.dtype) -> None:
    weight = uniform(4, 4)

    def cast(w: Tensor, x: Tensor) -> Tensor:
        y = (x.to(dtype) @ w.to(dtype)).float() + torch.zeros(4)
        return y.type_as(x) * torch.ones(4, dtype=torch.float32)

    expected = float(torch.linalg.matrix_norm(weight.to(dtype).double(), 2))
    assert search(of(cast, weight), torch.zeros(1, 4), steps=30).value == pytest.approx(expected, rel=1e-5)
    model = nn.Linear(4, 4).to(dtype)
    expected = float(torch.linalg.matrix_norm(model.weight.detach().double(), 2))
    assert search(model, torch.zeros(1, 4, dtype=dtype), steps=30).value == pytest.approx(expected, rel=1e-5)


def test_autocast_is_left_out() -> None:
    def cast(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    assert search(of(cast, torch.eye(4)), torch.zeros(1, 4)).value == pytest.approx(1, rel=1e-6)


def test_a_norm_keeps_the_floor_of_the_precision_it_is_computed_in() -> None:
    norm = nn.RMSNorm(2)
    exact = torch.finfo(torch.float32).eps ** -0.5
    near_zero = nn.Sequential(BallProjection(1e-5), norm)
    assert 0.5 * exact < search(near_zero, torch.zeros(1, 2), radius=1e-4).value <= exact


def test_integers_and_masks_stay_as_they_are() -> None:
    model = of(lambda x, scale, keep: torch.where(keep, x * scale, 0.0))
    example = (torch.zeros(1, 2, 2), torch.tensor([[[3, 1]]]), torch.tensor([[[False, True]]]))
    assert search(model, example).value == pytest.approx(1, rel=1e-6)


def test_a_derivative_that_is_not_the_function_s_own_makes_no_bound() -> None:
    """Detached parts have a derivative all the same, and a wrong one is found out by the difference."""
    assert search(of(lambda x: x - x.detach()), torch.zeros(1, 2)).value == 0.0
    assert search(of(lambda x: x.detach() * 1.0), torch.zeros(1, 2)).value == pytest.approx(1)
    at_zero = of(lambda x: (x * 0).relu() - (x * 0).clamp(min=0) + x)  # torch has slopes 0 and 1 at the kink
    assert search(at_zero, torch.zeros(1, 2)).value == pytest.approx(1)


@pytest.mark.parametrize("bias", [1e6, 1e8])
def test_a_difference_of_large_results_is_no_gain(bias: float) -> None:
    model = of(lambda x: 1e-6 * x + bias)
    program = capture(model, torch.zeros(1, 4).double())
    assert search(program).value <= certify(program).lipschitz


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_a_sum_that_nearly_cancels_within_the_model_is_no_gain(factor: float) -> None:
    """Whatever enlarges its rounding error afterwards."""
    program = capture(of(lambda x: ((x + 1e8) - 1e8) * factor), torch.zeros(1, 4).double())
    found = search(program).value
    assert 0.9 * factor < found <= certify(program).lipschitz


def test_the_model_s_own_example() -> None:
    class Own(nn.Linear):
        def example_input(self) -> Tensor:
            return torch.zeros(5, 2)

    assert next(iter(search(Own(2, 2)).inputs.values())).shape == (1, 2)  # one sample


def test_the_search_does_not_change_the_model_and_repeats_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    first, again = (search(model, torch.zeros(2, 3)) for _ in range(2))
    assert first.value == again.value
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: lower_bound(nn.Linear(2, 2), 2.0), "itself fails on the example"),
    (lambda: lower_bound(nn.GELU()), "GELU has no method `example_input`; pass example_input="),
    (lambda: lower_bound(of(lambda x: x * 2.0), torch.zeros(1, 2).long()), "nothing of the input is a variable"),
    (lambda: lower_bound(of(lambda x: x * 2.0), torch.tensor(1.0)), "single number; pass a batch of vectors"),
    (lambda: lower_bound(of(lambda x: x.long()), torch.zeros(1, 2)), "not a tensor of floats"),
    (lambda: lower_bound(of(lambda x: (x, x)), torch.zeros(1, 2)), "pass output="),
    (lambda: lower_bound(nn.Dropout(0.5), torch.ones(1, 2)), "draws random numbers"),
])  # fmt: skip
def test_what_is_wrong_is_said(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_assignments_to_slices() -> None:
    def shifted(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape)
        y[:, 1:] = 3 * x[:, :-1]
        y[:, :, 1] = 5
        return y

    assert search(of(shifted), torch.zeros(1, 3, 2)).value == pytest.approx(3)  # in its first entry


def test_an_operation_without_second_derivative() -> None:
    distance = of(lambda x: torch.cdist(x, torch.ones(1, 2, 4)))
    assert search(distance, torch.zeros(1, 3, 4)).value == pytest.approx(math.sqrt(2), rel=1e-3)  # two distances


def test_an_operation_without_derivative_is_refused() -> None:
    @torch.library.custom_op("search::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    doubled.register_fake(torch.empty_like)
    with pytest.raises(UncertifiableError, match="the search needs derivatives"):
        search(of(doubled), torch.zeros(1, 3))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_it_searches_where_gradients_are_off(without: Any) -> None:
    with without():
        found = lower_bound(nn.Linear(2, 2), torch.zeros(1, 2), steps=2).value
    assert found > 0
