"""A campaign goes on where it stopped, without the number that ended its process."""

import math

import pytest

from campaigns.outcomes import Outcome, go_on


def test_a_campaign_goes_on(tmp_path, capsys):
    path, examined = tmp_path / "rows.jsonl", []

    def examine(number):
        examined.append(number)
        if examined == [0, 1, 2]:
            raise KeyboardInterrupt
        outcome = Outcome(number, (), 1.0, "within")
        with outcome.recorded():
            assert number != 3
        return outcome

    with pytest.raises(KeyboardInterrupt):
        go_on(path, 5, math.inf, examine, ("crashed",))
    path.write_text(path.read_text()[:-5])  # of the last row, which was cut off as its number was begun
    found = go_on(path, 5, math.inf, examine, ("crashed",))
    assert examined == [0, 1, 2, 3, 4]
    assert [(each["number"], each["status"]) for each in found] == [(0, "within"), (3, "crashed"), (4, "within")]
    assert "rows, 3" in capsys.readouterr().out
    assert go_on(path, 6, 0.0, examine, ()) == found
