"""Forged certificates: what the checker and `wellnormed verify` say of 10,000 mutations of certificates.

Bytes, fields, orders, tensors and configs are edited (`campaigns.forgeries`), all digests are computed again, and
after an edit of what is computed everything that follows from it is stated anew. What is accepted is judged without the
checker's rules (`campaigns.statements`): a false accept is an accepted statement that graph and weights do not imply.
`wellnormed verify` is also asked of folders whose certificate, weights or config was edited.

    python -m campaigns.mutations --count 10500
    python -m campaigns.mutations --only 17      # one mutation, in full

What is done lies in `runs/mutations/`, so that a campaign goes on where it stopped; remove it to begin again. The same
under `python -O` must give the same answers: the file says how many differ, where both are there.
"""

import argparse
import copy
import io
import json
import re
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.random import Generator
from torch import nn

import wellnormed as wn
from campaigns import forgeries, statements
from campaigns.forgeries import Document, Draft, Tensors, changed, follow, pick, places, spans
from papers.header import header, write_result
from wellnormed._files import MANIFEST, _sha256, json_text, write_files
from wellnormed.certificates import Certificate
from wellnormed.certificates.certifying import arguments_of
from wellnormed.cli import Verify
from wellnormed.models import GPTConfig, PotentialConfig, load
from wellnormed.models.files import FORMAT, WEIGHTS
from wellnormed.models.gpt import GPT
from wellnormed.models.potential_gpt import PotentialGPT
from wellnormed.program.domain import domain_of
from wellnormed.proof import CheckError, check, check_folder
from wellnormed.proof.files import Stored, parse_json, read_safetensors
from wellnormed.propagation.stored import raw_tensor

RESULTS, PROGRESS = Path("results/mutations.json"), Path("runs/mutations")
NAMES = ("potential gpt", "gpt", "cnn")
SECONDS, BYTES = 10, 3 * 2**30
"""What a mutation may take; more is a hang, or memory that a forgery made the checker ask for."""
KINDS = {"bytes": 4, "fields": 5, "orders": 3, "constants": 1, "claims": 1, "groups": 1, "tensors": 2, "lowered": 3,
         "structure": 12, "folder": 4}  # fmt: skip
"""Kinds of mutations, and how often each is drawn."""
_UNFIT = (LookupError, TypeError, ValueError, AttributeError, StopIteration, RuntimeError)
"""What an edit ends in that a certificate has no place for, or a document that an edit has ruined."""
Files = dict[str, bytes]


@dataclass
class Case:
    """A certificate, and what is needed to judge its forgeries."""

    document: Document
    tensors: Tensors
    files: Files
    """A folder with the certificate and all tensors, which `wellnormed verify` reads if it is of a model of ours."""
    floor: Document = field(default_factory=dict)
    """What follows if every claim is the number itself: nothing less is true of these rows."""
    seen: set[int] = field(default_factory=set)


def model_of(name: str) -> tuple[nn.Module, Any]:
    """A small model with random weights, the same every time, and an example of its input."""
    torch.manual_seed(0)
    if name == "potential gpt":
        config = PotentialConfig(vocabulary_size=7, length=3, hidden=6, token_width=4, mixing_heads=2, blocks=1)
        model: nn.Module = PotentialGPT(config)
    elif name == "gpt":
        model = GPT(GPTConfig(vocabulary_size=7, width=8, heads=4, blocks=1, length=3, expansion=2))
    else:
        first = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GELU()]
        model = nn.Sequential(*first, nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.3)
            elif name == "cnn":
                parameter.abs_()
    return model.eval(), None if name != "cnn" else torch.zeros(1, 2, 16, 16)


@cache
def case_of(name: str) -> Case:
    """A certificate of that model."""
    model, example = model_of(name)
    certificate = wn.certify(model, example, margins=name != "gpt")
    own = {n: raw_tensor(t) for n, t in model.state_dict().items()}
    computed = {n: raw_tensor(t) for n, t in certificate.computed.items()}
    with tempfile.TemporaryDirectory() as folder:
        if name != "cnn":
            config = {"format": FORMAT, "model": asdict(model.config)}  # type: ignore[call-overload]
            kept = {WEIGHTS: _safetensors(own), "config.json": json_text(config, sealed=True, indent=2)}
            write_files(Path(folder) / "m", kept, {"format": FORMAT})
        certificate.save(Path(folder) / "m" / "certificate.json")
        files = {path.name: path.read_bytes() for path in sorted((Path(folder) / "m").iterdir())}
    files.setdefault(WEIGHTS, _safetensors(own))
    case = Case(json.loads(json.dumps(certificate.document())), own | computed, files)
    least = Draft(copy.deepcopy(case.document), case.tensors)
    follow(least, margin=False)
    case.floor = least.document
    return case


def _safetensors(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    head, position = {}, 0
    for name, each in tensors.items():
        head[name] = {
            "dtype": each.dtype,
            "shape": each.shape,
            "data_offsets": [position, position + len(each.content)],
        }
        position += len(each.content)
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(each.content for each in tensors.values())


@dataclass
class Outcome:
    """What became of one mutation."""

    number: int
    case: str
    kind: str
    status: str = ""
    """`refused`, `no edit`, `unchanged`, `looser`, `tighter`, `another`, `false`, or `raw`."""
    reason: str = ""
    seconds: float = 0.0


class _LateError(BaseException):
    pass


@contextmanager
def limits() -> Iterator[None]:
    """Raise a `_LateError` after some seconds, and a `MemoryError` beyond some memory."""

    def late(*_: Any) -> None:
        raise _LateError(f"more than {SECONDS} s of the processor")

    before, size = signal.signal(signal.SIGPROF, late), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES if pages else size[0], size[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, size)


def meaning(document: Document, tensors: Tensors) -> Any:
    """What is computed: the rows without numbers that were derived, and the tensors that they name."""
    rows = [
        {key: each for key, each in row.items() if key not in (*statements.KINDS, "claims")}
        | {"claims": [{k: v for k, v in claim.items() if k != "values"} for claim in row["claims"]]}
        for row in document["rows"]
    ]
    names = {n for row in rows for claim in row["claims"] for n in claim["tensors"]}
    names |= {each for row in rows for each in row["constants"].values() if isinstance(each, str) and each in tensors}
    return rows, {name: tensors[name].digest for name in names}


def numbers(document: Document) -> list[Decimal]:
    """The bounds that rows state, and the results."""
    found = [Decimal(v) for row in document["rows"] for k in statements.KINDS if row.get(k) for v in row[k]["values"]]
    results = [
        document["lipschitz"],
        document.get("l2_lipschitz") or 0,
        *chain(*document.get("attention_logits", {}).values()),
    ]
    return found + [Decimal(each) for each in results]


def judge(case: Case, document: Document, tensors: Tensors, number: int, full: bool) -> tuple[str, str]:
    """Of an accepted document: whether it is false, and if not, how it differs from the case's own."""
    document = json.loads(json.dumps(document))
    if meaning(document, tensors) == meaning(case.document, case.tensors):
        shapes = [[row[k]["shape"] for k in statements.KINDS] for row in document["rows"] if row.get("gain")]
        mine, least = numbers(document), numbers(case.floor)
        if len(mine) != len(least) or shapes != [
            [r[k]["shape"] for k in statements.KINDS] for r in case.floor["rows"] if r["gain"]
        ]:
            return _by_search(case, document, tensors, number, full)
        if any(a < b * (1 - Decimal("1e-12")) for a, b in zip(mine, least, strict=True)):
            return "false", "a number is less than what follows from the tensors' own norms"
        original = numbers(case.document)
        if mine == original:
            return "unchanged", ""
        return ("looser" if any(a > b for a, b in zip(mine, original, strict=True)) else "tighter"), ""
    return _by_search(case, document, tensors, number, full)


def _by_search(case: Case, document: Document, tensors: Tensors, number: int, full: bool) -> tuple[str, str]:
    before = {json.dumps({**row, **dict.fromkeys(statements.KINDS)}) for row in case.document["rows"]}
    new = {
        row["name"] for row in document["rows"] if json.dumps({**row, **dict.fromkeys(statements.KINDS)}) not in before
    }
    rng = np.random.default_rng(number)
    function = statements.Function(document, {})

    def edited(name: str) -> bool:
        row = function.rows[name]
        moved = [name, *row["inputs"]]
        for each in moved:
            if function.rows[each]["operation"] in statements.MOVES:
                moved += function.rows[each]["inputs"]
        return full or any(each in new for each in moved) or rng.random() < 0.15

    named = {n: t.array() for n, t in tensors.items()}
    margin = check(document, tensors).margin
    most = None if margin is None else float(margin)
    lies = statements.broken(document, named, most, number, case.seen, edited)
    return ("false", "; ".join(lies[:5])) if lies else ("another", "")


def reason_of(error: BaseException) -> str:
    """A refusal without names and numbers."""
    text = re.sub(r"^row \d+ \(.*?\): ", "", str(error), flags=re.DOTALL)
    text = re.sub(r"'.*'|\".*\"|\[.*\]|\(.*\)|\{.*\}", "…", text, flags=re.DOTALL)
    text = re.sub(r"\S*[\d/]\S*", "#", text)
    return text.partition(": ")[0][:70] if text.count(" ") > 12 else text[:70]


def memory(error: BaseException | None) -> bool:
    """Whether an error comes from a lack of memory."""
    return error is not None and (isinstance(error, MemoryError) or memory(error.__cause__))


def run(number: int, seed: int, full: bool = False, kind: str | None = None) -> Outcome:
    """Make one mutation, ask for its proof, and judge the answer."""
    rng = np.random.default_rng([seed, number])
    name = NAMES[number % len(NAMES)]
    weights = np.array(list(KINDS.values())) / sum(KINDS.values())
    drawn = kind or str(rng.choice(list(KINDS), p=weights))
    drawn = "structure" if name == "cnn" and drawn == "folder" else drawn
    outcome, start, case = Outcome(number, name, drawn), time.process_time(), case_of(name)
    try:
        with limits():
            if drawn == "folder":
                document, tensors = folder(case, name, rng)
            elif drawn == "bytes":
                document, tensors = in_bytes(case, rng)
            else:
                document, tensors = in_document(case, drawn, rng)
    except (CheckError, _RefusedError) as error:
        outcome.status, outcome.reason = "refused", reason_of(error)
        if full:
            print(error)
        if memory(error):
            outcome.status, outcome.reason = "raw", f"memory: {error}"
    except _NoEditError as error:
        outcome.status, outcome.reason = "no edit", str(error)
    except (Exception, _LateError):
        outcome.status, outcome.reason = "raw", traceback.format_exc().replace(f"{Path.cwd()}/", "")
    else:
        try:
            outcome.status, outcome.reason = judge(case, document, tensors, number, full)
        except Exception:  # what was accepted has no meaning
            outcome.status, outcome.reason = "false", traceback.format_exc().replace(f"{Path.cwd()}/", "")
    outcome.seconds = round(time.process_time() - start, 3)
    return outcome


class _NoEditError(Exception):
    """The drawn edit cannot be made of this certificate."""


class _RefusedError(Exception):
    """`wellnormed verify` says no."""


def in_document(case: Case, kind: str, rng: Generator) -> tuple[Document, Tensors]:
    """Edit the document or the tensors, and check them; what is accepted."""
    draft = Draft(copy.deepcopy(case.document), dict(case.tensors))
    try:
        getattr(forgeries, kind)(draft, rng)
        if kind == "tensors":
            draft.follow = rng.random() < 0.5
    except _UNFIT as error:
        raise _NoEditError(f"{type(error).__name__}") from error
    if kind != "fields" or rng.random() < 0.3:
        _try(draft.mend)
    if draft.follow:
        _try(lambda: follow(draft))
    check(draft.document, draft.tensors)
    return draft.document, draft.tensors


def _try(do: Any) -> None:
    """What cannot be mended stays, for the checker to refuse."""
    try:
        do()
    except (*_UNFIT, ArithmeticError):
        return


def in_bytes(case: Case, rng: Generator) -> tuple[Document, Tensors]:
    """Edit the bytes of a file, with or without mending all digests, and check the folder."""
    files = {n: each for n, each in case.files.items() if n == "certificate.json" or n.endswith(".safetensors")}
    name = pick(rng, files)
    files[name] = spans(files[name], rng)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for each, content in files.items():
            (folder / each).write_bytes(content)
        if rng.random() < 0.6:
            _try(lambda: (folder / "certificate.json").write_text(_mended(folder)))
        if rng.random() < 0.5:
            certificate, weights = folder / "certificate.json", folder / WEIGHTS
            wn.verify(certificate, weights)
        check_folder(folder)
        document = parse_json((folder / "certificate.json").read_bytes(), "it")
        tensors: dict[str, Stored] = {}
        for path in folder.glob("*.safetensors"):
            tensors |= read_safetensors(path)
    return document, tensors


def _mended(folder: Path) -> str:
    """The certificate's text with the digests of the tensors beside it, sealed."""
    draft = Draft(json.loads((folder / "certificate.json").read_bytes()), {})
    draft.document.pop("digest", None)
    for path in folder.glob("*.safetensors"):
        draft.tensors |= read_safetensors(path)
    draft.mend()
    draft.document["computed"] = {n: draft.tensors[n].digest for n in draft.document["computed"]}
    return json_text(draft.document, sealed=True, indent=1)


@cache
def _certified(config: str, weights: str, radius: float, box: tuple[float, float] | None, margins: bool) -> Certificate:
    return _certify(_MODELS[config, weights], None, radius, box=box, margins=margins)


_certify, _MODELS = wn.certify, {}


def _remembered(
    model: nn.Module, example: Any, radius: float = 1.0, *, box: Any = None, margins: bool = False, **nothing: None
) -> Certificate:
    """As `wn.certify`, once for every model."""
    key = repr(model.config), _sha256(b"".join(raw_tensor(t).content for t in model.state_dict().values()))
    _MODELS.setdefault(key, model)
    return _certified(*key, radius, box, margins)


def folder(case: Case, name: str, rng: Generator) -> tuple[Document, Tensors]:
    """Edit a file of a model's folder, mend every digest, and run `wellnormed verify`; what it accepts."""
    files, kind = dict(case.files), pick(rng, ("config", "config", "certificate", "certificate", "weights", "bytes"))
    draft = Draft(copy.deepcopy(case.document), dict(case.tensors))
    config = json.loads(files["config.json"])
    config.pop("digest")
    own = read_names(files[WEIGHTS])
    if kind == "config":
        way = pick(rng, places(config))
        forgeries.at(config, way[:-1])[way[-1]] = changed(forgeries.at(config, way), rng)
    elif kind == "weights":
        draft.tensors = {n: t for n, t in draft.tensors.items() if n in own}
        _edit(draft, "tensors", rng)
        files[WEIGHTS] = _safetensors(draft.tensors)
        draft.tensors |= {n: t for n, t in case.tensors.items() if n not in own}
        if rng.random() < 0.5:
            _try(lambda: follow(draft))
    elif kind == "certificate":
        edit = pick(rng, ("fields", "orders", "constants", "claims", "attention", "insert", "lowered", "structure"))
        _edit(draft, edit, rng)
        if draft.follow or rng.random() < 0.5:
            _try(lambda: follow(draft))
        if rng.random() < 0.5:  # what it computes may be edited too
            files["certificate.safetensors"] = _safetensors(
                {n: t for n, t in draft.tensors.items() if n not in own}
            )  # fmt: skip
    _try(draft.mend)
    with tempfile.TemporaryDirectory() as where:
        _try(lambda: files.update({"config.json": json_text(config, sealed=True, indent=2).encode()}))
        beside = Path(where) / "x"
        beside.write_bytes(files.get("certificate.safetensors", _safetensors({})))
        draft.document["computed"] = {n: t.digest for n, t in sorted(read_safetensors(beside).items())}
        beside.unlink()
        _try(lambda: files.update({"certificate.json": json_text(draft.document, sealed=True, indent=1).encode()}))
        if kind == "bytes":
            each = pick(rng, files)
            files[each] = spans(files[each], rng)
        manifest = json.loads(case.files[MANIFEST])
        manifest.pop("digest")
        if rng.random() < 0.8:
            manifest["sha256"] = {n: _sha256(files[n]) for n in manifest["sha256"]}
            files[MANIFEST] = json_text(manifest, sealed=True, indent=2).encode()
        for each, content in files.items():
            (Path(where) / each).write_bytes(content)
        said = io.StringIO()
        try:
            remembering = patch("wellnormed.certificates.verifying.certify", _remembered)
            with remembering, redirect_stdout(io.StringIO()), redirect_stderr(said):
                code = Verify(Path(where))()
        except (ValueError, OSError) as error:  # which the command line says in a sentence
            raise _RefusedError(str(error).replace(where, "it")) from error
        if code:
            raise _RefusedError(said.getvalue().replace(where, "it").removeprefix("NOT VERIFIED: "))
        accepted = json.loads((Path(where) / "certificate.json").read_bytes())
        model = load(where)
    held = {n: raw_tensor(t) for n, t in model.state_dict().items()}
    domain = next(domain_of(row["constants"]) for row in accepted["rows"] if row["operation"] == "input")
    margins = any(row["operation"] == "margin" for row in accepted["rows"])
    fresh = _remembered(model, None, **arguments_of(domain), margins=margins)
    bound = Certificate.lipschitz.fget(fresh)  # type: ignore[attr-defined]
    if float(accepted["lipschitz"]) < bound * (1 - 1e-5):  # computed tensors may differ by rounding
        raise AssertionError(f"accepted {accepted['lipschitz']} of a model whose bound is {bound}")
    tensors = held | {n: t for n, t in draft.tensors.items() if n not in held}
    return accepted, tensors


def _edit(draft: Draft, kind: str, rng: Generator) -> None:
    try:
        getattr(forgeries, kind)(draft, rng)
    except _UNFIT as error:
        raise _NoEditError(f"{type(error).__name__}") from error


def read_names(content: bytes) -> list[str]:
    """The tensors of a safetensors file."""
    return list(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def summary(outcomes: list[Mapping[str, Any]], seed: int, command: str) -> dict[str, Any]:
    """What `results/mutations.json` holds."""
    made = [each for each in outcomes if each["status"] != "no edit"]
    count = Counter(each["status"] for each in made)
    reasons = Counter(each["reason"] for each in made if each["status"] == "refused")
    table = Counter((each["case"], each["kind"], each["status"]) for each in made)
    return {
        **header(command, seed),
        "config": {"cases": NAMES, "kinds": KINDS, "seconds": SECONDS, "bytes": BYTES, "slack": statements.SLACK},
        "optimized": not __debug__,
        "mutations": len(made),
        "refused": count["refused"],
        "accepted_unchanged": count["unchanged"],
        "accepted_looser_but_true": count["looser"],
        "accepted_tighter_but_true": count["tighter"],
        "accepted_true_of_other_rows": count["another"],
        "false_accepts": [each for each in made if each["status"] == "false"],
        "raw_exceptions": [each for each in made if each["status"] == "raw"],
        "edits_that_could_not_be_made": len(outcomes) - len(made),
        "slowest_seconds_of_the_processor": max((each["seconds"] for each in made), default=0.0),
        "refusals": dict(reasons.most_common(80)) | {"others": sum(n for _, n in reasons.most_common()[80:])},
        "rows": [{"case": a, "kind": b, "status": c, "mutations": n} for (a, b, c), n in sorted(table.items())],
    }


def _read(folder: Path) -> list[dict[str, Any]]:
    """What is done, by number."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda each: each["number"])


def main() -> None:
    """Make the mutations, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=10_500, help="numbers 0, ..., COUNT - 1; some find nothing to edit"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one mutation, with all rows searched")
    parser.add_argument("--kind", choices=[*KINDS, "insert", "attention"], help="of this kind alone")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="0 2 and 1 2: two processes, half each")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        print(json.dumps(asdict(run(options.only, options.seed, True, options.kind)), indent=1).replace("\\n", "\n"))
        return
    folder, start = PROGRESS / f"seed-{options.seed}{'' if __debug__ else '-optimized'}", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    own, of = options.share
    done = {each["number"] for each in _read(folder)}
    with (folder / f"{own}-of-{of}.jsonl").open("a") as file:
        for number in range(own, options.count, of):
            if number in done:
                continue
            outcome = run(number, options.seed)
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()
            if outcome.status in ("false", "raw"):
                print(f"{outcome.status} {number} {outcome.case} {outcome.kind}: {outcome.reason}", flush=True)
            if number // 500 != (number + of) // 500:
                print(f"{number} after {time.monotonic() - start:.0f} s", flush=True)
    outcomes = [each for each in _read(folder) if each["number"] < options.count]
    if len(outcomes) < options.count:
        print(f"{options.count - len(outcomes)} are left to other processes, the last of which writes the summary")
        return
    command = f"python -m campaigns.mutations --count {options.count} --seed {options.seed}"
    content = summary(outcomes, options.seed, command)
    others = _read(PROGRESS / f"seed-{options.seed}{'-optimized' if __debug__ else ''}")
    if len(others := [each for each in others if each["number"] < options.count]) == len(outcomes):
        answers = [[(each["status"], each["reason"]) for each in several] for several in (outcomes, others)]
        content["answers_that_differ_with_and_without_python_O"] = sum(a != b for a, b in zip(*answers, strict=True))
    write_result(options.output, content)
    print(json.dumps({k: v for k, v in content.items() if k not in ("rows", "refusals", "environment")}, indent=1))


if __name__ == "__main__":
    main()
