"""`bilevel train PRESET`: learn a representation for few-shot classification."""

from __future__ import annotations

import inspect
import shlex
import sys
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from bilevel.errors import BilevelError
from bilevel.meta.presets import PRESETS, RECIPES, preset
from bilevel.meta.recipes import Recipe, is_recipe
from bilevel.meta.settings import Settings

DATA_ROOT = Annotated[Path | None, typer.Option(metavar="DIR", help="Where the data are. BILEVEL_DATA does the same.")]
THREADS = Annotated[int | None, typer.Option(min=1, help="Threads of each process; torch's choice if not given.")]


def command(**options: Any) -> None:
    """Learn a representation for few-shot classification by Algorithm 1 of the paper.

    PRESET names one of the paper's experiments, or one in stages; options change it, or describe a training of your
    own. The run goes to a folder with its configuration, metrics, weights and checkpoints. Ctrl-C saves and stops, and
    --resume goes on bit for bit. For several processes: torchrun --nproc-per-node 2 -m bilevel train PRESET.
    """
    name, out, resume = options.pop("preset"), options.pop("out"), options.pop("resume")
    data_root, threads, file = options.pop("data_root"), options.pop("threads"), options.pop("recipe")
    given = {key: value for key, value in options.items() if value is not None}
    if "dataset" in given and Path(given["dataset"]).is_dir():
        given["dataset"] = str(Path(given["dataset"]).resolve())  # so that the run can be used from anywhere
    if "initial" in given and Path(given["initial"]).is_dir():
        given["initial"] = str(Path(given["initial"]).resolve())
    default = name or (file.stem if file else Path(given.get("dataset", "custom")).resolve().name)
    folder = out or Path("runs") / default
    if resume and not ((folder / "config.json").exists() or is_recipe(folder)):
        raise BilevelError(f"{folder} holds no run that --resume could continue. Leave --resume out to begin one.")
    recipe = _recipe(name, file, given, folder if resume else None)
    common: dict[str, Any] = {
        "resume": resume,
        "data_root": data_root,
        "threads": threads,
        "command": shlex.join(["bilevel", *sys.argv[1:]]),
    }
    if recipe is not None:
        from bilevel.cli._staged_training import run_recipe

        raise typer.Exit(run_recipe(recipe, folder, **common))
    settings = _settings(name, given, folder if resume else None)

    from bilevel.cli._training import run

    raise typer.Exit(run(settings, name, folder, **common))


def _recipe(name: str | None, file: Path | None, given: dict[str, Any], resumed: Path | None) -> Recipe | None:
    """The stages that are asked for, if it is stages, with changes to all of them."""
    if file is not None and name is not None:
        raise BilevelError(f"Both the preset {name} and the recipe {file} say what to do; pass one of them.")
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


def _settings(name: str | None, given: dict[str, Any], resumed: Path | None) -> Settings:
    """A preset with changes; or the defaults with changes; or, when a run is continued and nothing is said, its own."""
    if name is None and not given and resumed is None:
        presets = "\n".join(f"  {known}" for known in [*PRESETS, *RECIPES])
        raise BilevelError(
            f"Name a preset, or describe the training with options such as --dataset. Presets:\n{presets}"
        )
    if name is not None:
        base = preset(name)
    elif resumed is not None:
        from bilevel.training.folder import RunFolder

        base = Settings.of(RunFolder(resumed).config()["settings"])
    else:
        base = Settings()
    return replace(base, **given)


def _parameters() -> list[inspect.Parameter]:
    """The options: those of running anything, and one for every setting, with its help."""
    own: dict[str, tuple[Any, Any]] = {
        "preset": (Annotated[str | None, typer.Argument(help=f"One of {', '.join([*PRESETS, *RECIPES])}.")], None),
        "recipe": (
            Annotated[
                Path | None, typer.Option(metavar="FILE", help="A TOML file with a table [[stage]] for each stage.")
            ],
            None,
        ),
        "out": (
            Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/PRESET if not given.")],
            None,
        ),
        "resume": (Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")], False),
        "data_root": (DATA_ROOT, None),
        "threads": (THREADS, None),
    }
    hints = get_type_hints(Settings)
    own |= {f.name: (_option(f, hints[f.name]), None) for f in fields(Settings)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(key, keyword, default=value, annotation=kind) for key, (kind, value) in own.items()]


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


# One list of settings serves the library, the configuration file and the command line.
command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
command.__annotations__ = {p.name: p.annotation for p in _parameters()}
