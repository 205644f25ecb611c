"""Calls of the user's functions: errors with the shapes of the arguments, and arguments that must stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree


def call_user(name: str, function: Callable[..., Any], *args: Any, context: str = "") -> Any:
    """Call the user's function. An error of torch is raised again with the shapes of the arguments."""
    try:
        return function(*args)
    except BilevelError:
        raise
    except (RuntimeError, TypeError, IndexError, KeyError, ValueError, AttributeError) as error:
        detail = f" Here {context}." if context else ""
        if isinstance(error, RuntimeError) and re.search("shape|size|dtype|device|same type|backend", str(error)):
            detail += " Shapes, dtypes and devices must fit each other."
        text = str(error).rstrip(".")
        raise BilevelError(f"{name} failed at its first call: {type(error).__name__}: {text}.{detail}") from error


def what_is(value: Any) -> str:
    """A value in an error message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '…'}"


@contextmanager
def changing_nothing(name: str, arguments: Mapping[str, Tree]) -> Iterator[None]:
    """Refuse a function that changes one of its arguments in place: autograd does not see it, or sees it too late."""
    tensors = [(part, leaf) for part, tree in arguments.items() for leaf in trees.tensors(tree)]
    # Tensors that were made in inference mode have no version.
    versions = [None if leaf.is_inference() else leaf._version for _, leaf in tensors]
    yield
    for (part, leaf), version in zip(tensors, versions, strict=True):
        if version is not None and leaf._version != version:
            raise BilevelError(
                f"{name} changed {part} in place (a tensor of shape {list(leaf.shape)}). A function of a problem must "
                "leave its arguments as they are, or hypergradients would be wrong. Compute a new tensor: w = w - lr * "
                "g instead of w -= lr * g, x.clamp(…) instead of x.clamp_(…)."
            )
    for part, tree in arguments.items():
        before = [leaf for where, leaf in tensors if where == part]
        now = trees.tensors(tree)
        if len(now) != len(before) or any(one is not two for one, two in zip(before, now, strict=True)):
            raise BilevelError(
                f"{name} changed {part}: it removed an entry, added one or put another tensor in its place, and the "
                'next call would see that. Write batch["y"] instead of batch.pop("y"), and a new name instead of '
                "lam[key] = …"
            )


def refuse_hidden_tensors(state: Tree) -> None:
    """Refuse auxiliary variables that keep tensors in an object of the user's own: derivatives through these would be
    lost wherever a state is detached."""
    for leaf in trees.leaves(state):
        if not isinstance(leaf, Tensor) and trees.tensors(_contents(leaf)):
            raise BilevelError(
                f"The auxiliary variables of the dynamics hold a {type(leaf).__name__}, and the derivative through the "
                "tensors in it would be lost. Keep tensors in a tuple, a list, a dict or a named tuple."
            )


def _contents(value: Any) -> list[Any]:
    if isinstance(value, type):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, f.name, None) for f in fields(value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
