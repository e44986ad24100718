"""The golden record is the same again, and names what a change of behaviour has moved."""

from itertools import islice

from campaigns.golden import PARTS, differences
from wellnormed.optim import parts
from wellnormed.proof import functions


def record():
    """The first two entries of each of the quick parts."""
    quick = ("certificates", "refusals", "steps")
    return {f"{part}: {name}": value for part in quick for name, value in islice(PARTS[part](), 2)}


def test_a_change_of_behaviour_is_named_and_nothing_else(monkeypatch):
    before = record()
    assert not list(differences(before, record()))
    low, _, *rest = functions.FUNCTIONS["gelu"]
    monkeypatch.setitem(functions.FUNCTIONS, "gelu", (low, "1.2", *rest))
    monkeypatch.setattr(parts.Oracle, "__call__", lambda self, seen: 0.999 * seen.norm.dualize(seen.momentum))
    places = {line.split(" / ")[0] for line in differences(before, record())}
    assert places == {name for name in before if not name.startswith("refusals")}
    assert list(differences(before, {})) == [f"{name}: is missing now" for name in before]
