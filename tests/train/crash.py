"""Commands that are stopped from without, and what a resumed run must repeat."""

import contextlib
import hashlib
import io
import json
import os
import resource
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


def bits(folder):
    """Name of every file -> digest of what a resumed run must repeat: all but times and speeds."""
    found = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        content = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):  # white space means nothing
            rows = [json.loads(each) for each in (content.splitlines() if path.suffix == ".jsonl" else [content])]
            for row in rows:
                row.pop("digest")
                for timed in ("tokens_per_second", "peak_memory_bytes", "metrics_sha256"):
                    row.pop(timed, None)
                row.get("sha256", {}).pop("metrics.jsonl", None)  # which covers the speeds
            content = json.dumps(rows).encode()
        name = str(path.relative_to(folder))
        found[name] = "made again" if name in MADE_AGAIN else hashlib.sha256(content).hexdigest()
    return found


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


def killed(number, *arguments):
    """One command that is killed after so many times that it made, opened, renamed or removed a file of a run."""
    left = iter(range(number, -1, -1))

    def hook(event, details):
        acts = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and "runs/" in str(details[0])
        if acts and next(left, None) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return call(list(arguments))[0]


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
