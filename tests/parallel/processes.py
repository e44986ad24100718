"""A few processes that stay alive between tests and run functions together; starting them takes longer than a test."""

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.apart import CONTEXT

TIMEOUT = 300.0
"""Seconds for one function in all processes; a collective call that waits as long fails. On a busy machine the start of
a model, 5 seconds of processor time, has taken a minute."""


class Processes:
    """A gloo group of `world` processes. They look functions up by name, in modules of this folder."""

    def __init__(self, world):
        self.folder = tempfile.TemporaryDirectory()
        ends = [CONTEXT.Pipe() for _ in range(world)]
        self.pipes = [here for here, _ in ends]
        self.children = [
            CONTEXT.Process(target=_serve, args=(rank, world, self.folder.name, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for child in self.children:
            child.start()
        for _, there in ends:
            there.close()

    def run(self, function, *args):
        """What `function(*args)` returns in every process. If one fails, all are ended and its traceback is shown."""
        # pytest gives the modules of tests names of its own
        home = f"{__package__}.{function.__module__.rpartition('.')[2]}"
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((home, function.__name__, args)))
        results, errors, deadline = {}, [], time.monotonic() + TIMEOUT
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    fine, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.children[rank].join(1)
                    stack = Path(self.folder.name, f"crash-{rank}").read_text()
                    fine, value = False, f"the process ended with code {self.children[rank].exitcode}\n{stack}"
                if fine:
                    results[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
                    deadline = min(deadline, time.monotonic() + 2)  # the others wait for it in vain
        if waiting or errors:
            self.stop()
            silent = [f"rank {rank}: no answer" for rank in waiting.values()]
            raise AssertionError("\n".join([f"in {len(self.pipes)} processes:", *errors, *silent]))
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self):
        for child in self.children:
            child.kill()
            child.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    @property
    def alive(self):
        return all(child.is_alive() for child in self.children)


def _serve(rank, world, folder, pipe):
    stack = open(os.path.join(folder, f"crash-{rank}"), "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.enable(stack)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=TIMEOUT)
    )
    with contextlib.suppress(EOFError):  # the parent has gone
        while True:
            message = pipe.recv_bytes()
            try:
                home, name, args = pickle.loads(message)
                answer = True, getattr(importlib.import_module(home), name)(*args)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))
