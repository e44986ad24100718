"""What cannot work is refused in one sentence, as early as it can be known."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from wellnormed._files import json_text
from wellnormed.cli import main
from wellnormed.data import load_shakespeare, shakespeare
from wellnormed.train import RunFolder

from .crash import OPTIONS

TOKENS = """
nanogpt --steps 6 --batch 4 --model.width 16 --model.blocks 1 --model.heads 2 --model.length 16 --checkpoint-every 3
--validation-tokens 500 --attack-steps 1 --sample-tokens 5 --device cpu --data data
""".split()  # noqa: SIM905 (a command line reads best as one)
WITHOUT_TORCH = """
import json, os, sys
from wellnormed.cli import main
statuses = [main(arguments) for arguments in json.loads(sys.argv[1])]
assert not {"torch", "numpy"} & sys.modules.keys()
print(json.dumps(statuses), os.environ["OMP_WAIT_POLICY"])
"""


def without_torch(*commands, **environment):
    """The statuses of commands in one process that imports no torch, OpenMP's policy in it, and its errors by line."""
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    statuses, _, policy = done.stdout.splitlines()[-1].rpartition(" ")
    return json.loads(statuses), policy, done.stderr.splitlines()


def test_a_folder_that_cannot_be_made_is_refused_before_torch_is_imported(place):
    (place / "runs").mkdir()
    (place / "runs" / "file").write_text("x")
    (place / "runs" / "link").symlink_to("nowhere")
    before = sorted(place.rglob("*"))
    cases = (
        ("a" * 300, "could not be written (File name too long); choose a shorter name"),
        ("file", "a file stands where there should be a folder, so choose another name"),
        ("link", "runs/link is a link to nowhere, which does not exist; repair it or remove it"),
        ("../x", "'../x' must be the name of one folder in runs/, without slashes and line breaks"),
    )
    for which in ([], ["nanogpt"]):
        statuses, _, shown = without_torch(*(["train", *which, "--name", name] for name, _ in cases))
        assert statuses == [2] * len(cases)
        for (_, message), line in zip(cases, shown, strict=True):
            assert message in line
    assert sorted(place.rglob("*")) == before


def test_waiting_threads_sleep_unless_the_user_wants_them_to_spin():
    """OpenMP reads the environment once, when torch is imported."""
    assert without_torch(["--version"])[:2] == ([0], "PASSIVE")
    assert without_torch(["--version"], OMP_WAIT_POLICY="ACTIVE")[:2] == ([0], "ACTIVE")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "scion"])
def test_a_rate_at_which_nothing_stays_finite_is_one_sentence(place, optimizer, refused):
    assert main(["tokens", "text.txt", "data", "--validation", "text.txt", "--tokenizer", "bytes"]) == 0
    options = [*TOKENS, "--optimizer", optimizer, "--learning-rate", "1e30", "--constraint", "none"]
    shown = refused("train", *options, "--name", "run")
    assert "lower the learning rate" in shown
    assert "JSON" not in shown


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_named_with_its_place(value):
    with pytest.raises(ValueError, match=rf"rows\.1\.loss must be finite, got {value}: .*lower the learning rate"):
        json_text({"rows": [{"loss": 1.0}, {"loss": value}]})


@pytest.mark.parametrize("which", [["nanogpt", "--data", "shakespeare"], []])
def test_a_run_that_began_without_a_network_goes_on_with_its_own_text(place, which, monkeypatch, capsys):
    monkeypatch.setenv("WELLNORMED_DATA", str(place / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(shakespeare, "_files_of_plays", list)
    monkeypatch.setattr(shakespeare, "URL", (place / "text.txt").as_uri())
    options = [*(TOKENS[1:-2] if which else OPTIONS), *which[1:], "--certify", "no", "--sample-tokens", "0"]
    assert main(["train", *which[:1], *options, "--name", "run"]) == 0
    shown = capsys.readouterr().out
    first = shown.partition("\n")[0]
    assert first == "no Shakespeare is available, so this is the English text that Python ships:"
    assert "python-topics of Python 3." in RunFolder("runs/run").report_file.read_text()
    content = (place / "text.txt").read_bytes()
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(content).hexdigest())  # now there is a network
    assert load_shakespeare().source == "tiny-shakespeare"
    RunFolder("runs/run").manifest_file.unlink()
    assert main(["train", "--resume", "runs/run"]) == 0
    assert "python-topics of Python 3." in capsys.readouterr().out


def test_a_seed_that_is_too_large_is_refused_by_all_commands(place, refused):
    for which in (["--source", "text.txt"], ["nanogpt"]):
        assert "must lie in [0, 2**60)" in refused("train", *which, "--seed", str(2**60))
