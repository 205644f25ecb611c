"""Attacks on what a training writes: weights, cards, configurations, metrics, checkpoints, kept classifiers."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.files import write_json
from bilevel.learners import library, recognition
from bilevel.learners.recipes import Recipe
from bilevel.learners.runs import schedule
from bilevel.report.page import render
from bilevel.report.read import gather
from bilevel.training.files import read_tensors, write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import METRICS, read_metrics
from bilevel.training.loop import Run
from faults import healthy
from faults.judging import Attack
from faults.mutations import HOSTILE, forge


def digest(tensors) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def answers(found) -> list:
    """What a model says about four pictures that it is adapted to, and its threshold."""
    if min(found.preparation.height, found.preparation.width) > 512:
        return [[0.5, 0.5]]  # large pictures are slow and no fault
    images = healthy.labelled(found.preparation)
    made = recognition.adapted(found, images, ["bar", "bar", "ring", "ring"])
    recognition.none_of_these(found, made, 0.25)
    found.stages  # noqa: B018, it is computed
    return made.predict_proba(images).tolist()


def use_model(file: Path):
    """As `bilevel classify` uses it."""
    found = recognition.trained(str(file.with_suffix("")), None)
    return digest(found.learner.lam), answers(found)


def use_run(file: Path):
    """As `bilevel classify`, `runs` and `report` use the run that the file belongs to."""
    found = recognition.trained(str(file.parent), None)
    listed = CliRunner().invoke(build(), ["runs", str(file.parent)])
    if listed.exception is not None and not isinstance(listed.exception, SystemExit):
        raise listed.exception
    sources = gather([file.parent])
    render(sources, [None] * len(sources.runs), "a page")
    return digest(found.learner.lam), answers(found), [run.metrics for run in sources.runs]


def use_classifier(file: Path):
    kept = recognition.saved_classifier(str(file))
    assert kept is not None
    model, made = kept
    return made.predict_proba(healthy.labelled(model.preparation)).tolist(), made.classes


def use_checkpoint(file: Path):
    """Resume: the newest checkpoint that can be read, and what the next hyperiteration makes of it."""
    job = healthy.job()
    said: list[str] = []
    run = Run(job, RunFolder(file.parent.parent), replace(schedule(healthy.TINY), iterations=4), report=said.append)
    finite = all(bool(tensor.isfinite().all()) for tensor in job.state().values())
    return run.iteration, digest(job.state()), run.validation.stopping.state(), finite


def possible(found, wanted) -> bool:
    """A state that a run can go on from, whatever a forged file says."""
    return type(found[0]) is int and found[0] >= 0 and found[3]


def same_or_earlier(found, wanted) -> bool:
    """The damaged checkpoint was not used: the run is where the one before it was."""
    return found == wanted or found[0] < wanted[0]


def probable(found, wanted) -> bool:
    """Probabilities, whatever they are: a forged file may describe another model."""
    return all(abs(sum(row) - 1) < 1e-4 and min(row) >= 0 for row in found[1])


def probable_classifier(found, wanted) -> bool:
    return all(abs(sum(row) - 1) < 1e-4 and min(row) >= 0 for row in found[0])


def some_records(found, wanted) -> bool:
    """Every record is one of the healthy ones."""
    return all(record in wanted for record in found)


def some_metrics(found, wanted) -> bool:
    return found[:2] == wanted[:2] and all(some_records(a, b) for a, b in zip(found[2], wanted[2], strict=True))


def forged_json(file: Path, content: bytes, draw: Random) -> None:
    """Hostile values without a checksum, as a stranger would write them."""
    value = json.loads(content)
    value.pop("checksum", None)
    file.write_text(json.dumps(forge(value, draw)), encoding="utf-8", errors="surrogatepass")


def forged_tensors(file: Path, content: bytes, draw: Random) -> None:
    """Hostile facts or tensors with a checksum that fits."""
    file.write_bytes(content)
    tensors, facts = read_tensors(file)
    if draw.random() < 0.6:
        facts = forge(facts, draw)
        facts = facts if isinstance(facts, dict) else {"iteration": facts}
        facts = json.loads(json.dumps(facts).replace("\\ud800", "?"))
    else:
        name = draw.choice(list(tensors))
        tensors[name] = draw.choice(TENSORS)(tensors[name])
        tensors = {key: value for key, value in tensors.items() if value is not None}
    write_tensors(file, tensors, facts)


TENSORS = (
    lambda x: x.float() * torch.nan,
    lambda x: x.float() + torch.inf,
    lambda x: x.to(torch.int8),
    lambda x: x > 0,
    lambda x: x.reshape(-1)[:-1],
    lambda x: x[None],
    lambda x: x.double(),
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.zeros(0),
    lambda x: None,
    lambda x: -x.float() - 100,
)


def _forged_line(file: Path, content: bytes, draw: Random) -> None:
    lines = content.decode().splitlines()
    place = draw.randrange(len(lines))
    lines[place] = json.dumps(draw.choice([forge(json.loads(lines[place]), draw), draw.choice(HOSTILE)]))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _recipe(folder: Path) -> Path:
    folder.joinpath("recipe").mkdir()
    recipe = Recipe({"first": healthy.TINY, "second": healthy.TINY})
    write_json(folder / "recipe" / "recipe.json", recipe.plain(), sealed=True)
    return folder / "recipe" / "recipe.json"


def _newest(folder: Path) -> Path:
    return RunFolder(healthy.run_of(folder)).checkpoints.files()[-1]


def attacks() -> list[Attack]:
    card, weights = (
        lambda folder, end=end: healthy.model(folder).with_suffix(end) for end in (".json", ".safetensors")
    )
    config, metrics, tuned, best = (
        lambda folder, name=name: healthy.run_of(folder) / name
        for name in ("config.json", METRICS, library.CALIBRATION, "best.safetensors")
    )

    def records(file):
        return read_metrics(file.parent)

    def recipe(file):
        return Recipe.read(file.parent).plain()

    return [
        Attack("weights of a model, damaged", weights, use_model),
        Attack("weights of a model, forged", weights, use_model, probable, forged_tensors),
        Attack("card of a model, damaged", card, use_model),
        Attack("card of a model, forged", card, use_model, probable, forged_json, weight=3),
        Attack("configuration of a run, damaged", config, use_run),
        Attack("configuration of a run, forged", config, use_run, probable, forged_json, weight=2),
        Attack("metrics of a run, damaged", metrics, records, some_records, weight=2),
        Attack(
            "metrics of a run, forged", metrics, use_run, lambda found, wanted: found[:2] == wanted[:2], _forged_line
        ),
        Attack("metrics of a run, used", metrics, use_run, some_metrics, weight=0.5),
        Attack("calibration of a run, damaged", tuned, use_run, probable, weight=0.5),
        Attack("calibration of a run, forged", tuned, use_run, probable, forged_json, weight=0.5),
        Attack("weights of a run, damaged", best, use_run, weight=0.5),
        Attack("checkpoint of a run, damaged", _newest, use_checkpoint, same_or_earlier),
        Attack("checkpoint of a run, forged", _newest, use_checkpoint, possible, forged_tensors),
        Attack("kept classifier, damaged", healthy.classifier, use_classifier),
        Attack("kept classifier, forged", healthy.classifier, use_classifier, probable_classifier, forged_tensors),
        Attack("stages of a training, damaged", _recipe, recipe, weight=0.5),
        Attack("stages of a training, forged", _recipe, recipe, lambda *found: True, forged_json, weight=0.5),
    ]
