"""The contract of an experiment: what its file defines, and what running it writes.

An experiment is a module with

- a docstring whose first line describes it, and a string `PAPER` that says which table or figure it reproduces;
- a frozen dataclass, a subclass of `ExperimentSettings`, whose fields are typed and whose defaults are the full run;
- a dict `QUICK` of the settings that `--quick` changes;
- a function `run(settings, out, progress) -> ExperimentResult` that saves its pictures in `out` and returns everything
  else.

`reproduce` does the rest, the same for all: it checks that the results can be written before any work is done, times
the run, and writes `table.md` and `result.json` beside the pictures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bilevel.errors import BilevelError, DivergenceError
from bilevel.experiments import find, load
from bilevel.experiments.overrides import apply, as_options
from bilevel.experiments.records import ExperimentRecord, machine, staging

if TYPE_CHECKING:
    from bilevel.data import ImageDataset
    from bilevel.outer_loop import Solution


CHOSEN = "What the paper leaves open or does otherwise, and this run chose"
CLAIM = ("claim", "paper", "ours", "difference", "why")  # the columns of a table of claims; see `claim`


@dataclass(frozen=True)
class ExperimentSettings:
    """The base of every experiment's settings. A subclass is a frozen dataclass."""

    def at_least(self, least: float, **why: str) -> None:
        """Refuse settings below `least`. For each setting, `why` is what is wrong with a smaller number."""
        for name, meaning in why.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            require(all(one >= least for one in values), f"{name}={value} {meaning}; pass at least {least:g}.")

    def check_step_scale(self, scale: float) -> None:
        """Refuse a step size η = scale/ν with which gradient descent does not converge."""
        require(
            0 < scale < 2,
            f"step_scale={scale} gives η = {scale}/ν, and gradient descent needs 0 < η < 2/ν; pass a number between 0 "
            "and 2.",
        )


@dataclass(frozen=True)
class TextTable:
    """A table of texts, with the paper's numbers and ours side by side.

    Attributes:
        prose: columns of sentences, which are too long for a terminal; only `table.md` has them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: Sequence[str] = ("why",)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class ExperimentResult:
    """What an experiment found.

    Attributes:
        numbers: everything that was measured except times, as lists, dicts and numbers; a function of the settings.
        choices: what the paper leaves open and what was chosen, by name.
        tables: the numbers beside the paper's.
        pictures: names of the files saved in `out`.
        notes: sentences that a reader of the tables needs.
        data: the data sets by name, each with its description and fingerprint; generated data need none.
        runs: folders of the trainings that the numbers come from, relative to the result's own; see `runs_folder`.
        times: measured seconds, and what is computed from them; they differ from run to run.
    """

    numbers: Mapping[str, Any]
    choices: Mapping[str, str]
    tables: Sequence[TextTable]
    pictures: Sequence[str] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence[str] = ()
    times: Mapping[str, Any] = field(default_factory=dict)


def settings_of(module: ModuleType) -> type[ExperimentSettings]:
    """The class of an experiment's settings."""
    members = [member for member in vars(module).values() if isinstance(member, type)]
    return next(m for m in members if issubclass(m, ExperimentSettings) and m.__module__ == module.__name__)


def reproduce(
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    quick: bool = False,
    out: Path | str = "results",
    folder: str | None = None,
    progress: bool | None = None,
) -> tuple[ExperimentResult, ExperimentRecord]:
    """Run an experiment and write its results to `out/name/`.

    Args:
        name: as `bilevel list` prints it.
        overrides: settings by name, as the text that would follow `--set name=`.
        quick: the small form, for a first look and for tests.
        out: the folder of all results.
        folder: the name of the folder inside `out`; the experiment's name by default.
        progress: show a bar; None shows one on a terminal, and a line a minute elsewhere.
    """
    module = load(name)
    settings, given = apply(settings_of(module), module.QUICK if quick else {}, overrides or {})
    description = find()[name]
    began = time.perf_counter()
    with staging(Path(out), folder or name) as (scratch, publish):
        result: ExperimentResult = module.run(settings, scratch, progress)
        record = ExperimentRecord(
            experiment=name,
            summary=description.summary,
            paper=description.paper,
            command=" ".join(["bilevel run", name, *(["--quick"] if quick else []), *as_options(given)]),
            settings=asdict(settings),
            result=asdict(result),
            minutes=(time.perf_counter() - began) / 60,
            machine=machine(),
            folder=Path(out) / (folder or name),
        )
        (scratch / "table.md").write_text(_page(result, record), encoding="utf-8")
        (scratch / "result.json").write_text(record.json(), encoding="utf-8")
        publish()
    return result, record


def runs_folder(out: Path) -> Path:
    """The folder of an experiment's trainings, beside the files of its result. It can be resumed."""
    return out.parent / "runs"


def described(data: ImageDataset) -> str:
    """A data set as a result's record has it."""
    return f"{data.describe().partition(': ')[2]}, fingerprint {data.fingerprint}"


def finished(solution: Solution) -> Solution:
    """The solution, unless the loop was interrupted or diverged, which is raised as an error."""
    if solution.outcome.kind == "interrupted":
        raise KeyboardInterrupt
    if not solution.outcome.ok:
        raise DivergenceError(str(solution.outcome))
    return solution


def require(condition: bool, message: str) -> None:
    """Refuse settings that make no sense, before any work."""
    if not condition:
        raise BilevelError(message)


def percent(share: float, interval: float | None = None, digits: int = 2) -> str:
    """A share in per cent, with the half-width of its 95 % interval.

    >>> percent(0.985, 0.0032), percent(0.5, digits=1)
    ('98.50 ± 0.32', '50.0')
    """
    width = "" if interval is None else f" ± {100 * interval:.{digits}f}"
    return f"{100 * share:.{digits}f}{width}"


def points(gap: float, interval: float) -> str:
    """A difference of two shares in points, with the half-width of its 95 % interval.

    >>> points(0.0565, 0.005)
    '+5.65 ± 0.50'
    """
    return f"{100 * gap:+.2f} ± {100 * interval:.2f}"


def label(steps: int | None) -> str:
    """A number of inner steps as tables name it; None is the closed form of the inner minimiser."""
    return "exact" if steps is None else str(steps)


def claim(text: str, holds: bool, why: str, detail: str = "") -> tuple[str, ...]:
    """A row of a table of claims: a conclusion of the paper, and whether it holds here."""
    return text, "yes", ("yes" if holds else "no") + detail, "none" if holds else "differs", why


@contextmanager
def single_precision() -> Iterator[None]:
    """Inside the block torch's default type is float32, so that networks have the type of the images."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _page(result: ExperimentResult, record: ExperimentRecord) -> str:
    title = f"# {record.summary}\n\n{record.paper}"
    tables = "\n".join(f"## {table.title}\n\n{table.markdown()}\n" for table in result.tables)
    notes = "\n".join(f"{note}\n" for note in result.notes)
    pictures = "\n".join(f"![{record.summary}]({picture})" for picture in result.pictures)
    choices = "\n".join(f"- **{name}**: {text}" for name, text in result.choices.items())
    data = "".join(f"Data: {name}, {text}.\n\n" for name, text in result.data.items())
    where = (
        f"`{record.command}`, {record.minutes:.2f} minutes on {record.machine['cpu']} ({record.machine['cores']} "
        f"cores), torch {record.machine['torch']}."
    )
    chosen = f"{CHOSEN}:\n\n{choices}" if choices else ""
    return "\n\n".join(part.strip() for part in (title, tables, notes, pictures, chosen, data + where) if part) + "\n"
