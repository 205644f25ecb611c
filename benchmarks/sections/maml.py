"""MAML on a meta-batch, and the time of every learner.

As a program: `python -m sections.maml QUESTION CASE`, where QUESTION is "learners" or a row of the table of memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import probe
from harness.cases import dataset, hyper
from harness.contract import Case

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.pictures import Picture
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 57
TITLE = "MAML, and the time of every learner"
WHAT = """
λ is the initial point of a network with four convolutions of 64 filters. w is all its weights and a linear head that
starts at zero. There are T = 5 steps on each of 4 episodes (5-way 1-shot, 15 queries for each class), in float32. The
peers keep the graph of all steps. In the case with "cores" every contestant has two threads, and times are wall-clock
times. The package then runs episodes in parallel. Memory is the peak of the resident memory during one hypergradient,
minus what was resident before, in a fresh process. Only learn2learn's algorithm is measured for the peers, because all
of them keep the same graph. No method can need less memory than the gradient of one episode's outer objective: its 75
queries pass through the network together, because batch norm computes its statistics from all of them. The time of the
ridge head is compared with one forward and one backward pass of its network. Adapting means to train on one support set
and to classify its queries. The times of the ridge head and of adapting are measured with an allocator that keeps freed
memory, as `bilevel train` does.
"""
ROUNDS = 10
PEER = "learn2learn, by hand"
FLOOR = "gradient of one episode's outer objective"
METHODS = ("Reverse()", 'Reverse("sqrt")', 'Reverse("sqrt", group_bytes=0)')


@dataclass(frozen=True)
class MAMLMemory:
    """Bytes that one hypergradient of the meta-batch needed. `peak` is the smallest of `runs`."""

    way: str
    peak: int
    runs: list[int]


@dataclass(frozen=True)
class AdaptingCost:
    """Seconds of a learner on one episode: to adapt, and for the gradient of one training episode, if it has one."""

    learner: str
    adapting: float
    gradient: float | None


def maml(threads: int = 1, name: str = "maml") -> Case:
    case = hyper(5, 4, threads=threads, name=name)
    return replace(case, kind="maml")


def measure(bench: Bench) -> dict[str, Any]:
    alone, both = maml(), maml(2, "maml-cores")
    timings = bench.share(0.5).timed([alone], most_rounds=ROUNDS) + bench.share(0.2).timed([both], most_rounds=ROUNDS)
    path, memory = alone.save(bench.folder), []
    for way in (*METHODS, PEER, FLOOR):
        runs = [probe.ask("maml", way, str(path))["peak"] for _ in range(bench.pick(quick=1, full=3))]
        memory.append(asdict(MAMLMemory(way, min(runs), runs)))
        bench.tick(f"memory of {way}", 0.05)
    costs = probe.ask("maml", "learners", str(path))
    return {"timings": timings, "memory": memory, "dataset": dataset(), **costs}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.figures import fastest
    from harness.targets import Target, ratio

    for case, timings in figures.by_case().items():
        ours = figures.named(case).get("maml_bilevel")
        peer = fastest(timings, lambda t: t.group == "torch peer")
        if "cores" in case:
            yield ratio("on both cores at least 1.8 times faster than the fastest peer", case, peer, ours, 1.8, True)
        else:
            yield ratio("at least 1.3 times faster than the fastest peer", case, peer, ours, 1.3, True)
    peaks = {row.way: row.peak for row in figures.rows(MAMLMemory, "memory")}
    ours, theirs = min(peaks[way] for way in METHODS[1:]), peaks[PEER]
    words = f"{ours / 1e6:.1f} of {theirs / 1e6:.1f} MB"
    if FLOOR in peaks:
        words += f"; the outer objective alone needs {peaks[FLOOR] / 1e6:.1f} MB"
    yield Target('Reverse("sqrt") at most a third of a peer\'s memory', "maml", ours / theirs, 1 / 3, words)
    head, network = figures["ridge head"], figures["network alone"]
    claim = "ridge-head within 1.05 times a pass of its network"
    if head is None:
        yield Target(claim, "ridge-head", None, 1.05, "there is no learner `ridge-head`")
    else:
        yield Target(claim, "ridge-head", head / network, 1.05, f"{1e3 * head:.1f} and {1e3 * network:.1f} ms")


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table, case_table, milliseconds

    for case, timings in figures.by_case().items():
        yield case_table(case, timings)
    found = figures.rows(MAMLMemory, "memory")
    theirs = next(row.peak for row in found if row.way == PEER)
    rows = [
        [f"`{row.way}`" if row.way in METHODS else row.way, f"{row.peak / 1e6:.1f}", f"{row.peak / theirs:.2f}"]
        for row in found
    ]
    yield Table("Peak memory of a hypergradient of the meta-batch", ["method", "MB", "relative to the peer"], rows)
    rows = [
        [cost.learner, milliseconds(cost.adapting), "–" if cost.gradient is None else milliseconds(cost.gradient)]
        for cost in sorted(figures.rows(AdaptingCost, "learners"), key=lambda cost: cost.adapting)
    ]
    columns = ["learner", "adapting, ms", "gradient of one training episode, ms"]
    yield Table("Every learner on one episode", columns, rows, "The fastest of several calls, one thread.")


def pictures(figures: Figures) -> Iterator[Picture]:
    from harness.pictures import ratio_bars

    return ratio_bars("maml", figures.by_case())


# ------------------------------------------------------------------------------------------------- in a fresh process


def memory(case: Case, way: str) -> dict[str, Any]:
    import bilevel as bl
    from bilevel.experiments._peak_memory import peak_memory
    from bilevel.learners.catalogue.maml import MAML
    from problems.by_learn2learn import adaptation
    from problems.initialisation import with_all_weights
    from problems.representation_in_bilevel import learner_and_episodes

    if way == PEER:
        return {"peak": peak_memory(with_all_weights(adaptation)(case))}
    if way == FLOOR:
        learner, episodes = learner_and_episodes(case, MAML)
        return {"peak": peak_memory(lambda: outer_gradient(learner, episodes))}
    methods = bl.Reverse(), bl.Reverse("sqrt"), bl.Reverse("sqrt", group_bytes=0)
    learner, episodes = learner_and_episodes(case, MAML, method=dict(zip(METHODS, methods, strict=True))[way])
    return {"peak": peak_memory(lambda: learner.hypergradient(episodes))}


def outer_gradient(learner: Any, episodes: Any) -> Any:
    """∇_w E at w_0, for the first episode."""
    import torch

    queries, answers = (x[0] for x in episodes.val[:2])
    ways = int(answers.max()) + 1
    w = {name: leaf.detach().requires_grad_() for name, leaf in learner.start(learner.lam, ways).items()}
    loss = torch.nn.functional.cross_entropy(learner.logits(w, learner.lam, queries), answers)
    return torch.autograd.grad(loss, list(w.values()))


def costs(case: Case) -> dict[str, Any]:
    """Seconds of every learner on one episode, and of the ridge head and its network on the meta-batch."""
    import torch

    from bilevel import learners
    from bilevel.cli._allocator import keep_freed_memory
    from bilevel.learners.presets import for_learner, preset
    from bilevel.learners.streams import open_data
    from bilevel.learners.training import FewShotTraining

    keep_freed_memory()
    torch.set_num_threads(1)
    settings = preset("omniglot-5way-1shot" if dataset() == "omniglot" else "glyphs-5way-1shot")
    data, found, pair = open_data(settings), [], (None, None)
    for name in learners.names():
        job = FewShotTraining(for_learner(settings, name), data)
        found.append(asdict(_cost(name, job)))
        if name == "ridge-head":
            pair = _head_and_network(job.learner, job.stream.draw(range(4)))
    return {"learners": found, "ridge head": pair[0], "network alone": pair[1]}


def _cost(name: str, job: Any) -> AdaptingCost:
    learner, one = job.learner, job.val.batch(range(1))
    adapting = _least(lambda: learner.adapt(one.train[0][0], one.train[1][0]).predict(one.val[0][0]))
    if not (learner.trains and learner.episodic):
        return AdaptingCost(name, adapting, None)
    group = job.stream.draw(range(1))
    return AdaptingCost(name, adapting, _least(lambda: learner.hypergradient(group)))


def _head_and_network(learner: Any, episodes: Any) -> tuple[float, float]:
    """The best seconds of the ridge head and of a pass of its network, measured in turns."""
    import torch

    lam = {name: leaf.clone().requires_grad_() for name, leaf in learner.lam.items()}
    network_leaves = [lam[name] for name in learner.representation.names]

    def network() -> None:
        outputs = learner.representation.episodes(lam, episodes.train[0], episodes.val[0], training=True)
        torch.autograd.grad(outputs, network_leaves, [torch.ones_like(x) for x in outputs])

    pairs = [(_seconds(lambda: learner.hypergradient(episodes)), _seconds(network)) for _ in range(20)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def _least(call: Callable[[], object]) -> float:
    call()
    return min(_seconds(call) for _ in range(5))


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    question, path = sys.argv[1:]
    loaded = Case.load(Path(path))
    print(json.dumps(costs(loaded) if question == "learners" else memory(loaded, question)))
