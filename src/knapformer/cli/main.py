"""Entry point of `knapformer`: commands are imported when called, errors are one line, `--json` is one object."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from knapformer.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("cyclopts", "rich"):
            raise
        sys.exit(
            f"the command line needs {error.name}, which is missing; install it with: pip install 'knapformer[cli]'"
        )
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
