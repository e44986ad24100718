"""`python -m wellnormed.proof FOLDER`: prove a folder's certificate, and print its statements or why it is refused."""

import sys

from wellnormed.proof import CheckError, check_folder


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status: 0 if the certificate is proved, 1 if not, 2 for wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
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
