"""Pytree algebra: λ, w and batches are nested dicts, lists, tuples and dataclasses of tensors.

The structure of a tree comes from `optree`. This module adds the linear algebra that the methods need, and readable
names of leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

Tree: TypeAlias = Any
# An `optree.PyTreeSpec`. Its annotations are less precise than Any for our trees.
Spec: TypeAlias = Any
NAMESPACE = "bilevel"
# The dataclasses that are nodes, with the names of their children.
_registered: dict[type, tuple[str, ...]] = {}


def flatten(tree: Tree) -> tuple[list[Any], Spec]:
    """The leaves of `tree`, left to right, and the structure to rebuild it from leaves."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def leaves(tree: Tree) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:  # noqa: A001 - read as trees.map
    return optree.tree_map(function, tree, *others, namespace=NAMESPACE)


def register(cls: type, fields: Sequence[str]) -> None:
    """Make the dataclass `cls` a node: `fields` are its children, every other attribute is kept as it is."""

    def unflatten(template: Any, children: Iterable[Any]) -> Any:
        copy: Any = object.__new__(cls)
        copy.__dict__.update(template, **dict(zip(fields, children, strict=True)))
        return copy

    def split(node: Any) -> tuple[list[Any], _IgnoredSettings, tuple[str, ...]]:
        rest = {name: value for name, value in vars(node).items() if name not in fields}
        return [getattr(node, name) for name in fields], _IgnoredSettings(rest), tuple(fields)

    optree.register_pytree_node(cls, split, unflatten, namespace=NAMESPACE)
    _registered[cls] = tuple(fields)


def settings(tree: Tree) -> tuple[dict[str, Any], ...]:
    """What the registered dataclasses in `tree` hold besides their children; structures do not compare it."""
    found: list[dict[str, Any]] = []

    def collect(node: Any) -> bool:
        if type(node) in _registered:
            children = _registered[type(node)]
            found.append({name: value for name, value in vars(node).items() if name not in children})
        return False

    optree.tree_leaves(tree, is_leaf=collect, namespace=NAMESPACE)
    return tuple(found)


class _IgnoredSettings(dict[str, Any]):
    """Settings stored in a node. They are ignored when two structures are compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IgnoredSettings)

    def __ne__(self, other: object) -> bool:
        # A dict has one of its own, which compares the settings.
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


def paths(tree: Tree) -> list[str]:
    """A name for every leaf, as it is written in Python.

    >>> paths({"a": 1, "b": (2, 3)})
    ["['a']", "['b'][0]", "['b'][1]"]
    """
    accessors = optree.tree_accessors(tree, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def is_variable(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that can be differentiated with respect to."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def detach(tree: Tree) -> Tree:
    return map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def clone(tree: Tree) -> Tree:
    return map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def scale(tree: Tree, factor: Any) -> Tree:
    return map(lambda leaf: leaf * factor, tree)


def add(left: Tree, right: Tree) -> Tree:
    return left + right if isinstance(left, Tensor) else map(torch.add, left, right)


def subtract(left: Tree, right: Tree) -> Tree:
    return left - right if isinstance(left, Tensor) else map(torch.sub, left, right)


def dot(left: Tree, right: Tree) -> Tensor:
    """Σ ⟨aᵢ, bᵢ⟩ over all leaves."""
    products = [torch.sum(a * b) for a, b in zip(leaves(left), leaves(right), strict=True)]
    return torch.stack(products).sum() if products else torch.zeros(())


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm of all leaves together."""
    return dot(tree, tree).sqrt()


def size(tree: Tree) -> int:
    """How many numbers the tensors of `tree` hold."""
    return sum(leaf.numel() for leaf in tensors(tree))


def nbytes(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors(tree))


def all_finite(tree: Tree) -> bool:
    """Whether all numbers are finite. Testing a sum takes a third of the time, unless it overflows."""
    return all(
        math.isfinite(leaf.detach().sum().item()) or bool(torch.isfinite(leaf).all())
        for leaf in tensors(tree)
        if is_variable(leaf)
    )


def to_vector(parts: Sequence[Tensor]) -> Tensor:
    """All parts as one long vector."""
    return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def from_vector(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `to_vector`; leading axes of `vector` (a batch of vectors) are kept."""
    batch = vector.shape[:-1]
    pieces = torch.split(vector, [part.numel() for part in like], dim=-1)
    return [piece.reshape(batch + part.shape) for piece, part in zip(pieces, like, strict=True)]


def describe(tree: Tree) -> str:
    """Shapes and dtypes of a tree, in a form short enough for an error message."""
    parts = []
    for path, leaf in zip(paths(tree), leaves(tree), strict=True):
        kind = (
            f"{str(leaf.dtype)[6:]}{list(leaf.shape)} on {leaf.device}"
            if isinstance(leaf, Tensor)
            else type(leaf).__name__
        )
        parts.append(f"{path} {kind}".strip())
    return ", ".join(parts[:6]) + (", …" if len(parts) > 6 else "") if parts else "nothing"
