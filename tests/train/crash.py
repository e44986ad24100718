"""Runs of the command line in forked children whose file operations are stopped at a chosen one.

The tests start this file as a script, because forking is safe only in a process with one thread:
`python crash.py TEXT WHICH` prints the list of outcomes as JSON. SIGKILL comes just before an operation, which is
just after the one before. WHICH is `every` operation, or `some`: every fourth of the last of each kind (the same
operation on files of the same name is of one).
"""

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

OPTIONS = """
--steps 6 --batch 2 --threads 1 --device cpu --checkpoint-every 2 --log-every 2 --attack-steps 1 --sample-characters 5
--model.length 8 --model.token-width 4 --model.mixing-heads 2 --model.hidden 8 --model.blocks 1
""".split()  # noqa: SIM905 (a command line reads best as one)
PART = "parts/model-00001-of-00001.safetensors"
MADE_AGAIN = ("environment.json", "report.html", ".lock", ".holder")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def bits(folder):
    """Name of every file -> digest of what a resumed run must repeat: all but times and speeds."""
    found = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        content = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):  # white space means nothing
            rows = [json.loads(each) for each in (content.splitlines() if path.suffix == ".jsonl" else [content])]
            for row in rows:
                row.pop("digest")
                for timed in ("tokens_per_second", "peak_memory_bytes", "update_share", "metrics_sha256"):
                    row.pop(timed, None)
                row.get("sha256", {}).pop("metrics.jsonl", None)  # which covers the speeds
            content = json.dumps(rows).encode()
        name = str(path.relative_to(folder))
        found[name] = "made again" if name in MADE_AGAIN else hashlib.sha256(content).hexdigest()
    return found


def operation(event, arguments):
    """What an operation does to the run's folder, in words; None for those that change nothing there."""
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, str) and "runs/" in path and (flags & WRITING if mode is None else set(mode) & set("wax+")):
            return f"open {path}"
    elif event == "os.mkdir":
        if "runs/" in str(arguments[0]) and not os.path.exists(arguments[0]):
            return f"mkdir {arguments[0]}"
    elif event in ("os.rename", "os.remove", "os.rmdir") and "/tmp/" not in str(arguments[0]):
        return f"{event} {arguments[0]}"
    return None


def call(arguments):
    """Status and standard error of one command."""
    from wellnormed.cli import main

    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
        except BaseException:
            status = "traceback"
            traceback.print_exc()
    return status, shown.getvalue()


def child(arguments, at=-1):
    """One command in a child: its status and standard error (None if it was killed), and its file operations."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        seen = []

        def hook(event, details):
            what = operation(event, details)
            if what is None:
                return
            seen.append(what)
            if len(seen) == at + 1:
                os.write(write, json.dumps([None, None, seen]).encode())
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        os.write(write, json.dumps([*call(arguments), seen]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return answer


def limited(size, *arguments):
    """One command where no file may be larger: the kernel refuses in the middle of it."""
    from wellnormed.cli import main

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return main(list(arguments))


def signalled_twice(*arguments):
    """One command that is signalled twice in its first step."""
    from wellnormed.cli import main
    from wellnormed.train.language import LanguageTask

    def advance(task):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    LanguageTask.advance = advance
    return main(list(arguments))


def main(text, which):
    from wellnormed.certificates.certificate import Certificate
    from wellnormed.train import evaluate, finish

    # every run of the same bits has the same program and certificate, which take most of a run's time
    capture, programs = evaluate.capture, []

    def captured(model, example):
        if not programs:
            programs.append(capture(model, example))
        return programs[0]

    evaluate.capture = captured
    begin = ["train", "--source", text, *OPTIONS, "--name"]
    status, shown = call([*begin, "warm"])
    assert status == 0, shown
    certificate = Certificate.load("runs/warm/certificate.json")
    finish.certify_model = lambda *model: certificate
    print(json.dumps(outcomes_of(begin, which)))


def outcomes_of(begin, which):
    shutil.rmtree("runs/whole", ignore_errors=True)
    status, shown, operations = child([*begin, "whole"])
    assert status == 0, shown
    outcomes = []
    kinds = {re.sub(r"[0-9]+", "", f"{what.split()[0]} {Path(what).name}"): at for at, what in enumerate(operations)}
    chosen = {"every": range(len(operations)), "some": sorted(kinds.values())[::4]}
    for at in chosen[which]:
        name = f"kill-{at}"
        status, shown, seen = child([*begin, name], at)
        assert len(seen) > at, f"operation {at} was never reached: {shown}"
        resume = ["train", "--resume", f"runs/{name}"]
        if which == "every":  # the resumed run is stopped too, at one of its first operations
            child(resume, at % 13)
        again, advice, _ = child(resume)
        begun_anew = again != 0
        if begun_anew:  # the run had not begun to exist
            again, _, _ = child([*begin, name])
        resumed, expected = bits(f"runs/{name}"), bits("runs/whole")
        differing = sorted(file for file in resumed | expected if resumed.get(file) != expected.get(file))
        configured = any(what.startswith("os.rename") and "config.json" in what for what in seen[:at])
        outcomes.append({
            "at": seen[at], "configured": configured, "status": status, "shown": shown, "advice": advice,
            "begun anew": begun_anew, "again": again, "differing": differing,
        })  # fmt: skip
    return outcomes


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.undrawn import undrawn

    with undrawn():
        main(*sys.argv[1:])
