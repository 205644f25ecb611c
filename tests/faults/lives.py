"""A training that is killed again and again, and goes on each time with other numbers of processes and threads.

A life is one start of the real command. It is a fork of this process, so that torch is imported once; the parent has
run nothing in parallel before.
"""

import faulthandler
import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bilevel.cli import main

# Seconds after which a life that does not end by itself is called a hang.
PATIENCE = 600.0
# The same for the other processes of a run, one of which was killed. torchrun would end them at once.
GRACE = 5.0
# What writes to a folder; Python announces each of these events before it happens.
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "tempfile.mkstemp")


@dataclass(frozen=True)
class Death:
    """How a life ends before its time.

    Args:
        kind: "kill" (SIGKILL after a time), "signal" (another signal after a time), "write" (SIGKILL before the n-th
            change to the run's folder), "half" (killed in the middle of writing a file), "full" (no room for a file).
        after: seconds, the number of the change, or the bytes that fit into a file.
        signal: that is sent.
    """

    kind: str
    after: float
    signal: int = signal.SIGKILL

    def arm(self, folder: Path) -> None:
        """In the process that is to die, before it begins."""
        if self.kind == "write":
            _die_at_event(folder, int(self.after))
        if self.kind in ("half", "full"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.after), resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.kind == "half" else signal.SIG_IGN)


def _die_at_event(folder: Path, number: int) -> None:
    inside, left = str(folder), [number]

    def heard(event: str, arguments: tuple) -> None:
        if event not in WRITES or not str(arguments[0]).startswith(inside):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


@dataclass
class Life:
    """How one start of the command ended.

    Attributes:
        codes: exit codes of its processes, by rank; negative where a signal ended one.
        said: their standard errors and outputs.
        hung: whether a process had to be ended from outside.
    """

    codes: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    hung: bool = False

    @property
    def faults(self) -> list[str]:
        """What no life may end with."""
        found = [f"traceback: {said[-800:]}" for said in self.said if "Traceback" in said]
        return found + ([f"hung: {''.join(said[-2000:] for said in self.said)}"] if self.hung else [])


def live(folder: Path, words: list[str], processes: int, death: Death | None, victim: int = 0) -> Life:
    """Start the command with so many processes; `death` comes to the process `victim`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # Pipes, because a limit on the size of files would cut what is said as well.
    pipes = [os.pipe() for _ in range(processes)]
    children = [
        _fork(
            words,
            {**place, "RANK": str(rank)} if processes > 1 else {},
            output,
            (lambda: death.arm(folder)) if death is not None and rank == victim else (lambda: None),
        )
        for rank, (_, output) in enumerate(pipes)
    ]
    for _, output in pipes:
        os.close(output)
    return _wait(children, [heard for heard, _ in pipes], death, victim)


def _fork(words: list[str], place: dict[str, str], output: int, arm: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.environ.update(place)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["bilevel", *words]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1)  # to say where it hangs
        arm()
        main()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int], pipes: list[int], death: Death | None, victim: int) -> Life:
    """Send what is to be sent, and wait for all; whoever waits for a killed process is ended after a grace period."""
    began, codes, hung = time.monotonic(), dict.fromkeys(children), False
    said = [b""] * len(pipes)
    for pipe in pipes:
        os.set_blocking(pipe, False)
    sent, lost = death is None or death.kind not in ("kill", "signal"), None
    while None in codes.values():
        for child in [child for child, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
                lost = time.monotonic() if codes[child] and lost is None else lost
        now = time.monotonic()
        if not sent and now - began > death.after:
            sent = True
            if codes[children[victim]] is None:
                os.kill(children[victim], death.signal)
        late = now - began > PATIENCE
        if late or (lost is not None and now - lost > GRACE):
            hung = hung or late
            for number in (signal.SIGUSR1, signal.SIGKILL) if late else (signal.SIGKILL,):
                for child in [child for child, code in codes.items() if code is None]:
                    os.kill(child, number)
                time.sleep(0.5 * late)
        said = [before + _heard(pipe) for before, pipe in zip(said, pipes, strict=True)]
        time.sleep(0.005)
    said = [before + _heard(pipe) for before, pipe in zip(said, pipes, strict=True)]
    for pipe in pipes:
        os.close(pipe)
    return Life([codes[child] for child in children], [text.decode(errors="replace") for text in said], hung)


def _heard(pipe: int) -> bytes:
    """What has been written into a pipe since the last call, a part of it where that is much."""
    try:
        return os.read(pipe, 2**20)
    except BlockingIOError:
        return b""


def preload() -> None:
    """Import what every life needs, once, in the parent."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "bilevel.cli._training", "bilevel.learners.training", "bilevel.learners.library"):
        importlib.import_module(name)
