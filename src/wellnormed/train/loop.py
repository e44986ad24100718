"""The training loop, from a config or where a killed run stopped, to a folder with everything proved."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from wellnormed._files import read_json, write_json
from wellnormed.data import CharacterText, load_shakespeare
from wellnormed.train.config import TrainConfig
from wellnormed.train.environment import describe
from wellnormed.train.evaluate import validation_loss
from wellnormed.train.finish import finish, print_summary
from wellnormed.train.progress import ProgressDisplay
from wellnormed.train.run_folder import RunFolder
from wellnormed.train.session import TrainingSession

VALIDATION_WINDOWS = 128
"""Windows of the validation split that are evaluated at every checkpoint; at the end it is all of them."""


def train(config: TrainConfig, folder: str | Path, console: Console | None = None) -> RunFolder:
    """Train a character transformer with every weight norm enforced after every step.

    Args:
        config: The run; its model's vocabulary size is replaced by that of the text.
        folder: Where it is recorded; must not exist or be empty.
        console: Where progress is shown; standard output by default.

    Returns:
        The folder, with results, certificate, sample and report.

    Raises:
        ValueError: A setting is refused, or a loss or gradient is not finite.
    """
    text = load_shakespeare(config.source)
    config = _with_vocabulary(config, len(text.symbols))
    with _threads(config.threads):
        session = TrainingSession(config, text, _device(config.device))  # refuses settings before a folder exists
        run = RunFolder(folder)
        run.create(config, {"source": text.source, "sha256": text.sha256, "symbols": text.symbols})
        _run(session, run, console or Console())
    return run


def resume(folder: str | Path, console: Console | None = None) -> RunFolder:
    """Continue a run from its newest checkpoint; the weights end bit for bit as if it had never stopped.

    Args:
        folder: The run's folder. A finished run is left as it is.
        console: Where progress is shown; standard output by default.

    Raises:
        ValueError: Folder, checkpoint or text are missing, damaged, or not those the run began with.
    """
    console = console or Console()
    run = RunFolder(folder)
    config, described = run.read_config()
    if run.results_file.exists():
        console.print("this run is finished", highlight=False)
        print_summary(run, console)
        return run
    text = _same_text(config, described)
    checkpoint = run.load_checkpoint()
    with _threads(_first_threads(run) or config.threads):
        session = TrainingSession(config, text, _device(config.device))
        if checkpoint is not None:
            session.restore(checkpoint)
        run.cut_metrics(session.step if checkpoint is not None else -1)
        _run(session, run, console)
    return run


def _run(session: TrainingSession, run: RunFolder, console: Console) -> None:
    _record_environment(run, session)
    start = "" if session.step == 0 else f", from step {session.step}"
    parameters = sum(p.numel() for p in session.model.parameters())
    console.print(
        f"text {session.text.source}, {len(session.text.train):,} characters; {parameters:,} parameters; "
        f"{session.config.constraint} after every step; run folder {run.path}{start}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        _steps(session, run, console)
    except ValueError as error:
        saved = run.checkpoint_folders()
        left = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise ValueError(f"{error}\n{left}") from error
    finish(session, run, console)


def _steps(session: TrainingSession, run: RunFolder, console: Console) -> None:
    config = session.config
    tokens_a_step = config.batch * config.model.length
    logged, since = session.step, time.perf_counter()
    with ProgressDisplay(console, session.step, config.steps, line_every=config.checkpoint_every) as progress:
        while session.step < config.steps:
            rate = session.rate
            loss = session.advance()
            step = session.step
            progress.update(step)
            saving = step % config.checkpoint_every == 0 or step == config.steps
            if not (saving or step % config.log_every == 0 or step == 1):
                continue
            ratios = session.constraints.norm_ratios()
            now = time.perf_counter()
            speed = (step - logged) * tokens_a_step / (now - since)
            row = {
                "step": step,
                "loss": loss,
                "learning_rate": rate,
                "tokens_per_second": round(speed),
                "norms_over_caps": ratios,
            }
            progress.show(step, loss, rate, speed, max(ratios.values()))
            if saving:
                row["proved_norm_over_cap"] = session.require_caps()
                row["validation_loss"] = validation_loss(
                    session.model, session.text.validation, config.model.length, windows=VALIDATION_WINDOWS
                )
            run.append_metrics(row)
            if saving:
                run.save_checkpoint(session.checkpoint())
            logged, since = step, time.perf_counter()


def _with_vocabulary(config: TrainConfig, size: int) -> TrainConfig:
    return replace(config, model=replace(config.model, vocabulary_size=size))


def _same_text(config: TrainConfig, described: dict[str, str]) -> CharacterText:
    # "auto" may find another text today; the run's own source is the one to continue with
    path = Path(config.source)
    text = load_shakespeare(path if path.is_file() else described["source"])
    if text.sha256 != described["sha256"]:
        raise ValueError(
            f"the run was trained on a text with sha256 {described['sha256']}, but {text.source!r} has "
            f"{text.sha256} now; "
            "restore that text, or begin a new run"
        )
    return text


def _record_environment(run: RunFolder, session: TrainingSession) -> None:
    sessions = []
    if run.environment_file.exists():
        sessions = read_json(run.environment_file, "remove it")["sessions"]
    sessions.append(describe(session.device, session.step))
    write_json(run.environment_file, {"sessions": sessions})


def _first_threads(run: RunFolder) -> int | None:
    if not run.environment_file.exists():
        return None  # killed before it was written
    return read_json(run.environment_file, "remove it")["sessions"][0]["threads"]


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device; use --device cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
