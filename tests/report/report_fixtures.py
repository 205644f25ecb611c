"""Results and runs for tests, as files; and names that bite."""

import json

import numpy as np
from PIL import Image

from bilevel.files import write_json
from bilevel.learners.training import new_learner
from bilevel.training.files import write_tensors

BITE = "<img src=x onerror=window.hacked=1>"
SCRIPT = "</script><script>window.hacked=1</script>"


def picture(path, size=(40, 24)):
    Image.fromarray(np.full((*size, 3), 200, np.uint8)).save(path)


def record(**changes):
    """The fields of a result.json, as an experiment would write them."""
    table = {
        "title": "Error",
        "columns": ["T", "paper", "ours", "difference", "why"],
        "rows": [["10", "1.50", "1.40 ± 0.10", "−0.10", "another data set"], ["50", "", "0.20", "", ""]],
        "prose": ["why"],
    }
    fields = {
        "experiment": "ridge",
        "summary": "Ridge regression.",
        "paper": "Table 5",
        "command": "bilevel run ridge --seed 3",
        "settings": {"seeds": 5, "steps": [10, 50]},
        "seed": 3,
        "choices": {"noise": "normal"},
        "numbers": {},
        "tables": [table],
        "pictures": ["ridge.png"],
        "notes": ["One data set is not published."],
        "data": {},
        "runs": [],
        "minutes": 1.5,
        "machine": {"cpu": "a fast one", "cores": 2},
        "finished": "2020-01-01T00:00:00+00:00",
    }
    return {**fields, **changes}


def result(folder, **changes):
    folder.mkdir(parents=True)
    picture(folder / "ridge.png")
    (folder / "result.json").write_text(json.dumps(record(**changes)), encoding="utf-8")
    return folder


def metrics(count, seed):
    """The lines of a training: losses every 20 hyperiterations and accuracies every 100."""
    draw = np.random.default_rng(seed)
    for k in range(0, count + 1, 20):
        if k:
            yield {"iteration": k, "loss": 1.5 - k / count + 0.1 * draw.random(), "images_per_second": 900.0}
        if k % 100 == 0:
            yield {"iteration": k, "score": 0.3 + 0.5 * k / count, "interval": 0.02, "minutes": 0.5 + k / 100}


def run(folder, settings, data, count=400, seed=0):
    """The files of a training, with weights that were never trained."""
    folder.mkdir(parents=True)
    learner = new_learner(settings, data)
    lines = "".join(json.dumps(line) + "\n" for line in metrics(count, seed))
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    config = {
        "command": f"bilevel train --dataset pictures --l2 {settings.l2:g}",
        "preset": None,
        "settings": settings.plain(),
        "learner": learner.settings(),
        "data": {"name": data.name, "fingerprint": data.fingerprint},
        "threads": 1,
        "bilevel": "0",
        "commit": "c0ffee",
    }
    write_json(folder / "config.json", config)
    write_tensors(folder / "best.safetensors", learner.with_running(learner.lam), {"iteration": count})
    return folder
