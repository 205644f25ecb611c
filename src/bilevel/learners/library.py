"""Loading a trained learner from a run, a saved file or the zoo, and beginning a training with its weights."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.data import find as data_sources
from bilevel.errors import BilevelError, differences
from bilevel.files import read_json, write_json
from bilevel.learners import ZOO, ZOO_PREFIX
from bilevel.learners.base import Learner
from bilevel.learners.class_loss import PREFIX
from bilevel.learners.recipes import Recipe, is_recipe
from bilevel.learners.representation import CENTRE, LENGTH
from bilevel.learners.settings import TrainingSettings
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics

if TYPE_CHECKING:
    from bilevel.data.preparation import Preparation

# The data set in the settings of a learner whose card names none.
UNKNOWN = "unknown data"
# The file that `bilevel evaluate` and `bilevel calibrate` write into the folder of a run.
CALIBRATION = "calibration.json"
# Suffixes of the two files of a saved learner.
ENDINGS = (".safetensors", ".json")


@dataclass(frozen=True)
class TrainedLearner:
    """A trained learner with its settings and card.

    `weights` are all saved tensors, also those of a classifier over all classes that the learner does not use.
    """

    name: str
    learner: Any
    settings: TrainingSettings
    card: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def preparation(self) -> Preparation:
        """How a picture becomes an input of the learner: from the card, or from the data set if the card is older."""
        from bilevel.data.preparation import Preparation

        recorded = self.card.get("preparation")
        if recorded is not None:
            return Preparation.of(recorded)
        channels, height, width = self.learner.shape
        source = data_sources().get(self.settings.dataset)
        gray = "drawing" if source is None else source.pictures
        return Preparation(gray if channels == 1 else "photograph", channels, height, width)

    @property
    def knows_preparation(self) -> bool:
        """Whether the card or the data set determine how pictures are prepared. Otherwise `preparation` is a guess."""
        return self.card.get("preparation") is not None or self.settings.dataset in data_sources()

    @property
    def calibrations(self) -> list[dict[str, Any]]:
        """The calibrations in the card, as `bilevel evaluate` and `bilevel calibrate` write them."""
        recorded = self.card.get("calibrations") or []
        if not isinstance(recorded, list):
            raise BilevelError(
                f"The calibrations of {self.name} are {recorded!r:.60}, and not a list. Evaluate the model again."
            )
        return recorded

    def for_use(self) -> TrainedLearner:
        """The same model with batch norm mode "support" instead of "episode", so that predictions are independent."""
        learner = self.learner
        if learner.has_batch_norm and learner.batch_norm == "episode" and "support" in learner.batch_norm_modes:
            learner = copy.deepcopy(learner)
            learner.batch_norm = "support"
            return replace(self, learner=learner, settings=replace(self.settings, batch_norm="support"))
        return self

    def settings_of_input(self) -> dict[str, Any]:
        """Settings for a training on a folder of pictures with the same network and the same kind of pictures."""
        preparation, options = self.preparation, self.learner.options
        shared = ("network", "last_relu", "normalise")
        return {
            **{name: getattr(options, name) for name in shared if hasattr(options, name)},
            "image_size": preparation.height,
            "channels": "gray" if preparation.channels == 1 else "rgb",
            "prepare": preparation.kind,
        }

    def check_data(self, data: ImageDataset) -> None:
        """Refuse other data than those of the training, because training classes may be among their test classes."""
        if self.card.get("data", {}).get("fingerprint") not in (None, data.fingerprint):
            raise BilevelError(
                f"The images of {data.name} are not those that {self.name} was trained on, so its training classes may "
                "be among the test classes. Evaluate it on the data of its training; `bilevel classify` takes any "
                "pictures."
            )

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Command, hyperiterations, images and minutes of every stage of its training, in their order."""
        return stages_of(self.card)


def stages_of(card: Any) -> list[dict[str, Any]]:
    """The stages of a training, from its card or config.json, which holds that of the stage before as `initial`."""
    stages: list[dict[str, Any]] = []
    while isinstance(card, dict) and card:
        training = card.get("training")
        facts = {"hyperiterations": None, "images": None, "minutes": None}
        facts |= training if isinstance(training, dict) else {}
        stages.append({"command": card.get("command"), "settings": card.get("settings"), **facts})
        card = card.get("initial")
    return stages[::-1]


def zoo() -> dict[str, dict[str, Any]]:
    """The cards of the models that come with the package, by name."""
    return {file.stem: read_json(file) for file in sorted(ZOO.glob("*.json"))}


def find(spec: str, batch_norm: str | None = None, near: Path | None = None) -> TrainedLearner:
    """Load the model that `spec` names.

    Args:
        spec: `zoo:NAME`, the folder of a run or of a training in stages, or the path of a saved learner, with or
            without its suffix.
        batch_norm: a batch norm mode; None: that of the training.
        near: if `spec` begins with ../, the folder that it is relative to.
    """
    if near is not None and spec.startswith("../"):
        spec = str((near / spec).resolve())
    spec = _stem(spec)
    if is_recipe(Path(spec)):
        spec = _last_stage(Path(spec))
    if spec.startswith(ZOO_PREFIX):
        name = spec.removeprefix(ZOO_PREFIX)
        if name not in zoo():
            raise BilevelError(f"The zoo has no model {name!r}. Its models are {', '.join(zoo())}.")
        model = _from_files(spec, ZOO / name)
    elif RunFolder(Path(spec)).exists() or Path(spec).is_dir():
        model = _from_run(Path(spec))
    elif Path(spec).with_name(Path(spec).name + ".json").exists():
        model = _from_files(spec, Path(spec))
    else:
        raise BilevelError(
            f"There is no trained model {spec!r}. Pass the folder of a run (`bilevel runs` lists them), or a model "
            f"that comes with the package: {', '.join(ZOO_PREFIX + name for name in zoo())}."
        )
    if batch_norm is None or batch_norm == model.learner.batch_norm:
        return model
    if batch_norm == "running":
        raise BilevelError(
            f"batch_norm='running' needs running averages, and {spec} was trained without them. Pass 'support' or "
            "'episode', or train with --batch-norm running."
        )
    settings = TrainingSettings.of({**model.settings.plain(), "batch_norm": batch_norm})
    model.learner.batch_norm = settings.batch_norm
    return replace(model, settings=settings)


def _stem(spec: str) -> str:
    """The path of a saved learner without its suffix; other paths are returned as they are."""
    return str(Path(spec).with_suffix("")) if Path(spec).suffix in ENDINGS and not Path(spec).is_dir() else spec


def save_calibrations(spec: str, model: TrainedLearner, calibrations: list[dict[str, Any]]) -> None:
    """Write calibrations into the folder of the run, or into the card of the saved learner, that `spec` names."""
    if is_recipe(Path(spec)):
        spec = _last_stage(Path(spec))
    if RunFolder(Path(spec)).exists():
        contents = {"weights": model.card["weights"], "calibrations": calibrations}
        write_json(Path(spec) / CALIBRATION, contents, sealed=True)
    else:
        write_json(Path(f"{_stem(spec)}.json"), {**model.card, "calibrations": calibrations}, sealed=True)


def _last_stage(path: Path) -> str:
    """The folder of the last stage of a recipe that has weights."""
    stages = [path / folder for folder in Recipe.read(path).folders()]
    trained = [stage for stage in stages if RunFolder(stage).best.exists()]
    if not trained:
        raise BilevelError(f"{path} holds no weights yet; its first stage has not reached its first validation.")
    return str(trained[-1])


def _from_files(name: str, stem: Path) -> TrainedLearner:
    card = read_json(stem.with_name(stem.name + ".json"))
    if not isinstance(card, dict) or not isinstance(card.get("learner"), dict):
        raise BilevelError(
            f"{stem}.json is not the card of a learner. Pass one that `learner.save` or `evaluate --save` wrote."
        )
    weights = read_tensors(stem.with_name(stem.name + ".safetensors"))[0]
    learner = learner_from_settings(card["learner"], f"{stem}.json")
    learner.set_weights(weights)
    learner.recall_preparation(card.get("preparation"))
    return TrainedLearner(name, learner, _settings(card, learner), card, weights)


def _settings(card: dict[str, Any], learner: Learner) -> TrainingSettings:
    """The settings in the card. If it has none (`learner.save(path)` writes none), they come from the options."""
    if "settings" in card:
        return TrainingSettings.of(card["settings"])
    shared = {f.name for f in fields(TrainingSettings)}
    options = {name: value for name, value in asdict(learner.options).items() if name in shared}
    return TrainingSettings(**{**options, "learner": learner.name, "dataset": UNKNOWN})


def _from_run(path: Path) -> TrainedLearner:
    folder = RunFolder(path)
    config = folder.config()
    settings = TrainingSettings.of(config["settings"])
    file = next((file for file in (folder.best, folder.last) if file.exists()), None)
    if file is None:
        raise BilevelError(f"{path} holds no weights yet; the run has not reached its first validation.")
    weights, facts = read_tensors(file)
    learner = learner_from_settings(config.get("learner"), str(folder.config_file))
    learner.set_weights(weights)
    learner.recall_preparation(config.get("preparation"))
    metrics, iterations = read_metrics(folder.path), facts.get("iteration")
    minutes = [line["minutes"] for line in metrics if "minutes" in line and line["iteration"] == iterations]
    curve = [
        [line["iteration"], line["score"], line["interval"]] for line in metrics if {"score", "interval"} <= line.keys()
    ]
    images = None if iterations is None else iterations * settings.images_in_iteration
    training = {"hyperiterations": iterations, "images": images, "minutes": minutes[0] if minutes else None}
    card = {**config, "weights": facts, "training": training, "curve": curve}
    recorded = read_json(path / CALIBRATION) if (path / CALIBRATION).exists() else None
    if isinstance(recorded, dict) and recorded.get("weights") == facts:
        card["calibrations"] = recorded.get("calibrations")
    return TrainedLearner(str(path), learner, settings, card, weights)


def learner_from_settings(settings: Any, where: str) -> Learner:
    """The learner that these `settings()` describe, with new weights. A card of version 0.1 names no learner.

    Args:
        settings: what a file contains; it is not trusted.
        where: the name of that file, for messages.
    """
    try:
        return learners.get(settings.get("name", "hyper-representation")).from_settings(settings)
    except BilevelError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise BilevelError(
            f"{where} does not describe a learner ({error!r}). Train or save the model again."
        ) from error


# ------------------------------------------------------------------------------------------- beginning with weights


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
    return differences(there, here) + ([f"and {len(wrong) - 3} more tensors"] if len(wrong) > 3 else [])
