"""The long form of the campaign."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from faults import brought, judging, kills, learned, lives

# Inputs of different parts of a campaign have different seeds.
SEEDS = 1_000_000


def inputs(
    count: int, seed: int, folder: Path, report: Callable[[str], None] = print, only: str = ""
) -> dict[str, Counter]:
    """Break about `count` inputs, shared by the attacks whose name contains `only`; the ends, by attack.

    Each attack breaks one at least.
    """
    attacks = [attack for attack in (*learned.attacks(), *brought.attacks()) if only in attack.name]
    whole = sum(attack.weight for attack in attacks)
    found = {}
    for number, attack in enumerate(attacks):
        share = max(1, round(count * attack.weight / whole))
        found[attack.name] = judging.run(attack, folder / f"attack-{number}", share, seed, report)
        report(f"{attack.name}: {listed(found[attack.name])}")
    return found


def listed(counts: Counter) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def part(options: argparse.Namespace) -> dict[str, Counter]:
    """The campaign in this process: the ends of trainings under "", and those of inputs by attack."""
    found = {"": Counter()}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["BILEVEL_CACHE"] = f"{scratch}/cache"
        lives.preload()
        if options.kills:  # first, because a process that has run things in parallel cannot be forked
            found[""] = kills.campaign(options.kills, Path(scratch), options.seed, say, options.iterations)
        if options.inputs:
            found |= inputs(options.inputs, options.seed, Path(scratch), say, options.only)
    return found


def parts(options: argparse.Namespace) -> dict[str, Counter]:
    """The campaign shared by several processes, each with seeds of its own; their ends added up."""
    found: dict[str, Counter] = {}
    with tempfile.TemporaryDirectory() as scratch:
        started = []
        for number in range(options.jobs):
            shares = {name: -(-getattr(options, name) // options.jobs) for name in ("kills", "inputs")}
            given = {**shares, "iterations": options.iterations, "seed": options.seed + number * SEEDS}
            words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            words += ["--only", options.only, "--counts", f"{scratch}/{number}.json"]
            started.append(subprocess.Popen([sys.executable, "-m", "faults", *words]))
        codes = [process.wait() for process in started]
        files = [Path(scratch) / f"{number}.json" for number in range(options.jobs)]
        if any(code not in (0, 1) for code in codes) or not all(file.exists() for file in files):
            raise SystemExit(f"The parts of the campaign ended with {codes}.")
        for file in files:
            for name, counts in json.loads(file.read_text(encoding="utf-8")).items():
                found[name] = found.get(name, Counter()) + Counter(counts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=kills.ITERATIONS, help="of the trainings that are killed")
    parser.add_argument("--inputs", type=int, default=6_000)
    parser.add_argument("--only", default="", metavar="NAME", help="inputs of the attacks whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the campaign")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the counts to a file as well")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="write the counts as JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    found = part(options) if options.jobs == 1 else parts(options)
    if options.counts:
        options.counts.write_text(json.dumps(found), encoding="utf-8")
    lived = found.pop("", Counter())
    ends = sum(found.values(), Counter())
    faults = ends["faults"] + lived["faults"]
    summary = [
        *([f"Trainings: {listed(lived)}."] if lived else []),
        *([f"{ends.total():,} broken inputs: {listed(ends)}."] if ends else []),
        *(f"  {name}: {listed(counts)}" for name, counts in found.items()),
        f"{faults} faults. {(time.perf_counter() - began) / 60:.0f} minutes.",
    ]
    say("\n".join(summary))
    if options.write:
        options.write.write_text("\n".join(summary) + "\n", encoding="utf-8")
    return int(faults > 0)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
