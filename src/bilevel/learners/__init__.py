"""Few-shot learners: the contract in `base`, one file per learner in `catalogue`, and training, evaluation and files.

A learner's name is the name of its file with hyphens. Importing this package does not import torch.
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
    """The learner of that name: one of the package, or a subclass of `Learner` that your program has defined."""
    from bilevel.learners.base import Learner

    if name in names():
        module = importlib.import_module(f"{__name__}.catalogue.{name.replace('-', '_')}")
        candidates = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, Learner)]
    else:
        candidates = _subclasses(Learner)
    for kind in candidates:
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
    """Train a learner with validation, checkpoints and early stopping, as `bilevel train` does.

    If the folder holds this training already, it is resumed, with the same result as without the interruption, bit for
    bit; a finished training is only read. Ctrl-C saves a checkpoint and interrupts. At the end the learner has the
    weights of its best validation.

    Args:
        learner: the learner to train, for example `HyperRepresentation(module, shape)` with any module.
        data: the data set of the episodes: `bilevel.data.load("glyphs")`, or `load` with the path of a folder that has
            one folder of images per class.
        out: the folder of the run.
        progress: whether to draw a progress bar; None: on a terminal, and a line a minute elsewhere.
        settings: fields of `bilevel.learners.settings.TrainingSettings` that are not options of the learner: ways,
            shots, meta_batch, iterations, lr, validate_every, seed, …
    """
    from bilevel.learners.runs import train_learner

    return train_learner(learner, data, Path(out), progress, settings)


def unknown(name: str) -> BilevelError:
    """The error for a name that no learner has."""
    return BilevelError(
        f"There is no learner {name!r}. The learners are {', '.join(names())}. A class of your own is found after its "
        "module has been imported."
    )


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    """All subclasses, newest definition first: a class that is defined again in a session replaces the old one."""
    subclasses = [deeper for direct in kind.__subclasses__() for deeper in (direct, *_subclasses(direct))]
    return subclasses[::-1]
