"""What follows the last step: loss over the whole validation split, sample, certificate, lower bound."""

import copy
from typing import Any

import torch
from rich.console import Console

import wellnormed as wn
from wellnormed._files import read_json
from wellnormed.certificates.certificate import Certificate
from wellnormed.models.files import read_config
from wellnormed.nn import CappedEmbedding
from wellnormed.nn.projection import count_hits, hit_rates
from wellnormed.norms import ColNorm
from wellnormed.train.characters import CharacterTask
from wellnormed.train.evaluate import sample, validation_loss
from wellnormed.train.report import facts, write_report
from wellnormed.train.run_folder import RunFolder


def finish(task: CharacterTask, run: RunFolder, console: Console) -> None:
    """Prove the norms, evaluate, certify and report; the run folder is complete afterwards."""
    config, text = task.config, task.text
    proved = task.require_caps()
    model = copy.deepcopy(task.model).to("cpu").eval()
    prompt = text.encode("\n" if "\n" in text.symbols else text.symbols[0])
    written = text.decode(sample(model, prompt, config.sample_characters, task.generators["sample"]))
    certificate = certify_model(model, config.attack_steps, task.generators["lower bound"])
    certificate.save(run.certificate_file)
    count_hits(task.model)
    loss = validation_loss(task.model, text.validation, config.model.length)
    run.save_results(
        task.model.state_dict(),
        {
            "steps": task.step,
            "training_tokens": task.step * config.batch * config.model.length,
            "parameters": sum(p.numel() for p in model.parameters()),
            "source": text.source,
            "validation_loss": loss,
            "validation_tokens": len(text.validation) - 1,
            "proved_norm_over_cap": proved,
            "log10_lipschitz": certificate.log10_lipschitz,
            "log10_lipschitz_l2": certificate.log10_l2_lipschitz,
            "activation_rms": certificate.activation_rms,
            "largest_logit": certificate.largest_logit,
            "lower_bound": certificate.lower_bound,
            "projection_hit_rates": hit_rates(task.model),
            "sample": written,
        },
    )
    write_report(run.path)
    print_summary(run, console)


def certify_model(
    model: torch.nn.Module,
    attack_steps: int,
    generator: torch.Generator,
    example: Any = None,
    radius: float | None = None,
) -> Certificate:
    """The certificate of a model, with the gain that a search of so many steps met (0: no search).

    The radius is 1 by default, or the RMS of the model's largest embedding vector if that is larger.
    """
    if radius is None:
        kinds = torch.nn.Embedding | CappedEmbedding
        tables = [module.weight for module in model.modules() if isinstance(module, kinds)]
        largest = max((float(ColNorm(0).upper_bound(table.detach())) for table in tables), default=0.0)
        radius = max(1.0, largest)
    certificate = wn.certify(model, example, radius=radius, progress=True)
    if attack_steps:
        found = wn.lower_bound(model, example, radius=radius, steps=attack_steps, generator=generator)
        certificate = certificate.with_lower_bound(found.value)
    return certificate


def show_finished(run: RunFolder, console: Console) -> None:
    """Draw the report of a finished run again, where the disk allows it, and print its results."""
    console.print("this run is finished", highlight=False)
    try:
        write_report(run.path)
    except OSError as error:
        console.print(f"the report stays as it is: {error}", highlight=False, markup=False, soft_wrap=True)
    print_summary(run, console)


def print_summary(run: RunFolder, console: Console) -> None:
    """Print the results of a finished run."""
    results = read_json(run.results_file, f"{run.resume_command} writes it again", sealed=True)
    if results["sample"]:
        console.rule("sample")
        console.print(results["sample"].strip(), highlight=False, markup=False, soft_wrap=True)
        console.rule()
    certificate = Certificate.load(run.certificate_file) if run.certificate_file.exists() else None
    lines = [f"{value:>10}  {what}" for value, what in facts(read_config(run.path), results, certificate)]
    if "refused" in results:
        lines.append(f"no certificate: {results['refused']}")
    lines.append(f"run folder {run.path}; open {run.report_file}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
