"""The results of checkpoints and of the end: proofs, losses, a sample, certificate, lower bound."""

import copy
import os
from typing import Any

import torch
from rich.console import Console

from wellnormed._files import read_json
from wellnormed.certificates import Arithmetic, UncertifiableError, certify, lower_bound, number_formats
from wellnormed.certificates.arguments import settings_of
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.observing import summary
from wellnormed.certificates.orders import most_lanes
from wellnormed.models.files import Model, read_config
from wellnormed.nn import CappedEmbedding
from wellnormed.norms import ColNorm
from wellnormed.proof.reading import printable
from wellnormed.train.environment import threads
from wellnormed.train.evaluate import sample
from wellnormed.train.language import LanguageTask
from wellnormed.train.report import facts, write_report
from wellnormed.train.run_folder import RunFolder

OF_THE_LAST = ("proved_norm_over_cap", "largest_entry", "largest_logit")
"""The entries, besides losses, that the results of a run copy from the last row of its metrics."""
SETTLED_TOKENS = 8192
"""So many validation tokens, or one window of them, are predicted to see which predictions are settled."""


def evaluated(task: LanguageTask) -> dict[str, Any]:
    """The proofs, losses and largest entries of a checkpoint; a collective call."""
    task.require_equal_copies()
    proved = {} if task.config.certify == "no" else {"proved_norm_over_cap": task.require_caps()}
    row: dict[str, Any] = {**proved, **task.evaluate(), **summary(task.observe())}
    if task.config.certify == "checkpoints":
        weights = task.whole_weights()

        def prove() -> dict[str, Any]:
            return certificate_facts(certificate_of(task.copy(weights), 0, task), weights)

        row |= task.ranks.by_first(prove, patiently=True) or {}
    return row


def certificate_of(model: Model, attack_steps: int, task: LanguageTask) -> Certificate | str:
    """The certificate, or the reason why there is none, as a sentence."""
    try:
        return certify_model(model, attack_steps, task.generators["lower bound"])
    except UncertifiableError as error:
        return str(error)


def certificate_facts(certificate: Certificate | str, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The figures of a certificate, as results of a run; or the reason why it was refused."""
    if isinstance(certificate, str):
        return {"refused": certificate}
    formats = number_formats(certificate, weights=weights)
    return {
        "log10_lipschitz": certificate.rms_lipschitz.log10,
        "log10_lipschitz_l2": certificate.lipschitz.log10,
        "activation_rms": certificate.activation_rms,
        "proved_largest_entry": max(float(each.proved) for each in formats.ranges),
        "proved_largest_logit": certificate.largest_logit,
    }


@torch.no_grad()
def settled_shares(model: Model, certificate: Certificate, windows: torch.Tensor) -> dict[str, Any]:
    """The shares of predictions that no machine changes, in three arithmetics; see `Certificate.settled`.

    They are float32 with sums in any order; float32 with the order that this machine keeps in linear maps, or, if it
    keeps none, the reason; and float64 with sums in any order.

    Args:
        model: The model on the CPU, in float32 and eval mode.
        certificate: Its certificate, with a `forward_error`.
        windows: Tokens, `(B, T)`.
    """
    domain, double = settings_of(certificate.input_domain), copy.deepcopy(model).double()
    shapes = {name: tensor.shape for name, tensor in [*model.state_dict().items(), *certificate.computed.items()]}
    lanes, limit = most_lanes(certificate.rows, shapes.__getitem__)
    last = next(row for row in certificate.rows if row.name == certificate.rows[-1].inputs[0])
    margins = last.operation == "linear"  # the rows of the head, whose differences settle more
    stated = [(model, "float32", Arithmetic(lanes=lanes))] if lanes > 1 else []
    found: dict[str, Any] = {"tokens": windows.numel(), "shares": {}, "errors": {}}
    for executed, dtype, arithmetic in [(model, "float32", Arithmetic()), *stated, (double, "float64", Arithmetic())]:
        each = certify(executed, **domain, margins=margins, arithmetic=arithmetic)
        masks = [each.settled(executed(part)) for part in windows.split(max(1, 1024 // windows.shape[1]))]
        found["shares"][f"{dtype}, {arithmetic}"] = float(torch.cat(masks).double().mean())
        found["errors"][f"{dtype}, {arithmetic}"] = each.forward_error
    if lanes == 1 and limit is not None:
        found["not_kept"] = f"adds {limit.depth} times to one of the {limit.inputs} addends of {limit.row}"
    return found


def finish(task: LanguageTask, run: RunFolder, console: Console) -> None:
    """Evaluate, certify and report; the run folder is complete afterwards."""
    config, ranks = task.config, task.ranks
    ahead = ["the loss of the validation split"]
    if config.certify != "no":
        ahead += ["the certificate", *(["a search for a lower bound"] if config.attack_steps else [])]
    console.print(f"all steps are done; now {', '.join(ahead)}, a sample and the report", highlight=False)
    seen = task.observe()
    losses = task.evaluate(last=True)
    weights = task.whole_weights()

    @task.requests.at_once()
    def end() -> None:
        model = task.copy(weights)
        last = run.read_metrics()[-1]  # the row of the last step, with the evaluation
        results = {
            "steps": task.step,
            "training_tokens": task.step * config.batch * config.model.length,
            "parameters": sum(p.numel() for p in model.parameters()),
            "source": task.corpus.name,
            "validation_tokens": task.validation_tokens,
            **{key: last[key] for key in OF_THE_LAST if key in last},
            **losses,
            "observed": seen,
        }
        if config.certify != "no":
            certificate = certificate_of(model, config.attack_steps, task)
            results |= certificate_facts(certificate, weights)
            if isinstance(certificate, Certificate):
                certificate.save(run.certificate_file)
                results["lower_bound"] = certificate.rms_lower_bound
                if certificate.forward_error is not None:
                    windows = task.validation_windows(SETTLED_TOKENS)
                    results["settled"] = settled_shares(model, certificate, windows)
        results["sample"] = _written(model, task)
        run.save_results(weights, results)
        write_report(run.path)
        print_summary(run, console)

    others_wait = config.threads is None and ranks.world > 1  # and torchrun gives each rank one thread
    with threads(os.cpu_count() if others_wait else None):
        ranks.by_first(end, patiently=True)


def _written(model: Model, task: LanguageTask) -> str:
    """A text sampled from the model; empty if this machine lacks the tokenizer."""
    try:
        tokenizer = task.corpus.require_tokenizer()
    except ValueError:
        return ""
    prompt = torch.tensor([tokenizer.end_of_text])
    drawn = sample(model, prompt, task.config.sample_tokens, task.generators["sample"])
    begun = int(tokenizer.token_bytes[tokenizer.end_of_text] == 0)  # a token that is no part of the text
    return tokenizer.decode(drawn[begun:].tolist())


def certify_model(
    model: torch.nn.Module, attack_steps: int, generator: torch.Generator, example: Any = None
) -> Certificate:
    """The certificate of a model, with the largest gain found by a search of `attack_steps` steps (0: no search).

    The radius is 1, or the RMS of the model's largest embedding vector if that is larger.
    """
    kinds = torch.nn.Embedding | CappedEmbedding
    tables = [module.weight for module in model.modules() if isinstance(module, kinds)]
    radius = max([1.0, *(float(ColNorm(0).upper_bound(table.detach())) for table in tables)])
    certificate = certify(model, example, radius=radius)
    if attack_steps:
        largest_gain = lower_bound(model, example, radius=radius, steps=attack_steps, generator=generator)
        certificate = certificate.with_lower_bound(largest_gain.value)
    return certificate


def show_finished(run: RunFolder, console: Console) -> None:
    """Draw the report of a finished run again, and print its results."""
    console.print("this run is finished", highlight=False)
    write_report(run.path)
    print_summary(run, console)


def print_summary(run: RunFolder, console: Console) -> None:
    """Print the results of a finished run."""
    results = read_json(run.results_file, f"{run.resume_command} writes it again", sealed=True)
    if results["sample"]:
        console.rule("sample")
        console.print(printable(results["sample"].strip()), highlight=False, markup=False, soft_wrap=True)
        console.rule()
    certificate = Certificate.load(run.certificate_file) if run.certificate_file.exists() else None
    lines = [f"{value:>10}  {what}" for value, what in facts(read_config(run.path), results, certificate)]
    if "refused" in results:
        lines.append(f"no certificate: {results['refused']}")
    lines.append(f"run folder {run.path}; open {run.report_file}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
