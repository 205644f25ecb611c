"""A training that begins with the weights of another: what carries over, and what must fit."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.learners.base import Learner
from bilevel.learners.class_loss import PREFIX
from bilevel.learners.library import TrainedLearner
from bilevel.learners.representation import CENTRE, LENGTH
from bilevel.learners.settings import TrainingSettings
from bilevel.training.folder import differences


def continued(learner: Learner, settings: TrainingSettings, before: TrainedLearner) -> None:
    """Copy the weights of an earlier training into a new learner.

    The network's weights must all be there and fit. Batch norm's averages, the centre and length of features and the
    classifier over all classes are taken over where both trainings have them; with images of another size the last
    three have another number of features and begin anew.
    """
    wanted, given = learner.with_running(learner.lam), before.weights
    network = set(learner.representation.names)
    known = {name for name in given if not name.startswith(PREFIX) and name not in (CENTRE, LENGTH)}
    known -= {name for name in known if "running_" in name}
    wrong = [name for name in network | known if not _fits(name, wanted, given)]
    if wrong:
        raise BilevelError(
            f"{before.name} cannot be where this training begins, because its network is another one:\n"
            + "\n".join(f"  {line}" for line in _differences(settings, before.settings, sorted(wrong), wanted, given))
        )
    weight = f"{PREFIX}weight"
    if weight in wanted and weight in given and len(wanted[weight]) != len(given[weight]):
        raise BilevelError(
            f"{before.name} was trained to tell {len(given[weight])} classes apart, and this training has "
            f"{len(wanted[weight])}. Use the same data and rotations, or leave --initial out."
        )
    classifier = [name for name in wanted if name.startswith(PREFIX)]
    anew = set() if all(_fits(name, wanted, given) for name in classifier) else set(classifier)
    for name, tensor in wanted.items():
        if name not in anew and _fits(name, wanted, given):
            tensor.copy_(given[name])


def with_learner(found: TrainedLearner, settings: TrainingSettings, data: ImageDataset) -> TrainedLearner:
    """The network of a trained model under the learner that the settings name, which is not trained any further.

    What the other learner has beside the network (a scale, a penalty) is as at the start of its training.
    """
    learner = learners.get(settings.learner).for_training(settings, data)
    continued(learner, settings, found)
    return replace(found, learner=learner, settings=settings)


def _fits(name: str, wanted: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    return name in wanted and name in given and wanted[name].shape == given[name].shape


def _differences(
    settings: TrainingSettings,
    before: TrainingSettings,
    wrong: list[str],
    wanted: dict[str, Tensor],
    given: dict[str, Tensor],
) -> list[str]:
    """What differs, in words: the settings that decide about a network, and its first few tensors."""
    there, here = (
        {name.replace("_", " "): getattr(one, name) for name in ("network", "dataset", "image_size")}
        | {name: list(tensors[name].shape) if name in tensors else "none" for name in wrong[:3]}
        for one, tensors in ((before, given), (settings, wanted))
    )
    return differences(there, here, set()) + ([f"and {len(wrong) - 3} more tensors"] if len(wrong) > 3 else [])
