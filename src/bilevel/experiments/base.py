"""The frame of an experiment: what its file defines, and what running it leaves behind.

An experiment is a module with

- a docstring whose first line describes it, and a string `PAPER` that says which table or figure it reproduces;
- a frozen dataclass `Settings` whose fields are typed and whose defaults are the full run;
- a dict `QUICK` of the settings that `--quick` changes;
- a function `run(settings, out, progress) -> Result` that saves its pictures in `out` and returns everything else.

`reproduce` does the rest, the same for all: it checks that the results can be written before any work is done, times
the run, and writes `table.md` and `result.json` beside the pictures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.errors import BilevelError, DivergenceError
from bilevel.experiments import find, load
from bilevel.experiments.overrides import apply, as_options
from bilevel.experiments.records import Record, machine, staging

if TYPE_CHECKING:
    from bilevel.data import ImageDataset
    from bilevel.outer_loop import Solution


CHOSEN = "What the paper leaves open or does otherwise, and this run chose"


@dataclass(frozen=True)
class Table:
    """Rows of ready text under named columns, with the paper's numbers and ours side by side.

    Attributes:
        prose: columns of sentences, which a terminal is too narrow for; they are left to `table.md`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: Sequence[str] = ("why",)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Result:
    """What an experiment found.

    Attributes:
        numbers: everything measured, as plain lists, dicts and numbers; a function of the settings alone, times do not
            belong here.
        choices: what the paper leaves open and what was chosen, by name.
        tables: the numbers beside the paper's.
        pictures: names of the files saved in `out`.
        notes: sentences that a reader of the tables needs.
        data: the data sets by name, each with its description and fingerprint; generated data need none.
        runs: folders of the trainings that the numbers come from, relative to the result's own; see `kept`.
        times: measured seconds, and what is computed from them; they differ from run to run.
    """

    numbers: Mapping[str, Any]
    choices: Mapping[str, str]
    tables: Sequence[Table]
    pictures: Sequence[str] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence[str] = ()
    times: Mapping[str, Any] = field(default_factory=dict)


def reproduce(
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    quick: bool = False,
    out: Path | str = "results",
    folder: str | None = None,
    progress: bool | None = None,
) -> tuple[Result, Record]:
    """Run an experiment and write its results to `out/name/`.

    Args:
        name: as `bilevel list` prints it.
        overrides: settings by name, as the text that would follow `--set name=`.
        quick: the small form, for a first look and for tests.
        out: the folder of all results.
        folder: the name of the folder inside `out`; the experiment's name by default.
        progress: show a bar; None shows one on a terminal.
    """
    module = load(name)
    settings, given = apply(module.Settings, module.QUICK if quick else {}, overrides or {})
    description = find()[name]
    began = time.perf_counter()
    with staging(Path(out), folder or name) as (scratch, publish):
        result: Result = module.run(settings, scratch, progress)
        minutes = (time.perf_counter() - began) / 60
        values = asdict(settings)
        command = " ".join(["bilevel run", name, *(["--quick"] if quick else []), *as_options(given)])
        record = Record(
            experiment=name,
            summary=description.summary,
            paper=description.paper,
            command=command,
            settings=values,
            seed=values.get("seed"),
            choices=result.choices,
            numbers=result.numbers,
            tables=[asdict(table) for table in result.tables],
            pictures=result.pictures,
            notes=result.notes,
            data=result.data,
            runs=result.runs,
            times=result.times,
            minutes=minutes,
            machine=machine(),
        )
        (scratch / "table.md").write_text(_page(result, record), encoding="utf-8")
        (scratch / "result.json").write_text(record.json(), encoding="utf-8")
        folder_written = publish()
    return result, record.at(folder_written)


def kept(out: Path) -> Path:
    """Where an experiment keeps its trainings, beside the files it publishes: they go on where they were killed."""
    return out.parent / "runs"


def described(data: ImageDataset) -> str:
    """A data set as a result's record has it."""
    return f"{data.describe().partition(': ')[2]}, fingerprint {data.fingerprint}"


def finished(solution: Solution) -> Solution:
    """The solution, if its loop ran to its end; an experiment must not report what an interrupted or diverged run left
    behind."""
    if solution.outcome.kind == "interrupted":
        raise KeyboardInterrupt
    if not solution.outcome.ok:
        raise DivergenceError(str(solution.outcome))
    return solution


def require(condition: bool, message: str) -> None:
    """Refuse settings that make no sense, before any work."""
    if not condition:
        raise BilevelError(message)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block.

    Matrices of a few dozen rows gain nothing from a second thread, and on a busy machine waiting for it made a ridge
    run six times slower.
    """
    from bilevel import side_by_side  # here, because it imports torch

    with side_by_side.one_thread():
        yield


@contextmanager
def single_precision() -> Iterator[None]:
    """Networks are built in float32 inside the block, as the pictures of episodes are, whatever the default is."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def counter(title: str, total: int, show: bool | None) -> Iterator[Callable[[str], None]]:
    """A bar that moves by one at each call, with a word on what is being done; silent where nobody is looking."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda doing: None
        return
    from bilevel.progress import bar

    done = -1
    with bar(title, total, "{task.fields[value]}") as advance:

        def begin(doing: str) -> None:
            nonlocal done
            done += 1
            advance(done, value=doing)

        yield begin
        advance(total, value="done")


def _page(result: Result, record: Record) -> str:
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
