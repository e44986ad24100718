import subprocess
import sys

import pytest
import torch

from tests import sealed
from wellnormed.cli import main
from wellnormed.models import GPTConfig, build, export, load
from wellnormed.models.files import config_sha256

TINY = """
--steps 4 --batch 2 --threads 1 --device cpu --checkpoint-every 2 --attack-steps 2 --sample-characters 5
--model.length 8 --model.token-width 4 --model.mixing-heads 2 --model.attention-heads 2 --model.hidden 16
--model.blocks 1
""".split()  # noqa: SIM905 (a command line reads best as one)
HELP = """
import sys
from wellnormed.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
assert not {"torch", "numpy", "matplotlib", "rich"} & sys.modules.keys()  # it takes a tenth of a second without them
"""


pytestmark = pytest.mark.usefixtures("quick_ends")


def test_help_does_not_import_torch():
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True).stdout
    assert all(command in shown for command in ("train", "certify", "verify", "sample", "report", "tokens"))


def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-m", "wellnormed.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == 141


def test_mistyped_options_are_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--learning-rat", "3"])
    assert "--learning-rate" in capsys.readouterr().err


def test_the_preset_sets_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--preset", "paper", "--help"])
    assert "(default: 64)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("--caps.query 0", "caps.query=0.0 must be positive and finite (on the command line: --caps.query)"),
        ("--caps.head nan", "--caps.head"), ("--model.hidden 0", "--model.hidden"),
        ("--model.attention-heads 3", "--model.attention-heads"),
        ("--model.attention-blocks 5", "--model.attention-blocks"), ("--lipschitz 0", "--lipschitz"),
        ("--lipschitz 1e-9", "lipschitz=1e-09 must be at least 1.24e-07"),
        ("--preset caps --lipschitz 3", "must be left out for a `gpt`, whose constant follows from its caps"),
        ("nanogpt --variant nanogpt --lipschitz 3", "must be left out for a `nanogpt`"),
        ("--lipschitz None", "must be a number for a `potential` model"),
        ("--preset caps --model.heads 3", "--model.heads"), ("--learning-rate -1", "--learning-rate"),
        ("--momentum 1", "--momentum"), ("--checkpoint-every 0", "--checkpoint-every"), ("--threads 0", "--threads"),
    ],
)  # fmt: skip
def test_bad_values_are_answered_with_the_name_of_the_option(options, answer, refused):
    shown = refused("train", *options.split())
    assert answer in shown
    assert "tyro" not in shown


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "a/", "..", ".", "", "a\nb", "a\0b", "\x1b[2J"])
def test_a_name_that_leads_out_of_runs_is_refused(name, place, refused):
    assert "must be the name of one folder in runs/" in refused("train", "--name", name, *TINY)
    assert not (place / "runs").exists()


def test_every_command_on_run_and_exported_model(place, capsys, refused):
    assert main(["train", "--source", "text.txt", "--name", "a", *TINY]) == 0
    assert "validation loss" in capsys.readouterr().out
    export(load("runs/a"), "exported")
    for folder in ("runs/a", "exported"):
        assert main(["certify", folder, "--attack-steps", "2"]) == 0
        assert "Lipschitz bound" in capsys.readouterr().out
        assert main(["verify", folder]) == 0
        assert "verified" in capsys.readouterr().out
        assert main(["report", folder]) == 0
        assert "<svg" in (place / folder / "report.html").read_text()
    capsys.readouterr()
    assert main(["sample", "runs/a", "--prompt", "Speak", "--characters", "9"]) == 0
    assert len(capsys.readouterr().out) == 5 + 9 + 1
    assert "the prompt has a character that the model never saw: '{'" in refused("sample", "runs/a", "--prompt", "S{")
    assert "exported is an exported model, which does not store its characters" in refused("sample", "exported")
    assert main(["train", "--resume", "runs/a"]) == 0
    refused("train", "--resume", "runs/a", "--steps", "9")
    assert "exists" in refused("train", "--source", "text.txt", "--name", "a", *TINY)
    assert "is an exported model, which cannot be continued" in refused("train", "--resume", "exported")
    path = place / "exported" / "certificate.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["verify", "exported"]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().err


def test_a_terminal_is_shown_no_commands_of_a_model(place, capsys, monkeypatch):
    """A model writes what it learned, such as the character that begins a terminal's commands."""
    model = build(GPTConfig(vocabulary_size=4, length=4, width=8, heads=1, blocks=1))
    export(model, "own", certificate=False, onnx=False)
    path, manifest = place / "own/config.json", sealed.read(place / "own/manifest.json")
    sealed.write(path, sealed.read(path) | {"text": {"tokenizer": "characters", "symbols": "a\n\x1b\x07"}})
    sealed.write(place / "own/manifest.json", manifest | {"config_sha256": config_sha256(sealed.read(path))})
    command = ["sample", "own", "--prompt", "a\n\x1b", "--characters", "0"]
    assert main(command) == 0
    assert capsys.readouterr().out == "a\n\x1b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().out == "a\n\\u{1b}\n"


def test_a_run_from_another_folder_names_the_text_that_it_misses(place, refused, monkeypatch):
    assert main(["train", "--source", "text.txt", "--name", "a", *TINY]) == 0
    (place / "runs/a/manifest.json").unlink()
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert "a relative path is looked for in the present folder" in refused("train", "--resume", "../runs/a")
    shown = refused("train", "--resume", str(place / "runs/b"))
    assert f"does not exist (did you mean {place / 'runs/a'}?)" in shown


def test_the_proof_of_an_exported_model_of_one_s_own_is_checked(tmp_path, capsys, refused):
    model = torch.nn.Linear(3, 2)
    export(model.eval(), tmp_path / "own", torch.zeros(1, 3), onnx=False)
    assert main(["verify", str(tmp_path / "own")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the model's code is not here, so only the proof of the program is checked\n")
    assert "is L-Lipschitz with L = " in shown
    (tmp_path / "own" / "weights.safetensors").write_bytes(b"other")
    assert main(["verify", str(tmp_path / "own")]) == 1
    assert "not proved: " in capsys.readouterr().err
    assert "is a file, which wn.verify proves if" in refused("verify", str(tmp_path / "own/certificate.json"))
    (tmp_path / "own" / "certificate.json").unlink()
    assert "wellnormed.models" in refused("verify", str(tmp_path / "own"))
    (tmp_path / "own" / "manifest.json").unlink()
    assert "wn.export(model, folder, x)" in refused("certify", str(tmp_path / "own"))


@pytest.mark.parametrize("command", ["certify", "verify", "sample", "report"])
def test_a_missing_run_is_one_line_of_error(command, refused, place):
    shown = refused(command, "runs/nothing")
    assert shown.startswith("error: runs/nothing does not exist; pass a run folder")
    with pytest.raises(ValueError, match="runs/nothing"):
        main([command, "runs/nothing", "--debug"])
