"""The `wellnormed` command, or the line to type if a package that it needs is not installed."""

import sys
from importlib.util import find_spec

EXTRA = ("tyro", "rich", "matplotlib", "filelock")
"""The packages that the extra `train` installs."""


def main() -> int:
    """Run the command line; without the extra `train` say how to get it, with status 2."""
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        print(
            f"the command needs {', '.join(missing)}, which the library does without: in a clone type "
            'pip install ".[train]"',
            file=sys.stderr,
        )
        return 2
    from wellnormed import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
