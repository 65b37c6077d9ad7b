"""`python -m knapformer` is the command `knapformer`."""

from knapformer.cli.main import main

if __name__ == "__main__":
    main()
