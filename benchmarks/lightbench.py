"""LightBench's tasks on the CPU, with this package's Muon and Scion beside torch's Muon, AdamW and HeavyBall's SOAP.

python -m venv HERE; HERE/bin/pip install lightbench==0.1.1 matplotlib pandas gpytorch torch==2.13.0
PYTHONPATH=src HERE/bin/python -m benchmarks.lightbench [--tasks xor_digit] [--difficulties trivial easy]

LightBench (HomebrewML, the suite of HeavyBall) asks of a task whether any setting that its search of four
hyperparameters tries reaches the task's loss. It is written for CUDA, and gives optimizers parameters without their
model; so it is copied to a temporary folder with `cuda` replaced by the CPU, and the model passed on. Its own runner is
not used: in 0.1.1 it looks for a line that no task prints, and hands several tasks a dtype that they refuse. Searches
are shorter than its defaults, 1,000 trials of 100,000 steps, by the constants below, which are everybody's. As in its
runner, who fails a task is not asked its harder form. Rows that exist are not repeated.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import io
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wellnormed as wn
from papers.header import Stored
from wellnormed.optim.directions import BoundedAdam

RESULTS = Path(__file__).parents[1] / "results" / "lightbench.json"
TRIALS, STEPS = 20, 500  # LightBench runs whole groups of steps: 480 of the constrained tasks, 256 of the others
MATRICES = """
xor_digit_rnn xor_sequence_rnn xor_spot_rnn xor_digit xor_sequence xor_spot wide_linear minimax class_imbalance_rare
multi_objective_pareto transfer_domain_shift generalization_summod generalization_weighted_summod
""".split()  # noqa: SIM905 (a list of names reads best so)
VECTORS = """
beale rosenbrock rastrigin saddle_point plateau_navigation quadratic_varying_scale quadratic_varying_target noisy_matmul
discontinuous_gradient scale_invariant momentum_utilization batch_size_scaling layer_wise_scale parameter_scale
gradient_delay adversarial_gradient quadratic_flip quadratic_outliers quadratic_sparse quadratic_quantized_gradient
absolute_varying_scale quadratic_quantization_aware_training vanishing_gradient ill_conditioned
ill_conditioned_mismatched constrained_optimization_relu constrained_optimization_log non_markovian
""".split()  # noqa: SIM905
LEFT_OUT = {
    "memory_constrained": "it measures the memory of a GPU",
    "plasticity_summod, plasticity_weighted_summod": "they need at least 897 steps",
    "sparse_gradient, sparse_parameters, dynamic_landscape, gradient_noise_scale_*": "one vector of 4,096 to 65,536",
}


class Together:
    """Optimizers as one. Where a gradient is not finite, which ours refuse, the loss is NaN, and the trial ends."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        """Clear the gradients of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One step of all, after one gradient."""
        loss = closure()
        weights = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if not all(p.grad is None or p.grad.isfinite().all() for p in weights):
            return loss * torch.nan
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def adamw(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.Optimizer:
    """The AdamW of torch."""
    return torch.optim.AdamW(model.parameters(), lr, betas=betas, weight_decay=weight_decay)


def torch_muon(model: nn.Module, lr: float, betas: tuple[float, float], beta: float, weight_decay: float) -> Together:
    """The Muon of torch on hidden matrices, with the unit that lets one rate serve its AdamW on the rest."""
    hidden = [a.parameter for a in wn.assign_norms(model, "muon", bare_matrices(model)) if a.norm]
    rest = [p for p in model.parameters() if not any(p is other for other in hidden)]
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        settings: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": weight_decay}
        parts.append(torch.optim.Muon(hidden, lr, momentum=beta, **settings))
    if rest:
        parts.append(torch.optim.AdamW(rest, lr, betas=betas, weight_decay=weight_decay))
    return Together(*parts)


def soap(
    model: nn.Module, lr: float, betas: tuple[float, float], shampoo_beta: float, weight_decay: float,
    precondition_frequency: int, max_precond_dim: int, merge_dims: bool, warmup_steps: int,
) -> Any:  # fmt: skip
    """HeavyBall's, with the settings that LightBench gives it."""
    import heavyball

    settings = {key: value for key, value in locals().items() if key not in ("model", "heavyball")}
    return heavyball.SOAP(model.parameters(), **settings)


def wn_muon(model: nn.Module, lr: float, beta: float, weight_decay: float) -> Together:
    """Ours with its defaults, but for the momentum, which is searched."""
    settings: dict[str, Any] = {"overrides": bare_matrices(model), "weight_decay": weight_decay}
    return Together(wn.Muon(model, lr, momentum=beta, **settings))


def wn_scion(model: nn.Module, lr: float, beta: float, weight_decay: float) -> Together:
    """The same."""
    settings: dict[str, Any] = {"overrides": bare_matrices(model), "weight_decay": weight_decay}
    return Together(wn.Scion(model, lr, momentum=beta, **settings))


def wn_classic_muon(
    model: nn.Module, lr: float, betas: tuple[float, float], beta: float, weight_decay: float
) -> Together:
    """Ours with the recipe and the unit of torch's arm: AdamW moves all but hidden matrices, at the same rate."""
    adamw = wn.optim.AdamWSettings(lr, betas, weight_decay=weight_decay)
    settings: dict[str, Any] = {"overrides": bare_matrices(model), "weight_decay": weight_decay, "recipe": "muon"}
    return Together(wn.Muon(model, lr, momentum=beta, adjust_lr_fn="match_rms_adamw", adamw=adamw, **settings))


def wn_bounded_adam(model: nn.Module, lr: float, beta: float, weight_decay: float) -> Together:
    """Scion whose steps of vectors and tables become short in noise."""
    settings: dict[str, Any] = {"overrides": bare_matrices(model), "weight_decay": weight_decay}
    return Together(wn.Scion(model, lr, momentum=beta, directions={"*": BoundedAdam()}, **settings))


def bare_matrices(model: nn.Module) -> dict[str, wn.norms.Norm]:
    """Norms of the matrices that a task's model holds itself, outside of any layer."""
    return {name: wn.Spectral() for name, p in model.named_parameters(recurse=False) if p.ndim == 2}


OPTIMIZERS = {
    "adamw": adamw, "torch-muon": torch_muon, "soap": soap, "wn-muon": wn_muon, "wn-scion": wn_scion,
    "wn-classic-muon": wn_classic_muon, "wn-scion-bounded-adam": wn_bounded_adam,
}  # fmt: skip


def for_cpu(folder: Path) -> None:
    """Write LightBench's tasks into a folder, for a CPU and for optimizers that are given the model; import from it."""
    spec = find_spec("lightbench")
    if spec is None or spec.origin is None:
        raise SystemExit("lightbench is not installed here; see the module's docstring")
    (folder / "lightbench").mkdir()
    for path in Path(spec.origin).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8").replace(".cuda()", "").replace('"cuda"', '"cpu"')
        source = re.sub(r"torch\.cuda\.synchronize\(\)", "None", source)
        if path.name == "utils.py":
            if source.count("self.m.parameters(),") != 1:
                raise SystemExit(f"lightbench {version('lightbench')} is another version; install 0.1.1")
            source = source.replace("self.m.parameters(),", "self.m,")
        (folder / "lightbench" / path.name).write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))


def passes(task: str, difficulty: str, optimizer: Callable[..., Any]) -> dict[str, Any]:
    """Whether the search found a setting that passes, in how many trials; why it ended, if by an error."""
    utils = importlib.import_module("lightbench.utils")
    module = importlib.import_module(f"lightbench.{task}")
    won, trials, inner = [], [], utils.Objective.objective

    class Won(ValueError):
        def __init__(self) -> None:
            won.append(True)

    def counted(self: Any, parameters: Any) -> float:
        trials.append(parameters)
        return inner(self, parameters)

    utils.WinConditionMet, utils.Objective.objective, utils.cleanup = Won, counted, gc.collect
    of_one = inspect.signature(module.main).parameters["dtype"].annotation is str
    error = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        try:
            module.main(
                dtype="float32" if of_one else ["float32"], steps=STEPS, weight_decay=0, opt=[optimizer], trials=TRIALS,
                win_condition_multiplier=1.0, config=difficulty,
            )  # fmt: skip
        except utils.Stop:  # the search gave up
            pass
        except utils.SkipConfig:
            error = {"error": "no such difficulty"}
        except Exception as problem:
            error = {"error": f"{type(problem).__name__}: {problem}"[:300]}
        finally:
            utils.Objective.objective = inner
    return {"passed": bool(won), "trials": len(trials), **error}


def main() -> None:
    """Run the cells that have no row, and write a row after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=MATRICES + VECTORS)
    parser.add_argument("--difficulties", nargs="+", default=["trivial", "easy"])
    parser.add_argument("--only", nargs="+", default=list(OPTIMIZERS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for_cpu(Path(folder))
        import heavyball.utils
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        heavyball.utils.compile_mode = None  # compiling takes longer than a search
        versions = {package: version(package) for package in ("lightbench", "heavyball", "optuna")}
        about = {"versions": versions, "trials": TRIALS, "steps": STEPS, "left_out": LEFT_OUT}
        stored = Stored(RESULTS, "python -m benchmarks.lightbench", **about)
        for task in chosen.tasks:
            for name in chosen.only:
                for difficulty in chosen.difficulties:
                    cell = {"task": task, "difficulty": difficulty, "optimizer": name}
                    if not stored.has(**cell):
                        stored.add(cell | passes(task, difficulty, OPTIMIZERS[name]))
                    if not stored.has(**cell, passed=True):
                        break


if __name__ == "__main__":
    main()
