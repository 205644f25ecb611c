"""Trainings in processes of their own, small enough to wait for."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from typer.testing import CliRunner

from bilevel.cli import build

TINY = [
    *("--ways", "3", "--queries", "2", "--meta-batch", "2", "--steps", "2"),
    *("--validation-episodes", "2", "--checkpoint-every", "4", "--threads", "1"),
]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "BILEVEL_DEBUG"} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONIOENCODING": "utf-8",
}


def words(folder, *options):
    return ["train", "glyphs-5way-1shot", *TINY, "--out", str(folder), *map(str, options)]


def here(*arguments):
    """The command in this process; in single precision, as it is outside of tests."""
    torch.set_default_dtype(torch.float32)
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


def start(*arguments, launcher=(), program=("-m", "bilevel"), environment=None, **options):
    return subprocess.Popen(
        [sys.executable, *launcher, *program, *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        env=ENVIRONMENT | (environment or {}),
    )


def torchrun(*arguments, restarts=0):
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return start(*arguments, launcher=["-m", "torch.distributed.run", *options])


def pair(*arguments, **options):
    """Two processes that work together, without torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [start(*arguments, environment={**world, "RANK": str(rank)}, **options) for rank in (0, 1)]


def finish(process, seconds=120):
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out or "", err or ""


def wait_for(path, process, seconds=120):
    """Until the file is there, which the process writes."""
    began = time.monotonic()
    while not Path(path).exists():
        assert process.poll() is None and time.monotonic() - began < seconds, finish(process)
        time.sleep(0.002)


def weights(folder, name="last"):
    return (Path(folder) / f"{name}.safetensors").read_bytes()


def worker(process, rank):
    """The process id of a worker of torchrun."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no worker {rank}")
