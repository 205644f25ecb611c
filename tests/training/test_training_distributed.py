"""Two real processes: the same weights as one, also after a kill; stops and errors of one are those of both."""

import os
import signal
import sys

import pytest
from processes import finish, here, pair, torchrun, wait_for, weights, words, worker

from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics

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


def test_two_processes_learn_what_one_learns(tmp_path, alone):
    code, out, err = finish(torchrun(*words(tmp_path / "two", "--iterations", ITERATIONS)))
    assert code == 0, err
    assert "2 processes" in out and out.count("Ran all 20 hyperiterations.") == 1
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
    for process, message in zip(
        pair(*words(alone, "--iterations", ITERATIONS)),
        ("holds a run already. Continue it with --resume", "Another process of this run cannot go on"),
        strict=True,
    ):
        code, out, err = finish(process, seconds=60)
        assert code == 2 and message in err and "Traceback" not in err and out == ""
    assert weights(alone) == before


def test_a_stop_of_one_process_stops_both_and_the_run_goes_on(tmp_path, alone):
    folder = tmp_path / "run"
    first, second = pair(*words(folder, "--iterations", 100_000))
    wait_for(folder / "checkpoints" / "000000004.safetensors", first)
    second.send_signal(signal.SIGTERM)
    code, out, err = finish(first)
    done = int(RunFolder(folder).checkpoints.files()[-1].stem)
    assert code == 128 + signal.SIGTERM and "Traceback" not in err
    assert f"Stopped by a signal to another process after hyperiteration {done}." in out and "is saved" in out
    code, out, err = finish(second)
    assert code == 128 + signal.SIGTERM and out == "" and "Traceback" not in err
    # One process goes on where two were.
    last = max(done + 1, ITERATIONS)
    assert here("train", "--resume", "--out", folder, "--iterations", last).exit_code == 0
    if last > ITERATIONS:
        assert here("train", "--resume", "--out", alone, "--iterations", last).exit_code == 0
    assert weights(folder) == weights(alone)
