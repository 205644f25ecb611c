"""Few-shot learners: the contract in `base`, one file per learner in `catalogue`, and what trains and keeps them.

A learner's name is the name of its file with hyphens. Nothing here imports torch before a learner is asked for.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.errors import BilevelError
from bilevel.learners import catalogue

if TYPE_CHECKING:
    from bilevel.data import ImageDataset
    from bilevel.learners.base import Learner
    from bilevel.training.loop import Ending

# Trained models that come with the package, and the prefix of their names.
ZOO = Path(__file__).parent / "zoo"
ZOO_PREFIX = "zoo:"


def names() -> list[str]:
    """The learners that come with the package.

    >>> "maml" in names()
    True
    """
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(catalogue.__path__))


def find() -> dict[str, type[Learner]]:
    """Every learner of the package, by name."""
    return {name: get(name) for name in names()}


def get(name: str) -> type[Learner]:
    """The learner of that name: one of the package, or a subclass of `Learner` that a program has defined."""
    from bilevel.learners.base import Learner

    if name in names():
        module = importlib.import_module(f"{__name__}.catalogue.{name.replace('-', '_')}")
        known = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, Learner)]
    else:
        known = _subclasses(Learner)
    for kind in known:
        if kind.name == name and not inspect.isabstract(kind):
            return kind
    raise unknown(name)


def fit(
    learner: Learner,
    data: ImageDataset,
    out: str | Path,
    *,
    progress: bool | None = None,
    **settings: Any,
) -> Ending:
    """Train a learner, of any module, with validation, checkpoints and early stopping, as `bilevel train` does.

    The folder is that of a run. If it holds this training already, the training goes on bit for bit, or is just read
    where it is finished. Ctrl-C saves and interrupts. At the end the learner has the weights of its best validation.

    Args:
        learner: what to train; `HyperRepresentation(module, shape)`, for example.
        data: where the episodes come from, `bilevel.data.load("glyphs")` or a folder of class folders.
        out: the folder.
        progress: whether to draw a progress bar; None: where there is a terminal.
        settings: those of `bilevel.learners.settings.TrainingSettings` that are not the learner's own: ways, shots,
            meta_batch, iterations, lr, validate_every, seed, …
    """
    from bilevel.learners.runs import train_learner

    return train_learner(learner, data, Path(out), progress, settings)


def unknown(name: str) -> BilevelError:
    """The error for a name that is no learner's."""
    return BilevelError(
        f"There is no learner {name!r}. The learners are {', '.join(names())}. A class of your own is known after its "
        "module has been imported."
    )


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    """Newest definition first, so that a class which is defined again in a session replaces the old one."""
    found = [deeper for below in kind.__subclasses__() for deeper in (below, *_subclasses(below))]
    return found[::-1]
