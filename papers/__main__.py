"""`python -m papers NAME` runs an experiment; `python -m papers train ...` trains the models that only papers need."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from papers.training import PaperVariant, TrainPaper, paper_preset
from wellnormed import cli
from wellnormed.train.environment import device_of
from wellnormed.train.presets import Size


@dataclass(frozen=True)
class Reproduce:
    """Run an experiment of the four papers, and put the results beside the published ones.

    `python -m papers train --variant lipsformer`, or with `--float8`, trains a language model; see its --help. The
    other commands of `wellnormed`, such as `python -m papers certify FOLDER`, know these models here.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(help="Experiment; see --list.")] = None
    preset: Literal["cpu", "paper"] = "cpu"
    """cpu takes minutes on two cores; paper is the paper's own setting."""
    only: tuple[str, ...] = ()
    """Run these cells alone, such as `--only width=32,64 seed=0`."""
    device: str = "cpu"
    """Where the cells compute, such as cuda."""
    jobs: int = 1
    """Processes that run cells at the same time."""
    cluster: str | None = None
    """Submit cells as jobs to a cluster that `submitit` knows, such as slurm."""
    folder: Path = Path("results/reproduce")
    """Holds a folder for every experiment and preset."""
    list: bool = False
    """Show every experiment, with its state, cost and verdicts; with a name, the cells of that one."""
    dry_run: bool = False
    """Say how many cells would run, and how long such cells took, and run none."""

    def __call__(self) -> int:
        from rich.console import Console

        from papers import reproduce

        if self.list and self.name is None:
            Console().print(reproduce.overview(self.folder))
            return 0
        if self.name is None:
            raise ValueError("name the experiment, or pass --list to see all")
        if self.list or self.dry_run:
            where = self.name, self.preset, self.folder
            said = reproduce.states(*where) if self.list else reproduce.plan(*where, self.only)
            Console().print(said, highlight=False, soft_wrap=True, markup=False)
            return 0
        device = str(device_of(self.device)) if self.cluster is None else self.device  # a cluster has other devices
        arguments = {key: value for key, value in vars(self).items() if key not in ("list", "dry_run")}
        return int(reproduce.reproduce(**arguments | {"device": device}) > 0)


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:
        rest = arguments[2:] if arguments[1:2] == ["nanogpt"] else arguments[1:]
        size = cli.chosen("preset", get_args(Size), rest)
        variant = cli.chosen("variant", get_args(PaperVariant), rest)
        start = TrainPaper(paper_preset(size, variant), size, variant)  # pyrefly: ignore
        config = (tyro.conf.AvoidSubcommands,)
        return tyro.cli(TrainPaper, default=start, prog="python -m papers train", args=rest, config=config)() or 0
    if arguments[:1] and arguments[0] in ("certify", "verify", "sample", "report"):
        return cli.main(arguments)
    return tyro.cli(Reproduce, prog="python -m papers", args=arguments)()


def main(arguments: list[str] | None = None) -> int:
    """Run one command; exit statuses are those of `wellnormed`."""
    return cli.guarded(arguments, _main)


if __name__ == "__main__":
    sys.exit(main())
