"""The pictures of the guide: `python docs/pictures/draw.py` draws them all into docs/images."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def scripts() -> list[str]:
    """One picture per file beside this one."""
    return sorted(file.stem for file in HERE.glob("*.py") if file.stem not in ("draw", "_canvas"))


def draw(folder: Path) -> None:
    for name in scripts():
        importlib.import_module(name).draw(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(HERE.parent / "images")
