"""What cannot work is refused in one sentence, as early as it can be known."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

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
import sys
from wellnormed.cli import main
status = main(sys.argv[1:])
assert not {"torch", "numpy"} & sys.modules.keys()
sys.exit(status)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Speak, speak. We know't, we know't.\n" * 60)
    return tmp_path


def without_torch(*arguments):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("which", [[], ["nanogpt"]])
def test_a_folder_that_cannot_be_made_is_refused_before_torch_is_imported(here, which):
    (here / "runs").mkdir()
    (here / "file").write_text("x")
    (here / "link").symlink_to("nowhere")
    before = sorted(here.rglob("*"))
    for name, message in (
        ("a" * 300, "could not be written (File name too long); choose a shorter name"),
        ("../file", "a file stands where there should be a folder, so choose another name"),
        ("../file/within", "a file stands where there should be a folder, so choose another name"),
        ("../link", "runs/../link is a link to nowhere, which does not exist; mend it or remove it"),
        ("../link/within", "link is a link to nowhere, which does not exist; mend it or remove it"),
        ("..", "runs/.. holds 'file' but no config.json; choose another --name"),
    ):
        status, shown = without_torch("train", *which, "--name", name)
        assert (status, message in shown) == (2, True), shown
    assert sorted(here.rglob("*")) == before


def test_the_version_is_told_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "wellnormed 0.1.0\n")


def test_a_disk_that_takes_no_more_is_refused_before_torch_is_imported(here):
    if os.geteuid() == 0 and os.path.isdir("/proc/self"):
        status, shown = without_torch("train", "--name", "/proc/wellnormed")  # where even root makes no folder
        assert (status, "/proc/wellnormed could not be written" in shown) == (2, True)
    else:
        (here / "runs").mkdir(mode=0o500)
        status, shown = without_torch("train")
        assert (status, "could not be written (Permission denied); make room or give permission" in shown) == (2, True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "scion"])
def test_a_rate_at_which_nothing_stays_finite_is_one_sentence(here, optimizer, capsys):
    assert main(["tokens", "text.txt", "data", "--validation", "text.txt", "--tokenizer", "bytes"]) == 0
    options = [*TOKENS, "--optimizer", optimizer, "--learning-rate", "1e30", "--constraint", "none"]
    capsys.readouterr()
    assert main(["train", *options, "--name", "run"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert "lower the learning rate" in shown
    assert "JSON" not in shown


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_named_with_its_place(value):
    with pytest.raises(ValueError, match=rf"rows\.1\.loss is {value}, which is no result.*lower the learning rate"):
        json_text({"rows": [{"loss": 1.0}, {"loss": value}]})


@pytest.mark.slow
def test_the_largest_seed_trains_samples_and_searches(here):
    """The draws of a step once needed seed times steps to be below 2**64."""
    assert main(["tokens", "text.txt", "data", "--validation", "text.txt", "--tokenizer", "bytes"]) == 0
    seed = str(2**60 - 1)
    assert main(["train", *TOKENS, "--name", "tokens", "--certify", "no", "--seed", seed]) == 0
    assert main(["train", "--source", "text.txt", *OPTIONS, "--name", "characters", "--seed", seed]) == 0
    assert main(["sample", "runs/characters", "--prompt", "S", "--characters", "3", "--seed", seed]) == 0


@pytest.mark.parametrize("which", [["nanogpt", "--data", "shakespeare"], []])
def test_a_run_that_began_without_a_network_goes_on_with_its_own_text(here, which, monkeypatch, capsys):
    monkeypatch.setenv("WELLNORMED_DATA", str(here / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setattr(shakespeare, "_files_of_plays", list)
    monkeypatch.setattr(shakespeare, "URL", (here / "text.txt").as_uri())
    options = [*TOKENS[1:-2], *which[1:], "--certify", "no"] if which else OPTIONS
    assert main(["train", *which[:1], *options, "--name", "run"]) == 0
    shown = capsys.readouterr().out
    assert "there is no Shakespeare here, so this is the English that Python ships: " in shown
    assert "python-topics of Python 3." in RunFolder("runs/run").report_file.read_text()
    content = (here / "text.txt").read_bytes()
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(content).hexdigest())  # now there is a network
    assert load_shakespeare().source == "tiny-shakespeare"
    RunFolder("runs/run").manifest_file.unlink()
    assert main(["train", "--resume", "runs/run"]) == 0
    assert "python-topics of Python 3." in capsys.readouterr().out


def test_a_seed_that_is_too_large_is_refused_by_all_commands(here, capsys):
    for command in (["train", "--source", "text.txt"], ["train", "nanogpt"]):
        assert main([*command, "--seed", str(2**60)]) == 2
        assert "must lie in [0, 2**60)" in capsys.readouterr().err


def test_a_finished_run_on_a_read_only_disk_is_shown(here, monkeypatch, capsys):
    assert main(["train", "--source", "text.txt", *OPTIONS, "--name", "run"]) == 0
    before = RunFolder("runs/run").report_file.read_bytes()
    capsys.readouterr()
    opened = Path.open

    def read_only(path, mode="r", *more, **named):
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", read_only)
    assert main(["train", "--resume", "runs/run"]) == 0
    shown = capsys.readouterr()
    assert "this run is finished" in shown.out
    assert "validation loss" in shown.out
    assert "the report stays as it is: runs/run/report.html could not be written (Read-only file system)" in shown.out
    assert RunFolder("runs/run").report_file.read_bytes() == before
    RunFolder("runs/run").manifest_file.unlink()
    assert main(["train", "--resume", "runs/run"]) == 2  # one that is not finished would have to be written
    assert "runs/run/.holder could not be written (Read-only file system)" in capsys.readouterr().err
