"""The commands, and what happens to errors."""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

import cyclopts
from rich.console import Console
from rich.markup import escape

from knapformer import __version__, tools
from knapformer.errors import KnapFormerError

app = cyclopts.App(
    name="knapformer",
    help="Online load balancing for training diffusion transformers on images and videos of every size.",
    version=__version__,
)
app.command("knapformer.cli.demo:demo", help="Train on real images and clips over CPU ranks, unbalanced and balanced.")
app.command(
    "knapformer.cli.train:train", help="Train from a configuration file, under torchrun or on ranks started here."
)
app.command(
    "knapformer.cli.plan:plan", help="Plan recorded or generated lengths and print what a planner makes of them."
)
app.command("knapformer.cli.report:report", help="Make tables and figures of run records.")
for _tool in iter_modules(tools.__path__):  # each tool is a folder: its docstring is the help, `command` the command
    _help = (import_module(f"knapformer.tools.{_tool.name}").__doc__ or "").partition("\n")[0]
    app.command(f"knapformer.tools.{_tool.name}.command:command", name=_tool.name, help=_help)


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, or 2 for input that cannot be used."""
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    warnings.showwarning = lambda message, *_: messages.print(f"[bold yellow]warning:[/] {escape(str(message))}")
    try:
        app(list(arguments), exit_on_error=False, print_error=True, result_action="return_value")
        sys.stdout.flush()
    except cyclopts.CycloptsError:
        return 2
    except KnapFormerError as error:
        messages.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
