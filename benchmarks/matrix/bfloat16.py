"""Times of products in bfloat16 over those in float32 on this processor, beside the flags that `msign` decides by.

python -m benchmarks.matrix.bfloat16
"""

import torch

from wellnormed.matrix.msign import multiplies_bfloat16

from .record import alternate, median, write

SHAPES = ((768, 128, 1024), (768, 1024, 128), (1024, 1024, 1024))
"""Rows, inner side and columns: the products of the preset `cpu`, and a large one."""
FLAGS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "bf16")


def main() -> None:
    """Write `results/matrix/bfloat16.json`, and print it."""
    generator, rows = torch.Generator().manual_seed(0), []
    for m, k, n in SHAPES:
        left, right = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k)))
        half_left, half_right = left.bfloat16(), right.bfloat16()
        contenders = {
            "float32": lambda a=left, b=right: a @ b.mT,
            "bfloat16": lambda a=half_left, b=half_right: a @ b.mT,
        }
        seconds = {name: median(times) for name, times in alternate(contenders, rounds=200, seconds=10)[0].items()}
        rows.append({"shape": [m, k, n], "bfloat16_over_float32": round(seconds["bfloat16"] / seconds["float32"], 2)})
        print(rows[-1])
    known = torch.cpu.get_capabilities()
    flags = {name: bool(known.get(name)) for name in FLAGS}
    content = {"flags": flags, "taken_as_native": multiplies_bfloat16("cpu"), "rows": rows}
    print(write("bfloat16", "python -m benchmarks.matrix.bfloat16", content), flags, content["taken_as_native"])


if __name__ == "__main__":
    main()
