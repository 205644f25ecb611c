"""Optional packages: `pip install bilevel` brings torch, numpy and optree, and extras bring the rest."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bilevel.errors import BilevelError

# Names on PyPI that differ from the names in Python.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


class MissingPackage(BilevelError, ImportError):
    """An optional package is not installed. The message has the command that installs it."""


def require(*packages: str, extra: str, purpose: str) -> None:
    """Raise a `MissingPackage` unless all packages are installed. Nothing is imported.

    Args:
        packages: names as in `import NAME`.
        extra: the extra of `pyproject.toml` that brings them.
        purpose: what needs them; the subject of the message.

    >>> require("json", "no_such_package", extra="table", purpose="Reading a table")
    Traceback (most recent call last):
    bilevel.extras.MissingPackage: Reading a table needs no_such_package. Write: pip install "bilevel[table]"
    """
    missing = [name for name in packages if not installed(name)]
    if missing:
        names = " and ".join(DISTRIBUTIONS.get(name, name) for name in missing)
        raise MissingPackage(f'{purpose} needs {names}. Write: pip install "bilevel[{extra}]"')


def load(module: str, *, extra: str, purpose: str) -> Any:
    """The module of an optional package, imported now; `require` explains the other arguments.

    >>> load("json", extra="table", purpose="Reading a table").dumps([1])
    '[1]'
    """
    require(module.partition(".")[0], extra=extra, purpose=purpose)
    return import_module(module)


def installed(package: str) -> bool:
    return find_spec(package) is not None
