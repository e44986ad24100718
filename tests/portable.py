"""The numerical tests under other kernels than this processor's own: what holds on one machine must hold on all.

    python -m tests.portable [ROOM ...]

Every request (an environment variable of MKL or of torch, and a number of threads) is first tried on three small
computations. Where every bit stays as it was under an earlier request, this processor has ignored it, which is said,
and nothing is run twice. `tests.third` takes two thirds of every tolerance away.
"""

import hashlib
import json
import os
import subprocess
import sys
import time

ROOMS = ("matrix", "norms", "routing", "constraints", "nn", "modular", "optim", "certificates")
REQUESTS = (
    "", "MKL_ENABLE_INSTRUCTIONS=SSE4_2", "MKL_ENABLE_INSTRUCTIONS=AVX2", "MKL_CBWR=COMPATIBLE",
    "ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2",
)  # fmt: skip
THREADS = (1, 2)


def digest(tensor) -> str:
    """Of every bit of a result."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def used() -> dict[str, str]:
    """What this process computes with: names where a library tells them, and results to compare."""
    import torch

    x = torch.randn(1024, 640, generator=torch.Generator().manual_seed(0))
    return {
        "vectors of torch": torch.backends.cpu.get_cpu_capability(),
        "products": digest(x.mT @ x) + digest(x.mT.double() @ x.double()),
        "eigenvectors": digest(torch.linalg.eigh((x.mT @ x)[:300, :300]).eigenvectors),
        "sums": digest(torch.exp(x).sum(0)) + digest(torch.linalg.vector_norm(x, dim=0)),
    }


def ask(environment: dict[str, str]) -> dict[str, str]:
    """`used`, in a process of its own."""
    command = [sys.executable, "-c", "import json; from tests.portable import used; print(json.dumps(used()))"]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def run(environment: dict[str, str], threads: int, rooms: tuple[str, ...]) -> int:
    """The tests of the rooms: two processes of one thread each, or one of several."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.third", "-m", "not slow and not gpu"]
    command += [f"tests/{room}" for room in rooms]
    return subprocess.run([*command, *(["-n", "2"] if threads == 1 else [])], env=environment, check=False).returncode


def main(rooms: tuple[str, ...]) -> int:
    """Try every request, run the tests under each that changes something, and sum up."""
    seen: dict[tuple[str, ...], str] = {}
    verdicts: list[str] = []
    failed = False
    for threads in THREADS:
        plain: dict[str, str] = {}
        for request in REQUESTS:
            name = f"{request or 'no request'}, {threads} thread{'s' * (threads > 1)}"
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            environment |= dict([request.split("=")]) if request else {}
            found = ask(environment)
            plain = plain or found
            results = tuple(value for key, value in found.items() if key != "vectors of torch")  # a name
            if results in seen:
                verdicts.append(f"{name:50} ignored by this processor: every bit as under {seen[results]!r}")
                print(verdicts[-1], flush=True)
                continue
            changed = ", ".join(key for key, value in found.items() if value != plain[key]) or "nothing"
            seen[results] = name
            print(f"== {name}: vectors of torch {found['vectors of torch']}; changes {changed}", flush=True)
            start = time.monotonic()
            code = run(environment, threads, rooms)
            failed |= code != 0
            verdict = "passed" if code == 0 else f"FAILED (exit status {code})"
            verdicts.append(f"{name:50} {verdict} in {time.monotonic() - start:.0f} s; changes {changed}")
    print("\n".join(["", *verdicts]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or ROOMS))
