"""Trainings that are killed, stopped, damaged and run out of disk, and must end like one that was left alone."""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bilevel.errors import BilevelError
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics
from faults import healthy
from faults.judging import Fault
from faults.lives import Death, Life, live
from faults.mutations import damage

CLASSES, EACH = 12, 6
# Trainings that keep different things in their checkpoints.
KINDS = (
    [],
    ["--average", "0.9", "--learner", "prototypical"],
    ["--optimizer", "sgd", "--momentum", "0.9", "--normalise", "--schedule", "cosine"],
)
ITERATIONS = 30
# Bytes that fit into a file: less than a configuration, metrics, weights, or a checkpoint.
ROOM = (50, 500, 3_000, 10**5, 4 * 10**5, 10**6)
# What differs from run to run although the training is the same.
TIMES = ("minutes", "images_per_second", "processor_seconds")
# Signals that ask a run to save and leave, with the exit codes that say so; 130 is Ctrl-C before the run began.
STOPS = {signal.SIGTERM: (143, -15), signal.SIGINT: (130,), signal.SIGHUP: (129, -1)}


def pictures(folder: Path) -> Path:
    """A folder of drawings to train on."""
    for kind in range(CLASSES):
        place = folder / "pictures" / f"{kind:02}"
        place.mkdir(parents=True)
        for seed in range(EACH):
            healthy.drawing(kind, seed).save(place / f"{seed}.png")
    return folder / "pictures"


@dataclass
class Campaign:
    """Kills of one training after another.

    Args:
        folder: where the trainings are.
        draw: decides about everything.
        report: gets a line about every training and every fault.
        iterations: hyperiterations of each training.
    """

    folder: Path
    draw: Random
    report: Callable[[str], None] = print
    iterations: int = ITERATIONS

    def __post_init__(self) -> None:
        self.counts: Counter = Counter()
        self.wholes: dict[int, Path] = {}
        self.data = pictures(self.folder)

    def words(self, run: Path, kind: int, threads: int, resume: bool) -> list[str]:
        if resume:
            return ["train", "--resume", "--out", str(run), "--threads", str(threads)]
        return [
            *("train", "--dataset", str(self.data), "--split", "0.5,0.25,0.25", "--channels", "gray"),
            *("--network", "omniglot-net", "--image-size", "28", "--ways", "2", "--shots", "1", "--queries", "2"),
            *("--meta-batch", "4", "--validation-episodes", "4", "--validate-every", "5", "--checkpoint-every", "3"),
            *("--iterations", str(self.iterations), "--threads", str(threads), "--out", str(run), *KINDS[kind]),
        ]

    def start(self, run: Path, kind: int, death: Death | None) -> Life:
        """One life, with random numbers of processes and threads; new or resumed, as the folder is."""
        processes, threads = self.draw.choice((1, 1, 1, 2, 3)), self.draw.choice((1, 2))
        words = self.words(run, kind, threads, RunFolder(run).exists())
        # Only the first process writes.
        writes = death is not None and death.kind in ("write", "half", "full")
        life = live(run, words, processes, death, 0 if writes else self.draw.randrange(processes))
        for fault in life.faults:
            self.fault(f"{run.name}, {death}: {fault}")
        return life

    def fault(self, text: str) -> None:
        self.counts["faults"] += 1
        self.report(text)

    def whole(self, kind: int) -> Path:
        """The same training, left alone."""
        if kind not in self.wholes:
            run = self.folder / f"whole-{kind}"
            life = live(run, self.words(run, kind, 1, False), 1, None)
            if life.codes != [0]:
                raise Fault(f"a training that was left alone ended with {life.codes}: {life.said}")
            self.wholes[kind] = run
        return self.wholes[kind]

    def train(self, kills: int) -> None:
        """A training with so many kills, and with stops, full disks and damage between them; then compare."""
        kind = self.draw.randrange(len(KINDS))
        run = self.folder / f"run-{self.counts['trainings']}"
        self.counts["trainings"] += 1
        whole = self.whole(kind)
        done, clean = 0, True
        while done < kills:
            death = self.death()
            life = self.start(run, kind, death)
            done += self.count(death, life, run)
            if RunFolder(run).checkpoints.files() and self.draw.random() < 0.3:
                clean &= self.damaged(run, kind)
            if all(code == 0 for code in life.codes):  # it was finished before its death; kill another one
                break
        life = self.start(run, kind, None)
        if any(life.codes):
            self.fault(f"{run.name} was not finished: {life.codes} {life.said[0][-500:]}")
            return
        self.compare(run, whole, clean)
        shutil.rmtree(run)

    def death(self) -> Death:
        way = self.draw.random()
        if way < 0.35:
            return Death("kill", self.draw.uniform(0.05, 2.5))
        if way < 0.7:
            return Death("write", self.draw.randrange(25))
        if way < 0.8:
            return Death("half", self.draw.choice(ROOM))
        if way < 0.9:
            return Death("signal", self.draw.uniform(0.3, 2.5), self.draw.choice(list(STOPS)))
        return Death("full", self.draw.choice(ROOM))

    def count(self, death: Death, life: Life, run: Path) -> int:
        """Check the exit codes, and return whether it was a kill."""
        if -signal.SIGKILL in life.codes or -signal.SIGXFSZ in life.codes:
            self.counts["kills during a write" if death.kind in ("write", "half") else "kills"] += 1
            return 1
        if all(code == 0 for code in life.codes):
            self.counts["finished before"] += 1
            return 0
        if death.kind == "full":
            said = "".join(life.said)
            if "could not be written" not in said and "cannot be written" not in said:
                self.fault(f"{run.name}, full disk: {life.codes} {said[-500:]}")
            self.counts["full disks"] += 1
            return 0
        if death.kind == "signal" and any(code in STOPS[death.signal] for code in life.codes):
            self.counts["stops"] += 1
            return 0
        self.fault(f"{run.name}, {death}: {life.codes} {''.join(life.said)[-700:]}")
        return 1

    def damaged(self, run: Path, kind: int) -> bool:
        """Damage a file, and resume: a sentence, or a run that is none the worse. Whether the metrics are whole."""
        folder = RunFolder(run)
        newest = folder.checkpoints.files()
        file = self.draw.choice([*newest, folder.config_file, folder.metrics, folder.best, folder.last])
        if not file.exists():
            return True
        content = file.read_bytes()
        broken = damage(content, self.draw) if content else b"x"
        file.write_bytes(broken)
        self.counts["damaged files"] += 1
        life = self.start(run, kind, Death("kill", self.draw.uniform(0.5, 1.5)))
        refused = any(code == 2 for code in life.codes)
        if refused and not any(line.startswith("Error: ") for said in life.said for line in said.splitlines()):
            self.fault(f"{run.name}, {file.name}: {life.codes} {life.said}")
        # What no later step replaces is put back; so is what a run needs and did not get to read: its last checkpoint.
        # A file that the resumed run has written since is left as it is: the old content would be older than the run.
        # So is a checkpoint that the resumed run has passed over: its metrics have been forgotten by then.
        needed = file in (folder.config_file, folder.best, folder.last) or self.stuck(folder)
        restored = needed and file.exists() and file.read_bytes() == broken
        if restored:
            file.write_bytes(content)
        return file != folder.metrics or restored

    @staticmethod
    def stuck(folder: RunFolder) -> bool:
        """Whether no checkpoint can be read, so that every resume must refuse."""
        try:
            return folder.checkpoints.newest(lambda said: None) is None
        except BilevelError:
            return True

    def compare(self, run: Path, whole: Path, clean: bool) -> None:
        """Bit for bit the same weights, best weights and, unless they were damaged, metrics."""
        for name in ("last.safetensors", "best.safetensors"):
            if (run / name).read_bytes() != (whole / name).read_bytes():
                self.fault(f"{run.name}: another {name} than without faults")
        ours, theirs = (sorted(json.dumps(self._record(line)) for line in read_metrics(path)) for path in (run, whole))
        if clean and ours != theirs:
            self.fault(f"{run.name}: other metrics than without faults: {set(ours) ^ set(theirs)}")
        left = [path.name for path in run.rglob(".*") if path.name != ".lock"]
        if left:
            self.fault(f"{run.name}: {left} was left behind")

    @staticmethod
    def _record(line: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in line.items() if name not in TIMES}


def campaign(
    kills: int, folder: Path, seed: int, report: Callable[[str], None] = print, iterations: int = ITERATIONS
) -> Counter:
    """Trainings until there were so many kills."""
    made = Campaign(folder, Random(seed), report, iterations)
    while made.counts["kills"] + made.counts["kills during a write"] < kills:
        made.train(made.draw.randrange(4, 10))
        report(", ".join(f"{n} {what}" for what, n in made.counts.most_common()))
    return made.counts
