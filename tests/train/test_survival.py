"""A run survives kills, files that cannot grow and damage to any of its files, or says in one line what is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apart import ended
from tests.train.crash import MADE_AGAIN, OPTIONS, PART, bits, call, killed, limited
from wellnormed._files import json_text, read_json
from wellnormed.train.lock import locked

from .conftest import with_runs

WHICH = pytest.mark.parametrize("which", ["some", pytest.param("every", marks=pytest.mark.slow)])
"""Some places; the slow tests take every one."""


def one_line(shown):
    """One sentence on one line, naming what it is about."""
    assert shown.startswith(("error: ", "NOT VERIFIED: ")), shown
    assert shown.count("\n") == 1, shown
    assert "Errno" not in shown, shown
    return shown


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, and in runs/whole a finished run without figures."""
    begin = ["train", "--source", "text.txt", "--name", "whole", *OPTIONS]
    with with_runs(tmp_path_factory.mktemp("place"), begin) as folder:
        yield folder


@pytest.fixture
def damaged(place):
    """A copy of the finished run, to be damaged."""
    shutil.rmtree(place / "runs" / "damaged", ignore_errors=True)
    return Path(shutil.copytree(place / "runs" / "whole", place / "runs" / "damaged"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(0, 30, 3), *range(30, 300, 9)])
def test_a_kill_at_any_moment_ends_in_the_same_bits(number, place, tmp_path):
    run, begin = place / "runs" / "killed", ["train", "--source", "text.txt", "--name", "killed", *OPTIONS]
    shutil.rmtree(run, ignore_errors=True)
    status, _ = ended(killed, number, *begin, errors=tmp_path / "errors")
    assert status in (-signal.SIGKILL, 0)  # 0: it had ended before
    status, shown = call(["train", "--resume", "runs/killed"])
    if status != 0:  # it had not begun to exist
        assert re.search(r"does not exist|was killed before it began", one_line(shown))
        assert call(begin)[0] == 0
    assert bits(run) == bits(place / "runs" / "whole")


def test_a_file_that_stops_growing_is_one_line_and_then_the_same_bits(place, tmp_path):
    """The kernel itself refuses in the middle of a file: of the checkpoint here."""
    run = place / "runs" / "limited"
    shutil.rmtree(run, ignore_errors=True)
    limit = (place / "runs/whole/checkpoints/step-00000006" / PART).stat().st_size // 2
    command = ["train", "--source", "text.txt", "--name", "limited", *OPTIONS]
    status, shown = ended(limited, limit, *command, errors=tmp_path / "errors")
    assert status == 2, shown
    assert f"step-00000002/{PART} could not be written (File too large)" in one_line(shown)
    assert not list(run.rglob("*.tmp"))  # half a file would keep a full disk full
    assert call(["train", "--resume", "runs/limited"])[0] == 0
    assert bits(run) == bits(place / "runs" / "whole")


FILES = [
    "config.json", "environment.json", "metrics.jsonl", "certificate.json", "certificate.safetensors", "results.json",
    "sample.txt", "model.safetensors", "manifest.json", "report.html", ".lock",
    *(f"checkpoints/step-0000000{step}/{name}" for step in (4, 6)
      for name in (PART, "metrics.jsonl", "manifest.json")),
]  # fmt: skip


def damages(content, which):
    """A missing file (None), a changed byte; `every`: also elsewhere, a part of it, something appended."""
    yield None
    for length in {len(content) // 2, 0, 1, len(content) - 1} & set(range(len(content))) if which == "every" else ():
        yield content[:length]
    for place in {len(content) // 3, *([len(content) - 2] if which == "every" else [])} & set(range(len(content))):
        changed = bytearray(content)
        changed[place] ^= 1
        yield bytes(changed)
    if which != "some":
        yield content + b"\0garbage"


def test_the_list_of_files_is_complete(place):
    whole = place / "runs" / "whole"
    assert sorted(FILES) == sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())


PRODUCTS = ("manifest.json", "results.json", "sample.txt", "model.safetensors", "report.html")
STAGES = [(name, "finished") for name in FILES if "checkpoints" not in name]
STAGES += [(name, "before the end") for name in FILES if name not in PRODUCTS and "step-00000004" not in name]


@WHICH
@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_damage_ends_in_the_same_bits_or_in_one_line(name, stage, which, damaged, place):
    """Resuming either repeats every bit or names the damaged file and the way out; the way out then works."""
    expected = bits(place / "runs" / "whole")
    path = damaged / name
    whole = path.read_bytes()
    for content in damages(whole, which):
        if stage == "before the end":
            for product in PRODUCTS:
                (damaged / product).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        status, shown = call(["train", "--resume", "runs/damaged"])
        if status != 0:
            assert status == 2
            assert Path(name).name in one_line(shown)
            if name == "config.json":  # the run itself: nothing can make it again
                assert re.search("pass a run folder|pass the folder of a run|restore it from a copy", shown)
                path.write_bytes(whole)
            else:
                remove = re.search(
                    r"remove (\S+) to (?:resume|go on)|(\S+) (?:is|does|cannot|holds).*; remove it", shown
                )
                assert remove, shown
                doomed = place / (remove[1] or remove[2])
                shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
            status, shown = call(["train", "--resume", "runs/damaged"])
            assert status == 0, shown
        found = bits(damaged)
        differing = {file for file in expected if file not in MADE_AGAIN and found.get(file) != expected[file]}
        assert not differing, (name, content)
        assert "<svg>loss figure</svg>" in (damaged / "report.html").read_text()


_MODEL = ("config.json", "model.safetensors", "manifest.json")
_CERTIFICATE = ("certificate.json", "certificate.safetensors")
READ = {
    "sample": _MODEL,
    "certify": _MODEL,
    "verify": _MODEL + _CERTIFICATE,
    "report": (*_MODEL, *_CERTIFICATE, "environment.json", "metrics.jsonl", "results.json"),
}
"""Command -> the files that it reads."""
MORE = {"certify": ["--attack-steps", "0"], "sample": ["--characters", "3"]}


@WHICH
@pytest.mark.parametrize(("command", "name"), [(command, name) for command, names in READ.items() for name in names])
def test_other_commands_on_damage_succeed_or_say_one_line(command, name, which, damaged):
    whole = (damaged / name).read_bytes()
    certificate = (damaged / "certificate.json").read_bytes()
    for content in damages(whole, which):
        (damaged / "certificate.json").write_bytes(certificate)
        (damaged / name).write_bytes(b"" if content is None else content)
        status, shown = call([command, "runs/damaged", *MORE.get(command, [])])
        if status != 0:
            assert Path(name).name in one_line(shown)
        else:  # nothing that it says may differ: only white space at the end may be lost
            assert content is not None
            assert content.split() == whole.split(), (command, name)


@pytest.mark.parametrize("command", READ)
def test_files_that_a_command_does_not_read_may_be_damaged(command, damaged):
    for name in set(FILES) - set(READ[command]):
        (damaged / name).write_bytes(b"")
    assert call([command, "runs/damaged", *MORE.get(command, [])]) == (0, "")


def test_a_flipped_byte_anywhere_in_a_manifest_is_noticed(damaged):
    """The file that holds the checksums is covered by one of its own."""
    path = damaged / "checkpoints/step-00000006/manifest.json"
    (damaged / "manifest.json").unlink()
    whole = path.read_bytes()
    intact = read_json(path, "", sealed=True)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            found = read_json(path, "", sealed=True)
        except ValueError:
            continue
        assert found == intact
        assert json.loads(changed) == json.loads(whole), place  # only white space changed


def test_a_second_writer_is_refused_and_told_who_the_first_is(damaged):
    with locked(damaged):
        for command in (["train", "--resume", "runs/damaged"], ["certify", "runs/damaged", "--attack-steps", "0"]):
            status, shown = call(command)
            assert status == 2
            assert re.search(
                rf"runs/damaged is being written by process {os.getpid()} on host \S+ since 20\S+ \S+ UTC; wait until",
                one_line(shown),
            )
        for command in ("verify runs/damaged", "sample runs/damaged --characters 3", "report runs/damaged"):
            assert call(command.split()) == (0, ""), command
    assert call(["certify", "runs/damaged", "--attack-steps", "0"]) == (0, "")
    assert not (damaged / ".holder").exists()  # nothing names a machine once the writer has ended


HOLDER = """
import sys, time
from pathlib import Path
from wellnormed.train.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_falls_with_its_process(damaged):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(damaged)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        status, shown = call(["train", "--resume", "runs/damaged"])
        assert status == 2
        assert f"process {process.pid} " in shown
        process.kill()
    assert str(process.pid) in (damaged / ".holder").read_text()  # which means nothing any more
    assert call(["train", "--resume", "runs/damaged"])[0] == 0


@pytest.mark.parametrize("content", ["a file of its own", None])
def test_a_foreign_folder_is_left_alone(content, place, monkeypatch):
    foreign = place / "runs" / "foreign"
    shutil.rmtree(foreign, ignore_errors=True)
    foreign.mkdir()
    if content is not None:
        (foreign / "notes.txt").write_text(content)
    before = sorted(foreign.iterdir())
    for command in ("train --resume", "certify", "verify", "sample", "report"):
        status, shown = call([*command.split(), "runs/foreign"])
        assert status == 2
        assert "config.json is missing" in one_line(shown)
    if content is not None:
        status, shown = call(["train", "--source", "text.txt", "--name", "foreign", *OPTIONS])
        assert status == 2
        assert "holds 'notes.txt' but no config.json; choose another --name" in one_line(shown)
    assert sorted(foreign.iterdir()) == before


def test_a_run_of_an_older_format_is_named_as_such(damaged):
    config = json.loads((damaged / "config.json").read_text())
    del config["digest"]
    (damaged / "config.json").write_text(json_text(config | {"format": 1}, sealed=True))
    status, shown = call(["sample", "runs/damaged"])
    assert status == 2
    assert "config.json: format 1 is not 3" in one_line(shown)
