"""The tables of docs/results.md on steps and matrix signs on a GPU, from the content of their files."""

from collections.abc import Iterator
from typing import Any

PEER = "torch.optim.Muon"
SAID = (
    "A step of Muon on hidden matrices, in milliseconds, launches and waits included, beside torch's Muon in the same "
    "run. Before the first run on a GPU a batch had at most 2^20 entries, so that each of these matrices was one, and "
    "bounds were copied from the CPU. Now a batch is a tenth of all entries, and a 24th under constraints. What a step "
    "takes at most is beside weights, gradients and state. A wait is one of the host for the device, as far as torch "
    "notices it. The later run was cut after 22 seconds."
)
Lines = list[tuple[object, ...]]


def steps(before: dict[str, Any], now: dict[str, Any]) -> Lines:
    """A line of each optimizer and model: time now, over torch's Muon now and before, memory, waits, graphs."""
    pairs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for when, content in (("before", before), ("now", now)):
        for row in content["rows"]:
            pairs.setdefault((row["model"], row["optimizer"]), {})[when] = row
    return [
        (
            model,
            optimizer,
            f"{found['now']['seconds'] * 1e3:.1f}" if "now" in found else "-",
            *(_over_peer(found.get(when), pairs.get((model, PEER), {}).get(when)) for when in ("now", "before")),
            *(_of(found["now"]) if "now" in found else ("-", "-", "-")),
        )
        for (model, optimizer), found in pairs.items()
    ]


def _over_peer(row: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
    return "-" if row is None or peer is None else f"{row['seconds'] / peer['seconds']:.2f}"


def _of(row: dict[str, Any]) -> Iterator[object]:
    yield f"{row['peak_bytes'] / 2**20:.0f}"
    yield row["waits"]
    yield "yes" if row["graph"] == "yes" else "no"


def signs(content: dict[str, Any]) -> Lines:
    """A line of each input and contender that ran: milliseconds, over torch's Muon, share of the peak."""
    return [
        (row["input"], row["contender"], f"{row['seconds'] * 1e3:.3f}", f"{row['ratio']:.2f}",
         f"{row['useful_of_peak']:.0%}")
        for row in content["rows"]
        if "missing" not in row
    ]  # fmt: skip
