"""The blocks of docs/certified-mnist.md on MNIST, which lies in `$WELLNORMED_DATA/mnist`: accuracy, radii, an attack.

One run writes what the blocks print into the page, and the result; the page's last section is written from it and from
that of `benchmarks.torchlip_mnist`.

WELLNORMED_DATA=data python -m benchmarks.certified_mnist            # three minutes
python -m benchmarks.certified_mnist --section                       # the last section alone
"""

import argparse
import json
import math
import textwrap
import time
from pathlib import Path
from typing import Any

from docs.run_examples import code_of, rewritten
from papers.header import header, write_result

PAGE = Path("docs/certified-mnist.md")
OUTPUT, PEER = Path("results/certified-mnist.json"), Path("results/torchlip-mnist.json")
HEADING = "\n\n## Beside deel-torchlip\n\n"
COMMAND = "python -m benchmarks.certified_mnist"
SEED = 0
RADII = (0.25, 0.5, 1.0, 1.58, 2.0)


def run(**instead: Any) -> dict[str, Any]:
    """What the page's blocks define, where `instead` changes what the first one does; the last, an attack, is left out.

    Example:
        `run(train=6000, test=300, EPOCHS=1)`, of the images the first so many.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    first, *others = code_of(PAGE)[:-1]
    exec(first, names)
    for part, prefix in (("train", ""), ("test", "test_")):
        for name in ("images", "labels"):
            names[prefix + name] = names[prefix + name][: instead.get(part)]
    names["EPOCHS"] = instead.get("EPOCHS", names["EPOCHS"])
    for code in others:
        exec(code, names)
    return names


def rounded_up(bound: float) -> str:
    """Four digits behind the point, and never less than the bound."""
    return f"{math.ceil(bound * 1e4) / 1e4:.4f}"


def section(content: dict[str, Any], peer: dict[str, Any]) -> str:
    """The end of the page, from the two results."""
    ours = {row["radius"]: row["certified"] for row in content["rows"]}
    best = max(peer["rows"], key=lambda row: row["certified"]["1.0"])
    library = "[deel-torchlip](https://github.com/deel-ai/deel-torchlip)"
    words = (
        "The shares of the test images that are classified rightly and certified within a radius, after "
        f"{content['epochs']} epochs of the same {content['train_images']:,} images with the same loss: [the run above]"
        f"(../results/certified-mnist.json), and [the network](../results/torchlip-mnist.json) of {library}'s examples "
        f"(`{peer['command']}`) at the best of {len(peer['rows'])} rates of Adam, {best['rate']:g}. Nothing else of it "
        "was tuned; its own loss and longer training may do better.",
        f"The accuracies are {content['accuracy']:.1%} and {best['accuracy']:.1%}. Both constants are proved here: at "
        f"most {rounded_up(content['l2_lipschitz'])} and {rounded_up(best['l2_lipschitz'])}. A search finds a gain of "
        f"{best['gain_found']:.3f} in the second network.",
    )
    lines = [f"| {r} | {ours[r]:.1%} | {best['certified'][str(r)]:.1%} |" for r in RADII]
    lines = ["| radius | this page | deel-torchlip |", "|--:|--:|--:|", *lines]
    first, last = (textwrap.fill(text, 128, break_on_hyphens=False, break_long_words=False) for text in words)
    return "\n".join([first, "", *lines, "", last, ""])


def write_section() -> None:
    """Write the end of the page from the results that there are."""
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    content, peer = (json.loads(path.read_text(encoding="utf-8")) for path in (OUTPUT, PEER))
    PAGE.write_text(before.rstrip() + HEADING + section(content, peer), encoding="utf-8")


def main() -> None:
    """Train, certify, attack, and write the result and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="store_true", help="write the last section of the page alone")
    if parser.parse_args().section:
        return write_section()
    about, start, found = header(COMMAND, SEED), time.perf_counter(), {}
    PAGE.write_text(rewritten(PAGE.resolve(), found), encoding="utf-8")
    radii, attacked = found["radii"], found["attacked"]
    rows = [
        {
            "radius": radius,
            "certified": float((radii >= radius).double().mean()),
            "certified_of_attacked": float((radii[attacked] >= radius).double().mean()),
            "not_broken_of_attacked": float(stands.double().mean()),
            "broken_inside_radius": int(((radii[attacked] >= radius) & ~stands).sum()),
        }
        for radius, stands in found["unbroken"].items()
    ]
    content = {
        **about,
        "runs": 1,
        "train_images": len(found["images"]),
        "epochs": found["EPOCHS"],
        "l2_lipschitz": found["certificate"].l2_lipschitz,
        "accuracy": float(found["right"].double().mean()),
        "median_radius": float(radii.median()),
        "attacked": attacked.stop,
        "rows": rows,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_result(OUTPUT, content)
    write_section()


if __name__ == "__main__":
    main()
