"""`wellnormed-proof FOLDER`: prove a folder's certificate, and print its statements or why it is refused.

`python -P -m wellnormed.proof FOLDER` does the same; without -P Python imports modules from the folder where it is run.
"""

import sys
from pathlib import Path

from wellnormed.proof import CheckError, check

_HOLDS = "certificate.json, which Certificate.save wrote, and beside it the weights, in *.safetensors"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if the certificate is proved, 1 if not, 2 for wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        asked = arguments in (["--help"], ["-h"])
        said = f"proves a certificate, and prints what it states; FOLDER has {_HOLDS}"
        print(f"usage: wellnormed-proof FOLDER\n\n{said}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        print(check(arguments[0]))
    except CheckError as error:
        print(f"not proved: {error}{_remedy(Path(arguments[0]))}", file=sys.stderr)
        return 1
    return 0


def _remedy(folder: Path) -> str:
    """What to pass in the place of a path that is no folder with a certificate."""
    if (folder / "certificate.json").exists():
        return ""
    return f"; pass {'the folder of this file' if folder.is_file() else 'a folder'} with {_HOLDS}"


if __name__ == "__main__":
    sys.exit(main())
