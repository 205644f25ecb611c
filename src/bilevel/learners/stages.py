"""Beginning a training with the weights of another: which tensors are copied, and which must fit."""

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


def begin_with_weights(learner: Learner, settings: TrainingSettings, earlier: TrainedLearner) -> None:
    """Copy the weights of an earlier training into a new learner.

    All weights of the network must be there and have the same shapes. The running averages, the centre and length of
    features, and the classifier over all classes are copied if both trainings have them with the same shapes. Images of
    another size change the number of features, so the centre and the classifier then keep their new values.
    """
    wanted, given = learner.with_running(learner.lam), earlier.weights
    network = set(learner.representation.names)
    required = {name for name in given if not name.startswith(PREFIX) and name not in (CENTRE, LENGTH)}
    required -= {name for name in required if "running_" in name}
    wrong = [name for name in network | required if not _fits(name, wanted, given)]
    if wrong:
        raise BilevelError(
            f"This training cannot begin with the weights of {earlier.name}, because the networks differ:\n"
            + "\n".join(f"  {line}" for line in _differences(settings, earlier.settings, sorted(wrong), wanted, given))
        )
    weight = f"{PREFIX}weight"
    if weight in wanted and weight in given and len(wanted[weight]) != len(given[weight]):
        raise BilevelError(
            f"{earlier.name} has a classifier over {len(given[weight])} training classes, and this training has "
            f"{len(wanted[weight])} classes. Use the same data and rotations, or leave --initial out."
        )
    classifier = [name for name in wanted if name.startswith(PREFIX)]
    not_copied = set() if all(_fits(name, wanted, given) for name in classifier) else set(classifier)
    for name, tensor in wanted.items():
        if name not in not_copied and _fits(name, wanted, given):
            tensor.copy_(given[name])


def with_learner(model: TrainedLearner, settings: TrainingSettings, data: ImageDataset) -> TrainedLearner:
    """The network of a trained model with the learner that the settings name, without further training.

    Other leaves of λ of that learner (a scale, a penalty) have their initial values.
    """
    learner = learners.get(settings.learner).for_training(settings, data)
    begin_with_weights(learner, settings, model)
    return replace(model, learner=learner, settings=settings)


def _fits(name: str, wanted: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    return name in wanted and name in given and wanted[name].shape == given[name].shape


def _differences(
    settings: TrainingSettings,
    earlier: TrainingSettings,
    wrong: list[str],
    wanted: dict[str, Tensor],
    given: dict[str, Tensor],
) -> list[str]:
    """Lines that say what differs: the settings that define a network, and the first few tensors."""
    there, here = (
        {name.replace("_", " "): getattr(values, name) for name in ("network", "dataset", "image_size")}
        | {name: list(tensors[name].shape) if name in tensors else "none" for name in wrong[:3]}
        for values, tensors in ((earlier, given), (settings, wanted))
    )
    return differences(there, here, set()) + ([f"and {len(wrong) - 3} more tensors"] if len(wrong) > 3 else [])
