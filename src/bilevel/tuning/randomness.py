"""Randomness as a function of a seed and a number, and the global generators left as they were."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def mixed(seed: int, what: str, number: int) -> int:
    """A seed for each purpose and number; different for neighbouring ones."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {what} {number}".encode(), digest_size=4).digest(), "big")


@contextmanager
def seeded(seed: int, what: str, number: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside it torch, numpy and random are seeded; afterwards they go on where they were.

    >>> before = torch.get_rng_state()
    >>> with seeded(0, "batch", 1):
    ...     one = torch.rand(3)
    >>> with seeded(0, "batch", 1):
    ...     two = torch.rand(3)
    >>> bool((one == two).all()), bool((before == torch.get_rng_state()).all())
    (True, True)
    """
    number = mixed(seed, what, number)
    cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # Not torch.manual_seed, which notes the whole stack for devices that are not there yet: it takes milliseconds.
        torch.default_generator.manual_seed(number)
        if cuda:
            torch.cuda.manual_seed(number)
        states = random.getstate(), np.random.get_state()
        random.seed(number)
        np.random.seed(number)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def draws(function: Callable[[], Any], device: torch.device | None = None) -> bool:
    """Whether calling `function` draws from one of the global generators."""
    with seeded(0, "draws", 0, device):
        before = _fingerprint(device)
        function()
        return before != _fingerprint(device)


def _fingerprint(device: torch.device | None) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device is not None and device.type == "cuda" else b""
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), numpy_state[1].tobytes(), numpy_state[2]
