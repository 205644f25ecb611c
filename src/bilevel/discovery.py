"""Find the classes of a package by walking its folder, so that one new thing is one new file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TypeVar

Kind = TypeVar("Kind")


def modules(package: ModuleType) -> list[str]:
    """The full names of the public modules in `package` and in its sub-packages."""
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    return [module.name for module in found if not module.name.rsplit(".", 1)[1].startswith("_")]


def classes(package: ModuleType, base: type[Kind]) -> dict[str, type[Kind]]:
    """Every concrete subclass of `base` that a module of `package` defines, by name."""
    found: dict[str, type[Kind]] = {}
    for name in modules(package):
        module = importlib.import_module(name)
        for member in vars(module).values():
            ours = inspect.isclass(member) and issubclass(member, base) and member.__module__ == name
            if ours and not inspect.isabstract(member) and not member.__name__.startswith("_"):
                found[member.__name__] = member
    return found
