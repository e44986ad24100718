"""The blocks of docs/certified-mnist.md on MNIST, which lies in `$WELLNORMED_DATA/mnist`: accuracy, radii, an attack.

WELLNORMED_DATA=data python -m benchmarks.certified_mnist
"""

import argparse
import lzma
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docs.run_examples import code_of
from papers.header import header, write_result
from wellnormed.data._download import places

PAGE = Path("docs/certified-mnist.md")
OUTPUT = Path("results/certified-mnist.json")
HEADING = "\n\n## On MNIST\n\n"
SEED = 0
RADII = (0.25, 0.5, 1.0, 1.58, 2.0)


def mnist(train: bool, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images `(N, 1, 28, 28)` with pixels in [0, 1], and labels, of the first `count` or all.

    Raises:
        FileNotFoundError: There is no MNIST in `$WELLNORMED_DATA`, nor in the user's cache.
    """
    part = "train" if train else "t10k"
    arrays = []
    for kind, start in (("images-idx3", 16), ("labels-idx1", 8)):
        found = [path for path in places(f"mnist/{part}-{kind}-ubyte.xz") if path.exists()]
        if not found:
            raise FileNotFoundError("there is no MNIST: set WELLNORMED_DATA to a folder that holds mnist/*-ubyte.xz")
        arrays.append(torch.from_numpy(np.frombuffer(lzma.decompress(found[0].read_bytes()), np.uint8)[start:].copy()))
    images, labels = arrays[0].reshape(-1, 1, 28, 28)[:count].float() / 255, arrays[1][:count].long()
    return images, labels


def run(epochs: int, train: int | None = None, test: int | None = None) -> dict[str, Any]:
    """What the page's blocks define when they train on so many images; the last one, which attacks, is left out."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(code_of(PAGE)[:-1]):
        exec(code, names)
        if number == 0:  # the page has drawn its own digits: others in their place
            names["EPOCHS"] = epochs
            names["images"], names["labels"] = mnist(True, train)
            names["test_images"], names["test_labels"] = mnist(False, test)
    return names


def section(content: dict[str, Any]) -> str:
    """The end of the page, from a result."""
    words = (
        f"[One run](../results/certified-mnist.json), `{content['command']}`, seed {content['seed']}, commit "
        f"{content['commit'][:10]}, on {content['machine']}: {content['epochs']} epochs of {content['train_images']:,} "
        f"images. Of the 10,000 test images {content['accuracy']:.1%} are classified rightly, half of all within "
        f"{content['median_radius']:.2f} and more. The attack is of the first {content['attacked']}."
    )
    lines = [
        textwrap.fill(words, 138, break_on_hyphens=False),
        "",
        "| radius | certified, of 10,000 | certified, of those attacked | not broken by the attack |",
        "|--:|--:|--:|--:|",
    ]
    for row in content["rows"]:
        shares = (row[key] for key in ("certified", "certified_of_attacked", "not_broken_of_attacked"))
        lines.append(f"| {row['radius']} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Train, certify, attack, and write the result and the end of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train", type=int, default=60_000, help="of the 60,000 images, the first so many")
    options, start = parser.parse_args(), time.perf_counter()
    found = run(options.epochs, options.train)
    radii, right = found["radii"], found["right"]
    attacked, exact = 300, found["exact"]
    images, labels = found["test_images"][:attacked].double(), found["test_labels"][:attacked]
    rows = []
    for radius in RADII:
        budget = torch.full((len(images), 1, 1, 1), radius).double()
        stands = exact(found["attack"](images, labels, budget)).argmax(1) == labels
        rows.append(
            {
                "radius": radius,
                "certified": float((radii >= radius).double().mean()),
                "certified_of_attacked": float((radii[:attacked] >= radius).double().mean()),
                "not_broken_of_attacked": float(stands.double().mean()),
                "broken_inside_radius": int(((radii[:attacked] >= radius) & ~stands).sum()),
            }
        )
    content = {
        **header(f"python -m benchmarks.certified_mnist --epochs {options.epochs} --train {options.train}", SEED),
        "runs": 1,
        "train_images": options.train,
        "epochs": options.epochs,
        "l2_lipschitz": found["certificate"].l2_lipschitz,
        "accuracy": float(right.double().mean()),
        "median_radius": float(radii.median()),
        "attacked": attacked,
        "rows": rows,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_result(OUTPUT, content)
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(before.rstrip() + HEADING + section(content), encoding="utf-8")


if __name__ == "__main__":
    main()
