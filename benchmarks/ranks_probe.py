"""Hyperiterations of a few-shot training, by all processes together: `torchrun … ranks_probe.py DATASET STEPS`.

One thread each, the same meta-batch for any number of processes. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining, open_data
from bilevel.training.distributed import world
from harness.cases import EPISODES

WARM_UP = 2


def main() -> None:
    torch.set_num_threads(1)
    dataset, steps = sys.argv[1], int(sys.argv[2])
    settings = Settings(dataset=dataset, meta_batch=EPISODES, step_bound=0.0)
    with world() as everybody:
        training = FewShotTraining(settings, open_data(settings), everybody)
        seconds, sampling = [], []
        for iteration in range(1, steps + WARM_UP + 1):
            began = time.perf_counter()
            training.step(iteration)
            seconds.append(time.perf_counter() - began)
        for iteration in range(steps):
            began = time.perf_counter()
            training.train.batch(everybody.share(range(iteration * EPISODES, (iteration + 1) * EPISODES)))
            sampling.append(time.perf_counter() - began)
        if everybody.writes:
            print(json.dumps({"seconds": seconds[WARM_UP:], "sampling": sampling}))


if __name__ == "__main__":
    main()
