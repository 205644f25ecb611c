"""Start-up time: the import of the package, and `--help` of the command.

As a program: `python -m sections.start WORD…` prints whether `bilevel WORD… --help` imports torch.
"""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import probe
from harness.environments import single_threaded
from harness.figures import Figures
from harness.section import Bench
from harness.tables import Table, case_table
from harness.targets import Target, ratio
from harness.timing import Timing

ORDER = 90
TITLE = "Start-up"
WHAT = """
Wall-clock time of a fresh Python process from its start to its end. The processes take turns. `import bilevel` imports
nothing until a name is used. "import bilevel and use it" uses the names of an ordinary script, which imports torch. The
command must answer `--help` quickly, so it does not import torch for it.
"""

IMPORTS = {
    "import torch": "import torch",
    "import bilevel": "import bilevel",
    "import bilevel and use it": "import bilevel as bl; "
    + "; ".join(f"bl.{name}" for name in ("hypergradient", "solve", "HyperRepresentation", "Reverse")),
}


def measure(bench: Bench) -> dict[str, Any]:
    import bilevel
    from bilevel import cli, discovery

    # pip compiles a package when it installs it, but not a checkout.
    compileall.compile_dir(str(Path(bilevel.__file__).parent), quiet=1)
    rounds = {"import": bench.pick(quick=3, full=15), "help": bench.pick(quick=2, full=5)}
    names = [name.rsplit(".", 1)[1].replace("_", "-") for name in discovery.modules(cli)]
    helps = {" ".join(["bilevel", *words, "--help"]): words for words in ([], *([name] for name in names))}
    commands = {
        "import": {label: ["-c", code] for label, code in IMPORTS.items()},
        "help": {label: ["-m", "bilevel", *words, "--help"] for label, words in helps.items()},
    }
    timings = [
        Timing(label, label, "by hand" if label == "import torch" else "bilevel", case, 0)
        for case, members in commands.items()
        for label in members
    ]
    turns = [timing for turn in range(max(rounds.values())) for timing in timings if turn < rounds[timing.case]]
    for timing in turns:
        timing.rounds.append([_run(commands[timing.case][timing.label])])
        bench.tick(timing.label, 1 / len(turns))
    heavy = [label for label, words in helps.items() if probe.ask("start", *words)["torch"]]
    return {"timings": [timing.as_json() for timing in timings], "heavy": heavy}


def targets(figures: Figures) -> Iterator[Target]:
    found = figures.named("import")
    for label in list(IMPORTS)[1:]:
        yield ratio(f"{label}: within 1.15 times `import torch`", "start", found[label], found["import torch"], 1.15)
    slowest = max(figures.by_case()["help"], key=lambda timing: timing.median)
    words = f"{slowest.median:.2f} s (`{slowest.label}`, median)"
    yield Target("`--help` of every command under half a second", "start", slowest.median, 0.5, words)
    words = ", ".join(figures["heavy"]) or f"none of {len(figures.by_case()['help'])}"
    yield Target("number of commands whose `--help` imports torch", "start", len(figures["heavy"]), 0, words)


def tables(figures: Figures) -> Iterator[Table]:
    cases = figures.by_case()
    whole = case_table("Imports", cases["import"])
    # Nothing is prepared or compiled here, so the column of first calls is left out.
    note = "Ratio: time relative to `import torch`."
    yield Table(whole.title, whole.columns[:-1], [row[:-1] for row in whole.rows], note)
    rows = [[t.label, f"{t.minimum * 1e3:.0f}", f"{t.median * 1e3:.0f}"] for t in cases["help"]]
    yield Table("Help", ["command", "minimum, ms", "median, ms"], rows)


def _run(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=single_threaded())
    return time.perf_counter() - began


def main() -> None:
    import contextlib
    import io

    from bilevel import cli

    assert "torch" not in sys.modules, "the harness imported torch, so this cannot show whether the command does"
    sys.argv = ["bilevel", *sys.argv[1:], "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        cli.main()
    print(json.dumps({"torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main()
