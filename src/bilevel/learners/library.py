"""Finding a trained learner: a run's folder, a saved file, or the zoo that comes with the package."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.data import find as data_sources
from bilevel.errors import BilevelError
from bilevel.files import read_json, write_json
from bilevel.learners import ZOO, ZOO_PREFIX
from bilevel.learners.base import Learner
from bilevel.learners.recipes import Recipe, is_recipe
from bilevel.learners.settings import TrainingSettings
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics

if TYPE_CHECKING:
    from bilevel.data.preparation import Preparation

PREFIX = ZOO_PREFIX
# What is said of a learner that was saved without saying what it was trained on.
UNKNOWN = "unknown data"
# The file in a run's folder that `bilevel evaluate` writes.
CALIBRATION = "calibration.json"
# Endings of the two files of a saved learner.
ENDINGS = (".safetensors", ".json")


@dataclass(frozen=True)
class TrainedLearner:
    """A learner with what is known about it; `weights` are all tensors that were saved, a classifier's too."""

    name: str
    learner: Any
    settings: TrainingSettings
    card: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def preparation(self) -> Preparation:
        """How a picture becomes what the learner takes; a card of an earlier version does not say, but its data do."""
        from bilevel.data.preparation import Preparation

        recorded = self.card.get("preparation")
        if recorded is not None:
            return Preparation.of(recorded)
        channels, height, width = self.learner.shape
        known = data_sources().get(self.settings.dataset)
        gray = "drawing" if known is None else known.pictures
        return Preparation(gray if channels == 1 else "photograph", channels, height, width)

    @property
    def knows_preparation(self) -> bool:
        """Whether the card or the data say how pictures are prepared; otherwise `preparation` is a guess."""
        return self.card.get("preparation") is not None or self.settings.dataset in data_sources()

    @property
    def calibrations(self) -> list[dict[str, Any]]:
        """What `bilevel evaluate` found out about its probabilities."""
        found = self.card.get("calibrations") or []
        if not isinstance(found, list):
            raise BilevelError(f"The calibrations of {self.name} are {found!r:.60}, and not a list. Evaluate it again.")
        return found

    def for_use(self) -> TrainedLearner:
        """The same in the batch norm mode in which a query stands for itself, where it was trained in another."""
        learner = self.learner
        if learner.has_batch_norm and learner.batch_norm == "episode" and "support" in learner.batch_norm_modes:
            learner = copy.deepcopy(learner)
            learner.batch_norm = "support"
            return replace(self, learner=learner, settings=replace(self.settings, batch_norm="support"))
        return self

    def settings_of_input(self) -> dict[str, Any]:
        """Settings with which a training on a folder takes the same network and the same kind of pictures."""
        how, options = self.preparation, self.learner.options
        shared = ("network", "last_relu", "normalise")
        return {
            **{name: getattr(options, name) for name in shared if hasattr(options, name)},
            "image_size": how.height,
            "channels": "gray" if how.channels == 1 else "rgb",
            "prepare": how.kind,
        }

    def check_data(self, data: ImageDataset) -> None:
        """Refuse to judge it on other images than it was trained on: its training classes may be among the test's."""
        if self.card.get("data", {}).get("fingerprint") not in (None, data.fingerprint):
            raise BilevelError(
                f"The images of {data.name} are not those that {self.name} was trained on, so its training classes may "
                "be among those of the test. Judge it on the data it was trained on; `bilevel classify` takes any "
                "pictures."
            )

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Command, hyperiterations, images and minutes of every training that led to it, the first one first."""
        stages: list[dict[str, Any]] = []
        card: Any = self.card
        while isinstance(card, dict) and card:
            known = card.get("training")
            facts = {"hyperiterations": None, "images": None, "minutes": None}
            facts |= known if isinstance(known, dict) else {}
            stages.append({"command": card.get("command"), "settings": card.get("settings"), **facts})
            card = card.get("initial")
        return stages[::-1]


def zoo() -> dict[str, dict[str, Any]]:
    """The cards of the models that come with the package, by name."""
    return {file.stem: read_json(file) for file in sorted(ZOO.glob("*.json"))}


def find(spec: str, batch_norm: str | None = None, near: Path | None = None) -> TrainedLearner:
    """The learner that `spec` names, possibly with another batch norm mode.

    Args:
        spec: `zoo:NAME`, the folder of a run or of a training in stages, or the path of a saved learner, with or
            without its ending.
        batch_norm: a mode other than the one it was trained with.
        near: a folder that a path which begins with ../ is relative to.
    """
    if near is not None and spec.startswith("../"):
        spec = str((near / spec).resolve())
    spec = _stem(spec)
    if is_recipe(Path(spec)):
        spec = _last_stage(Path(spec))
    if spec.startswith(PREFIX):
        found = _from_zoo(spec.removeprefix(PREFIX))
    elif RunFolder(Path(spec)).exists() or Path(spec).is_dir():
        found = _from_run(Path(spec))
    elif Path(spec).with_name(Path(spec).name + ".json").exists():
        found = _from_files(spec, Path(spec))
    else:
        raise BilevelError(
            f"There is no trained model {spec!r}. Pass the folder of a run (`bilevel runs` lists them), or one that "
            f"comes with the package: {', '.join(PREFIX + name for name in zoo())}."
        )
    if batch_norm is None or batch_norm == found.learner.batch_norm:
        return found
    if batch_norm == "running":
        raise BilevelError("batch_norm='running' needs averages from training, and this model was trained without.")
    settings = TrainingSettings.of({**found.settings.plain(), "batch_norm": batch_norm})
    found.learner.batch_norm = settings.batch_norm
    return replace(found, settings=settings)


def _stem(spec: str) -> str:
    """The path of a saved learner without its ending; other paths as they are."""
    return str(Path(spec).with_suffix("")) if Path(spec).suffix in ENDINGS and not Path(spec).is_dir() else spec


def keep_calibrations(spec: str, found: TrainedLearner, calibrations: list[dict[str, Any]]) -> None:
    """Write them into the folder of the run, or into the card of the saved learner, that `spec` names."""
    if is_recipe(Path(spec)):
        spec = _last_stage(Path(spec))
    if RunFolder(Path(spec)).exists():
        kept = {"weights": found.card["weights"], "calibrations": calibrations}
        write_json(Path(spec) / CALIBRATION, kept, sealed=True)
    else:
        write_json(Path(f"{_stem(spec)}.json"), {**found.card, "calibrations": calibrations}, sealed=True)


def _last_stage(path: Path) -> str:
    """The last stage of a recipe that has weights."""
    stages = [path / folder for folder in Recipe.read(path).folders()]
    trained = [stage for stage in stages if RunFolder(stage).best.exists()]
    if not trained:
        raise BilevelError(f"{path} holds no weights yet; its first stage has not reached its first validation.")
    return str(trained[-1])


def _from_zoo(name: str) -> TrainedLearner:
    if name not in zoo():
        raise BilevelError(f"The zoo has no {name!r}; it has {', '.join(zoo())}.")
    return _from_files(PREFIX + name, ZOO / name)


def _from_files(name: str, stem: Path) -> TrainedLearner:
    card = read_json(stem.with_name(stem.name + ".json"))
    if not isinstance(card, dict) or not isinstance(card.get("learner"), dict):
        raise BilevelError(f"{stem}.json is not the card of a learner that `learner.save` or `evaluate --save` wrote.")
    weights = read_tensors(stem.with_name(stem.name + ".safetensors"))[0]
    learner = rebuilt(card["learner"], f"{stem}.json")
    learner.set_weights(weights)
    learner.recall_preparation(card.get("preparation"))
    return TrainedLearner(name, learner, _settings(card, learner), card, weights)


def _settings(card: dict[str, Any], learner: Learner) -> TrainingSettings:
    """Those in the card; `learner.save(path)` alone knows the learner's options and not how it was trained."""
    if "settings" in card:
        return TrainingSettings.of(card["settings"])
    shared = {f.name for f in fields(TrainingSettings)}
    known = {name: value for name, value in asdict(learner.options).items() if name in shared}
    return TrainingSettings(**{**known, "learner": learner.name, "dataset": UNKNOWN})


def _from_run(path: Path) -> TrainedLearner:
    folder = RunFolder(path)
    config = folder.config()
    settings = TrainingSettings.of(config["settings"])
    file = next((file for file in (folder.best, folder.last) if file.exists()), None)
    if file is None:
        raise BilevelError(f"{path} holds no weights yet; the run has not reached its first validation.")
    weights, facts = read_tensors(file)
    learner = rebuilt(config.get("learner"), str(folder.config_file))
    learner.set_weights(weights)
    learner.recall_preparation(config.get("preparation"))
    metrics = read_metrics(folder.path)
    minutes = [line["minutes"] for line in metrics if _is_of(line, facts)]
    curve = [
        [line["iteration"], line["score"], line["interval"]] for line in metrics if {"score", "interval"} <= line.keys()
    ]
    done = facts.get("iteration")
    images = None if done is None else done * settings.images_in_iteration
    training = {"hyperiterations": done, "images": images, "minutes": minutes[0] if minutes else None}
    card = {**config, "weights": facts, "training": training, "curve": curve}
    kept = read_json(path / CALIBRATION) if (path / CALIBRATION).exists() else None
    if isinstance(kept, dict) and kept.get("weights") == facts:
        card["calibrations"] = kept.get("calibrations")
    return TrainedLearner(str(path), learner, settings, card, weights)


def rebuilt(settings: Any, where: str) -> Learner:
    """The learner that these `settings()` describe, with fresh weights; a card of version 0.1 names none.

    Args:
        settings: what a file says, which may be anything.
        where: that file, for messages.
    """
    try:
        return learners.get(settings.get("name", "hyper-representation")).from_settings(settings)
    except BilevelError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise BilevelError(f"{where} does not say which learner this is ({error!r}).") from error


def _is_of(line: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a line of the metrics is the validation that these weights come from."""
    return "minutes" in line and line.get("iteration") == facts.get("iteration")
