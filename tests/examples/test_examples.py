"""The examples run with the real libraries: `make test-integrations` installs them; without them they are skipped."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("default")  # the libraries' own warnings are not ours to fix
@pytest.mark.parametrize(
    ("name", "library"), [("huggingface_trainer", "transformers"), ("lightning_module", "lightning")]
)
def test_constraints_hold_under_a_trainer(name, library):
    pytest.importorskip(library, reason="needs the extra `integrations`", exc_type=ImportError)
    loss, ratio = load(name).main()
    assert ratio <= 1
    assert loss < {"transformers": 2.6, "lightning": 3.0}[library]  # ln 14 = 2.64 and the variance, 2.9, of a constant


YOURS = {"torchlip": "deel.torchlip", "timm": "timm", "policy": "stable_baselines3"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", YOURS)
def test_a_network_of_theirs_gets_the_constant_of_the_guide(name, capsys):
    # timm imports torchvision, which raises RuntimeError where it is built for CUDA, and torch is not
    pytest.importorskip(YOURS[name], exc_type=(ImportError, RuntimeError))
    if name == "policy":
        free, capped = load("certify_yours").policy(steps=2048, most=2.0)
        assert capped <= 2 < free
        return
    getattr(load("certify_yours"), name)()
    (printed,) = capsys.readouterr().out.splitlines()
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    words, number = printed.rsplit(maxsplit=1)
    (stated,) = re.findall(rf"^{words} (.*)$", page, re.MULTILINE)
    assert float(number) == pytest.approx(float(stated), rel=1e-3)  # random weights and power iterations in float32


def test_timm_groups_train():
    first, last = load("timm_groups").main()
    assert last < 0.5 * first


def test_airbench_moves_its_kernels_as_published():
    """Its rule, written here: kernels at the Frobenius norm sqrt(d_out), then a step of 0.24 in singular values."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(d_in, d_out, 3, bias=False).double() for d_in, d_out in ((3, 4), (4, 4), (2, 40))]
    kernels = [layer.weight.detach().clone() for layer in layers]
    buffers = [torch.zeros_like(kernel) for kernel in kernels]
    optimizer = load("airbench94").muon(layers, lr=0.24)
    for _ in range(3):
        for layer, kernel, buffer in zip(layers, kernels, buffers, strict=True):
            layer.weight.grad = torch.randn_like(kernel)
            buffer.mul_(0.6).add_(layer.weight.grad)
            x = (layer.weight.grad + 0.6 * buffer).flatten(1)
            x /= x.norm()
            for _ in range(5):
                x = 3.4445 * x + (-4.7750 * x @ x.mT + 2.0315 * x @ x.mT @ x @ x.mT) @ x
            kernel *= len(kernel) ** 0.5 / kernel.norm()
            kernel -= 0.24 * x.view_as(kernel)
        optimizer.step()
        for layer, kernel in zip(layers, kernels, strict=True):  # both in float64: only roundings differ
            torch.testing.assert_close(layer.weight, kernel * len(kernel) ** 0.5 / kernel.norm(), rtol=0, atol=1e-9)


def test_another_version_of_airbench_is_refused():
    with pytest.raises(ValueError, match="lacks 'optimizer2 = Muon"):
        load("airbench94").changed("    model.reset()\n    step = 0\n")


def test_torchtitan_takes_our_configuration_from_its_command_line(monkeypatch):
    pytest.importorskip("torchtitan.models.llama3", reason="needs torchtitan and triton", exc_type=ImportError)
    from torchtitan.config import ConfigManager

    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = ["--module", "torchtitan_optimizer", "--config", "llama3_scion", "--optimizer.lr", "0.03"]
    config = ConfigManager().parse_args(options)
    model = config.model_spec.model.build()
    optimizers = config.optimizer.build(model_parts=[model])
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.03}
    capped = {name for constraints in optimizers.constraints for name in constraints.proved_ratios()}
    assert capped == {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")}


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_torchtitan_goes_on_from_a_checkpoint_to_the_same_losses(launcher):
    needed = "needs torchtitan and triton, which the extra `integrations` does not install"
    pytest.importorskip("torchtitan.models.llama3", reason=needed, exc_type=ImportError)
    command = [sys.executable, *launcher, str(EXAMPLES / "torchtitan_optimizer.py")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    losses, again = ([float(x) for x in line.partition(":")[2].split()] for line in process.stdout.splitlines()[:2])
    assert losses[4:] == again
    assert losses[-1] < 0.5 * losses[0]
    assert float(process.stdout.split()[-1]) <= 1
