"""Processes that are forked from one that has imported the libraries and run nothing: they start in milliseconds."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from torch.distributed import TCPStore

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["bilevel", "bilevel.estimators", "matplotlib.pyplot", "sklearn.linear_model", "torch", "torch._dynamo"]
)


def start_ranks(script, folder, *words, count=2):
    """Start `script FOLDER WORDS` in processes that work together, with the environment that torchrun would give them.

    As with torchrun, the store through which they find each other is held by the process that started them: keep what
    this function returns, the processes and the store.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(script), str(folder), *map(str, words)]
    # The server's environment is that of the test that started it, not of this one.
    environment = {**os.environ, **world}
    started = [PROCESSES.Process(target=_rank, args=(rank, environment, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    return started, store


def run_ranks(script, folder, *words, count=2, seconds=300):
    """Run `script FOLDER WORDS` in processes that work together, until all of them have ended well."""
    started, _store = start_ranks(script, folder, *words, count=count)
    for rank, process in enumerate(started):
        assert end_of(process, seconds) == 0, (folder / f"{rank}.stderr").read_text(encoding="utf-8")


def end_of(process, seconds=120):
    """The exit code; after so many seconds the process is killed."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def _rank(rank, environment, arguments):
    errors = open(Path(arguments[1]) / f"{rank}.stderr", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.pop("BILEVEL_DEBUG", None)
    import torch

    torch.set_num_threads(1)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
