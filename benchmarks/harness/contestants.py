"""The contestants. Every file of `contestants/` is one contestant, and each runs in its own process."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.contract import Case
from harness.environments import python_of, single_threaded

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Contestant:
    """The constants of a contestant's file.

    Attributes:
        group: "bilevel", "torch peer", "by hand", "jax" or "floor". It decides in which targets the contestant is used.
            A floor computes a lower limit of the time, not a hypergradient.
        kinds: the kinds of problems on which the contestant is timed.
        slow_start: compilation takes about a minute, so quick runs leave the contestant out.
    """

    name: str
    path: Path
    label: str
    group: str
    environment: str | None = None
    requirements: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("ridge", "network")
    slow_start: bool = False

    @staticmethod
    def read(path: Path) -> Contestant:
        """Read the constants without importing the file, because its imports exist only in its own environment."""
        constants: dict[str, Any] = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                constants[node.targets[0].id.lower()] = ast.literal_eval(node.value)
        return Contestant(path.stem, path, **constants)

    def enters(self, case: Case) -> bool:
        return case.kind in self.kinds


def find() -> list[Contestant]:
    return [Contestant.read(path) for path in sorted((BENCHMARKS / "contestants").glob("[!_]*.py"))]


class WorkerError(Exception):
    """A contestant failed. The message includes what it printed."""


class Worker:
    """The process of one contestant. It answers one request at a time."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        python = python_of(contestant.environment, contestant.requirements)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            [str(python), str(BENCHMARKS / "worker.py"), str(contestant.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=single_threaded(),
        )
        self.versions: dict[str, str] = {}

    def wait_until_ready(self) -> None:
        """Wait until the contestant has done its imports. Workers that were started together import in parallel."""
        packages = [re.split(r"[=<>~!]", requirement)[0] for requirement in self.contestant.requirements]
        self.versions = self.ask(do="hello", packages=packages)["versions"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        reply = json.loads(line) if line else {"error": "the process ended"}
        if "error" in reply:
            self._log.seek(0)
            raise WorkerError(
                f"{self.contestant.label} failed at {request.get('case', request['do'])}: "
                f"{reply['error']}\n{self._log.read()[-3000:]}"
            )
        return reply

    def close(self) -> None:
        """Close the input of the process, which makes it end. Kill it if it has not ended after ten seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()
        self._log.close()
