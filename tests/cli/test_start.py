"""The command answers at once: asking for help imports nothing heavy."""

import json
import subprocess
import sys

PROGRAM = """
import contextlib, io, json, sys
from bilevel import cli, discovery

answers = {}
for name in ["", *(module.rsplit(".", 1)[1].replace("_", "-") for module in discovery.modules(cli))]:
    sys.argv = ["bilevel", *([name] if name else []), "--help"]
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        cli.main()
    heavy = [module for module in ("torch", "sklearn", "pandas", "matplotlib") if module in sys.modules]
    answers[name] = [heavy, printed.getvalue()]
print(json.dumps(answers))
"""


def test_help_of_every_command_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    assert {"", "train", "tune", "run"} <= set(answers)
    for name, (heavy, printed) in answers.items():
        assert heavy == [], name
        assert printed.startswith("Usage: bilevel") or "Usage" in printed.splitlines()[1], name


def test_importing_the_package_imports_nothing_heavy():
    program = "import bilevel, sys; print('torch' in sys.modules, hasattr(bilevel, 'Reverse'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
