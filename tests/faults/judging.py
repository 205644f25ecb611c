"""What a damaged input ends in: a right load, a sentence, or a fault."""

import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bilevel.errors import BilevelError, BilevelWarning
from faults.mutations import damage

# Seconds that one input may take; a healthy one takes milliseconds.
LIMIT = 20.0
# Bytes beyond what the process has already, so that a bomb is an error and not the end of the machine.
MEMORY = 3 * 2**30
# A sentence for people is not longer.
LONGEST = 4_000


class Fault(Exception):
    """An end that is neither a right load nor a sentence."""


class Hang(BaseException):
    """The time is up."""


@dataclass(frozen=True)
class Attack:
    """One kind of input, one way to break it, and what uses it.

    Args:
        name: what is attacked.
        make: writes the healthy input into a folder and returns the file that is broken.
        use: loads the input, given that file, and returns what can be compared.
        right: whether a loaded value is right, given the value of the healthy file; by default they are equal.
        strike: breaks the file, given its healthy content; by default random damage to its bytes.
        weight: how many of the inputs are of this kind, relative to the others.
    """

    name: str
    make: Callable[[Path], Path]
    use: Callable[[Path], Any]
    right: Callable[[Any, Any], bool] = lambda found, healthy: found == healthy
    strike: Callable[[Path, bytes, Random], None] = lambda file, content, draw: _write(file, damage(content, draw))
    weight: float = 1.0


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def up(number, frame):
        raise Hang

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def bounded_memory(beyond: int = MEMORY) -> Iterator[None]:
    """At most so many bytes more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + beyond, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(attack: Attack, file: Path, healthy: Any) -> str:
    """How the use of a broken file ends: "right" or "refused"; a Fault otherwise."""
    try:
        with warnings.catch_warnings(), time_limit(LIMIT):
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", BilevelWarning)
            found = attack.use(file)
    except BilevelError as error:
        said = str(error)
        if not said.strip() or len(said) > LONGEST:
            raise Fault(f"a sentence of {len(said)} characters: {said[:300]!r}") from error
        return "refused"
    except Hang:
        raise Fault(f"hung for {LIMIT:g} seconds") from None
    except Exception as error:
        raise Fault(f"traceback: {''.join(traceback.format_exception(error)[-3:])}") from error
    if not attack.right(found, healthy):
        raise Fault(f"silent: {found!s:.300} instead of {healthy!s:.300}")
    return "right"


def run(attack: Attack, folder: Path, count: int, seed: int, report: Callable[[str], None]) -> Counter:
    """Break the input `count` times; faults are counted and reported with the seed that repeats them."""
    folder.mkdir(parents=True)
    file = attack.make(folder)
    content = file.read_bytes()
    healthy = attack.use(file)
    counts: Counter = Counter()
    with bounded_memory():
        for number in range(seed, seed + count):
            attack.strike(file, content, Random(number))
            try:
                counts[judge(attack, file, healthy)] += 1
            except Fault as fault:
                counts["faults"] += 1
                report(f"{attack.name}, seed {number}: {fault}")
    return counts
