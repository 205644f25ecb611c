"""What a tuning gives back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bilevel import trees
from bilevel.certificate import Certificate
from bilevel.errors import Outcome
from bilevel.training.files import not_written, write_bytes, write_json, write_tensors
from bilevel.trees import Tree
from bilevel.tuning import pictures, table
from bilevel.tuning.gap import Gap
from bilevel.tuning.space import Space

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Tuned:
    """A trained model and the hyperparameters it was trained with.

    Attributes:
        model: a copy of the model, trained with the tuned hyperparameters, in eval mode.
        values: the tuned hyperparameters by name, in natural units: floats, arrays, dicts by layer or parameter.
        before: their values at the start.
        value: the validation loss f_T of the tuned hyperparameters, on the whole validation set.
        start_value: that of the start.
        history: arrays with one entry per hyperiteration, "value", "gradient_norm" and "seconds", and "values", a dict
            of the hyperparameters that have at most 1,000 entries.
        outcome: a sentence that says how it ended.
        method: a sentence that says how hypergradients were computed, and why so.
        lam: λ, the leaves that the optimiser moved.
    """

    model: nn.Module = field(repr=False)
    values: dict[str, Any] = field(repr=False)
    before: dict[str, Any] = field(repr=False)
    value: float
    start_value: float
    history: dict[str, Any] = field(repr=False)
    outcome: Outcome
    method: str
    lam: dict[str, Tree] = field(repr=False)
    space: Space = field(repr=False)
    ask_gap: Callable[[], Gap] = field(repr=False)

    @functools.cached_property
    def gap(self) -> Gap:
        """How far the validation loss is from that of a training that goes on to the end (computed when first asked
        for: it takes some hundred passes over the training set)."""
        return self.ask_gap()

    @property
    def certificate(self) -> Certificate | None:
        """The certificate behind `gap`; None where the inner problem cannot be certified."""
        return self.gap.certificate

    def table(self) -> str:
        """Name, number of values, start, tuned, range, and how many are at a bound, as Markdown."""
        return table.markdown(self.space, self.lam)

    def plot(self, figure: Figure | None = None) -> Figure:
        """The validation loss over hyperiterations and every hyperparameter: schedules as lines, layers as bars,
        thousands as a histogram.

        Args:
            figure: draw into this one, `matplotlib.pyplot.figure()` say; a new one by default.
        """
        return pictures.draw(figure, self.history, self.space, self.before, self.values)

    def save(self, folder: str | Path) -> Path:
        """Write table.md, values.json, values.safetensors, model.safetensors and tuning.png into a folder."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(folder, error) from error
        write_bytes(folder / "table.md", f"{self._sentences()}\n\n{self.table()}\n".encode())
        write_json(folder / "values.json", trees.map(_as_json, self.values))
        leaves = trees.flatten(self.values)[0]
        names = ["/".join(map(str, path)) for path in _paths(self.values)]
        write_tensors(
            folder / "values.safetensors",
            {name: torch.as_tensor(leaf) for name, leaf in zip(names, leaves, strict=True)},
        )
        write_tensors(folder / "model.safetensors", {n: x.clone() for n, x in self.model.state_dict().items()})
        self.plot().savefig(folder / "tuning.png", dpi=150, metadata={"Software": None})
        return folder

    def __str__(self) -> str:
        return f"{self._sentences()}\n\n{self.table()}"

    def _sentences(self) -> str:
        return (
            f"Validation loss {self.start_value:.6g} before, {self.value:.6g} after. {self.outcome}\n"
            f"Hypergradients by {self.method}"
        )


def _as_json(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def _paths(values: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys above every leaf, in the order of `trees.leaves`."""
    found: list[tuple[str, ...]] = []
    for key in sorted(values):
        inside = values[key]
        found += _paths(inside, (*before, key)) if isinstance(inside, dict) else [(*before, key)]
    return found
