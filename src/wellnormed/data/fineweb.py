"""FineWeb as GPT-2 tokens, downloaded with the checksums that Hugging Face states."""

import hashlib
import importlib
import shutil
from pathlib import Path
from typing import Any

from wellnormed._files import read_json, write_json, writing
from wellnormed.data._download import cache
from wellnormed.data.bpe import NAME, VOCABULARY
from wellnormed.data.shards import META

REPOSITORIES = {"fineweb10B": "kjj0/fineweb10B-gpt2", "fineweb100B": "kjj0/fineweb100B-gpt2"}
"""Data sets on Hugging Face whose files are shards of about 98.5 million tokens, and one to validate on."""


def download_fineweb(name: str = "fineweb10B", shards: int = 9, folder: Path | None = None) -> Path:
    """Download the validation shard and the first training shards, about 200 MB each, and return their folder.

    A download that was stopped goes on. The checksums are asked for first, of one revision of the data set, and what
    has come is compared with them, also files that were there before; `huggingface_hub` by itself does not compare.
    `meta.json` names the revision and the checksums.

    Args:
        name: "fineweb10B", of 103 training shards, or "fineweb100B", of 1,030.
        shards: How many training shards.
        folder: Where the files go; by default the user's cache, where `load_shards(split, name)` finds them.

    Raises:
        ValueError: If there is no such data set or shard, `huggingface_hub` is not installed, the machine is offline,
            the disk has too little room, and if a file is another one than its checksum says.

    Example:
        >>> download_fineweb("fineweb1T")
        Traceback (most recent call last):
        ValueError: there is no data set 'fineweb1T' to download; choose one of fineweb10B, fineweb100B
    """
    if name not in REPOSITORIES:
        raise ValueError(f"there is no data set {name!r} to download; choose one of {', '.join(REPOSITORIES)}")
    if shards < 1:
        raise ValueError(f"shards={shards} must be at least 1")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ValueError(
            "a download of FineWeb needs the package huggingface_hub: in a clone type pip install '.[hub]'"
        ) from None
    repository, folder = REPOSITORIES[name], folder or cache(name)
    if (folder / META).exists() and "source" not in read_json(folder / META, "remove it"):
        raise ValueError(f"{folder} has shards of converted texts; choose another folder")
    files = ["fineweb_val_000000.bin", *(f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1))]
    revision, facts = _facts(hub, repository, files, folder)
    if missing := [file for file in files if file not in facts]:
        raise ValueError(f"{repository} has no {missing[0]}; ask for fewer than {shards} shards")
    wanted = [file for file in files if not _is(folder / file, facts[file])]
    _require_room(folder, sum(facts[file].size for file in wanted))
    for file in wanted:
        path = folder / file
        path.unlink(missing_ok=True)  # the package takes a file that is there for the right one
        try:
            hub.hf_hub_download(repository, file, repo_type="dataset", revision=revision, local_dir=folder)
        except Exception as error:  # the package's own errors and those of what it sends requests with
            raise ValueError(_not_downloaded(f"{path}", error, folder)) from error
        if not _is(path, facts[file]):
            path.unlink()
            raise ValueError(
                f"{path} does not have the sha256 {facts[file].lfs.sha256} that Hugging Face states, and was removed; "
                "download it again"
            )
    sums = {file: facts[file].lfs.sha256 for file in files}
    source = {"tokenizer": NAME, "vocabulary": VOCABULARY, "source": repository, "revision": revision, "sha256": sums}
    write_json(folder / META, source)
    return folder


def _facts(hub: Any, repository: str, files: list[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """The data set's newest revision, and what the files in it are by name, with `size` and `lfs.sha256`."""
    try:
        revision = hub.HfApi().dataset_info(repository).sha
        infos = hub.HfApi().get_paths_info(repository, files, repo_type="dataset", revision=revision)
    except Exception as error:  # see above
        raise ValueError(_not_downloaded(repository, error, folder)) from error
    return revision, {info.path: info for info in infos}


def _not_downloaded(what: str, error: Exception, folder: Path) -> str:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"{what} could not be downloaded from Hugging Face ({reason}); run the same again with a network, and it goes "
        f"on, or put the files into {folder}"
    )


def _is(path: Path, fact: Any) -> bool:
    """Whether a file is there and has the size and the checksum that Hugging Face states."""
    if not path.exists() or path.stat().st_size != fact.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == fact.lfs.sha256


def _require_room(folder: Path, size: int) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < size:
        raise ValueError(
            f"{folder} has room for {free / 1e9:.1f} GB, but the shards to download have {size / 1e9:.1f} GB; make "
            "room, or ask for fewer shards"
        )
