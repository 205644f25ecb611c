"""The command `bilevel`: one file per command, found by walking this folder.

A command is a module with a function `command`. The name of the command is that of the file, and its help is the
docstring of the function. Files whose names begin with an underscore are shared code. Commands import torch only when
they run, so that `--help` and `list` are fast.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bilevel import __version__, discovery
from bilevel.cli._allocator import keep_freed_memory
from bilevel.errors import BilevelError, BilevelWarning


def build() -> typer.Typer:
    """The command line as a typer app."""
    app = typer.Typer(
        name="bilevel",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": 120},
    )
    state = {"debug": False}

    @app.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error. BILEVEL_DEBUG=1 does the same.")
        ] = False,
    ) -> None:
        """Bilevel optimisation in PyTorch: hyperparameters and meta-learning by hypergradients.

        Start with `bilevel demo`. `bilevel list` prints the tables and figures that `bilevel run NAME` reproduces.
        """
        state["debug"] = debug or os.environ.get("BILEVEL_DEBUG", "0").lower() not in ("", "0", "false", "no")

    for name in discovery.modules(sys.modules[__name__]):
        module = importlib.import_module(name)
        app.command(name.rsplit(".", 1)[1].replace("_", "-"))(_guarded(module.command, state))
    return app


def main() -> None:
    """The entry point of the command. It sets the allocator and the display of warnings for the whole process."""
    keep_freed_memory()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        build()()
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        typer.echo("Interrupted.", err=True)
        sys.exit(130)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Print a warning without the line of code that it comes from."""
    kind = "Note" if issubclass(category, BilevelWarning) else category.__name__
    typer.echo(f"{kind}: {message}", err=True)


def _guarded(command: Callable[..., Any], state: dict[str, bool]) -> Callable[..., Any]:
    """The command, which prints a `BilevelError` as one message instead of a traceback."""

    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BilevelError as error:
            if state["debug"]:
                raise
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            consequence = str(stop) or "Nothing was written; earlier results are as they were."
            typer.echo(f"Interrupted. {consequence}", err=True)
            raise typer.Exit(130) from None

    # typer evaluates annotations that are strings several times, for every command.
    call.__signature__ = signature = _signature(command)  # type: ignore[attr-defined]
    call.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return call


@functools.cache
def _signature(command: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a command, with their annotations evaluated."""
    return inspect.signature(command, eval_str=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bilevel {__version__}")
        raise typer.Exit
