"""A certified MNIST classifier by deel-torchlip, beside that of docs/certified-mnist.md: same data, epochs and loss.

The network is that of the library's own examples: two convolutions of 3 x 3, each followed by GroupSort2 and pooling by
Euclidean norms, and two linear layers, all 1-Lipschitz by construction as the library says, with its default settings.
It is trained by Adam at rates that fall to zero; the loss asks for the margin that the page asks for. Its export
to plain layers is then certified by `wn.certify`, whose constant gives the radii, and its largest gain is searched for.

    pip install ".[models]"
    WELLNORMED_DATA=data python -m benchmarks.torchlip_mnist
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from benchmarks.certified_mnist import PAGE, RADII, SEED
from docs.run_examples import code_of
from papers.header import header, write_result

OUTPUT = Path("results/torchlip-mnist.json")
RATES, BATCH = (0.001, 0.003, 0.01), 100  # at 0.03 its weights become NaN


def network() -> Any:
    """The classifier of the library's examples; the last layer is 1-Lipschitz as a whole, not by output."""
    from deel import torchlip as lip

    return lip.Sequential(
        lip.SpectralConv2d(1, 16, (3, 3), padding="same"),
        lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)),
        lip.SpectralConv2d(16, 32, (3, 3), padding="same"),
        lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)),
        nn.Flatten(),
        lip.SpectralLinear(32 * 7 * 7, 64),
        lip.GroupSort2(),
        lip.SpectralLinear(64, 10),
    )


def train(rate: float, epochs: int, images: Tensor, labels: Tensor) -> tuple[nn.Module, float]:
    """The exported network after training, and the seconds of processor time."""
    count = len(images)
    torch.manual_seed(SEED)
    model, start = network(), time.process_time()
    optimizer, steps = torch.optim.Adam(model.parameters(), lr=rate), epochs * (count // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        for chosen in torch.randperm(count, generator=generator).split(BATCH)[: count // BATCH]:
            optimizer.zero_grad()
            F.multi_margin_loss(model(images[chosen]), labels[chosen], margin=1.5 * math.sqrt(2)).backward()
            optimizer.step()
            schedule.step()
    return model.vanilla_export().eval(), time.process_time() - start


def measure(rate: float, data: dict[str, Any]) -> dict[str, Any]:
    """One row: accuracy, the proved constant, the largest gain found, and the certified shares."""
    model, seconds = train(rate, data["EPOCHS"], data["images"], data["labels"])
    images, labels = data["test_images"], data["test_labels"]
    certificate = wn.certify(model, images[:1], box=(0, 1))
    found = wn.lower_bound(model, images[:4], box=(0, 1), steps=100, generator=torch.Generator().manual_seed(SEED))
    gain = found.value * certificate.l2_lipschitz / certificate.lipschitz  # of RMS -> of Euclidean norms
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(1000)]).double()
    first, second = logits.topk(2).values.unbind(1)
    reach = (first - second) / math.sqrt(2) * (logits.argmax(1) == labels)
    return {
        "rate": rate,
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "l2_lipschitz": certificate.l2_lipschitz,
        "gain_found": gain,
        "seconds_of_training": round(seconds, 1),
        "certified": {str(r): float((reach / certificate.l2_lipschitz >= r).double().mean()) for r in RADII},
    }


def main() -> None:
    """Train at every rate, certify, and write the rows."""
    torch.set_num_threads(1)
    about, rows, data = header("python -m benchmarks.torchlip_mnist", SEED), [], {}
    exec(code_of(PAGE)[0], data)  # the images of the page
    for rate in RATES:
        rows.append(measure(rate, data))
        print(rows[-1], flush=True)
        content = {"peer": "deel-torchlip 1.0.5", "train_images": len(data["images"]), "epochs": data["EPOCHS"]}
        write_result(OUTPUT, {**about, **content, "rows": rows})


if __name__ == "__main__":
    main()
