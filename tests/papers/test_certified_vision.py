"""Networks of constant 1, their training, and the images that they read."""

import gzip
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import wellnormed as wn
from papers import certified_vision, mnist
from papers.certified_vision import MEASURED, Training, cells, figures, margin_loss, verdicts
from papers.one_lipschitz import BetaAbs, Shift, attending, optimizer_of
from wellnormed.data._download import DataError
from wellnormed.train.task import fit


def small(name="wellnormed", **changes):
    (cell,) = (each for each in cells("cpu")[:3] if (each.data, each.network) == ("cifar10", name))
    return replace(cell, channels=(8, 16), depths=(0, 1), hidden=(16,), batch=8, steps=6, **changes)


@pytest.fixture
def training(monkeypatch):
    torch.manual_seed(0)
    images = torch.rand(20, 3, 32, 32), torch.randint(10, (20,))
    monkeypatch.setattr(certified_vision, "pixels_and_labels", lambda data, split, device: images)
    return lambda **changes: Training(small(**changes), torch.device("cpu"))


def test_beta_abs_is_max_min_in_another_basis():
    a, b = torch.randn(2, 5, 4, 3, 3).double()
    root = math.sqrt(0.5)
    first, second = BetaAbs(8).double()(torch.cat([a - b, a + b], 1) * root).chunk(2, 1)
    torch.testing.assert_close((second + first) * root, torch.maximum(a, b))
    torch.testing.assert_close((second - first) * root, torch.minimum(a, b))


def test_a_shift_moves_half_of_the_channels_by_one_pixel_each():
    x = torch.zeros(1, 8, 5, 5)
    x[:, :, 2, 2] = 1
    places = [tuple(each.nonzero()[0].tolist()) for each in Shift()(x)[0]]
    assert places == [(3, 2), (1, 2), (2, 3), (2, 1), (2, 2), (2, 2), (2, 2), (2, 2)]


def test_attention_between_quarters_has_the_constant_that_it_states():
    torch.manual_seed(0)
    model = attending((1, 8, 8), 16, (8,))
    optimizer_of(model, lr=0.1)  # which makes its maps orthogonal
    body, image = model[:-1].double(), torch.rand(1, 1, 8, 8, dtype=torch.float64)
    certificate = wn.certify(body, image, box=(0, 1))
    assert 1.5 < certificate.lipschitz <= (1 + math.sqrt(5) / 2) * (1 + 1e-6)
    found = wn.lower_bound(body, image, box=(0, 1), steps=20, generator=torch.Generator().manual_seed(0))
    assert 0.1 * certificate.lipschitz < found.value <= certificate.lipschitz


def test_the_body_has_the_constant_one_and_the_rows_are_at_most_one_also_after_training(training):
    task = training()
    fit(task)
    pixels = torch.rand(1, 3, 32, 32)
    proved = wn.certify(task.model[:-1], pixels, box=(0, 1)).lipschitz
    assert 0.99 < proved <= 1 + 1e-6  # caps are held in float32, as stored
    assert task.model[-1].weight.norm(dim=1).max() <= 1 + 1e-6
    # some change is kept: the bound is tight
    body = task.model[:-1].double()
    found = wn.lower_bound(body, pixels.double(), box=(0, 1), steps=20, generator=torch.Generator().manual_seed(0))
    assert found.value > 0.9 * proved


def test_the_loss_is_the_cross_entropy_of_a_lowered_logit():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    torch.testing.assert_close(margin_loss(logits, labels, 0.0, 1.0), F.cross_entropy(logits, labels))
    lowered = logits.clone()
    lowered[torch.arange(6), labels] -= 1.5
    expected = 0.5 * F.cross_entropy(2 * lowered, labels)
    torch.testing.assert_close(margin_loss(logits, labels, 1.5, 0.5), expected)
    right = (2 * lowered).softmax(1).gather(1, labels[:, None])[:, 0]
    annealed = -0.5 * ((1 - right) ** 5 * right.log()).mean()
    torch.testing.assert_close(margin_loss(logits, labels, 1.5, 0.5, 5.0), annealed)


def test_a_batch_depends_on_seed_and_step_alone(training):
    task, again, other = training(), training(), training(seed=1)
    for each in (task, again, other):
        each.model.load_state_dict(task.model.state_dict())
    for _ in range(3):
        task.batch_loss()
        task.step += 1
    again.step = other.step = 3  # as after a stop, in the second epoch
    found, expected, different = (each.batch_loss().item() for each in (again, task, other))
    assert found == expected != different


def test_a_library_that_is_missing_is_named(training, monkeypatch):
    monkeypatch.setitem(sys.modules, "deel", None)
    with pytest.raises(ValueError, match=r"deel-torchlip is not installed .*--only network=wellnormed"):
        Training(replace(small(), network="deel-torchlip"), torch.device("cpu"))


def test_runs_that_all_diverged_are_told_without_a_figure():
    rows = [{"config": vars(small()), "results": dict.fromkeys(MEASURED)}]
    assert figures(rows) == {}
    assert [line.ours for line in verdicts(rows, "cpu")] == ["0"]  # no image of theirs was certified or attacked


def test_the_files_of_mnist_are_read_as_published(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mnist").mkdir()
    mnist.load_mnist.cache_clear()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz was not found; set WELLNORMED_DATA"):
        mnist.load_mnist("train")
    images, labels = bytes(range(16)) + bytes([7]) * (2 * 784), bytes(8) + bytes([3, 9])
    for name, content in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / "mnist" / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    pixels, classes = mnist.load_mnist("test")
    assert pixels.shape == (2, 1, 28, 28)
    assert bool((pixels == 7).all())
    assert classes.tolist() == [3, 9]
    mnist.load_mnist.cache_clear()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels[:-1]))
    with pytest.raises(DataError, match="2 images and 1 labels"):
        mnist.load_mnist("test")
    mnist.load_mnist.cache_clear()
