"""`python -m wellnormed.proof FOLDER`: print what is proved of a folder's certificate, or why nothing is."""

import sys

from wellnormed.proof import CheckError, check_folder


def main(arguments: list[str]) -> int:
    """The exit status: 0 if proved, 1 if not, 2 for wrong usage."""
    if len(arguments) != 1:
        print("usage: python -m wellnormed.proof FOLDER", file=sys.stderr)
        return 2
    try:
        print(check_folder(arguments[0]))
    except CheckError as error:
        print(f"not proved: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
