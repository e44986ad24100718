import json
import math
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"caps": Caps(query=cap)}, r"caps.query=.* must be positive") for cap in (0.0, -1.0, math.nan, math.inf)),
        ({"constraint": "softcap"}, "constraint=softcap must be one of soft-cap, hard-cap, spectral-normalize"),
        *(({name: value}, name) for name, value in
          (("momentum", 1.0), ("learning_rate", 0.0), ("threads", 0), ("attack_steps", -1))),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["caps"], **change)
