"""Checkpoints: the states from which a run can be resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.files import not_written
from bilevel.training.files import read_tensors, write_tensors


@dataclass(frozen=True)
class Checkpoints:
    """A folder of states, named by hyperiteration. The last two are kept, in case one is damaged."""

    folder: Path
    keep: int = 2

    def write(self, iteration: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        path = self.folder / f"{iteration:09d}.safetensors"
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise not_written(path, error) from error
        write_tensors(path, tensors, {"iteration": iteration, **facts})
        files = self.files()
        here = files.index(path)
        # Later checkpoints are damaged; otherwise the run would have been resumed from them.
        for other in [*files[: max(0, here + 1 - self.keep)], *files[here + 1 :]]:
            with contextlib.suppress(OSError):
                other.unlink()

    def newest(self, report: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest state that can be read, or None if there is none at all; damaged ones are reported."""
        files = self.files()
        for file in reversed(files):
            try:
                tensors, facts = read_tensors(file)
                if type(facts.get("iteration")) is not int or facts["iteration"] < 0:
                    raise BilevelError(f"{file} is not a checkpoint: it has no hyperiteration.")
                return tensors, facts
            except BilevelError as error:
                report(f"{error} Looking for the checkpoint before it.")
        if files:
            raise BilevelError(f"None of the {len(files)} checkpoints in {self.folder} can be read; start a new run.")
        return None

    def files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("[0-9]*.safetensors"))
