"""A script that calls `solve`, as a user's would, for tests that start it under torchrun: `FOLDER CASES ITERATIONS`.

Each process writes λ, w and the history of a case to FOLDER/CASE/RANK.json, every number in hexadecimal.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import bilevel as bl
from bilevel import trees

RANK = os.environ.get("RANK", "0")


def task(seed, rows=30):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.0, 0.5]) + 0.3 * torch.randn(rows, generator=generator)
    return bl.Task((x[::2], y[::2]), (x[1::2], y[1::2]))


def squares(w, data):
    return ((data[0] @ w - data[1]) ** 2).mean()


problem = bl.Problem(
    inner=lambda w, lam, data: squares(w, data) + (lam["decay"].exp() * w**2).sum() + ((w - lam["prior"]) ** 2).mean(),
    outer=lambda w, lam, data: squares(w, data),
    init=lambda lam: torch.zeros(4),
)


def sides():
    whole = task(0, 96)
    return whole.train, whole.val


def cut(kind, size):
    return bl.Task(*(bl.shards(kind(side, size), 3) for side in sides()))


def cases():
    folds = [task(seed) for seed in range(5)]
    sgd, heavy = (lambda p: torch.optim.SGD(p, lr=1e3)), bl.HeavyBall(0.05, 0.5)
    quasi = {"algorithm": bl.LBFGSB(tol=0.0, first_step=0.1), "constraint": bl.Box(-3, 1)}
    return {
        "cold": {"tasks": folds, "steps": 15, "method": bl.Reverse()},
        "warm": {"tasks": folds, "steps": 5, "method": bl.Implicit(bl.CG(tol=1e-6)), "start": "warm"},
        "online": {"tasks": folds, "steps": 3, "method": bl.Forward(), "start": "online", "dynamics": heavy},
        "source": {"tasks": lambda k: [task(100 * k + i) for i in range(3)], "steps": 10},
        "iterator": {"tasks": ([task(100 * k + i) for i in range(3)] for k in range(1000)), "steps": 10},
        "lbfgsb": {"tasks": folds, "steps": 15, **quasi},
        "soba": {"tasks": cut(bl.Minibatches, 12), "algorithm": bl.SOBA()},
        "saba": {"tasks": cut(bl.FixedBatches, 12), "algorithm": bl.SABA(), "constraint": bl.Box(-3, 1)},
        "bome": {"tasks": bl.Task(*(bl.shards(side, 3) for side in sides())), "algorithm": bl.BOME(inner_steps=3)},
        "diverging": {"tasks": folds, "steps": 15, "optimizer": sgd},
        "different": {"tasks": [task(int(RANK))], "steps": 5},
    }


def run(case, folder, iterations, **settings):
    lam = {"decay": torch.full((4,), -1.0), "prior": torch.zeros(4)}
    settings = {**cases()[case], **settings}
    if "steps" in settings:
        settings = {"dynamics": bl.GradientDescent(0.1), **settings}
    tasks, place = settings.pop("tasks"), folder / case / "checkpoints"
    return bl.solve(problem, lam, tasks, iterations=iterations, checkpoint=place, checkpoint_every=4, **settings)


def digits(found):
    numbers = [*trees.leaves(found.outer), *trees.leaves(found.inner)]
    numbers += [torch.from_numpy(found.history[key]) for key in ("value", "gradient_norm")]
    return {"numbers": [[float(x).hex() for x in leaf.reshape(-1)] for leaf in numbers], "outcome": str(found.outcome)}


if __name__ == "__main__":
    for case in sys.argv[2].split(","):
        (Path(sys.argv[1]) / case).mkdir(parents=True, exist_ok=True)
        try:
            slowly = [lambda here: time.sleep(float(sys.argv[4]))] if sys.argv[4:] else ()
            result = digits(run(case, Path(sys.argv[1]), int(sys.argv[3]), callbacks=slowly))
        except bl.BilevelError as error:
            result = {"error": str(error)}
        (Path(sys.argv[1]) / case / f"{RANK}.json").write_text(json.dumps(result))
