"""The training loop, from a config or where a killed run stopped, to a folder with everything proved."""

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellnormed._files import write_atomically
from wellnormed.data import CharacterText, load_shakespeare
from wellnormed.train.characters import CharacterTask
from wellnormed.train.config import TrainConfig
from wellnormed.train.environment import device_of, record_environment, threads
from wellnormed.train.evaluate import validation_loss
from wellnormed.train.finish import finish, show_finished
from wellnormed.train.lock import locked
from wellnormed.train.progress import progress_display, show_note
from wellnormed.train.run_folder import RunFolder, explained, memory_explained
from wellnormed.train.stopping import Requests
from wellnormed.train.task import fit

VALIDATION_WINDOWS = 128
"""Windows of the validation split that are evaluated at every checkpoint; at the end it is all of them."""


@memory_explained()
def train(config: TrainConfig, folder: str | Path, console: Console | None = None) -> RunFolder:
    """Train a character transformer with every weight norm enforced after every step.

    The model's vocabulary size is replaced by that of the text. The folder, new or empty at first, is returned with
    results, certificate, sample and report. Progress is shown on the console, standard output by default. A setting or
    folder that is refused, and a loss or gradient that is not finite, is a `ValueError`.
    """
    run = RunFolder(folder)
    run.require_new()
    text = load_shakespeare(config.source)
    model = replace(config.model, vocabulary_size=len(text.symbols))
    config = replace(config, model=model, threads=config.threads or torch.get_num_threads())
    with threads(config.threads):
        task = CharacterTask(config, text, device_of(config.device))  # refuses settings before a folder exists
        with locked(run.path):
            run.create(config, {"source": text.source, "sha256": text.sha256, "symbols": text.symbols})
            _run(task, run, console or Console())
    return run


@memory_explained()
def resume(folder: str | Path, console: Console | None = None) -> RunFolder:
    """Continue a run from its newest checkpoint; the weights end bit for bit as if it had never stopped.

    A finished run is left as it is. A folder, checkpoint or text that is missing, damaged or not the run's own is a
    `ValueError`, as is a folder that another process is writing.
    """
    console = console or Console()
    run = RunFolder(folder)
    if run.is_of_tokens() or os.environ.get("WORLD_SIZE", "1") != "1":  # which are trained by many processes
        from wellnormed.train.token_loop import resume_tokens

        return resume_tokens(folder, console)
    config, described = run.read_config(TrainConfig)
    with ExitStack() as stack, threads(config.threads):
        problem = run.take_up(stack)
        if problem is None:
            show_finished(run, console)
            return run
        if run.manifest_file.exists():
            console.print(problem, highlight=False, soft_wrap=True)
        checkpoint = run.load_checkpoint()
        task = CharacterTask(config, _same_text(config, described), device_of(config.device))
        if checkpoint is not None:
            task.restore(checkpoint)
        write_atomically(run.metrics_file, checkpoint.metrics if checkpoint else "")
        _run(task, run, console)
    return run


def _run(task: CharacterTask, run: RunFolder, console: Console) -> None:
    config, start = task.config, f", from step {task.step}" if task.step else ""
    kept = config.constraint
    if config.lipschitz is not None:
        body = config.lipschitz / config.head_cap
        kept = f"Lipschitz constant at most {config.lipschitz:g} (head {config.head_cap:.4g}, all before it {body:.4g})"
    parameters = sum(p.numel() for p in task.model.parameters())
    show_note(task.text.note, console)
    console.print(
        f"text {task.text.source}, {len(task.text.train):,} characters; {parameters:,} parameters; "
        f"{kept} after every step; run folder {run.path}{start}",
        highlight=False,
        soft_wrap=True,
    )
    task.requests = Requests(config.checkpoint_minutes)
    with explained(run), task.requests:
        record_environment(run.environment_file, task.device, task.step)
        _steps(task, run, console)
        with task.requests.at_once():
            finish(task, run, console)


def _steps(task: CharacterTask, run: RunFolder, console: Console) -> None:
    config, length = task.config, task.config.model.length
    windows = min(VALIDATION_WINDOWS, (len(task.text.validation) - 1) // length)
    validation = task.text.validation[: windows * length + 1]
    logged, since = task.step, time.perf_counter()

    def save() -> None:
        run.save_checkpoint(replace(task.checkpoint(), metrics=run.metrics_file.read_bytes()))

    def watch(task: CharacterTask, loss: float) -> None:
        step = task.step
        saving = step % config.checkpoint_every == 0 or step == config.steps
        if saving or step % config.log_every == 0 or step == 1:
            log(task, loss, saving)
        else:
            show(step, None)
        task.requests.after_step(saving, save)

    def log(task: CharacterTask, loss: float, saving: bool) -> None:
        nonlocal logged, since
        step = task.step
        assert task.constraints is not None  # every character transformer has some
        ratios = task.constraints.norm_ratios()
        now, rate = time.perf_counter(), config.learning_rate * task.rate_factor(step - 1)
        speed = (step - logged) * config.batch * length / (now - since)
        row: dict[str, Any] = {"step": step, "loss": loss, "learning_rate": rate}
        row |= {"tokens_per_second": round(speed), "norms_over_caps": ratios}
        largest = max(ratios.values())
        show(step, f"loss {loss:.3f}  lr {rate:.4f}  {speed:,.0f} tokens/s  norm/cap {largest:.4f}")
        if saving:
            row["proved_norm_over_cap"] = task.require_caps()
            row["validation_loss"] = validation_loss(task.model, validation, length)
        run.append_metrics(row)
        if saving:
            save()
        logged, since = step, time.perf_counter()

    with progress_display(console, task.step, config.steps, config.checkpoint_every) as show:
        fit(task, watch)


def _same_text(config: TrainConfig, described: dict[str, str]) -> CharacterText:
    # "auto" may find another text today; the run's own source is the one to continue with
    path = Path(config.source)
    try:
        text = load_shakespeare(path if path.is_file() else described["source"])
    except ValueError as error:
        raise ValueError(
            f"the text that the run was trained on ({config.source}) cannot be had: {error}; "
            "a relative path is looked for in the present folder"
        ) from error
    if text.sha256 != described["sha256"]:
        raise ValueError(
            f"the run was trained on {described['source']} with sha256 {described['sha256']}, but {text.source} "
            f"has {text.sha256} now; restore that text, or begin a new run"
        )
    return text
