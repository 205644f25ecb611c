"""`bilevel WORDS` as one of several forked processes; what it prints is in the folder that is named first."""

import os
import sys
from pathlib import Path

from bilevel.cli import main

if __name__ == "__main__":
    printed = open(Path(sys.argv[1]) / f"{os.environ['RANK']}.stdout", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(printed.fileno(), 1)
    sys.argv = ["bilevel", *sys.argv[2:]]
    try:
        main()
    finally:
        sys.stdout.flush()
