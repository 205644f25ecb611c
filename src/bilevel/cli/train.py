"""`bilevel train PRESET`: train a few-shot learner."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
import time
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from bilevel import learners
from bilevel.errors import BilevelError
from bilevel.experiments.overrides import describe, pairs, parse
from bilevel.learners.configuration import read_configuration, read_table
from bilevel.learners.presets import PRESETS, RECIPES, for_learner
from bilevel.learners.presets import preset as settings_of_preset
from bilevel.learners.recipes import Recipe, is_recipe
from bilevel.learners.settings import TrainingSettings

# Settings of the pictures, which do not depend on the learner.
SHARED_INPUT = {"image_size", "channels", "prepare"}
DATA_ROOT = Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the data; or set BILEVEL_DATA.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else.")]


def _set_threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


# An option that takes effect when it is parsed: commands need not use its value.
THREADS = Annotated[
    int | None,
    typer.Option(min=1, callback=_set_threads, help="The threads of each process; torch's default if not given."),
]


def command(
    preset: Annotated[str | None, typer.Argument(help=f"One of {', '.join([*PRESETS, *RECIPES])}.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML, YAML or JSON file of settings, such as a config.json of a run. Options override it.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file with a table [[stage]] for each stage.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/PRESET if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    hours: Annotated[
        float | None,
        typer.Option(help="Save and exit with code 75 after this number of hours, if the run is not finished."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the learner; may be repeated."),
    ] = None,
    data_root: DATA_ROOT = None,
    threads: THREADS = None,
    **options: Any,
) -> None:
    """Train a few-shot learner.

    By default it learns a hyper-representation by Algorithm 1 of the paper.

    PRESET is one of the paper's experiments, or a training in stages. Options change the preset, or describe a training
    of your own, as does a file with --config. --learner selects another strategy on the same episodes, and --set sets
    what only this learner has. The folder of the run gets its configuration, metrics, weights and checkpoints.
    Ctrl-C, a closed terminal and the end of --hours save and stop; --resume continues with the same result, bit for
    bit. For several processes: torchrun --nproc-per-node 2 -m bilevel train PRESET.
    """
    name, file, deadline, own = preset, recipe, _deadline(hours), pairs(change or [])
    given = {key: value for key, value in options.items() if value is not None}
    if config is not None:
        if name is not None or file is not None:
            raise BilevelError(
                f"--config {config} describes the training already; leave {name or f'--recipe {file}'} out."
            )
        if {"stage", "stages"} & read_table(config).keys():
            file = config
        else:
            read = read_configuration(config)
            name, given, threads = read.preset, {**read.settings, **given}, threads or read.threads
    shared = get_type_hints(TrainingSettings)
    given |= {key: _parsed(key, own.pop(key), shared[key]) for key in list(own) if key in shared and key != "options"}
    if "learner" in given and given["learner"] not in learners.names():
        raise learners.unknown(given["learner"])
    for key in ("dataset", "initial"):
        if given.get(key) and Path(given[key]).is_dir():
            given[key] = str(Path(given[key]).resolve())  # so that the run can be used from anywhere
    if written := config or file:
        # The configurations of all runs have the same name, so the folder gives the name of the new run.
        default = written.resolve().parent.name if written.name in ("config.json", "recipe.json") else written.stem
    else:
        default = name or Path(given.get("dataset", "custom")).resolve().name
    folder = out or Path("runs") / default
    if resume and not ((folder / "config.json").exists() or is_recipe(folder)):
        raise BilevelError(f"{folder} has no run that --resume could continue. Leave --resume out to begin one.")
    staged = _recipe(name, file, given, folder if resume else None)
    if staged is not None and own:
        raise BilevelError(
            f"--set {next(iter(own))} is for a training in one stage. Set `options` in the file of the recipe instead."
        )
    common: dict[str, Any] = {
        "resume": resume,
        "data_root": data_root,
        "threads": threads,
        "deadline": deadline,
        "command": shlex.join(["bilevel", *sys.argv[1:]]),
    }
    if staged is not None:
        from bilevel.cli._training import run_recipe

        raise typer.Exit(run_recipe(staged, folder, **common))
    settings = _settings(name, given, own, folder if resume else None)

    from bilevel.cli._training import run

    raise typer.Exit(run(settings, name, folder, **common))


def _deadline(hours: float | None) -> float:
    """The end of the time budget, on the clock of `time.monotonic`."""
    if hours is None:
        return math.inf
    if not hours > 0:
        raise BilevelError(f"--hours {hours} leaves no time to train; pass a number above 0, such as 2.5.")
    return time.monotonic() + 3600 * hours


def _recipe(name: str | None, file: Path | None, given: dict[str, Any], resumed: Path | None) -> Recipe | None:
    """The recipe of a training in stages, with changes to all stages; None for a training in one stage."""
    if file is not None and name is not None:
        raise BilevelError(f"The preset {name} and --recipe {file} both describe a training; pass one of them.")
    if file is None and name not in RECIPES and not (resumed is not None and is_recipe(resumed)):
        return None
    if file is not None:
        base = Recipe.load(file)
    elif name is not None:
        base = RECIPES[name]
    else:
        assert resumed is not None
        base = Recipe.read(resumed)
    return base.changed(given)


def _settings(name: str | None, given: dict[str, Any], own: dict[str, str], resumed: Path | None) -> TrainingSettings:
    """The settings: those of the preset, of the resumed run, or the defaults; with the given changes."""
    if name is None and not given and not own and resumed is None:
        presets = "\n".join(f"  {known}" for known in [*PRESETS, *RECIPES])
        raise BilevelError(
            f"Pass a preset, or describe the training with options such as --dataset. Presets:\n{presets}"
        )
    if name is not None:
        base = settings_of_preset(name)
    elif resumed is not None:
        from bilevel.training.folder import RunFolder

        base = TrainingSettings.of(RunFolder(resumed).config()["settings"])
    else:
        base = TrainingSettings()
    if given.get("learner", base.learner) != base.learner:
        base = for_learner(base, given["learner"])
    if given.get("initial") and resumed is None and Path(given.get("dataset", base.dataset)).is_dir():
        from bilevel.learners import library

        # The network and the kind of pictures must be those of the weights, so they are the defaults.
        of_weights = library.find(given["initial"]).settings_of_input()
        used = {f.name for f in fields(learners.get(given.get("learner", base.learner)).Options)} | SHARED_INPUT
        given = {**{key: value for key, value in of_weights.items() if key in used}, **given}
    return with_own_settings(replace(base, **given), own)


def with_own_settings(settings: TrainingSettings, own: dict[str, str]) -> TrainingSettings:
    """The settings with the values of --set, which are settings that only the learner has."""
    if not own:
        return settings
    kind = learners.get(settings.learner)
    hints = {f: hint for f, hint in get_type_hints(kind.Options).items() if f not in get_type_hints(TrainingSettings)}
    unknown = [key for key in own if key not in hints]
    if unknown:
        listed = "\n".join(f"  {key}={getattr(kind.Options(), key)}  ({describe(hints[key])})" for key in hints)
        raise BilevelError(
            f"--set {unknown[0]}: {kind.name} has no setting {unknown[0]!r}. "
            + (f"Its own settings for --set are:\n{listed}" if hints else "It has none of its own.")
        )
    values = {key: _parsed(key, text, hints[key]) for key, text in own.items()}
    return replace(settings, options={**settings.options, **values})


def _parsed(key: str, text: str, hint: Any) -> Any:
    try:
        return parse(text, hint)
    except ValueError as error:
        raise BilevelError(f"--set {key}={text}: {key} is {describe(hint)}.") from error


def _add_options() -> None:
    """Give the command an option for every setting of a training, in the place of its keyword arguments.

    So one list of settings serves the library, the configuration file and the command line.
    """
    signature, hints = inspect.signature(command, eval_str=True), get_type_hints(TrainingSettings)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for f in fields(TrainingSettings):
        if f.name != "options":
            annotation = _option(f, hints[f.name])
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _option(setting: Field[Any], hint: Any) -> Any:
    assert setting.default is not MISSING
    legal = ""
    if get_origin(hint) is Literal:
        legal = f" One of {', '.join(get_args(hint))}."
        hint = str
    flag = f"--{setting.name.replace('_', '-')}"
    flags = f"{flag}/--no-{flag[2:]}" if hint is bool else flag
    text = f"{setting.metadata['help']}{legal} [{setting.default}]"
    return Annotated[hint | None, typer.Option(flags, help=text, show_default=False)]


_add_options()
