"""What follows the last step: loss over the whole validation split, sample, certificate, lower bound."""

import copy
import math

import torch
from rich.console import Console

import wellnormed as wn
from wellnormed._files import read_json
from wellnormed.models.files import Model
from wellnormed.nn.projection import count_hits, hit_rates
from wellnormed.train.evaluate import sample, validation_loss
from wellnormed.train.report import write_report
from wellnormed.train.run_folder import RunFolder
from wellnormed.train.session import TrainingSession, named_generators


def finish(session: TrainingSession, run: RunFolder, console: Console) -> None:
    """Prove the norms, evaluate, certify and report; the run folder is complete afterwards."""
    config, text = session.config, session.text
    proved = session.require_caps()
    count_hits(session.model)
    loss = validation_loss(session.model, text.validation, config.model.length)
    hits = hit_rates(session.model)
    count_hits(session.model, enabled=False)
    model = copy.deepcopy(session.model).to("cpu").eval()
    generators = named_generators(config.seed)
    prompt = text.encode("\n" if "\n" in text.symbols else text.symbols[0])
    written = text.decode(sample(model, prompt, config.sample_characters, generators["sample"]))
    certificate = certify_model(model, config.attack_steps, generators["lower bound"])
    certificate.save(run.certificate_file)
    run.save_results(
        session.model.state_dict(),
        {
            "steps": session.step,
            "training_tokens": session.step * config.batch * config.model.length,
            "parameters": sum(p.numel() for p in model.parameters()),
            "source": text.source,
            "validation_loss": loss,
            "validation_tokens": len(text.validation) - 1,
            "proved_norm_over_cap": proved,
            "log10_lipschitz": certificate.log10_lipschitz,
            "log10_lipschitz_l2": certificate.log10_lipschitz
            + 0.5 * math.log10(model.config.vocabulary_size / model.embedding.width),
            "activation_rms": certificate.activation_rms,
            "lower_bound": certificate.lower_bound,
            "projection_hit_rates": hits,
            "sample": written,
        },
    )
    write_report(run.path)
    print_summary(run, console)


def certify_model(model: Model, attack_steps: int, generator: torch.Generator) -> "wn.certificates.Certificate":
    """The certificate of a model, with the gain that a search of so many steps met (0: no search)."""
    certificate = wn.certify(model, torch.zeros(1, model.config.length, dtype=torch.long))
    if attack_steps:
        found = wn.lower_bound(model, steps=attack_steps, generator=generator)
        certificate = certificate.with_lower_bound(float(found.value))
    return certificate


def print_summary(run: RunFolder, console: Console) -> None:
    """Print the results of a finished run."""
    results = read_json(run.results_file, f"{run.resume_command} writes it again", sealed=True)
    console.rule("sample")
    console.print(results["sample"].strip(), highlight=False, markup=False, soft_wrap=True)
    console.rule()
    certified = (
        f"log10 of the certified Lipschitz bound {results['log10_lipschitz']:.4f} "
        f"({results['log10_lipschitz_l2']:.4f} in Euclidean norms per token)"
    )
    if results["lower_bound"]:
        certified += f"; log10 of the largest gain found by search {math.log10(results['lower_bound']):.3f}"
    hits = results["projection_hit_rates"]
    projected = f"ball projections: {sum(hits.values()) / len(hits):.1%} of vectors projected" if hits else None
    lines = [
        f"validation loss {results['validation_loss']:.4f} over {results['validation_tokens']:,} characters of "
        f"{results['source']}, after {results['training_tokens']:,} training tokens",
        certified,
        f"largest proved norm / cap {results['proved_norm_over_cap']:.6f}",
        projected or "no ball projections",
        f"run folder {run.path}; open {run.report_file}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
