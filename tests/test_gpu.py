"""What only a CUDA device shows: its products, what it waits for, graphs, and runs that move between devices."""

import copy
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wellnormed as wn
from tests.on_gpu import DEVICE
from tests.parallel.training import CONSTRAINTS, OPTIMIZERS, network
from wellnormed import constraints as c
from wellnormed.cli import main
from wellnormed.matrix import REGISTRY, spectral_hardcap
from wellnormed.matrix.msign import coarse_msign, multiplies_bfloat16, overshoot

pytestmark = pytest.mark.gpu

SIZES = ((300, 40), (64, 64), (64, 64), (96, 256), (512, 512))
CAPS = {
    "hard": wn.HardCap(1.1), "hard, waiting": wn.HardCap(1.1, every=4), "soft": wn.SoftCap(1.1),
    "normalize": c.SpectralNormalize(1.1), "sphere": c.Sphere(1.1), "decay": c.ClippedWeightDecay(0.9, 1.0),
    "Stiefel": c.Stiefel(1.1),
}  # fmt: skip


def matrices(dtype=torch.float32, sizes=SIZES):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in sizes).to(DEVICE, dtype)


def draw(model, generator):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def muon(model, **settings):
    return wn.Muon(wn.assign_norms(model, overrides={"*": wn.Spectral()}), lr=0.05, **settings)


def norms(x):
    return torch.linalg.matrix_norm(x.double().cpu(), 2)


EVERY_STEP = {**CONSTRAINTS, "7": wn.HardCap(1.0), "9": wn.HardCap(0.9)}
"""Those of the parallel tests but for two: a cap that waits leaves more room where it is computed by products, and the
vector that a hammer strikes is found to a tolerance."""


@pytest.mark.parametrize(("kind", "constraints"), [*((kind, None) for kind in OPTIMIZERS), ("Scion", EVERY_STEP)])
def test_steps_are_those_of_a_cpu(kind, constraints):
    ends = []
    for device in ("cpu", DEVICE):
        model = network().to(device)
        optimizer = OPTIMIZERS[kind](wn.assign_norms(model))
        if constraints:
            wn.constrain(optimizer, constraints)
        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            optimizer.zero_grad()
            tokens = torch.randint(7, (16,), generator=generator)
            target = torch.randn(16, 3, generator=generator, dtype=torch.float64)
            (model(tokens.to(device)) - target.to(device)).square().mean().backward()
            optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-6)  # float64; singular vectors may differ by more than it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
def test_a_promise_is_proved_after_every_step(cap, dtype, generator):
    model = matrices(dtype)
    optimizer = muon(model)
    constraints = wn.constrain(optimizer, {"*": cap})
    for _ in range(12):
        draw(model, generator)
        optimizer.step()
        ratios = constraints.proved_ratios()
        assert len(ratios) == len(SIZES)
        assert max(ratios.values()) <= 1, ratios


LOOKS = {"hard": 2, "decay": 2, "normalize": 1, "sphere": 1, "Stiefel": 1}
"""What a cap asks the device for each of the four shapes; the others ask nothing."""


@pytest.mark.parametrize("name", ["none", *CAPS])
def test_a_step_waits_for_the_device_no_more_than_said(name, generator):
    model = matrices()
    optimizer = muon(model)
    if name != "none":
        wn.constrain(optimizer, {"*": CAPS[name]})
    draw(model, generator)
    for _ in range(5):  # a cap that waits does not project in the sixth
        optimizer.step()
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which warns of itself, and an error would leave the mode on
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in found if "a synchronizing" in str(one.message)]
    assert len(waits) == 1 + 4 * LOOKS.get(name, 0), waits


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("dtype", "promise"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(64, 64), (300, 128), (512, 512)])
def test_a_hard_cap_keeps_its_promise(shape, dtype, promise, precision):
    x = torch.randn(100, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / norms(x)[:, None, None] * torch.linspace(0.9, 1.6, 100)[:, None, None]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        capped = spectral_hardcap(x.to(DEVICE, dtype), 1.0)
    finally:
        torch.set_float32_matmul_precision(before)
    assert norms(capped).max() <= 1 + promise
    u, s, vh = torch.linalg.svd(x.to(dtype).double(), full_matrices=False)
    exact = (u * s.clamp_max(1)[..., None, :]) @ vh
    assert (norms(capped.double().cpu() - exact) / s[..., 0]).max() <= promise


@pytest.mark.parametrize("coefficients", [name for name, s in REGISTRY.items() if s.coarser_than_bfloat16])
@pytest.mark.parametrize("n", [128, 768, 2048])
def test_a_step_in_bfloat16_stays_within_its_overshoot(coefficients, n):
    assert multiplies_bfloat16("cuda")
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, n, generator=generator)
    few = torch.randn(n, 3, generator=generator) @ torch.randn(3, n, generator=generator)
    for x in (normal, normal.repeat(3, 1), few, few + 1e-3 * normal, torch.ones(n, n), torch.eye(n)):
        assert norms(coarse_msign(x.to(DEVICE), 1.0, coefficients)) <= overshoot(coefficients)


def test_a_graph_refuses_a_constraint_that_looks(generator):
    model = matrices(torch.bfloat16)
    optimizer = muon(model)
    wn.constrain(optimizer, {"*": wn.HardCap(1.1)})
    draw(model, generator)
    optimizer.step()
    with pytest.raises(RuntimeError, match="a CUDA graph cannot record"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("cap", [None, wn.HardCap(1.1), wn.SoftCap(1.1)], ids=["none", "hard", "soft"])
def test_a_graph_records_a_step(cap, generator):
    ends = []
    for recorded in (False, True):
        model, fresh = matrices(), torch.Generator().manual_seed(1)
        draw(model, fresh)
        optimizer = muon(model)
        if cap is not None:
            wn.constrain(optimizer, {"*": cap})
        for _ in range(3):
            optimizer.step()
        step = optimizer.step
        if recorded:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad.copy_(torch.randn(parameter.shape, generator=fresh))
            step()
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_a_state_moves_between_devices(generator):
    model = matrices()
    optimizer = muon(model)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(1.1, every=4)})
    draw(model, generator)
    optimizer.step()
    twin = matrices().cpu()
    again = muon(twin)
    caps = wn.constrain(again, {"*": wn.HardCap(1.1, every=4)})
    for mine, theirs in ((twin, model), (again, optimizer), (caps, constraints)):
        mine.load_state_dict(theirs.state_dict())
    assert all(t.device.type == "cpu" for s in again.state.values() for t in s.values() if torch.is_tensor(t))
    draw(twin, generator)
    again.step()
    assert max(caps.proved_ratios().values()) <= 1


def test_a_model_on_the_device_is_attacked_there_and_certified_on_the_cpu():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    example = torch.randn(4, 8)
    bound = wn.certify(model, example).lipschitz
    moved = copy.deepcopy(model).to(DEVICE)
    with pytest.raises(ValueError, match=r"'0\.weight' lies on cuda:0, .* pass copy\.deepcopy\(model\)\.cpu\(\)"):
        wn.certify(moved, example.to(DEVICE))
    assert wn.certify(copy.deepcopy(moved).cpu(), example).lipschitz == bound
    constraints = wn.constrain(wn.Scion(moved, lr=0.01), {"*.weight": wn.HardCap(1.0)})
    with pytest.raises(ValueError, match=r"constraints = copy\.deepcopy\(\(model, constraints\)\)"):
        wn.certify(moved, example.to(DEVICE), within=constraints)
    copied, promises = copy.deepcopy((moved, constraints))
    assert wn.certify(copied.cpu(), example, within=promises).rms_lipschitz < 1.001
    assert moved[0].weight.device.type == DEVICE.type
    assert 0 < wn.lower_bound(moved, example.to(DEVICE), steps=20).value <= bound


def test_one_process_of_nccl_is_none(tmp_path, generator):
    ends = []
    for kind in ("one", "fsdp"):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).to(DEVICE)
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        if kind == "fsdp":
            store = dist.FileStore(str(tmp_path / "store"), 1)
            dist.init_process_group("nccl", store=store, rank=0, world_size=1)
            fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        try:
            optimizer = wn.Scion(wn.assign_norms(model), lr=0.05)
            wn.constrain(optimizer, {"*.weight": wn.HardCap(1.1)})
            fresh = torch.Generator().manual_seed(0)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 32, generator=fresh).to(DEVICE)).square().mean().backward()
                optimizer.step()
            ends.append([getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()])
        finally:
            if kind == "fsdp":
                dist.destroy_process_group()
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


OPTIONS = [
    *("--steps", "6", "--batch", "4", "--model.width", "16", "--model.blocks", "1", "--model.heads", "2"),
    *("--model.length", "16", "--checkpoint-every", "3", "--validation-tokens", "500", "--attack-steps", "1"),
    *("--sample-tokens", "20", "--model.residual-strength", "0.25"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "auto"])
def test_the_command_trains_resumes_certifies_and_verifies(here, precision, at_step):
    def stop(task):
        raise KeyboardInterrupt

    options = [*OPTIONS, "--device", "cuda", "--precision", precision]
    assert main(["train", "nanogpt", "--name", "whole", *options]) == 0
    with at_step(4, stop):
        main(["train", "nanogpt", "--name", "cut", *options])
    assert main(["train", "--resume", "runs/cut"]) == 0
    losses = [
        [json.loads(line).get("loss") for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert main(["certify", "runs/whole"]) == 0
    assert main(["verify", "runs/whole"]) == 0
