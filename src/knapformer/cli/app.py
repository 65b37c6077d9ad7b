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

COMMANDS = {
    "demo": "Train on real images and clips over CPU ranks, unbalanced and balanced.",
    "train": "Train from a configuration file, under torchrun or on ranks started here.",
    "plan": "Plan recorded or generated lengths and print what a planner makes of them.",
    "report": "Make tables and figures of run records.",
}
"""Commands that are no tools, and what the list of commands says of them."""


def make_app(chosen: str = "") -> cyclopts.App:
    """All commands, imported when called.

    Args:
        chosen: command whose own help is shown whole; the list of commands says a line of each.
    """
    app = cyclopts.App(
        name="knapformer",
        help="Online load balancing for training diffusion transformers on images and videos of every size.",
        version=__version__,
        default_parameter=cyclopts.Parameter(negative=()),
    )
    places = {name: (f"knapformer.cli.{name}:{name}", line) for name, line in COMMANDS.items()}
    for tool in iter_modules(tools.__path__):  # each is a folder: the first line of its docstring is what it does
        place = f"knapformer.tools.{tool.name}"
        line = (import_module(place).__doc__ or "").partition("\n")[0]
        places[tool.name] = f"{place}.command:command", line
    for name, (place, line) in places.items():
        if name == chosen:
            app.command(place, name=name)
        else:
            app.command(place, name=name, help=line)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, or 2 for input that cannot be used."""
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    warnings.showwarning = lambda message, *_: messages.print(f"[bold yellow]warning:[/] {escape(str(message))}")
    app = make_app(arguments[0] if arguments else "")
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
