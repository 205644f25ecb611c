"""`torchrun script.py` with `solve`: the same bits for any number of ranks, also after a kill and with other ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import share_script
import solve_script
import torch
from processes import ENVIRONMENT, finish, wait_for, worker

import bilevel as bl
from forking import end_of, run_ranks, start_ranks

ITERATIONS = 10
EVERY = ["cold", "warm", "online", "source", "iterator", "lbfgsb", "soba", "saba", "bome", "diverging"]
LATER = [case for case in EVERY if case != "diverging"]


def two_ranks(folder, case, *pause, restarts=0):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    words = [*launcher, solve_script.__file__, str(folder), case, str(ITERATIONS), *map(str, pause)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], **pipes, text=True, env=ENVIRONMENT)


def result(folder, case, rank):
    return json.loads((folder / case / f"{rank}.json").read_text())


def alone(folder, case, iterations=ITERATIONS, **settings):
    """The run of one process: this one, in single precision as a script is."""
    torch.set_default_dtype(torch.float32)
    return solve_script.digits(solve_script.run(case, folder, iterations, **settings))


def test_ranks_return_what_one_process_returns(tmp_path):
    run_ranks(solve_script.__file__, tmp_path / "two", ",".join([*EVERY, "different"]), ITERATIONS)
    for case in EVERY:
        one = alone(tmp_path / "one", case)
        assert ("Diverged" in one["outcome"]) == (case == "diverging")
        assert result(tmp_path / "two", case, 0) == result(tmp_path / "two", case, 1) == one, case
    for rank in (0, 1):
        assert (
            "with different λ, tasks, steps, dynamics or methods"
            in result(tmp_path / "two", "different", rank)["error"]
        )


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_rank_is_started_again_by_torchrun_and_resumed(tmp_path):
    process = two_ranks(tmp_path / "two", "warm", 0.1, restarts=1)
    wait_for(tmp_path / "two" / "warm" / "checkpoints" / "000000004.safetensors", process)
    os.kill(worker(process, 1), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert result(tmp_path / "two", "warm", 1) == alone(tmp_path / "one", "warm")


def test_one_process_resumes_the_run_of_two_that_were_killed(tmp_path):
    """One is killed, and the other notices."""
    place = tmp_path / "two" / "online"
    (first, second), _store = start_ranks(solve_script.__file__, tmp_path / "two", "online", ITERATIONS, 0.1)
    began = time.monotonic()
    while not (place / "checkpoints" / "000000004.safetensors").exists():
        assert first.is_alive() and second.is_alive() and time.monotonic() - began < 120
        time.sleep(0.002)
    os.kill(second.pid, signal.SIGKILL)
    assert end_of(second) == -signal.SIGKILL and not (place / "1.json").exists()
    assert end_of(first) == 0
    assert "Another process of this run has ended" in result(tmp_path / "two", "online", 0)["outcome"]
    seen = []
    assert alone(tmp_path / "two", "online", callbacks=[lambda here: seen.append(here.k)]) == alone(
        tmp_path / "one", "online"
    )
    assert seen[0] >= 4


@pytest.mark.parametrize("case", LATER)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, case):
    def interrupt(here):
        if here.k == 6:
            raise KeyboardInterrupt

    assert "Interrupted" in alone(tmp_path / "cut", case, callbacks=[interrupt])["outcome"]
    seen = []
    found = alone(tmp_path / "cut", case, callbacks=[lambda here: seen.append(here.k)])
    assert seen[0] == 4 and found == alone(tmp_path / "whole", case)


@pytest.mark.parametrize("case", LATER)
def test_a_finished_run_is_not_repeated_and_can_be_made_longer(tmp_path, case):
    first, seen = alone(tmp_path / "run", case), []
    assert alone(tmp_path / "run", case, callbacks=[lambda here: seen.append(here.k)]) == first and seen == []
    assert alone(tmp_path / "run", case, 14) == alone(tmp_path / "long", case, 14)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 7]),
    ],
)
def test_optimisers_and_schedulers_go_on(tmp_path, scheduler):
    optimizer = lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9)  # noqa: E731
    settings = {"optimizer": optimizer, "scheduler": scheduler, "patience": 20}
    alone(tmp_path / "run", "cold", 5, **settings)
    assert alone(tmp_path / "run", "cold", **settings) == alone(tmp_path / "whole", "cold", **settings)


def test_a_line_search_goes_on(tmp_path):
    settings = {"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), "start": "warm", "steps": 3}
    alone(tmp_path / "run", "cold", 5, **settings)
    assert alone(tmp_path / "run", "cold", **settings) == alone(tmp_path / "whole", "cold", **settings)


def test_checkpoints_of_another_run_are_refused(tmp_path):
    alone(tmp_path, "cold")
    for changed, words in (
        ({"steps": 7}, "steps: 15 there, 7 here"),
        ({"tasks": [solve_script.task(9)]}, "tasks: "),
        ({"start": "warm"}, "start: cold there, warm here"),
        ({"algorithm": bl.LBFGSB()}, "algorithm: Descent() there, LBFGSB("),
    ):
        with pytest.raises(bl.BilevelError, match="are those of another run") as error:
            alone(tmp_path, "cold", **changed)
        assert words in str(error.value)


def test_checkpoints_of_another_step_size_are_refused(tmp_path):
    optimizer = lambda lr: lambda p: torch.optim.SGD(p, lr=lr)  # noqa: E731
    scheduler = lambda steps: lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps)  # noqa: E731
    alone(tmp_path, "cold", 5, optimizer=optimizer(0.1), scheduler=scheduler(20))
    for changed, words in (
        ({"optimizer": optimizer(0.2), "scheduler": scheduler(20)}, "lr: 0.1 there, 0.2 here"),
        ({"optimizer": optimizer(0.1), "scheduler": scheduler(30)}, "T_max of the scheduler: 20 there, 30 here"),
        ({"optimizer": optimizer(0.1)}, "scheduler: CosineAnnealingLR there, none here"),
        ({"scheduler": scheduler(20)}, "optimizer: SGD there, Adam here"),
    ):
        with pytest.raises(bl.BilevelError, match="other settings of the optimiser") as error:
            alone(tmp_path, "cold", **changed)
        assert words in str(error.value)


@pytest.mark.parametrize("start", ["cold", "warm", "online"])
def test_checkpoints_of_another_problem_are_refused(tmp_path, start):
    """Functions cannot be compared. The value at the last λ can."""
    before = solve_script.problem
    other = replace(before, outer=lambda w, lam, data: before.outer(w, lam, data) + 5)
    trained = replace(before, inner=lambda w, lam, data: 1.1 * before.inner(w, lam, data))
    lam = {"decay": torch.zeros(4), "prior": torch.tensor(0.1)}
    run = {"steps": 5, "start": start, "checkpoint": tmp_path, "checkpoint_every": 2}
    rates = {"dynamics": bl.GradientDescent(0.1)}
    bl.solve(before, lam, solve_script.task(0), iterations=4, **rates, **run)
    for problem, changed, words in (
        (other, rates, "f_T at the last λ"),
        (trained, rates, "f_T at the last λ"),
        (before, {"dynamics": bl.GradientDescent(0.02)}, r"dynamics: GradientDescent\(lr=0.1\) there"),
        (before, {"dynamics": lambda lam: bl.GradientDescent(lam["prior"])}, "dynamics: "),
        (before, {"method": bl.Forward(), **rates}, "method: Reverse"),
    ):
        with pytest.raises(bl.BilevelError, match=f"(?s)are those of another run.*{words}"):
            bl.solve(problem, lam, solve_script.task(0), iterations=6, **changed, **run)
    again = bl.solve(before, lam, solve_script.task(0), iterations=6, **rates, **run)
    assert len(again.history["value"]) == 6


def test_another_problem_is_noticed_after_a_blow_up(tmp_path):
    """A huge value in the history must not hide the difference at the last λ."""
    before = solve_script.problem
    lam = {"decay": torch.zeros(4), "prior": torch.tensor(0.1)}
    # The second hyperiteration is at a λ where the steps diverge; the third is back where the first was.
    moves = iter([-50.0, 50.0, 0.0, 0.0, 0.0])

    class Jump(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(next(moves, 0.0) * -0.1)

    run = {"dynamics": bl.GradientDescent(0.1), "steps": 5, "checkpoint": tmp_path, "checkpoint_every": 4}
    run["optimizer"] = lambda leaves: Jump(leaves, lr=0.1)
    found = bl.solve(before, lam, solve_script.task(0), iterations=4, **run)
    assert max(found.history["value"]) > 1e9 * found.value
    other = replace(before, outer=lambda w, lam, data: before.outer(w, lam, data) + 5)
    with pytest.raises(bl.BilevelError, match="f_T at the last λ"):
        bl.solve(other, lam, solve_script.task(0), iterations=6, **run)


def test_checkpoints_of_other_functions_in_the_dynamics_are_refused(tmp_path):
    lam = {"decay": torch.zeros(4), "prior": torch.tensor(0.1)}

    def run(rate, iterations):
        dynamics = bl.GradientDescent(lambda t: rate / t)
        return bl.solve(
            solve_script.problem, lam, solve_script.task(0), dynamics=dynamics, steps=5, iterations=iterations,
            checkpoint=tmp_path,
        )  # fmt: skip

    run(0.1, 4)
    with pytest.raises(bl.BilevelError, match="f_T at the last λ"):
        run(0.2, 6)
    assert run(0.1, 6).outcome.kind == "finished"


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(tmp_path):
    whole = alone(tmp_path, "cold")
    newest = tmp_path / "cold" / "checkpoints" / "000000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.warns(bl.BilevelWarning, match="Looking for the checkpoint before it"):
        assert alone(tmp_path, "cold") == whole


def test_what_a_checkpoint_cannot_hold_is_said(tmp_path):
    rate = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)  # noqa: E731

    class Stateful(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "path": Path("here")}

    with pytest.raises(bl.BilevelError, match="A checkpoint cannot hold PosixPath"):
        alone(tmp_path, "cold", optimizer=lambda p: Stateful(p, lr=0.1), scheduler=rate, raise_on_failure=True)

    class Own(bl.Algorithm):
        def minimise(self, outer):
            raise AssertionError("no work before the check")

    with pytest.raises(bl.BilevelError, match="Own cannot resume from a saved state"):
        alone(tmp_path, "cold", algorithm=Own())


Pair = namedtuple("Pair", ["slope", "level"])


@pytest.mark.parametrize("start", ["cold", "warm", "online"])
def test_ordered_dicts_are_resumed_in_their_own_order(tmp_path, start):
    """Optimisers know the leaves of λ by their numbers: a dict has another order of leaves than an `OrderedDict`."""
    x, y = torch.linspace(-1, 1, 6), torch.linspace(0, 2, 6).square()
    lam = OrderedDict(z=torch.tensor(0.0), a=torch.tensor(0.5))
    problem = bl.Problem(
        lambda w, lam, _: (w["slope"] * x + w["level"] - y).square().mean() + lam["z"].exp() * w["slope"] ** 2,
        lambda w, lam, _: (w["slope"] * x + w["level"] - y).cosh().mean() + (lam["a"] * w["level"]) ** 2,
        lambda lam: OrderedDict(slope=torch.zeros(()), level=torch.zeros(())),
    )

    def run(iterations, **settings):
        return bl.solve(
            problem, lam, bl.Task(None, None), dynamics=bl.HeavyBall(0.1, 0.5), steps=3, start=start, **settings,
            iterations=iterations, optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.1), raise_on_failure=True,
        )  # fmt: skip

    whole = run(7)
    run(4, checkpoint=tmp_path, checkpoint_every=2)
    found = run(7, checkpoint=tmp_path, checkpoint_every=2)
    assert found.outer == whole.outer and found.inner == whole.inner
    assert list(found.outer) == ["z", "a"] and list(found.inner) == ["slope", "level"]


def test_structures_that_checkpoints_cannot_hold_are_refused_at_once(tmp_path):
    calls, done = [], []

    def inner(w, lam, _):
        calls.append(1)
        return (w.slope - lam.slope) ** 2 + (w.level - lam.level) ** 2

    def run(lam, problem, **settings):
        run = {"dynamics": bl.GradientDescent(0.1), "steps": 3, "iterations": 9, "raise_on_failure": True, **settings}
        return bl.solve(problem, lam, bl.Task(None, None), **run, checkpoint=tmp_path)

    pair = Pair(torch.tensor(1.0), torch.tensor(2.0))
    problem = bl.Problem(
        inner, lambda w, lam, _: (w.slope * w.level) ** 2, lambda lam: Pair(*map(torch.zeros_like, lam))
    )
    with pytest.raises(bl.BilevelError, match="A checkpoint cannot hold Pair"):
        run(pair, problem)
    assert not calls
    reading = replace(problem, inner=lambda w, lam, _: inner(w, Pair(*lam), _))
    with pytest.raises(bl.BilevelError, match="A checkpoint cannot hold Pair"):
        run(tuple(pair), reading, callbacks=[done.append])
    assert len(done) == 1


def test_ranks_agree_on_an_estimator_and_share_the_trainings_of_tune(tmp_path):
    run_ranks(share_script.__file__, tmp_path)
    torch.set_default_dtype(torch.float32)
    one, two = share_script.everything(), [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for part in ("estimator", "tuned"):
        assert one[part]["numbers"] == two[0][part]["numbers"] == two[1][part]["numbers"], part
    shares, whole = [rank["tuned"]["tasks"] for rank in two], one["tuned"]["tasks"]
    assert sum(shares) == whole and min(shares) >= whole // 3
