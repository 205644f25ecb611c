"""The long form of the campaign."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from faults import brought, judging, kills, learned, lives


def inputs(count: int, seed: int, folder: Path, report: Callable[[str], None] = print) -> dict[str, Counter]:
    """Break about `count` inputs, shared by the attacks, and each attack once at least; the ends, by attack."""
    attacks = [*learned.attacks(), *brought.attacks()]
    whole = sum(attack.weight for attack in attacks)
    found = {}
    for number, attack in enumerate(attacks):
        share = max(1, round(count * attack.weight / whole))
        found[attack.name] = judging.run(attack, folder / f"attack-{number}", share, seed, report)
        report(f"{attack.name}: {listed(found[attack.name])}")
    return found


def listed(counts: Counter) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=kills.ITERATIONS, help="of the trainings that are killed")
    parser.add_argument("--inputs", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the counts to a file as well")
    options = parser.parse_args()
    began, found, lived = time.perf_counter(), dict[str, Counter](), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["BILEVEL_CACHE"] = f"{scratch}/cache"
        lives.preload()
        if options.kills:  # first, because a process that has run things in parallel cannot be forked
            lived = kills.campaign(options.kills, Path(scratch), options.seed, say, options.iterations)
        if options.inputs:
            found = inputs(options.inputs, options.seed, Path(scratch), say)
    ends = sum(found.values(), Counter())
    faults = ends["faults"] + lived["faults"]
    summary = [
        f"Trainings: {listed(lived)}.",
        f"{ends.total():,} broken inputs: {listed(ends)}.",
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
