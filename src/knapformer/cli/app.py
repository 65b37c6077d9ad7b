"""The commands, and what happens to errors."""

import sys
from collections.abc import Sequence

import cyclopts
from rich.console import Console

from knapformer import __version__
from knapformer.errors import KnapFormerError

app = cyclopts.App(
    name="knapformer",
    help="Online load balancing for training diffusion transformers on images and videos of every size.",
    version=__version__,
)
app.command("knapformer.cli.demo:demo")
app.command("knapformer.cli.train:train")
app.command("knapformer.cli.plan:plan")


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, or 2 for input that cannot be used."""
    try:
        app(list(arguments), exit_on_error=False, print_error=True)
    except cyclopts.CycloptsError:
        return 2
    except KnapFormerError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(error)}")
        return 2
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
    return 0


def escape(error: BaseException) -> str:
    """An error's message, safe to print as markup."""
    return str(error).replace("[", r"\[")
