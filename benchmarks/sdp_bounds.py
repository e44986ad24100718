"""Joint bounds of networks (`certify(effort="high")`) beside products of norms and a search, with the time they take.

The public networks of LipSDP lie in `$WELLNORMED_DATA/nets`; the others have random weights.

WELLNORMED_DATA=data OMP_NUM_THREADS=1 python -m benchmarks.sdp_bounds            # half an hour of one core
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers.header import header, write_result
from wellnormed.data._download import find

OUTPUT = Path("results/sdp-bounds.json")
COMMAND = "python -m benchmarks.sdp_bounds"
SEED = 0
BEST_KNOWN = {"lipsdp_mnist": 24.367, "lipsdp_random": 36.482}
"""The optimum of LipSDP by neurons, from a general solver of semidefinite programs."""


class Residuals(nn.Module):
    """`x + B f(A x)`, some times, and a last map."""

    def __init__(self, blocks: int, width: int, hidden: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(blocks))
        self.last, self.act = nn.Linear(width, 10), act

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + 0.5 * down(self.act(up(x)))
        return self.last(x)


def chain(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear maps with weights as He et al. draw them, and a function between each two."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
        nn.init.kaiming_normal_(layers[-2].weight)  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])


def public(name: str) -> nn.Sequential | None:
    """A public network, without biases; None where its file is not."""
    if (path := find(f"nets/{name}.npz")) is None:
        return None
    stored = np.load(path)
    weights = [torch.from_numpy(stored[f"w{i}"]).double() for i in range(len(stored.files))]
    model = chain(weights[0].shape[1], *map(len, weights))
    for layer, weight in zip(model[::2], weights, strict=True):
        layer.weight, layer.bias = nn.Parameter(weight), None
    return model


def networks() -> Iterator[tuple[str, nn.Module, int]]:
    """Name, model and number of inputs."""
    for name, inputs in (("lipsdp_mnist", 784), ("lipsdp_random", 2)):
        if (model := public(name)) is not None:
            yield name, model, inputs
    for title, act in (("ReLU", nn.ReLU), ("tanh", nn.Tanh), ("GELU", nn.GELU)):
        yield f"20-50-50-50-5, {title}", chain(20, 50, 50, 50, 5, act=act), 20
    yield "50-...-50-10, ReLU", chain(*[50] * 9, 10), 50
    yield "784-256-256-10, ReLU", chain(784, 256, 256, 10), 784
    yield "residuals, GELU", Residuals(4, 32, 64, F.gelu), 32


def measure(name: str, model: nn.Module, inputs: int) -> dict[str, Any]:
    """Bounds in Euclidean norms, what a search finds, and seconds of one core."""
    model = model.double().eval()
    example = torch.zeros(1, inputs, dtype=torch.float64)
    plain = wn.certify(model, example, math.inf)
    began = time.process_time()
    joint = wn.certify(model, example, math.inf, effort="high")
    seconds = time.process_time() - began
    began = time.process_time()
    wn.verify(joint, model.state_dict())
    checked = time.process_time() - began
    outputs = plain.rows[-1].shape[-1]
    found = wn.lower_bound(model, example, radius=10.0).value * math.sqrt(outputs / inputs)
    assert joint.l2_lipschitz is not None
    assert found <= joint.l2_lipschitz
    return {
        "network": name, "product": plain.l2_lipschitz, "joint": joint.l2_lipschitz, "found": found,
        "best_known": BEST_KNOWN.get(name), "seconds": round(seconds, 2), "seconds_of_the_checker": round(checked, 2),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rows = []
    for name, model, inputs in networks():
        rows.append(measure(name, model, inputs))
        print(rows[-1], flush=True)
    write_result(options.output, header(COMMAND, SEED) | {"rows": rows})


if __name__ == "__main__":
    main()
