"""The training loop of language models, on one process or on those that `torchrun` started, to a run folder."""

import hashlib
import os
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import wellnormed as wn
from wellnormed._files import read_bytes, write_atomically
from wellnormed.certificates.certificate import Certificate
from wellnormed.data.corpus import Corpus, load_corpus
from wellnormed.models.files import TokenModel
from wellnormed.propagation import UncertifiableError
from wellnormed.train.environment import record_environment, threads
from wellnormed.train.evaluate import sample
from wellnormed.train.finish import certify_model, print_summary, show_finished
from wellnormed.train.lock import locked
from wellnormed.train.progress import progress_display, show_note
from wellnormed.train.ranks import Ranks, joined
from wellnormed.train.report import write_report
from wellnormed.train.run_folder import RunFolder, explained, memory_explained
from wellnormed.train.sharded_checkpoint import load_parts, require_torch, save_parts
from wellnormed.train.stopping import Requests
from wellnormed.train.task import fit
from wellnormed.train.token_config import TokenTrainConfig
from wellnormed.train.tokens import TokenTask, with_vocabulary

PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "H100": 989.0, "H200": 989.0, "A100": 312.0,
}  # fmt: skip
"""Of dense bfloat16 products, from the maker's data sheets, by a part of the device's name; the first that fits."""


EVALUATED = (
    "proved_norm_over_cap", "validation_loss", "validation_accuracy", "bits_per_byte", "largest_entry", "largest_logit",
)  # fmt: skip
"""What the last row of the metrics and the results of a run both have."""


@memory_explained()
def train_tokens(
    config: TokenTrainConfig,
    folder: str | Path,
    console: Console | None = None,
    task_of: type[TokenTask] = TokenTask,
) -> RunFolder:
    """Train a language model, and leave everything about it in a run folder, which must be new or empty.

    Under `torchrun` every rank calls this, and all see one folder. The first writes and speaks. An error on any rank is
    raised on all, with one sentence; the last complete checkpoint stays. A setting, data or folder that is refused, and
    a loss or gradient that is not finite, is a `ValueError`. `task_of` makes what is trained.
    """
    run = RunFolder(folder, task_of.command)
    with joined(config.device) as ranks, threads(config.threads), ExitStack() as stack:
        _begin(config, run, ranks, stack, console, task_of)
    return run


def _begin(
    config: TokenTrainConfig,
    run: RunFolder,
    ranks: Ranks,
    stack: ExitStack,
    console: Console | None,
    task_of: type[TokenTask],
) -> None:
    ranks.by_first(run.require_new)
    ranks.together(require_torch)
    corpus, identity = _read(config.data, ranks)
    config = with_vocabulary(config, corpus.vocabulary)
    ranks.require_equal("config", _flat(asdict(config)))
    task = task_of(config, corpus, ranks)  # refuses settings before a folder exists

    def begin() -> None:
        stack.enter_context(locked(run.path))
        text = {"source": corpus.name, "tokenizer": corpus.tokenizer, **identity}
        run.create(config, text)

    ranks.by_first(begin)
    _require_shared(run, ranks)
    _run(task, run, _speaker(console, ranks))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings with those inside them, by their names as options."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _read(data: str, ranks: Ranks, source: str = "auto") -> tuple[Corpus, dict[str, str]]:
    """The data, the same on all ranks, and what a run that goes on must read again: all of it is hashed, once."""

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
def resume_tokens(
    folder: str | Path, console: Console | None = None, task_of: type[TokenTask] = TokenTask
) -> RunFolder:
    """Continue a run from its newest checkpoint, on any number of ranks.

    On the same number the weights end bit for bit as if it had never stopped; on another, gradients are added in
    another order. A finished run is left as it is. What is missing, damaged or not the run's own is a `ValueError`.
    """
    run = RunFolder(folder, task_of.command)
    try:
        device, count = (config := run.read_config(task_of.config_type)[0]).device, config.threads
    except ValueError:
        device, count = "auto", None  # all ranks say so together
    with joined(device) as ranks, threads(count), ExitStack() as stack:
        _go_on(run, ranks, stack, console, task_of)
    return run


def _go_on(run: RunFolder, ranks: Ranks, stack: ExitStack, console: Console | None, task_of: type[TokenTask]) -> None:
    config, described = ranks.together(lambda: run.read_config(task_of.config_type))
    ranks.together(require_torch)
    _require_shared(run, ranks)

    def begin() -> str | None:
        if (problem := run.take_up(stack)) is not None:
            run.manifest_file.unlink(missing_ok=True)  # of an end that is damaged, and is made again
        return problem

    if not any(ranks.gather(ranks.by_first(begin))):
        ranks.by_first(lambda: show_finished(run, console or Console()), patiently=True)
        return
    corpus, identity = _read(config.data, ranks, described["source"])  # where "auto" might find another text today
    for name, now in identity.items():
        if now != described.get(name):
            raise ValueError(
                f"the run was trained on other tokens: the {name} of {described['source']} was {described.get(name)}, "
                f"and that of {config.data!r} is {now} now; restore them, or begin a new run"
            )
    task = task_of(config, corpus, ranks)
    metrics, folders = b"", run.checkpoint_folders()
    if folders:
        remedy = f"remove {folders[-1]} to go on from " + (folders[-2].name if folders[1:] else "the beginning")
        expected = ranks.together(lambda: run.expected_of(folders[-1]))

        def read(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            nonlocal metrics
            facts, metrics = load_parts(folders[-1], tensors, expected, remedy, ranks)
            return facts

        task.restore_state(read)
    ranks.by_first(lambda: write_atomically(run.metrics_file, metrics))
    _run(task, run, _speaker(console, ranks))


def _speaker(console: Console | None, ranks: Ranks) -> Console:
    """The first rank's console; a silent one for the others."""
    return (console or Console()) if ranks.first else Console(quiet=True)


def _run(task: TokenTask, run: RunFolder, console: Console) -> None:
    config, ranks = task.config, task.ranks
    parameters = sum(p.numel() for p in task.model.parameters())
    kept = "no norm is kept" if task.constraints is None else f"{config.constraint} after every step"
    many = f" on {ranks.world} ranks ({config.parallel})" if ranks.world > 1 else ""
    many += "".join(f"; {note}" for note in task.notes)
    start = f", from step {task.step}" if task.step else ""
    show_note(task.corpus.note, console)
    console.print(
        f"data {task.corpus.name}, {len(task.corpus.train):,} tokens; {parameters:,} parameters; {kept}; run folder "
        f"{run.path}{many}{start}",
        highlight=False,
        soft_wrap=True,
    )
    task.requests = Requests(config.checkpoint_minutes, speaks=ranks.first)
    with explained(run), task.requests:
        ranks.by_first(lambda: record_environment(run.environment_file, task.device, task.step))
        _steps(task, run, console)
        _finish(task, run, console)


def _steps(task: TokenTask, run: RunFolder, console: Console) -> None:
    config, ranks = task.config, task.ranks
    tokens = config.batch * config.model.length
    logged, since, before = task.step, time.perf_counter(), time.perf_counter()

    def watch(task: TokenTask, loss: float) -> None:
        nonlocal logged, since, before
        step, now = task.step, time.perf_counter()
        saving = step % config.checkpoint_every == 0 or step == config.steps
        if saving or step % config.log_every == 0 or step == 1:
            rate = config.learning_rate * config.rate_factor(step - 1)
            row: dict[str, Any] = {"step": step, "loss": loss, "learning_rate": rate}
            row |= _speed(task, (step - logged) * tokens / (now - since), now - before)
            if task.constraints is not None:
                row["norms_over_caps"] = task.constraints.norm_ratios()
            if saving:
                row |= _evaluated(task)
            ranks.by_first(lambda: run.append_metrics(row))
            show(step, _shown(row))
            if saving:
                _save(task, run)
            logged, since = step, time.perf_counter()
        else:
            show(step, None)
        task.requests.after_step(saving, lambda: _save(task, run))
        task.timed = any((step + 1) % every == 0 for every in (config.log_every, config.checkpoint_every))
        before = time.perf_counter()

    task.timed = True
    with progress_display(console, task.step, config.steps, config.checkpoint_every) as show:
        fit(task, watch)


def _speed(task: TokenTask, speed: float, seconds: float) -> dict[str, Any]:
    """Tokens a second of all ranks, memory, the share of the device's peak, and the update's of the last step."""
    row: dict[str, Any] = {"tokens_per_second": round(speed), "peak_memory_bytes": _peak_memory(task.device)}
    peak = task.config.peak_tflops
    if peak is None and task.device.type == "cuda" and task.config.precision == "bfloat16":
        name = torch.cuda.get_device_name(task.device)
        peak = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    if peak is not None:
        row["model_flops_utilization"] = speed * task.flops_per_token / (1e12 * peak * task.ranks.world)
    if task.timed and task.update_seconds is not None:
        row["update_share"] = task.update_seconds / seconds
    return row


def _peak_memory(device: torch.device) -> int:
    """Of the first rank: what torch held on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _shown(row: dict[str, Any]) -> str:
    """A row of metrics in words."""
    words = [f"loss {row['loss']:.3f}", f"lr {row['learning_rate']:.4f}", f"{row['tokens_per_second']:,} tokens/s"]
    if "model_flops_utilization" in row:
        words.append(f"MFU {row['model_flops_utilization']:.1%}")
    if "update_share" in row:
        words.append(f"update {row['update_share']:.0%}")
    if "norms_over_caps" in row:
        words.append(f"norm/cap {max(row['norms_over_caps'].values()):.4f}")
    if "validation_loss" in row:
        words.append(f"validation {row['validation_loss']:.4f}")
        words.append(f"largest entry {row['largest_entry']:.3g}")
        if "largest_logit" in row:
            words.append(f"attention logit {row['largest_logit']:.3g}")
    return "  ".join(words)


def _evaluated(task: TokenTask) -> dict[str, Any]:
    """What is found at every checkpoint, on all ranks together."""
    task.require_equal_copies()
    row: dict[str, Any] = {"proved_norm_over_cap": task.require_caps(), **task.evaluate()}
    seen = task.observe()
    row["largest_entry"] = max(seen.entries.values())
    if seen.logits:
        row["largest_logit"] = max(seen.logits.values())
    if task.config.certify == "checkpoints":
        weights = task.whole_weights()

        def prove() -> dict[str, Any]:
            certificate = certificate_of(task.copy(weights), 0, task)
            return (
                certificate_facts(certificate, weights)
                if isinstance(certificate, Certificate)
                else {"refused": certificate}
            )

        row |= task.ranks.by_first(prove, patiently=True) or {}
    return row


def _save(task: TokenTask, run: RunFolder) -> None:
    tensors, facts = task.state()
    folder = run.checkpoints / f"step-{task.step:08d}"
    metrics = run.metrics_file.read_bytes() if task.ranks.first else b""
    save_parts(folder, tensors, facts | run.expected_of(folder), metrics, task.ranks)
    task.ranks.by_first(run.remove_leftovers)


def certificate_of(model: TokenModel, attack_steps: int, task: TokenTask) -> Certificate | str:
    """The certificate, or the sentence that says why there is none."""
    try:
        return certify_model(model, attack_steps, task.generators["lower bound"])
    except UncertifiableError as error:
        return str(error)


def certificate_facts(certificate: Certificate, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a certificate says, as results of a run."""
    formats = wn.certificates.number_formats(certificate, weights=weights)
    return {
        "log10_lipschitz": certificate.log10_lipschitz,
        "log10_lipschitz_l2": certificate.log10_l2_lipschitz,
        "activation_rms": certificate.activation_rms,
        "proved_largest_entry": max(float(each.proved) for each in formats.ranges),
        "proved_largest_logit": certificate.largest_logit,
    }


def _finish(task: TokenTask, run: RunFolder, console: Console) -> None:
    """Evaluate, certify and report; the run folder is complete afterwards."""
    config, ranks = task.config, task.ranks
    seen = task.observe()
    weights = task.whole_weights()

    def end() -> None:
        with task.requests.at_once():
            make()

    def make() -> None:
        model = task.copy(weights)
        last = run.read_metrics()[-1]  # of the last step, after which the model was evaluated
        results = {
            "steps": task.step,
            "training_tokens": task.step * config.batch * config.model.length,
            "parameters": sum(p.numel() for p in model.parameters()),
            "source": task.corpus.name,
            "validation_tokens": min(len(task.corpus.validation), config.validation_tokens),
            **{key: last[key] for key in EVALUATED if key in last},
            "observed_entries": seen.entries,
            "observed_logits": seen.logits,
            "observed_inputs": seen.inputs,
        }
        if config.certify != "no":
            certificate = certificate_of(model, config.attack_steps, task)
            if isinstance(certificate, Certificate):
                certificate.save(run.certificate_file)
                results |= certificate_facts(certificate, weights) | {"lower_bound": certificate.lower_bound}
            else:
                results["refused"] = certificate
        results["sample"] = _written(model, task)
        run.save_results(weights, results)
        write_report(run.path)
        print_summary(run, console)

    others_wait = config.threads is None and ranks.world > 1  # and torchrun gives each rank one thread
    with threads(os.cpu_count() if others_wait else None):
        ranks.by_first(end, patiently=True)


def _written(model: TokenModel, task: TokenTask) -> str:
    """A text of the model's own; nothing where this machine lacks the tokenizer."""
    try:
        tokenizer = task.corpus.require_tokenizer()
    except ValueError:
        return ""
    prompt = torch.tensor([tokenizer.end_of_text])
    drawn = sample(model, prompt, task.config.sample_tokens, task.generators["sample"])
    return tokenizer.decode(drawn[1:].tolist())
