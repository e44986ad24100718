import pytest
import torch

from wellnormed.matrix import foreach, msign, spectral_hardcap, spectral_norm, spectral_normalize

SHAPES = [(8, 4), (4, 8), (6, 6), (2, 3, 8, 4), (6, 6), (0, 3)]


def matrices(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(msign, ()), (spectral_hardcap, (1.5,)), (spectral_normalize, (1.0,)), (spectral_norm, ())],
)
def test_equals_one_call_per_matrix(function, arguments):
    for value, matrix in zip(foreach(function, matrices(), *arguments), matrices(), strict=True):
        # batched products sum in another order
        torch.testing.assert_close(value, function(matrix, *arguments), atol=1e-12, rtol=0)


def test_equal_shapes_make_one_batch():
    calls = []

    def spy(batch):
        calls.append(batch.shape)
        return batch

    values = foreach(spy, matrices())
    assert all(torch.equal(value, matrix) for value, matrix in zip(values, matrices(), strict=True))
    assert sorted(calls) == [(1, 3, 0), (2, 6, 6), (8, 8, 4)]
    assert foreach(spy, []) == []


def test_dtypes_are_kept_apart_and_errors_name_the_matrix():
    mixed = [torch.eye(3), torch.eye(3, dtype=torch.bfloat16)]
    assert [value.dtype for value in foreach(msign, mixed)] == [torch.float32, torch.bfloat16]
    with pytest.raises(ValueError, match=r"matrices\[1\]"):
        foreach(msign, [torch.eye(2), torch.ones(3)])
    with pytest.raises(ValueError, match=r"among matrices \[1\], of 3 x 2"):
        foreach(msign, [torch.eye(2), torch.full((2, 3), float("nan"))])
