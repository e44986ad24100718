"""airbench's network and images against their definitions."""

from itertools import pairwise

import pytest
import torch

from papers import _airbench, _cifar
from papers._airbench import AirbenchRun, AirbenchTask, airbench, augmented, whitening_kernels
from wellnormed.train.task import fit

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(200, 3, 32, 32, generator=GENERATOR)


@pytest.fixture
def task(monkeypatch):
    for module in (_airbench, _cifar):
        data = IMAGES[:40], torch.arange(40) % 10
        monkeypatch.setattr(module, "pixels_and_labels", lambda split, device, data=data: data)
    return lambda **settings: AirbenchTask(
        AirbenchRun(**{"width": 1 / 16, "lr": 0.1, "steps": 4, "batch": 8, "seed": 0, **settings}), torch.device("cpu")
    )


def test_the_parameters_of_airbench():
    channels = (24, 64, 64, 256, 256, 256, 256)
    kernels = sum(9 * a * b for a, b in pairwise(channels))
    trained = sum(p.numel() for p in airbench(1.0, IMAGES).parameters() if p.requires_grad)
    assert trained == kernels + 2 * (64 + 256 + 256) + 2560


def test_whitened_patches_are_uncorrelated_with_variance_one():
    centred = IMAGES - IMAGES.mean((0, 2, 3), keepdim=True)
    kernels = whitening_kernels(centred, floor=0.0)
    outputs = torch.nn.functional.conv2d(centred, kernels).movedim(1, -1).flatten(0, 2)[:, :12]
    covariance = outputs.mT @ outputs / len(outputs)
    # float32 sums over 190,000 patches, which err by less than 1e-3; a wrong direction would err by its correlation
    assert torch.allclose(covariance, torch.eye(12), atol=5e-3)
    assert torch.equal(kernels[12:], -kernels[:12])


def test_augmented_images_are_crops_of_the_padded_ones_or_of_their_mirror_images():
    images = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(1, 3, 8, 8)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), "reflect")[0]
    crops = [padded[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
    views = crops + [crop.flip(-1) for crop in crops]
    generator = torch.Generator().manual_seed(0)
    drawn = augmented(images.expand(400, -1, -1, -1), torch.randint(2, (400,), generator=generator), generator)
    number = [next(i for i, view in enumerate(views) if torch.equal(view, one)) for one in drawn]
    assert (
        len(set(number)) == 50
    )  # each of 50 is missed by 400 draws with probability 50 x 0.98^400 = 0.015; seed fixed


def test_logits_are_averaged_over_six_views(task):
    run, image = task(averaged=True), IMAGES[:1]
    run.model = lambda views: views[:, 0, 0, :1]  # the first pixel; borders are reflected
    pixels = image[0, 0]
    of_views = (pixels[0, 0] + pixels[0, 31] + pixels[1, 1] + pixels[1, 30]) / 4
    assert float(run.logits(image)) == pytest.approx(float(of_views), rel=1e-5)  # four float32 additions
    run.run = AirbenchRun(1 / 16, 0.1, 4, 8, 0)
    assert float(run.logits(image)) == float(pixels[0, 0])


def test_norms_end_within_their_radii_whatever_the_start(task):
    run = task(lr=1.0, steps=4)
    fit(run)
    result = run.evaluate()
    assert 0.1 < result["norm"] <= 1.0  # the first step, of rate 1, forgets the start
    assert 0 <= result["accuracy"] <= 1
