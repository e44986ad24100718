"""Proved constants of networks that other libraries make: deel-torchlip, timm, stable-baselines3.

pip install ".[integrations]"   # in a clone
python examples/certify_yours.py [torchlip | timm | policy]
"""

import sys

import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates import shown


def torchlip() -> float:
    """Layers of deel-torchlip are of constant 1 by design; what their power iterations leave is proved."""
    from deel import torchlip as lip

    torch.manual_seed(0)
    model = lip.Sequential(
        lip.SpectralConv2d(1, 8, (3, 3), padding=1, padding_mode="circular"),
        lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)),
        nn.Flatten(),
        lip.SpectralLinear(8 * 14 * 14, 64),
        lip.GroupSort2(),
        lip.FrobeniusLinear(64, 10),
    )
    images = torch.rand(8, 1, 28, 28)
    model(images)  # their power iterations, which go on in training mode
    certificate = wn.certify(model.eval().requires_grad_(False), images[:1], box=(0, 1))
    print("torchlip: proved constant in Euclidean norms", shown(certificate.lipschitz))
    return certificate.lipschitz


def timm() -> float:
    """A ResNet of timm without normalization layers: what standardizes its kernels is constant, and is proved along."""
    import timm as models

    torch.manual_seed(0)
    model = models.create_model("nf_resnet26", num_classes=10).eval()
    certificate = wn.certify(model, torch.zeros(1, 3, 32, 32), box=(0, 1))
    print("nf_resnet26: proved constant in Euclidean norms", shown(certificate.lipschitz))
    return certificate.lipschitz


def policy(steps: int = 8192, most: float = 5.0) -> tuple[float, float]:
    """PPO with its own Adam, first as it is, then with an actor whose constant is at most `most` after every step."""
    from stable_baselines3 import PPO

    constants = []
    for lipschitz in (None, most):
        agent = PPO("MlpPolicy", "CartPole-v1", learning_rate=1e-3, seed=0, device="cpu")
        actor = nn.Sequential(agent.policy.mlp_extractor.policy_net, agent.policy.action_net)
        observation = torch.zeros(1, 4)
        if lipschitz is not None:
            wn.constrain(
                agent.policy.optimizer, lipschitz=lipschitz, norm="rms", norms=actor, example_input=observation
            )
        agent.learn(steps)
        constants.append(wn.certify(actor, observation).rms_lipschitz)
        lengths = [episode["l"] for episode in agent.ep_info_buffer]
        print(
            "policy: proved constant from RMS to RMS",
            shown(constants[-1]),
            f"and {sum(lengths) / len(lengths):.0f} steps an episode",
        )
    return constants[0], constants[1]


if __name__ == "__main__":
    for name in sys.argv[1:] or ("torchlip", "timm", "policy"):
        {"torchlip": torchlip, "timm": timm, "policy": policy}[name]()
