"""Two real processes: the same weights as one, also after a kill; stops and errors of one are those of both."""

import os
import signal
import sys
import time

import command_script
import pytest
from processes import finish, here, pair, torchrun, wait_for, weights, words, worker

from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics
from forking import end_of, run_ranks, start_ranks

ITERATIONS = 20


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = here(*words(folder, "--iterations", ITERATIONS))
    assert done.exit_code == 0, done.output
    return folder


def close(one, other):
    (a, _), (b, _) = read_tensors(one / "last.safetensors"), read_tensors(other / "last.safetensors")
    return all(float((a[name] - b[name]).norm()) <= 1e-5 * float(a[name].norm()) for name in a)


def losses(folder):
    return [(line["iteration"], line["loss"]) for line in read_metrics(folder) if "loss" in line]


def start_two(place, *arguments):
    """Two forked processes that run one command; what they print is in `place`."""
    return start_ranks(command_script.__file__, place, *arguments)


def said(place, rank):
    """What a process printed, and its errors."""
    return [(place / f"{rank}.{stream}").read_text(encoding="utf-8") for stream in ("stdout", "stderr")]


def test_two_processes_learn_what_one_learns(tmp_path, alone):
    run_ranks(command_script.__file__, tmp_path / "said", *words(tmp_path / "two", "--iterations", ITERATIONS))
    (out, _), (silence, _) = (said(tmp_path / "said", rank) for rank in (0, 1))
    assert "2 processes" in out and out.count("Ran all 20 hyperiterations.") == 1 and silence == ""
    assert close(tmp_path / "two", alone)
    # More than was asked for: the sums are made in one order, whoever computed the terms.
    assert weights(tmp_path / "two") == weights(alone) and losses(tmp_path / "two") == losses(alone)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the threads in /proc")
def test_no_thread_of_a_process_group_outlives_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from bilevel import distributed\n"
        "with distributed.world() as world:\n"
        "    weight = torch.nn.Parameter(world.sum(torch.ones(3)))\n"
        "    optimizer = torch.optim.Adam([weight])\n"
        "    optimizer.step()\n"
        "assert len(os.listdir('/proc/self/task')) == 1, 'threads are left'\n"
    )
    # New processes, because in a forked one torch._dynamo, whose import leaves threads, is imported already.
    for process in pair(program=[str(script)]):
        code, _, err = finish(process)
        assert code == 0, err


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_process_is_started_again_and_nothing_is_lost(tmp_path, alone):
    folder = tmp_path / "run"
    process = torchrun(*words(folder, "--iterations", ITERATIONS), restarts=2)
    wait_for(folder / "checkpoints" / "000000004.safetensors", process)
    os.kill(worker(process, 1), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    assert out.count("Estimate: about") == 2 and "Continuing after hyperiteration" in out
    assert close(folder, alone) and weights(folder) == weights(alone) and losses(folder) == losses(alone)


def test_last_weights_are_written_again_after_a_kill_between_checkpoint_and_them(alone):
    """The checkpoint of the last hyperiteration was written, and its weights were not."""
    before, best = weights(alone), (alone / "best.safetensors").read_bytes()
    (alone / "last.safetensors").write_bytes(best)
    assert here("train", "--resume", "--out", alone, "--iterations", ITERATIONS).exit_code == 0
    assert weights(alone) == before


def test_an_error_of_one_process_does_not_leave_the_other_waiting(tmp_path, alone):
    before = weights(alone)
    processes, _store = start_two(tmp_path, *words(alone, "--iterations", ITERATIONS))
    for rank, message in enumerate(
        ("holds a run already. Continue it with --resume", "Another process of this run cannot go on")
    ):
        code, (out, err) = end_of(processes[rank], seconds=60), said(tmp_path, rank)
        assert code == 2 and message in err and "Traceback" not in err and out == ""
    assert weights(alone) == before


def test_a_stop_of_one_process_stops_both_and_the_run_goes_on(tmp_path, alone):
    folder = tmp_path / "run"
    (first, second), _store = start_two(tmp_path / "said", *words(folder, "--iterations", 100_000))
    began = time.monotonic()
    while not (folder / "checkpoints" / "000000004.safetensors").exists():
        assert first.is_alive() and time.monotonic() - began < 120, said(tmp_path / "said", 0)
        time.sleep(0.002)
    os.kill(second.pid, signal.SIGTERM)
    code, (out, err) = end_of(first), said(tmp_path / "said", 0)
    done = int(RunFolder(folder).checkpoints.files()[-1].stem)
    assert code == 128 + signal.SIGTERM and "Traceback" not in err
    assert f"Stopped by a signal to another process after hyperiteration {done}." in out and "is saved" in out
    code, (out, err) = end_of(second), said(tmp_path / "said", 1)
    assert code == 128 + signal.SIGTERM and out == "" and "Traceback" not in err
    # One process goes on where two were.
    last = max(done + 1, ITERATIONS)
    assert here("train", "--resume", "--out", folder, "--iterations", last).exit_code == 0
    if last > ITERATIONS:
        assert here("train", "--resume", "--out", alone, "--iterations", last).exit_code == 0
    assert weights(folder) == weights(alone)
