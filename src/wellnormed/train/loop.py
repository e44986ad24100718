"""The training loop, on one process or on those of `torchrun`: from a config to a run folder with proofs."""

import hashlib
import math
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellnormed._files import read_bytes, write_atomically
from wellnormed.data.corpus import Corpus, load_corpus
from wellnormed.models.config import PotentialConfig
from wellnormed.proof.decimals import shown
from wellnormed.train.checkpoint import load_parts, require_torch, save_parts
from wellnormed.train.config import TrainConfig
from wellnormed.train.environment import record_environment, threads
from wellnormed.train.finish import evaluated, finish, show_finished
from wellnormed.train.language import LanguageTask
from wellnormed.train.lock import locked, require_new
from wellnormed.train.progress import progress_display
from wellnormed.train.ranks import Ranks, joined
from wellnormed.train.run_folder import RunFolder, explained, memory_explained
from wellnormed.train.setup import with_precision, with_vocabulary
from wellnormed.train.stopping import Requests
from wellnormed.train.task import Schedule, fit


@memory_explained()
def train(
    config: TrainConfig,
    folder: str | Path,
    console: Console | None = None,
    *,
    schedule: Schedule | None = None,
    task_of: type[LanguageTask] = LanguageTask,
) -> RunFolder:
    """Train a model, and write all about it to a run folder, which must be new or empty.

    `schedule` makes a scheduler of torch from the optimizer, which sets its learning rates after every step; by default
    they follow the config. `task_of` is the class of the task.

    Under `torchrun` every rank calls this, and all see one folder. The first rank writes files and prints. An error on
    any rank is raised on all, with one sentence; the last complete checkpoint stays. Invalid settings, data or folders,
    and a loss or gradient that is not finite, are a `ValueError`.
    """
    run = RunFolder(folder, task_of.command)
    with joined(config.device) as ranks, threads(config.threads), ExitStack() as stack:
        ranks.by_first(lambda: require_new(run.path))
        ranks.together(lambda: require_torch(ranks.world))
        corpus, identity = _read(config.data, config.source, ranks)
        config = with_precision(with_vocabulary(config, corpus), ranks)
        if ranks.world == 1:
            config = replace(config, threads=config.threads or torch.get_num_threads())
        ranks.require_equal("config", _flat(asdict(config)))
        task = task_of(config, corpus, ranks, schedule=schedule)  # refuses settings before a folder exists

        def begin() -> None:
            stack.enter_context(locked(run.path))
            symbols = {} if corpus.symbols is None else {"symbols": corpus.symbols}
            run.create(config, {"source": corpus.name, "tokenizer": corpus.tokenizer, **symbols, **identity})

        ranks.by_first(begin)
        _require_shared(run, ranks)
        _run(task, run, console or Console())
    return run


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings and nested settings, by their names as options."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _read(data: str, source: str, ranks: Ranks) -> tuple[Corpus, dict[str, str]]:
    """The data, which must be the same on all ranks, and the facts that identify it; all of it is hashed once."""

    def read() -> tuple[Corpus, list[str]]:
        corpus = load_corpus(data, source)
        return corpus, [own.fingerprint() for own in (corpus.train, corpus.validation)]

    corpus, digests = ranks.together(read, patiently=True)
    facts: dict[str, Any] = {"tokenizer": corpus.tokenizer, "vocabulary": corpus.vocabulary}
    for name, own, digest in zip(("training", "validation"), (corpus.train, corpus.validation), digests, strict=True):
        facts[f"tokens of the {name} shards"] = [len(array) for array in own.arrays]
        facts[f"digest of the {name} shards"] = digest
    ranks.require_equal("set of data", facts)
    return corpus, {
        "tokens": str(len(corpus.train)),
        "digest": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
    }


def _require_shared(run: RunFolder, ranks: Ranks) -> None:
    """Refuse ranks that do not see the first one's run folder."""
    remedy = "put the run folder on a disk that all ranks see, and start them in the same folder"
    content = ranks.together(lambda: read_bytes(run.config_file, remedy))
    ranks.require_equal("run folder", {str(run.config_file): hashlib.sha256(content).hexdigest()})


@memory_explained()
def resume(
    folder: str | Path,
    console: Console | None = None,
    *,
    schedule: Schedule | None = None,
    task_of: type[LanguageTask] = LanguageTask,
) -> RunFolder:
    """Continue a run from its newest checkpoint, on any number of ranks.

    On the same number of ranks the final weights are bit for bit those of a run that never stopped; on another number,
    gradients are added in another order. A finished run is left as it is. A file that is missing, damaged, or of
    another run is a `ValueError`.
    """
    run = RunFolder(folder, task_of.command)
    try:
        device, count = (config := run.read_config(task_of.config_type)[0]).device, config.threads
    except ValueError:
        device, count = "auto", None  # all ranks refuse it together below
    with joined(device) as ranks, threads(count), ExitStack() as stack:
        task = _resumed(run, ranks, stack, task_of, schedule)
        if task is None:
            ranks.by_first(lambda: show_finished(run, console or Console()), patiently=True)
        else:
            _run(task, run, console or Console())
    return run


def _resumed(
    run: RunFolder, ranks: Ranks, stack: ExitStack, task_of: type[LanguageTask], schedule: Schedule | None
) -> LanguageTask | None:
    """The task at the newest checkpoint of a run, whose folder stays locked; None for a finished run."""
    config, described = ranks.together(lambda: run.read_config(task_of.config_type))
    ranks.together(lambda: require_torch(ranks.world))
    _require_shared(run, ranks)

    def begin() -> str | None:
        stack.enter_context(locked(run.path))
        run.remove_leftovers()
        if (problem := run.unfinished()) is not None:
            run.manifest_file.unlink(missing_ok=True)  # the damaged results are written again
        return problem

    if not any(ranks.gather(ranks.by_first(begin))):
        return None
    # since "auto" might find another text today
    source = config.source if Path(config.source).is_file() else described["source"]
    try:
        corpus, identity = _read(config.data, source, ranks)
    except ValueError as error:
        raise ValueError(
            f"the run's text ({described['source']}) is not available: {error}; a relative path is looked for "
            "in the present folder"
        ) from error
    for name, now in identity.items():
        if now != described.get(name):
            raise ValueError(
                f"the run was trained on other tokens: the {name} of {described['source']} was {described.get(name)}, "
                f"and that of {corpus.name} is {now} now; restore them, or begin a new run"
            )
    task = task_of(config, corpus, ranks, schedule=schedule)
    metrics, folders = b"", run.checkpoint_folders()
    if folders:
        remedy = f"remove {folders[-1]} to go on from " + (folders[-2].name if folders[1:] else "the beginning")
        expected = ranks.together(lambda: run.expected_of(folders[-1]))

        def read(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            nonlocal metrics
            facts, metrics = load_parts(folders[-1], tensors, expected, remedy, ranks)
            return facts

        task.restore_state(read)
        if task.step == config.steps and config.certify != "no":
            with task.evaluating():
                task.require_caps()  # no further step proves them, and the results state the proof
    ranks.by_first(lambda: write_atomically(run.metrics_file, metrics))
    return task


def _run(task: LanguageTask, run: RunFolder, console: Console) -> None:
    config, ranks = task.config, task.ranks
    console = console if ranks.first else Console(quiet=True)
    parameters = sum(p.numel() for p in task.model.parameters())
    kept = "no norm is kept" if task.constraints is None else f"{config.constraint} after every step"
    if config.lipschitz is not None:
        assert isinstance(config.model, PotentialConfig)
        body = config.lipschitz / config.head_cap
        parts = f"in RMS, {shown(config.head_cap, '.4g')} of the head times {shown(body, '.4g')} of all before it"
        euclidean = config.lipschitz * math.sqrt(config.model.vocabulary_size / config.model.token_width)
        kept = (
            f"Lipschitz constant at most {shown(config.lipschitz)} from RMS to RMS and {shown(euclidean)} in Euclidean "
            f"norms, both of tokens ({parts}), after every step"
        )
    many = f" on {ranks.world} ranks ({config.parallel})" if ranks.world > 1 else ""
    many += "".join(f"; {note}" for note in task.notes)
    start = f", from step {task.step}" if task.step else ""
    units = "characters" if task.corpus.symbols else "tokens"
    if task.corpus.note:
        console.print(task.corpus.note, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"data {task.corpus.name}, {len(task.corpus.train):,} {units}; {parameters:,} parameters; {kept}; run folder "
        f"{run.path}{many}{start}",
        highlight=False,
        soft_wrap=True,
    )
    task.requests = Requests(config.checkpoint_minutes, speaks=ranks.first)
    with explained(run), task.requests:
        ranks.by_first(lambda: record_environment(run.environment_file, task.device, task.step))
        _steps(task, run, console)
        with task.evaluating():
            finish(task, run, console)


def _steps(task: LanguageTask, run: RunFolder, console: Console) -> None:
    config, ranks = task.config, task.ranks
    tokens = config.batch * config.model.length
    logged, since = task.step, time.perf_counter()

    def watch(task: LanguageTask, loss: float) -> None:
        nonlocal logged, since, rate
        step, now = task.step, time.perf_counter()
        saving = step % config.checkpoint_every == 0 or step == config.steps
        if saving or step % config.log_every == 0 or step == 1:
            row: dict[str, Any] = {"step": step, "loss": loss, "learning_rate": rate}
            row["tokens_per_second"] = round((step - logged) * tokens / (now - since))
            row["peak_memory_bytes"] = _peak_memory(task.device)
            if task.constraints is not None:
                row["norms_over_caps"] = task.constraints.norm_ratios()
            if saving:
                with task.evaluating():
                    row |= evaluated(task)
            ranks.by_first(lambda: run.append_metrics(row))
            show(step, _shown(row))
            if saving:
                save()
            logged, since = step, time.perf_counter()
        else:
            show(step, None)
        task.requests.after_step(saving, save)
        rate = task.learning_rate()

    def save() -> None:
        tensors, facts = task.state()
        folder = run.checkpoints / f"step-{task.step:08d}"
        metrics = run.metrics_file.read_bytes() if ranks.first else b""
        save_parts(folder, tensors, facts | run.expected_of(folder), metrics, ranks)
        ranks.by_first(run.remove_leftovers)

    rate = task.learning_rate()  # the rate of the next step
    with progress_display(console, task.step, config.steps, config.checkpoint_every) as show:
        fit(task, watch)


def _peak_memory(device: torch.device) -> int:
    """The peak memory of the first rank: what torch held on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _shown(row: dict[str, Any]) -> str:
    """A row of metrics in words."""
    words = [f"loss {row['loss']:.3f}", f"lr {row['learning_rate']:.4f}", f"{row['tokens_per_second']:,} tokens/s"]
    if "norms_over_caps" in row:
        words.append(f"norm/cap {max(row['norms_over_caps'].values()):.4f}")
    if "validation_loss" in row:
        words.append(f"validation {row['validation_loss']:.4f}")
        words.append(f"largest entry {row['largest_entry']:.3g}")
        if "largest_logit" in row:
            words.append(f"attention logit {row['largest_logit']:.3g}")
    return "  ".join(words)
