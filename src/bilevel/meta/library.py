"""Finding a trained learner: a run's folder, a saved file, or the zoo that comes with the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.recipes import Recipe, is_recipe
from bilevel.meta.settings import Settings
from bilevel.training.files import read_json, read_tensors
from bilevel.training.folder import RunFolder, read_metrics

ZOO = Path(__file__).parent / "zoo"
PREFIX = "zoo:"


@dataclass(frozen=True)
class Trained:
    """A learner with what is known about it; `weights` are all tensors that were saved, a classifier's too."""

    name: str
    learner: HyperRepresentation
    settings: Settings
    card: dict[str, Any]
    weights: dict[str, Tensor]

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
        stages, card = [], self.card
        while card:
            facts = {"hyperiterations": None, "images": None, "minutes": None, **(card.get("training") or {})}
            stages.append({"command": card.get("command"), "settings": card.get("settings"), **facts})
            card = card.get("initial") or {}
        return stages[::-1]


def zoo() -> dict[str, dict[str, Any]]:
    """The cards of the models that come with the package, by name."""
    return {file.stem: read_json(file) for file in sorted(ZOO.glob("*.json"))}


def find(spec: str, batch_norm: str | None = None, near: Path | None = None) -> Trained:
    """The learner that `spec` names, possibly with another batch norm mode.

    Args:
        spec: `zoo:NAME`, the folder of a run or of a training in stages, or the path of a saved learner without its
            ending.
        batch_norm: a mode other than the one it was trained with.
        near: a folder that a path which begins with ../ is relative to.
    """
    if near is not None and spec.startswith("../"):
        spec = str((near / spec).resolve())
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
    if batch_norm is None or batch_norm == found.settings.batch_norm:
        return found
    if batch_norm == "running":
        raise BilevelError("batch_norm='running' needs averages from training, and this model was trained without.")
    settings = Settings.of({**found.settings.plain(), "batch_norm": batch_norm})
    found.learner.batch_norm = settings.batch_norm
    return replace(found, settings=settings)


def _last_stage(path: Path) -> str:
    """The last stage of a recipe that has weights."""
    stages = [path / folder for folder in Recipe.read(path).folders()]
    trained = [stage for stage in stages if RunFolder(stage).best.exists()]
    if not trained:
        raise BilevelError(f"{path} holds no weights yet; its first stage has not reached its first validation.")
    return str(trained[-1])


def _from_zoo(name: str) -> Trained:
    if name not in zoo():
        raise BilevelError(f"The zoo has no {name!r}; it has {', '.join(zoo())}.")
    return _from_files(PREFIX + name, ZOO / name)


def _from_files(name: str, stem: Path) -> Trained:
    card = read_json(stem.with_name(stem.name + ".json"))
    if not isinstance(card, dict) or not {"settings", "learner"} <= card.keys():
        raise BilevelError(f"{stem}.json is not the card of a learner that `bilevel evaluate --save` wrote.")
    weights = read_tensors(stem.with_name(stem.name + ".safetensors"))[0]
    learner = HyperRepresentation.from_settings(card["learner"])
    learner.set_weights(weights)
    return Trained(name, learner, Settings.of(card["settings"]), card, weights)


def _from_run(path: Path) -> Trained:
    folder = RunFolder(path)
    config = folder.config()
    settings = Settings.of(config["settings"])
    file = next((file for file in (folder.best, folder.last) if file.exists()), None)
    if file is None:
        raise BilevelError(f"{path} holds no weights yet; the run has not reached its first validation.")
    weights, facts = read_tensors(file)
    try:
        learner = HyperRepresentation.from_settings(config["learner"])
    except (KeyError, TypeError) as error:
        raise BilevelError(f"{folder.config_file} does not say which learner this is ({error}).") from error
    learner.set_weights(weights)
    metrics = read_metrics(folder.metrics)
    minutes = [line["minutes"] for line in metrics if _is_of(line, facts)]
    curve = [[line["iteration"], line["score"], line["interval"]] for line in metrics if "score" in line]
    done = facts.get("iteration")
    images = None if done is None else done * settings.images_in_iteration
    training = {"hyperiterations": done, "images": images, "minutes": minutes[0] if minutes else None}
    card = {**config, "weights": facts, "training": training, "curve": curve}
    return Trained(str(path), learner, settings, card, weights)


def _is_of(line: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a line of the metrics is the validation that these weights come from."""
    return "minutes" in line and line.get("iteration") == facts.get("iteration")
