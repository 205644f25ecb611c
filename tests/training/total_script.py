"""Sums over several processes, for a test that starts it under torchrun: `FOLDER`. Each process writes its sums."""

import json
import os
import sys
from pathlib import Path

import torch

from bilevel.distributed import current_world, world

COUNTS = (1, 2, 3, 4, 5, 8, 13)


def sums():
    """Sums of numbers whose rounding shows in which order they were added."""
    torch.manual_seed(0)
    terms = torch.randn(max(COUNTS), 50, dtype=torch.float64) * 10 ** torch.linspace(0, 6, 50, dtype=torch.float64)
    with world():
        return [current_world().total(terms.__getitem__, count, terms[0]).tolist() for count in COUNTS]


if __name__ == "__main__":
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(sums()))
