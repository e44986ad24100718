"""The report says which run it is and how far, has no empty axis, fits a narrow window, and is drawn by `certify`."""

import math
import re
import shutil
import subprocess

import pytest
import torch

from tests.undrawn import undrawn
from wellnormed._files import read_json
from wellnormed.certificates import certifying
from wellnormed.certificates.certificate import Certificate
from wellnormed.cli import main
from wellnormed.models import load
from wellnormed.train import RunFolder, TrainConfig, finish, report

from .conftest import with_runs
from .crash import OPTIONS

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a finished run of a long name."""
    begin = ["train", "--source", "text.txt", "--lipschitz", "5", *OPTIONS, "--name", "a" * 200]
    with with_runs(tmp_path_factory.mktemp("report"), begin) as folder:
        return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """A copy of the run, which may be changed."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RunFolder(tmp_path / "runs" / ("a" * 200))


def unfinished(run, rows=3):
    """As if the run had been killed after so many rows of metrics."""
    for file in (run.manifest_file, run.results_file, run.certificate_file, run.weights_file):
        file.unlink()
    run.metrics_file.write_text("".join(run.metrics_file.read_text().splitlines(keepends=True)[:rows]))


def shown(run):
    """The words of a report, without the time that its figures take."""
    with undrawn():
        return re.sub(r"<[^>]*>", " ", report.write_report(run.path).read_text().partition("<body>")[2])


def test_it_says_which_run_it_is_and_how_far(run):
    page = shown(run)
    assert "finished, 6 steps." in page
    assert f"on text.txt (digest {run.read_config(TrainConfig)[1]['digest'][:12]}), seed 0" in page
    assert "begun at 20" in page
    unfinished(run)
    page = shown(run)
    assert "unfinished, 4 of 6 steps." in page
    assert re.search(r"loss of a batch, step 4", page)


def test_it_says_what_is_proved_in_words_without_markup(run):
    page = shown(run)
    assert "A transformer of blocks whose form keeps their Lipschitz constants" in page
    assert re.search(r"A sample whose tokens each move by at most d in l2 has .* is proved from the weights", page)
    assert "`" not in page.partition("Config")[0]


def test_it_says_which_predictions_no_machine_changes(run, monkeypatch):
    page, found = shown(run), read_json(run.results_file, "", sealed=True)["settled"]
    shares = found["shares"]
    for arithmetic in shares:
        assert f"of {found['tokens']:,} validation predictions are the same on every machine: {arithmetic}" in page
    *_, double = shares
    assert double.startswith("float64")
    assert shares[double] == max(shares.values()) > 0
    model, windows = load(run.path).eval(), torch.zeros(1, 8, dtype=torch.long)
    certificate = Certificate.load(run.certificate_file)
    monkeypatch.setattr(finish, "most_lanes", lambda *_: (2, None))
    monkeypatch.setattr(certifying, "require_lanes", lambda *_: None)  # which this machine need not keep
    again = finish.settled_shares(model, certificate, windows)
    any_order, lanes, double = again["errors"].values()
    assert double < lanes < any_order == certificate.forward_error
    assert next(iter(again["shares"].values())) >= certificate.settled(model(windows)).double().mean()
    assert "not_kept" not in again
    few = {"tokens": 5, "shares": {"float32": 0.99999}, "errors": {"float32": 0.101}}
    assert [(value, what[-30:]) for value, what in report._settled(few)] == [
        ("99.9%", "are within 0.11 of the real ones"[-30:])
    ]


def test_it_needs_no_other_file(run):
    page = run.report_file.read_text()
    assert page.count("<svg") == 6
    for name in ("www.w3.org", "purl.org", "creativecommons.org"):  # of the format and of its licence
        page = page.replace(f"http://{name}", "")
    assert "http://" not in page


def test_what_was_asked_for_stands_beside_what_is_certified(run):
    page = shown(run)
    certified = re.search(r"(\S+)\s+certified Lipschitz bound from RMS to RMS; at most 5 was asked for", page)
    assert certified is not None
    assert float(certified[1]) <= 5


@pytest.mark.parametrize("rows", [None, 0, 1, 2, 3])
def test_no_axis_is_empty(run, rows, monkeypatch):
    if rows is not None:
        unfinished(run, rows)
    figures = []
    monkeypatch.setattr(report, "_svg", lambda figure: figures.append(figure) or "<svg/>")
    report.write_report(run.path)
    assert bool(figures) == (rows is None or rows > 1)
    for axes in [axes for figure in figures for axes in figure.axes]:
        sizes = [len(line.get_xdata()) for line in axes.lines if line.get_linestyle() != "--"]
        markers = [line.get_marker() not in ("", "None") for line in axes.lines if line.get_linestyle() != "--"]
        seen = [size > 1 or (size == 1 and marker) for size, marker in zip(sizes, markers, strict=True)]
        assert any(seen) or axes.patches, axes.get_title()


def test_certify_draws_it_again_and_says_what_it_could_not(run, capsys):
    folder = str(run.path)
    run.certificate_file.unlink()
    assert "largest gain found by search" not in shown(run)
    assert main(["certify", folder, "--attack-steps", "1"]) == 0
    assert f"{run.report_file} shows it" in capsys.readouterr().out
    page = run.report_file.read_text()
    assert "largest gain found by search" in page
    run.results_file.write_text("{}")
    assert main(["certify", folder, "--attack-steps", "1"]) == 0
    assert re.search(r"the report stays as it is: .*results\.json", capsys.readouterr().out)
    assert run.report_file.read_text() == page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [500, 1200])
def test_nothing_is_wider_than_the_window(run, width):
    report.write_report(run.path)
    measure = "root = document.documentElement; document.title = root.scrollWidth - root.clientWidth"
    page = run.path / "measured.html"
    page.write_text(run.report_file.read_text().replace("</body>", f"<script>{measure}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert re.search(r"<title>(-?\d+)</title>", done.stdout)[1] == "0"


def test_the_factors_of_the_layers_make_the_constant(run):
    certificate = Certificate.load(run.certificate_file)
    (axes,) = report._budget_figure(certificate).axes
    factors = dict(zip([each.get_text() for each in axes.get_yticklabels()], axes.patches, strict=True))
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(certificate.lipschitz.log10)
    norm = float(torch.linalg.matrix_norm(load(run.path).head.weight.detach(), 2))
    assert factors["head"].get_width() == pytest.approx(math.log10(norm), abs=1e-3)


def test_a_norm_above_its_cap_is_within_the_figure():
    rows = [{"step": step, "norms_over_caps": {"a": 0.9, "b": ratio}} for step, ratio in ((1, 1.0), (2, 1.7))]
    (axes,) = report._norms_figure(rows).axes
    assert axes.get_ylim()[1] > 1.7
