"""Pages whose Python and console blocks run, in order, and print what the text block after each of them shows."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

# A block, and the text block that follows it at once, if one does.
BLOCK = re.compile(r"```(python|console)\n(.*?)```\n(?:\n?```text\n(.*?)```)?", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The language and the code of a page's blocks, each with what it is said to print."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def printed(page: Path) -> list[tuple[str, str]]:
    """What each block prints when the page is run from top to bottom, beside what the page says."""
    scope: dict[str, object] = {"__name__": "__main__"}
    return [(_run(kind, code, page, scope), shown) for kind, code, shown in blocks(page)]


def _run(kind: str, code: str, page: Path, scope: dict[str, object]) -> str:
    if kind == "console":
        return "".join(_command(line.removeprefix("$ ")) for line in code.splitlines() if line.startswith("$ "))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(page), "exec"), scope)
    return output.getvalue()


def _command(line: str) -> str:
    # The commands of this environment, on a terminal as wide as a page and without colours.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def assert_prints_what_it_shows(page: Path) -> None:
    for found, shown in printed(page):
        one, other = found.split(), shown.split()
        assert len(one) == len(other), f"{page.name} prints\n{found}\nand shows\n{shown}"
        assert [pair for pair in zip(one, other, strict=True) if not alike(*pair)] == []


def alike(found: str, expected: str) -> bool:
    """The same word, or numbers that differ by rounding only; what is itself a rounding error need only be as small."""
    if found == expected:
        return True
    try:
        a, b = float(found.strip(",;()")), float(expected.strip(",;()"))
    except ValueError:
        return False
    return abs(a - b) <= 2e-3 * abs(b) or max(abs(a), abs(b)) < 1e-8
