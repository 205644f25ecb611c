"""`bilevel export RUN --to onnx`: write a trained network, or a classifier, for other programs."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from bilevel import extras
from bilevel.cli._output import check_writable
from bilevel.cli.classify import STEPS, STRICT
from bilevel.cli.train import THREADS
from bilevel.errors import BilevelError


class ExportFormat(str, Enum):
    """The values of `--to`."""

    onnx = "onnx"
    torch = "torch"


ENDINGS = {ExportFormat.onnx: ".onnx", ExportFormat.torch: ".pt2"}


def command(
    run: Annotated[
        str,
        typer.Argument(
            help="The folder of a run, a saved learner, zoo:NAME, or a classifier that `bilevel classify --save` wrote."
        ),
    ],
    to: Annotated[ExportFormat, typer.Option(help="onnx, or torch: a file of torch.export.")],
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with one folder of labelled pictures per class: export the classifier of these classes.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file to write, .onnx or .pt2; named after RUN if not given."),
    ] = None,
    steps: STEPS = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            help="support or running. If not given: support, also for models trained with episode. Its statistics are "
            "those of the labelled pictures, so it needs --support."
        ),
    ] = None,
    invert: Annotated[
        bool | None,
        typer.Option("--invert/--no-invert", help="As for bilevel classify.", show_default=False),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean/--no-clean", help="As for bilevel classify.")] = True,
    strict: STRICT = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON, and nothing else.")] = False,
    threads: THREADS = None,
) -> None:
    """Write a trained network as ONNX or as a file of torch.export.

    The file maps prepared pictures to features. With --support, or for a classifier that `bilevel classify --save`
    wrote, it also returns the logits and the probabilities of the classes. FILE.json describes the inputs and outputs,
    and how pictures are prepared. Before anything is written, the outputs are compared with those of this library, with
    a tolerance of 1e-4: ONNX with onnxruntime if that is installed, torch.export always.
    """
    ending = ENDINGS[to]
    name = Path(run.rpartition(":")[2]).resolve().name.removesuffix(".safetensors").removesuffix(".json")
    file = out or Path(f"{name}{ending}")
    if file.suffix != ending:
        raise BilevelError(f"--out {file} must have a name that ends in {ending}, because of --to {to.value}.")
    card = file.with_name(f"{file.name}.json")
    for path in (file, card):
        check_writable(path, str(path))
    if to is ExportFormat.onnx:
        extras.require("onnx", "onnxscript", extra="export", purpose="ONNX")

    from bilevel.cli import _exporting
    from bilevel.cli._classification import ClassifyOptions

    options = ClassifyOptions(batch_norm, steps, invert, clean, strict)
    source = _exporting.load(run, support, options)
    facts = _exporting.write(source, to.value, file, card)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for line in [*_exporting.summary(facts), *source.notes, f"file: {file}", f"card: {card}"]:
            typer.echo(line)
