"""Splits of classes: a function of the seed alone, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bilevel.errors import BilevelError


def shuffled(count: int, seed: int) -> list[int]:
    """0…count−1 in a random order that depends on the seed only: the raw stream of Philox is the same on all machines.

    >>> shuffled(5, seed=0) == shuffled(5, seed=0), sorted(shuffled(5, seed=1))
    (True, [0, 1, 2, 3, 4])
    """
    if not 0 <= seed < 2**64:
        raise BilevelError(f"seed={seed} must be a whole number from 0 to 2⁶⁴ − 1.")
    keys = np.random.Philox(key=seed).random_raw(count)
    return [int(index) for index in np.argsort(keys, kind="stable")]


def split_classes(count: int, seed: int, fractions: Sequence[float] = (0.64, 0.16, 0.2)) -> dict[str, list[int]]:
    """Classes divided into "train", "val" and "test" by a seeded shuffle. A split with a share above 0 is not empty.

    >>> {name: len(chosen) for name, chosen in split_classes(100, seed=0).items()}
    {'train': 64, 'val': 16, 'test': 20}
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise BilevelError(
            f"fractions={tuple(fractions)} must be three numbers ≥ 0 that sum to 1: the shares of classes for train, "
            "val and test, (0.64, 0.16, 0.2) for example."
        )
    wanted = sum(fraction > 0 for fraction in fractions)
    if count < wanted:
        raise BilevelError(
            f"{count} classes cannot be split by fractions={tuple(fractions)} into {wanted} parts; add classes, or "
            "pass fractions=(1, 0, 0) to keep them all in 'train'."
        )
    sizes = [max(round(count * fraction), int(fraction > 0)) for fraction in fractions]
    while sum(sizes) != count:
        largest = max(range(3), key=lambda part: sizes[part])
        sizes[largest] += 1 if sum(sizes) < count else -1
    order, (train, val, _) = shuffled(count, seed), sizes
    return {
        "train": sorted(order[:train]),
        "val": sorted(order[train : train + val]),
        "test": sorted(order[train + val :]),
    }
