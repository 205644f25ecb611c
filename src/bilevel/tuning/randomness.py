"""Random numbers as a function of a seed, a purpose and a number. The global generators are restored."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derived_seed(seed: int, purpose: str, number: int) -> int:
    """A seed for each purpose and number. Seeds of neighbouring numbers are unrelated."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {purpose} {number}".encode(), digest_size=4).digest(), "big")


@contextmanager
def seeded(seed: int, purpose: str, number: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of torch, numpy and random inside the context, and restore them afterwards.

    >>> before = torch.get_rng_state()
    >>> with seeded(0, "batch", 1):
    ...     one = torch.rand(3)
    >>> with seeded(0, "batch", 1):
    ...     two = torch.rand(3)
    >>> bool((one == two).all()), bool((before == torch.get_rng_state()).all())
    (True, True)
    """
    number = derived_seed(seed, purpose, number)
    cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would also seed all other devices, which takes milliseconds.
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


def draws_random_numbers(function: Callable[[], Any], device: torch.device | None = None) -> bool:
    """Whether calling `function` draws from one of the global generators."""
    with seeded(0, "draws", 0, device):
        before = _generator_states(device)
        function()
        return before != _generator_states(device)


def _generator_states(device: torch.device | None) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device is not None and device.type == "cuda" else b""
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), numpy_state[1].tobytes(), numpy_state[2]
