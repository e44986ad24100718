"""The `wellnormed` command. Imports torch only after the arguments are parsed, so that help is instant."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wellnormed.train.config import PRESETS, TrainConfig

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="Run folder or exported model.")]


@dataclass(frozen=True)
class Train:
    """Train a character transformer with every weight norm enforced after every step."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: Literal["cpu", "positions", "caps", "paper"] = "cpu"
    """Where all other options start from."""
    name: str | None = None
    """The run folder is runs/NAME; by default the date and the preset."""
    resume: Path | None = None
    """Continue this run folder, with its own config, to the same bits as if it had never stopped."""

    def __call__(self) -> int | None:
        from wellnormed.train import loop

        if self.resume is not None:
            if self.config != PRESETS[self.preset] or self.name is not None:
                raise ValueError("--resume continues with the run's own config and folder; leave out all other options")
            loop.resume(self.resume)
        else:
            loop.train(self.config, Path("runs", self.name) if self.name else _new_folder(self.preset))


@dataclass(frozen=True)
class Certify:
    """Prove a Lipschitz bound of a run or model, search for a lower one, and write certificate.json."""

    folder: Run
    attack_steps: int = 50
    """Steps of the search for a lower bound; 0 leaves it out."""
    seed: int = 0
    """Seeds the search."""

    def __call__(self) -> int | None:
        from wellnormed.models.exporting import certified
        from wellnormed.models.files import read_config
        from wellnormed.train.characters import named_generators
        from wellnormed.train.finish import certify_model
        from wellnormed.train.lock import locked

        if self.attack_steps < 0:
            raise ValueError(f"--attack-steps {self.attack_steps} must not be negative; 0 leaves the search out")
        read_config(self.folder)  # a folder of something else gets no lock file
        path = self.folder / "certificate.json"
        with locked(self.folder):  # a run in training would write its own certificate over this one
            generator = named_generators(self.seed)["lower bound"]
            model, example, _ = certified(self.folder)
            certificate = certify_model(model, self.attack_steps, generator, example)
            certificate.save(path)
        print(f"{certificate}\nwritten to {path}")


@dataclass(frozen=True)
class Verify:
    """Check certificate.json against weights and model, by independent arithmetic; status 1 if it fails."""

    folder: Run

    def __call__(self) -> int | None:
        import wellnormed as wn
        from wellnormed.models.exporting import certified
        from wellnormed.models.files import read_config

        read_config(self.folder)  # a folder of something else needs other advice than a missing certificate
        path = self.folder / "certificate.json"
        if not path.exists():
            raise ValueError(f"{path} is missing; write it with `wellnormed certify {self.folder}`")
        try:
            model, example, weights = certified(self.folder)
            report = wn.verify(path, weights)
            certificate = wn.certificates.Certificate.load(path)
            wn.certificates.require_same_model(certificate, model, example)
        except ValueError as error:
            print(f"NOT VERIFIED: {error}", file=sys.stderr)
            return 1
        print(
            f"verified: log10 of the Lipschitz bound is at most {certificate.log10_lipschitz} for {weights}\n{report}"
        )


@dataclass(frozen=True)
class Sample:
    """Write text with a run or exported model."""

    folder: Run
    prompt: str = "\n"
    """Text to continue."""
    characters: int = 500
    """How many to add."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest character."""
    seed: int = 0
    """Seeds the draws."""

    def __call__(self) -> int | None:
        from wellnormed.data.characters import decode, encode
        from wellnormed.models.files import load, model_symbols
        from wellnormed.train.characters import named_generators
        from wellnormed.train.evaluate import sample

        if self.characters < 0:
            raise ValueError(f"--characters {self.characters} must not be negative")
        symbols = model_symbols(self.folder)
        prompt = encode(self.prompt, symbols)
        generator = named_generators(self.seed)["sample"]
        print(decode(sample(load(self.folder), prompt, self.characters, generator, self.temperature), symbols))


@dataclass(frozen=True)
class Report:
    """Draw report.html again from the files of a run or exported model."""

    folder: Run

    def __call__(self) -> int | None:
        from wellnormed.train.report import write_report

        print(write_report(self.folder))


@dataclass(frozen=True)
class Reproduce:
    """Run an experiment of the four papers, and put what is found beside what was published."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(help="Experiment; see --list.")] = None
    preset: Literal["cpu", "paper"] = "cpu"
    """cpu takes minutes on two cores; paper is the paper's own setting."""
    device: str = "cpu"
    """Where the cells compute, such as cuda."""
    jobs: int = 1
    """Processes that run cells at the same time."""
    cluster: str | None = None
    """Submit cells as jobs to a cluster that `submitit` knows, such as slurm."""
    folder: Path = Path("results/reproduce")
    """Holds a folder for every experiment and preset."""
    list: bool = False
    """Show every experiment, with its state, cost and verdicts."""

    def __call__(self) -> int | None:
        from wellnormed.experiments import reproduce

        if self.list:
            from rich.console import Console

            Console().print(reproduce.overview(self.folder))
        elif self.name is None:
            raise ValueError("name the experiment, or pass --list to see all")
        else:
            arguments = {key: value for key, value in vars(self).items() if key != "list"}
            return int(reproduce.reproduce(**arguments) > 0)


@dataclass(frozen=True)
class Tokens:
    """Convert texts into shards of GPT-2's tokens, or download those of FineWeb; run again, both go on."""

    paths: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="Texts to train on, then the folder of the shards.")
    ] = ()
    validation: tuple[Path, ...] = ()
    """Texts to validate on."""
    name: str | None = None
    """What the names of the shards begin with; by default the folder's name."""
    shard_tokens: int = 100_000_000
    """Tokens of a full shard."""
    threads: int | None = None
    """How many encode; by default all of the machine's."""
    download: Literal["fineweb10B", "fineweb100B"] | None = None
    """Download the shards of FineWeb instead, into the folder or, without one, into the cache."""
    shards: int = 9
    """How many training shards to download, of 98.5 million tokens each."""

    def __call__(self) -> int | None:
        from wellnormed.train.lock import locked

        *texts, folder = self.paths or (None,)
        if self.download is not None:
            from wellnormed.data.fineweb import download_fineweb

            if texts or self.validation:
                raise ValueError("--download takes no texts, only the folder where the shards go")
            place = download_fineweb(self.download, self.shards, folder)
            print(f"{self.shards} training shards and one to validate are in {place}")
            return
        if folder is None or not (texts or self.validation):
            raise ValueError("name the texts to train on and then the folder of the shards, or pass --download")
        from wellnormed.data.convert import convert_texts

        with locked(folder):
            for split, inputs in (("train", texts), ("val", self.validation)):
                if inputs:
                    done = convert_texts(inputs, folder, split, self.name, self.shard_tokens, self.threads)
                    counts = f"{done['tokens']:,} tokens of {done['documents']:,} documents"
                    print(f"{split}: {counts} in {done['shards']:,} shard{'s' * (done['shards'] > 1)} in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: the command line's, or that of `arguments`, which leave out the program's name.

    The exit status is 0 for success, 1 if verification fails, 2 for an error that the message explains.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or os.environ.get("WELLNORMED_DEBUG") == "1"
    arguments = [a for a in arguments if a != "--debug"]
    named = re.search(r"--preset[= ](\S+)", " ".join(arguments))  # read first, for every default depends on it
    preset = named[1] if named and named[1] in PRESETS else "cpu"
    start = Train(PRESETS[preset], preset=preset)  # pyrefly: ignore
    train = Annotated[Train, tyro.conf.subcommand("train", default=start)]
    try:
        command = tyro.cli(
            train | Certify | Verify | Sample | Report | Reproduce | Tokens,  # pyrefly: ignore
            prog="wellnormed",
            description="Train Lipschitz-certified transformers, and prove it. --debug shows tracebacks.",
            args=arguments,
            config=(tyro.conf.AvoidSubcommands,),  # a preset chooses the architecture
        )
        return command() or 0
    except (ValueError, OSError) as error:
        if debug:
            raise
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\nstopped{interrupt}", file=sys.stderr)
        return 130


def _new_folder(preset: str) -> Path:
    base = f"{date.today():%Y-%m-%d}-{preset}"
    names = chain([base], (f"{base}-{number}" for number in count(2)))
    return next(folder for name in names if not (folder := Path("runs", name)).exists())


if __name__ == "__main__":
    sys.exit(main())
