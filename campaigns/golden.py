"""The golden record: certificates, optimizer steps, training runs and the guide's outputs, to the bit.

    python -m campaigns.golden --write        # before a change: writes build/golden.json
    python -m campaigns.golden                # after it: prints what differs, and exits with 1 if anything does
    python -m campaigns.golden --against HEAD # the same without the first: records that revision too

Floats differ among processors and versions of torch, so a record holds for one machine and is not part of the
repository. On one machine it is the same every time. A revision is recorded by its own `campaigns/golden.py`, so that
it needs no names of this one. `--only certificates steps` leaves out the other parts; all of them take two minutes on
one core.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # sums in one order, whatever else runs

import torch
from torch import Tensor, nn

import wellnormed as wn
from campaigns.zoo import certificates, refusals
from wellnormed import cli

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build" / "golden.json"
Record = dict[str, Any]


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# --- fifty steps of every named optimizer and constraint ---


class Net(nn.Module):
    """A table, a convolution, matrices of equal and other shapes, gains and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.table(tokens).mT).mT
        return self.head(self.norm(x + self.second(torch.relu(self.first(x)))))


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Every named optimizer, and every setting that changes what a step computes."""
    o = wn.optim
    return {
        "ConditionalGradient": lambda m: o.ConditionalGradient(m, lr=0.05),
        "Scion": lambda m: wn.Scion(m, lr=0.05),
        "Scion, constrained": lambda m: wn.Scion(m, lr=0.05, unconstrained=False),
        "Scion, decay": lambda m: wn.Scion(m, lr=0.05, weight_decay=0.1),
        "Scion, radii": lambda m: wn.Scion(m, lr=0.05, radius=2.0, radii={"head.*": 3.0}, lr_factors={"*.bias": 0.5}),
        "Scion, buffer": lambda m: wn.Scion(m, lr=0.05, momentum=0.9, nesterov=True, memory="buffer"),
        "Scion, normuon": lambda m: wn.Scion(m, lr=0.05, directions={"*": o.directions.NorMuon()}),
        "Scion, maximize": lambda m: wn.Scion(m, lr=0.05, maximize=True),
        "Scion, modular": lambda m: wn.Scion(m, lr=0.05, recipe="modular"),
        "Scion, language": lambda m: wn.Scion(m, lr=0.05, recipe="language"),
        "Scion, per head": lambda m: wn.Scion(m, lr=0.05, per_head=True),
        "Muon": lambda m: wn.Muon(m, lr=0.02),
        "Muon, original": lambda m: wn.Muon(m, lr=0.02, adjust_lr_fn="original"),
        "Muon, match_rms_adamw": lambda m: wn.Muon(m, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        "Muon, recipe muon": lambda m: wn.Muon(m, lr=0.02, recipe="muon"),
        "Almond": lambda m: wn.Almond(m, lr=0.05),
        "SpectralDescent": lambda m: o.SpectralDescent(m, lr=0.01),
        "Signum": lambda m: o.Signum(m, lr=0.005),
        "NormalizedSGD": lambda m: o.NormalizedSGD(m, lr=0.05),
    }


def constrained() -> dict[str, tuple[Callable[[], Any], str]]:
    """Every constraint, and the weights that it can hold."""
    c, matrices = wn.constraints, "[fs]*[td].weight"  # those of `first` and `second`
    return {
        "SoftCap": (lambda: c.SoftCap(1.2), matrices),
        "HardCap": (lambda: c.HardCap(1.2), matrices),
        "HardCap, every 4": (lambda: c.HardCap(1.2, every=4), matrices),
        "SpectralNormalize": (lambda: c.SpectralNormalize(1.2), matrices),
        "Clip": (lambda: c.SpectralInterval(0.3, 1.2), matrices),
        "Stiefel": (lambda: c.Stiefel(1.2), matrices),
        "Stiefel, svd": (lambda: c.Stiefel(1.2, method="svd"), matrices),
        "ClippedWeightDecay": (lambda: c.ClippedWeightDecay(0.9, 0.25), matrices),
        "WeightDecay": (lambda: c.WeightDecay(1.2), matrices),
        "SpectralWeightDecay": (lambda: c.SpectralWeightDecay(0.1), matrices),
        "Hammer": (lambda: c.Hammer(1.2), matrices),
        "Orthogonal": (lambda: c.Orthogonal(1.2), matrices),
        "Sphere": (lambda: c.Sphere(1.2), matrices),
        "FixedNorm": (lambda: c.FixedNorm(), matrices),
        "ColumnCap": (lambda: c.ColumnCap(1.2), "table.weight"),
        "EntryCap": (lambda: c.EntryCap(1.2), "norm.weight"),
        "QKClip": (lambda: c.QKClip(), matrices),
    }


Made = tuple[torch.optim.Optimizer, Any]
"""An optimizer, and what holds the weights after its steps, or None."""


def fifty_steps(model: nn.Module, make: Callable[[nn.Module], Made]) -> Record:
    """Hashes of weights and state after fifty steps on one task; or the error that refuses it."""
    try:
        optimizer, held = make(model)
        for step in range(50):
            tokens = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), (3 * tokens + 1).flatten() % 20).backward()
            optimizer.step()
    except (ValueError, TypeError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    state = {f"{i}.{key}": t for i, own in optimizer.state_dict()["state"].items() for key, t in own.items()}
    if held is not None:
        state |= {f"constraints.{name}": tensor for name, tensor in held.state_dict().items()}
    return {"weights": digest(dict(model.named_parameters())), "state": digest(state), "tensors": sorted(state)}


def steps() -> Iterator[tuple[str, Any]]:
    """Fifty steps of every optimizer, and of every constraint under Scion and under AdamW, which declares no steps."""

    def scion(model: nn.Module, pattern: str, constraint: Callable[[], Any]) -> Made:
        optimizer = wn.Scion(model, lr=0.05)
        return optimizer, wn.constrain(optimizer, {pattern: constraint()})

    def adamw(model: nn.Module, pattern: str, constraint: Callable[[], Any]) -> Made:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return optimizer, wn.constrain(optimizer, {pattern: constraint()}, norms=wn.assign_norms(model))

    for name, optimizer_of in optimizers().items():
        torch.manual_seed(0)
        yield name, fifty_steps(Net(), lambda model, make=optimizer_of: (make(model), None))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 20))
    yield "ModularDescent", fifty_steps(layers, lambda model: (wn.optim.ModularDescent(model, lr=0.05), None))
    for name, (constraint, pattern) in constrained().items():
        for title, make in (("Scion", scion), ("AdamW", adamw)):
            torch.manual_seed(0)
            yield f"{title} with {name}", fifty_steps(Net(), partial(make, pattern=pattern, constraint=constraint))


# --- one tiny run of each command ---

WORDS = ["Speak, speak. ", "We know't, we know't.\n", "Resolved, resolved: ", "let us kill him! ", "Is't a verdict?\n"]
RUN = shlex.split("--steps 6 --batch 4 --threads 1 --device cpu --checkpoint-every 3 --log-every 2 --attack-steps 2")
CHARACTERS = shlex.split("--sample-characters 20 --source text.txt --model.length 8")
POTENTIAL = shlex.split("--model.token-width 4 --model.mixing-heads 2 --model.hidden 16 --model.blocks 2")
ATTENTION = ["--model.attention-heads", "2"]
GPT = shlex.split("--model.width 16 --model.blocks 2 --model.heads 2")
TOKENS = shlex.split("--data shards --model.length 16 --validation-tokens 300 --sample-tokens 20")
RUNS = {
    "characters": ["train", *RUN, *CHARACTERS, *POTENTIAL, *ATTENTION],
    "characters, positions": ["train", "--preset", "positions", *RUN, *CHARACTERS, *POTENTIAL],
    "characters, caps": ["train", "--preset", "caps", *RUN, *CHARACTERS, *GPT],
    "characters, paper": ["train", "--preset", "paper", *RUN, *CHARACTERS, *GPT],
    "tokens": ["train", "nanogpt", *RUN, *TOKENS, *GPT],
    "tokens, hard cap, Muon": [
        *("train", "nanogpt", *RUN, *TOKENS, *GPT, "--optimizer", "muon", "--constraint", "hard-cap"),
        *("--micro-batch", "2", "--schedule", "cosine", "--precision", "bfloat16"),
    ],
    "tokens, nanogpt": ["train", "nanogpt", "--variant", "nanogpt", *RUN, *TOKENS, *GPT],
}
OF_THE_MACHINE = re.compile("second|memory|flops|share|minutes|digest|sha256")
"""Parts of the names of what is measured of the machine and not of the run, and digests over it."""


def commands() -> Iterator[tuple[str, Any]]:
    """Weights, metrics, results and certificate of tiny runs, and what `sample` and `verify` then print."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        draw = torch.Generator().manual_seed(0)
        text = "".join(WORDS[int(torch.randint(len(WORDS), (), generator=draw))] for _ in range(200))
        Path("text.txt").write_text(text)
        Path("validation.txt").write_text(text[:1000])
        shards = ["tokens", "text.txt", "shards", "--validation", "validation.txt", "--tokenizer", "bytes"]
        yield "tokens of a text", _command(shards)
        for label, arguments in RUNS.items():
            name = label.replace(",", "").replace(" ", "-")
            yield f"{label}: command", _command([*arguments, "--name", name])
            folder = Path("runs", name)
            if not (folder / "model.safetensors").exists():
                continue
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            yield f"{label}: metrics", [_own(row) for row in rows]
            yield f"{label}: results", _own(json.loads((folder / "results.json").read_text()))
            yield f"{label}: weights", hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            if (folder / "certificate.json").exists():
                yield f"{label}: verify", _command(["verify", str(folder)])
            yield f"{label}: sample", _command(["sample", str(folder), "--characters", "20", "--seed", "3"])


def _command(arguments: list[str]) -> Record:
    """Status and, of commands that print no times, output."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = cli.main(arguments)
    shown = {"output": output.getvalue()} if arguments[0] in ("verify", "sample") else {}
    return {"status": status, "errors": errors.getvalue()} | shown


def _own(row: Record) -> Record:
    return {key: value for key, value in row.items() if not OF_THE_MACHINE.search(key)}


# --- the guide ---


def guide() -> Iterator[tuple[str, Any]]:
    """The output of every code block of README.md and docs/*.md."""
    spec = importlib.util.spec_from_file_location("run_examples", ROOT / "docs" / "run_examples.py")
    assert spec is not None
    assert spec.loader is not None
    examples = importlib.util.module_from_spec(spec)
    sys.modules["run_examples"] = examples
    spec.loader.exec_module(examples)
    for page in examples.PAGES:
        torch.manual_seed(0)
        for number, block in enumerate(examples.run(page), start=1):
            if block.expected is not None:
                yield f"{page.name}, output {number}", block.printed


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "certificates": certificates,
    "refusals": refusals,
    "steps": steps,
    "commands": commands,
    "guide": guide,
}


def record(parts: list[str]) -> Record:
    """The record of these parts, as JSON holds it."""
    torch.set_num_threads(1)
    found = {f"{part}: {name}": value for part in parts for name, value in PARTS[part]()}
    return json.loads(json.dumps(found))


def differences(before: Any, now: Any, at: str = "") -> Iterator[str]:
    """One line for each value that is not what it was."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            place = f"{at} / {key}" if at else key
            if key not in now:
                yield f"{place}: is missing now"
            elif key not in before:
                yield f"{place}: is new"
            else:
                yield from differences(before[key], now[key], place)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{at}[{number}]")
    elif before != now:
        yield f"{at}:\n  before {before}\n  now    {now}"


def at_revision(revision: str, parts: list[str]) -> Record:
    """The record of a revision, by its own script in a worktree that is removed afterwards."""
    with tempfile.TemporaryDirectory() as place:
        tree, file = Path(place, "tree"), Path(place, "golden.json")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            paths = os.pathsep.join([str(tree / "src"), str(tree)])
            command = [sys.executable, "-m", "campaigns.golden", "--write", "--file", str(file), "--only", *parts]
            subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": paths}, check=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        return json.loads(file.read_text())


def main() -> int:
    """Write the record, or compare it with one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the record instead of comparing it")
    parser.add_argument("--against", metavar="REVISION", help="compare with this revision of git instead of the record")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--file", type=Path, default=RECORD, help="where the record is")
    options = parser.parse_args()
    if not options.write and options.against is None and not options.file.exists():
        parser.error(f"{options.file} is missing; write it before the change, or pass --against REVISION")
    now = record(options.only)
    if options.write:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(now, indent=1))
        print(f"{len(now)} entries in {options.file}; they hold for this machine")
        return 0
    before = at_revision(options.against, options.only) if options.against else json.loads(options.file.read_text())
    before = {key: value for key, value in before.items() if key.split(": ")[0] in options.only}
    lines = list(differences(before, now))
    print("\n".join(lines) or f"all {len(now)} entries are as before")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
