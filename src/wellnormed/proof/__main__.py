"""`wellnormed-proof FOLDER`: prove a folder's certificate, and print its statements or why it is refused.

`python -P -m wellnormed.proof FOLDER` does the same; without -P Python imports modules from the folder where it is run.
"""

import sys

from wellnormed.proof import CheckError, check


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if the certificate is proved, 1 if not, 2 for wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: wellnormed-proof FOLDER", file=sys.stderr)
        return 2
    try:
        print(check(arguments[0]))
    except CheckError as error:
        print(f"not proved: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
