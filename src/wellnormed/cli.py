"""The `wellnormed` command. Imports torch only after the arguments are parsed, so that help is instant."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

import wellnormed
from wellnormed.train.config import TrainConfig
from wellnormed.train.lock import require_new
from wellnormed.train.presets import PRESETS, Size, Variant, token_preset
from wellnormed.train.stopping import Stopped

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="Run folder or exported model of wellnormed.models.")]


@dataclass(frozen=True)
class Train:
    """Train a character transformer with every weight norm enforced after every step.

    `wellnormed train nanogpt` trains language models on tokens, on one process or many; see its --help.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: Literal["cpu", "positions", "caps", "paper"] = "cpu"
    """The defaults of all other options."""
    name: str | None = None
    """The run folder is runs/NAME; by default the date and the preset."""
    resume: Path | None = None
    """Continue this run folder, with its config, to the same bits as if it had never stopped."""

    def __call__(self) -> int | None:
        _train(self.config, PRESETS[self.preset], self.name, self.preset, self.resume)


@dataclass(frozen=True)
class TrainNanoGPT:
    """Train a language model on tokens; under `torchrun -m wellnormed.cli train nanogpt ...` on many processes."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: Size = "1m"
    """The size of the model, by the parameters of its blocks (124m and 350m are GPT-2's names), and the defaults of all
    other options."""
    variant: Variant = "lipschitz"
    """The transformer with enforced norms, the one whose blocks are 1-Lipschitz by form, or a peer without them."""
    name: str | None = None
    """The run folder is runs/NAME; by default the date, the preset and the variant."""
    resume: Path | None = None
    """Continue this run folder, with its config, on any number of processes."""

    def __call__(self) -> int | None:
        start = token_preset(self.preset, self.variant)
        _train(self.config, start, self.name, f"{self.preset}-{self.variant}", self.resume)


def _train(config: TrainConfig, start: TrainConfig, name: str | None, kind: str, resume: Path | None) -> None:
    """Begin a run, or continue one; a run that continues takes no other option."""
    if resume is not None and (config != start or name is not None):
        raise ValueError("--resume continues with the run's own config and folder; leave out all other options")
    folder = new_folder(name, kind) if resume is None else resume
    from wellnormed.train import loop

    if resume is None:
        loop.train(config, folder)
    else:
        loop.resume(folder)


@dataclass(frozen=True)
class Certify:
    """Prove a Lipschitz bound of a run or model, search for a lower one, and write certificate.json."""

    folder: Run
    attack_steps: int = 50
    """Steps of the search for a lower bound; 0 leaves it out."""

    def __call__(self) -> int | None:
        from wellnormed.models.exporting import certified
        from wellnormed.models.files import read_config
        from wellnormed.train.finish import certify_model
        from wellnormed.train.lock import locked
        from wellnormed.train.report import write_report
        from wellnormed.train.setup import named_generators

        if self.attack_steps < 0:
            raise ValueError(f"--attack-steps {self.attack_steps} must not be negative; 0 leaves the search out")
        config = read_config(self.folder)  # another kind of folder must get no lock file
        path = self.folder / "certificate.json"
        with locked(self.folder):  # a run in training would write its own certificate over this one
            model, example, _ = certified(self.folder)
            certificate = certify_model(model, self.attack_steps, named_generators(0)["lower bound"], example)
            certificate.save(path)
        print(f"{certificate}\nwritten to {path}")
        if "train" in config or (self.folder / "report.html").exists():
            try:
                print(f"{write_report(self.folder)} shows it")
            except (ValueError, OSError) as error:  # of files that the certificate does not need
                print(f"the report stays as it is: {error}")


@dataclass(frozen=True)
class Verify:
    """Prove certificate.json again from the weights, and compare its rows with the model; status 1 if it fails.

    If the folder has your own model, it does not contain the model's code, so only the proof is checked.
    """

    folder: Run

    def __call__(self) -> int | None:
        import wellnormed as wn
        from wellnormed.models.exporting import certified
        from wellnormed.models.files import holds_model, require_model
        from wellnormed.proof.__main__ import main as prove
        from wellnormed.proof.decimals import shown

        path = self.folder / "certificate.json"
        if path.exists() and not holds_model(self.folder):  # a model of the user's own
            print("the model's code is not here, so only the proof of the program is checked")
            return prove([str(self.folder)])
        require_model(self.folder)  # another kind of folder needs other advice than a missing certificate
        if not path.exists():
            raise ValueError(f"{path} is missing; write it with `wellnormed certify {self.folder}`")
        try:
            model, example, weights = certified(self.folder)
            certificate = wn.certificates.Certificate.load(path)
            report = wn.verify(certificate, weights if weights.is_file() else model.state_dict())
            wn.certificates.require_same_model(certificate, model, example)
        except ValueError as error:
            print(f"NOT VERIFIED: {error}", file=sys.stderr)
            return 1
        constants = f"{shown(report.lipschitz)} in Euclidean norms, {shown(report.rms_lipschitz)} from RMS to RMS"
        print(f"verified: the Lipschitz bound {constants}, holds for {weights}\n{report}")


@dataclass(frozen=True)
class Sample:
    """Write text with the model of a run."""

    folder: Run
    prompt: str | None = None
    """Text to continue; by default a line break."""
    characters: int = 500
    """The number of characters to add; for a model of tokens, the number of tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest character."""
    seed: int = 0
    """Seeds the draws."""

    def __call__(self) -> int | None:
        import torch

        from wellnormed.models.files import load
        from wellnormed.proof.reading import printable
        from wellnormed.train.evaluate import sample, tokenizer_of_folder
        from wellnormed.train.setup import named_generators

        if self.characters < 0:
            raise ValueError(f"--characters {self.characters} must not be negative")
        tokenizer = tokenizer_of_folder(self.folder)
        prompt = torch.from_numpy(tokenizer.encode("\n" if self.prompt is None else self.prompt).astype("i8"))
        generator = named_generators(self.seed)["sample"]
        drawn = sample(load(self.folder), prompt, self.characters, generator, self.temperature)
        text = tokenizer.decode(drawn.tolist())
        print(printable(text) if sys.stdout.isatty() else text)


@dataclass(frozen=True)
class Report:
    """Draw report.html again from the files of a run or exported model."""

    folder: Run

    def __call__(self) -> int | None:
        from wellnormed.train.report import write_report

        print(write_report(self.folder))


@dataclass(frozen=True)
class Tokens:
    """Convert UTF-8 texts, in which a line <|endoftext|> separates documents, into a new folder of shards of tokens."""

    paths: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="Texts to train on, then the folder of the shards.")
    ] = ()
    validation: tuple[Path, ...] = ()
    """Texts to validate on."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """GPT-2's byte-pair encoding, or bytes."""

    def __call__(self) -> int | None:
        if len(self.paths) < 2:
            raise ValueError("name the texts to train on and then the folder of the shards")
        from wellnormed.data.convert import convert_texts
        from wellnormed.data.shards import Split

        *texts, folder = self.paths
        splits: dict[Split, Sequence[Path]] = {"train": texts}
        if self.validation:
            splits["val"] = self.validation
        for split, done in convert_texts(splits, folder, self.tokenizer).items():
            counts = f"{done['tokens']:,} tokens of {done['documents']:,} documents"
            print(f"{split}: {counts} in {done['shards']:,} shard{'s' * (done['shards'] > 1)} in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line, or of `arguments` without the program's name; return its exit status.

    Exit statuses are those of `guarded`.
    """
    # Waiting threads sleep, unless the user has chosen otherwise. By default they spin: beside six other processes on
    # two cores a run on two threads made 289 tokens a second, 1,804 with this, and 1,232 on one thread. OpenMP reads it
    # when torch is imported, which is later. The bits of a run do not depend on it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return guarded(arguments, _main)


def guarded(arguments: Sequence[str] | None, run: Callable[[list[str]], int]) -> int:
    """Run a command line, and turn errors and signals into a sentence and an exit status.

    The status is that of `run` (0 for success, 1 if verification fails), 2 for an error that the message explains, 130
    or 143 after SIGINT or SIGTERM, and 141 if the reader of the output closed it. `--debug` shows tracebacks.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        status = run([argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()  # an error here counts as an error of the command
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the status after SIGPIPE
    except (ValueError, OSError) as error:
        if debug:
            raise
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped{interrupt}", file=sys.stderr)
        return 128 + (interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT)


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"wellnormed {wellnormed.__version__}")
        return 0
    if arguments[:2] == ["train", "nanogpt"]:
        return _parse_nanogpt(arguments[2:])() or 0
    preset = chosen("preset", PRESETS, arguments)
    start = Train(PRESETS[preset], preset=preset)  # pyrefly: ignore
    train = Annotated[Train, tyro.conf.subcommand("train", default=start)]
    command: Callable[[], int | None] = tyro.cli(
        train | Certify | Verify | Sample | Report | Tokens,  # pyrefly: ignore
        prog="wellnormed",
        description="Train Lipschitz-certified transformers, and prove it. --version says which this is, --debug "
        "shows tracebacks.",
        args=arguments,
        config=(tyro.conf.AvoidSubcommands,),  # a preset chooses the architecture
    )
    return command() or 0


def _parse_nanogpt(arguments: Sequence[str]) -> TrainNanoGPT:
    size, variant = chosen("preset", get_args(Size), arguments), chosen("variant", get_args(Variant), arguments)
    start = TrainNanoGPT(token_preset(size, variant), size, variant)  # pyrefly: ignore
    return tyro.cli(
        TrainNanoGPT, default=start, prog="wellnormed train nanogpt", args=arguments,
        config=(tyro.conf.AvoidSubcommands,),
    )  # fmt: skip


def chosen(option: str, names: Iterable[str], arguments: Sequence[str]) -> str:
    """The value of an option that is read first, since all defaults depend on it; by default the first name."""
    first, *_ = names = list(names)
    match = re.search(rf"--{option}[= ](\S+)", " ".join(arguments))
    return match[1] if match and match[1] in names else first


def new_folder(name: str | None, kind: str) -> Path:
    """The folder of a new run inside `runs`; an impossible one is refused before torch is imported."""
    if name is not None and not (name and name.isprintable() and Path(name).name == name and name != ".."):
        raise ValueError(f"--name {name!r} must be the name of one folder in runs/, without slashes and line breaks")
    base = f"{date.today():%Y-%m-%d}-{kind}"
    names = chain([base], (f"{base}-{number}" for number in count(2)))
    folder = Path("runs", name or next(each for each in names if not Path("runs", each).exists()))
    if os.environ.get("WORLD_SIZE", "1") == "1":  # with several ranks, the first one checks it later
        require_new(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
