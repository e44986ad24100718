import json
from dataclasses import asdict, replace

import pytest

from wellnormed._files import parse_dataclass
from wellnormed.train import PRESETS, Caps, TrainConfig


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = PRESETS[name]
    assert parse_dataclass(TrainConfig, json.loads(json.dumps(asdict(config))), "x") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 0.1}, "unknown key 'learning_rat'; another version"),
        ({"model": 3}, "config.model: expected an object"),
        ({"batch": 0}, "batch=0 must be positive"),
    ],
)
def test_json_is_read_strictly(change, message):
    with pytest.raises(ValueError, match=message):
        parse_dataclass(TrainConfig, asdict(PRESETS["cpu"]) | change, "config")


def test_a_missing_key_is_named():
    content = asdict(PRESETS["cpu"])
    del content["seed"]
    with pytest.raises(ValueError, match="missing key 'seed'"):
        parse_dataclass(TrainConfig, content, "config")


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_caps_are_positive(cap):
    with pytest.raises(ValueError, match=r"caps.query=.* must be positive"):
        TrainConfig(caps=Caps(query=cap))


def test_an_unknown_constraint_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="constraint=softcap must be one of soft-cap, hard-cap, spectral-normalize"):
        replace(PRESETS["caps"], constraint="softcap")


@pytest.mark.parametrize("change", [{"momentum": 1.0}, {"learning_rate": 0.0}, {"threads": 0}, {"attack_steps": -1}])
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(PRESETS["cpu"], **change)
