"""The result of `tune`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import plotting, trees
from bilevel.certificate import Certificate
from bilevel.errors import Outcome
from bilevel.files import not_written, write_bytes, write_json
from bilevel.training.files import write_tensors
from bilevel.trees import Tree
from bilevel.tuning import pictures
from bilevel.tuning.gap import Gap
from bilevel.tuning.holdout import HeldOutEstimate
from bilevel.tuning.random_search import RandomSearch
from bilevel.tuning.space import Space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("hyperparameter", "values", "start", "tuned", "range", "at a bound")
# Named entries have their own rows in the table, if there are at most this many.
LARGEST_LIST = 30


@dataclass(frozen=True)
class Tuned:
    """A trained model and the hyperparameters it was trained with.

    Attributes:
        model: a copy of the model, trained with the tuned hyperparameters, in eval mode.
        values: the tuned hyperparameters by name, in natural units: floats, arrays, dicts by layer or parameter.
        before: the values before tuning.
        value: the validation loss f_T of the tuned hyperparameters, on the validation examples that they were tuned on.
            On other examples the loss is larger.
        start_value: the validation loss of the values before tuning.
        history: arrays with one entry per hyperiteration, "value", "gradient_norm" and "seconds", and "values", a dict
            of the hyperparameters that have at most 1,000 entries.
        outcome: a sentence that says how the tuning ended.
        method: a sentence that says how hypergradients were computed, and why.
        lam: λ, the leaves that the optimiser updated.
        held_out: the losses on examples that were not used for tuning, with `tune(..., holdout=0.3)`.
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
    compute_gap: Callable[[], Gap] = field(repr=False)
    compute_weights: Callable[[Any, Any], Tensor] = field(repr=False)
    compute_search: Callable[[], RandomSearch] = field(repr=False)
    held_out: HeldOutEstimate | None = None

    @functools.cached_property
    def gap(self) -> Gap:
        """A bound on the change of the validation loss if training continued to the minimum.

        The first access computes it, in some hundred passes over the training set.
        """
        return self.compute_gap()

    @functools.cached_property
    def search(self) -> RandomSearch:
        """The result of a random search in the time of the tuning. The first access runs it, which takes this time."""
        return self.compute_search()

    def weights(self, inputs: Any, targets: Any) -> Tensor:
        """The weights of examples, also new ones, by the tuned scorer of `ExampleWeight`."""
        return self.compute_weights(inputs, targets)

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of `gap`; None if the inner problem cannot be certified."""
        return self.gap.certificate

    def table(self) -> str:
        """A table in Markdown: name, number of values, start, tuned, range, and how many are at a bound."""
        lines = [tuple(cell.replace("|", "\\|") for cell in line) for line in [HEADER, *self._rows()]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def row(first: str, others: list[str]) -> str:
            return f"| {' | '.join([first, *others])} |"

        rule = row("-" * widths[0], ["-" * (width - 1) + ":" for width in widths[1:]])
        rows = [
            row(line[0].ljust(widths[0]), [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)])
            for line in lines
        ]
        return "\n".join([rows[0], rule, *rows[1:]])

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        bounds = self.space.at_bounds(self.lam)
        for one in self.space.declared:
            before, after = self.before[one.name], self.values[one.name]
            low, high = self.space.transforms[one.name].range()
            limits = f"{low:.3g} … {high:.3g}" if np.isfinite([low, high]).any() else "free"
            at_bound, count = bounds[one.name]
            bound_text = ("yes" if at_bound else "no") if count == 1 else f"{at_bound:,} of {count:,}"
            rows.append((one.name, f"{count:,}", _summary(before), _summary(after), limits, bound_text))
            labels = one.labels(self.space.setup) or []
            if len(labels) <= LARGEST_LIST:
                rows += [(f"· {x}", "", f"{before[x]:.3g}", f"{after[x]:.3g}", "", "") for x in labels]
        return rows

    def plot(self, figure: Figure | None = None) -> Figure:
        """Draw the validation loss over hyperiterations and every hyperparameter.

        Schedules are lines, layers are bars, and many values are a histogram.

        Args:
            figure: the figure to draw into, for example `matplotlib.pyplot.figure()`. The default is a new one.
        """
        return pictures.draw(figure, self.history, self.space, self.before, self.values)

    def save(self, folder: str | Path) -> Path:
        """Write table.md, values.json, values.safetensors, model.safetensors and tuning.png into a folder."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(folder, error) from error
        write_bytes(folder / "table.md", f"{self}\n".encode())
        plain = trees.map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, self.values)
        write_json(folder / "values.json", plain)
        flat: dict[str, Any] = {}
        for name, value in self.values.items():
            flat |= {f"{name}/{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
        write_tensors(folder / "values.safetensors", {name: torch.as_tensor(value) for name, value in flat.items()})
        write_tensors(folder / "model.safetensors", {n: x.clone() for n, x in self.model.state_dict().items()})
        plotting.save(self.plot(), folder / "tuning.png")
        return folder

    def __str__(self) -> str:
        lines = [
            f"Validation loss {self.start_value:.6g} before, {self.value:.6g} after. {self.outcome}",
            str(
                self.held_out or "The loss after is of examples that were tuned on: holdout=0.3 measures it on others."
            ),
            str(self.__dict__.get("search", "`.search` tells what a random search reaches in the same time.")),
            f"Hypergradients by {self.method}",
        ]
        return "\n".join([*lines, "", self.table()])


def _summary(value: Any) -> str:
    """A single number, or the smallest, the median and the largest of several.

    >>> _summary(np.array([1.0, 2.0, 4.0]))
    '1 … 2 … 4'
    """
    entries = np.concatenate([np.ravel(leaf) for leaf in trees.leaves(value)])
    low, middle, high = np.quantile(entries, [0, 0.5, 1])
    return f"{low:.3g}" if low == high else f"{low:.3g} … {middle:.3g} … {high:.3g}"
