"""Pages whose Python and console blocks run, in order, and print what the text block after each of them shows."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner

from bilevel.cli import build

# A block, and the text block that follows it at once, if one does.
BLOCK = re.compile(r"```(python|console)\n(.*?)```\n(?:\n?```text\n(.*?)```)?", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The language and the code of a page's blocks, each with what it is said to print."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def printed(page: Path) -> list[tuple[str, str]]:
    """What each block prints when the page is run from top to bottom, beside what the page says."""
    text, scope = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    found = []
    for block in BLOCK.finditer(text):
        kind, code, shown = block.groups(default="")
        # Empty lines before the code let a traceback show the right line of the page.
        found.append((_run(kind, "\n" * text.count("\n", 0, block.start(2)) + code, page, scope), shown))
    return found


def _run(kind: str, code: str, page: Path, scope: dict[str, str]) -> str:
    if kind == "console":
        return "".join(_command(line.removeprefix("$ ")) for line in code.splitlines() if line.startswith("$ "))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(page), "exec"), scope)
    return output.getvalue()


def _command(line: str) -> str:
    """Standard output of a line: in this process if the line is our command alone, else in a shell.

    A process of its own imports torch first, which takes longer than most commands.
    """
    if line.startswith("bilevel ") and not set(line) & set("|&;<>$`"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # as in a process of its own
        try:
            done = CliRunner().invoke(build(), shlex.split(line)[1:], env={"COLUMNS": "100", "NO_COLOR": "1"})
        finally:
            torch.set_default_dtype(before)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        return done.stdout
    # The commands of this environment, on a terminal as wide as a page and without colours.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def assert_prints_what_it_shows(page: Path) -> None:
    for found, shown in printed(page):
        assert agree(found.split(), shown.split()), f"{page.name} prints\n{found}\nand shows\n{shown}"


def agree(found: list[str], shown: list[str]) -> bool:
    """Whether the words are alike, one by one; a word … in what is shown may stand for any number of them."""
    if len(found) == len(shown) and all(map(alike, found, shown)):
        return True
    if "…" not in shown:
        return False
    first = shown.index("…")
    if not (len(found) >= first and all(map(alike, found[:first], shown[:first]))):
        return False
    return any(agree(found[i:], shown[first + 1 :]) for i in range(first, len(found) + 1))


def alike(found: str, expected: str) -> bool:
    """The same word, or numbers that differ by rounding only; what is itself a rounding error need only be as small."""
    if found == expected:
        return True
    try:
        a, b = float(found.strip(",;:()%")), float(expected.strip(",;:()%"))
    except ValueError:
        return False
    return abs(a - b) <= 2e-3 * abs(b) or max(abs(a), abs(b)) < 1e-8
