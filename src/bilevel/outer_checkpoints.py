"""Checkpoints of `solve`: the state before hyperiteration k as tensors and JSON, so that nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bilevel import trees
from bilevel.distributed import World
from bilevel.dynamics import as_function_of_lam
from bilevel.engine.method import Hypergradient, Stats
from bilevel.engine.user_functions import call_user
from bilevel.errors import BilevelError, BilevelWarning, differences
from bilevel.hypergradients import Evaluator, as_method
from bilevel.training.checkpoints import Checkpoints
from bilevel.trees import Tree

# Classes that are saved by their fields.
RECORDS = {cls.__name__: cls for cls in (Hypergradient, Stats)}
# The number of entries of each tensor that enter its fingerprint.
SAMPLE = 1024


@dataclass
class OuterCheckpoints:
    """The folder that a `solve` writes its states to, and resumes from.

    Args:
        folder: where the checkpoints are.
        every: hyperiterations between two checkpoints.
        world: rank 0 writes, all ranks read.
        run: plain values that identify the run. The checkpoints of another run are refused.
    """

    folder: Path
    every: int
    world: World
    run: Mapping[str, Any]
    newest: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise BilevelError(
                f"checkpoint_every={self.every!r} is not a number of hyperiterations between two checkpoints; pass an "
                "int ≥ 1, or leave checkpoint out to write none."
            )

    def load(self, lam: Tree) -> tuple[int, Any] | None:
        """The hyperiteration and the state to resume from; None for a new run. A λ that cannot be saved is refused."""
        pack(lam)
        device = trees.leaves(lam)[0].device
        with self.world.agreed():
            found = Checkpoints(self.folder).newest(lambda message: warnings.warn(message, BilevelWarning, 4))
            if found is not None:
                tensors, facts = found
                self._check(facts)
                self.newest = facts["iteration"]
        self.world.same(
            self.newest,
            f"The processes found different checkpoints in {self.folder}. Pass a folder that all machines share.",
        )
        if found is None:
            return None
        return self.newest, unpack({name: tensor.to(device) for name, tensor in tensors.items()}, facts["state"])

    def save(self, k: int, state: Any) -> None:
        """Write the state before hyperiteration k."""
        if self.world.writes and k > self.newest:
            tensors, plain = pack(state)
            self.folder.mkdir(parents=True, exist_ok=True)
            Checkpoints(self.folder).write(k, tensors, {"run": dict(self.run), "state": plain})
        self.newest = max(k, self.newest)

    def _check(self, facts: Mapping[str, Any]) -> None:
        if "state" not in facts:
            raise BilevelError(f"The checkpoints in {self.folder} are not those of solve(…). Pass another folder.")
        # Checkpoints of version 0.1.0 do not say their constraint, nor the settings of their algorithm.
        free = set() if "constraint" in facts["run"] else {"constraint", "algorithm"}
        other = differences(facts["run"], self.run, free)
        if other:
            self._refuse(other)

    def check_value(self, before: float, now: float | None, first: float, eps: float) -> None:
        """Refuse the checkpoints if f_T has another value now at their last λ: functions cannot be compared."""
        # The order of a sum, and with it the rounding, may depend on the machine. A value near zero has the rounding
        # errors of larger numbers, for which the first value stands.
        tolerance = eps**0.5 * abs(before) + 100 * eps * abs(first)
        if now is not None and not abs(now - before) <= tolerance:
            there = f"f_T at the last λ: {before:.6g} there, {now:.6g} here"
            self._refuse([f"{there}, so the functions of the problem or of the dynamics, or the data, are others"])

    def _refuse(self, other: list[str]) -> NoReturn:
        raise BilevelError(
            f"The checkpoints in {self.folder} are those of another run ({'; '.join(other)}). Pass the arguments "
            "of that run to go on with it, or another folder to begin a new run."
        )


def fingerprint(tree: Tree) -> str:
    """A short hash of a tree: of the names, shapes and types of its tensors, and of some of their numbers.

    >>> fingerprint(torch.zeros(3)) == fingerprint(torch.ones(3))
    False
    """
    digest = hashlib.sha256()
    for path, leaf in zip(trees.paths(tree), trees.leaves(tree), strict=True):
        digest.update(path.encode())
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // SAMPLE)].cpu().contiguous()
            digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            digest.update(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"")
        elif isinstance(leaf, (bool, int, float, str)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def run_facts(evaluator: Evaluator, lam: Tree, method: Any) -> dict[str, Any]:
    """What can be said about a run in plain values; the functions of the problem cannot."""
    build, chosen = as_function_of_lam(evaluator.dynamics), as_method(method)
    dynamics = call_user("the function of λ passed as dynamics", build, trees.detach(lam))
    return {
        "lam": fingerprint(lam),
        "steps": evaluator.steps,
        "dynamics": description(dynamics),
        "method": "auto" if chosen is None else description(chosen),
    }


def description(value: Any) -> str:
    """A dynamics or a method as a text that is the same in every process: its settings, with functions by their names.

    >>> from bilevel.dynamics.gradient_descent import GradientDescent
    >>> description(GradientDescent(0.1)), description(GradientDescent(len))
    ('GradientDescent(lr=0.1)', 'GradientDescent(lr=<built-in function len>)')
    """
    if isinstance(value, Tensor):
        return f"tensor {fingerprint(value)}"
    if is_dataclass(value) and not isinstance(value, type):
        settings = [f"{f.name}={description(getattr(value, f.name))}" for f in fields(value) if f.repr]
        return f"{type(value).__name__}({', '.join(settings)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {description(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(description, value))}]"
    # A repr may have the address of an object in memory, which differs between processes.
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))


def without_caches(result: Hypergradient) -> Hypergradient:
    """The result without an `adjoint` that is not a tensor.

    Some methods keep factorised Hessians there, with the data that they belong to. These are computed again.
    """
    kept = result.adjoint if isinstance(result.adjoint, Tensor) else None
    return replace(result, adjoint=kept, tasks=[without_caches(one) for one in result.tasks])


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """A nested state as tensors by name, and the rest as JSON.

    >>> tensors, plain = pack({"w": torch.ones(2), "steps": {0: 1.5}})
    >>> unpack(tensors, plain)
    {'w': tensor([1., 1.]), 'steps': {0: 1.5}}
    """
    tensors: dict[str, Tensor] = {}
    # A tensor that is reached twice is saved once.
    names: dict[int, str] = {}

    def walk(value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float, np.number)):
            return value.item() if isinstance(value, np.number) else value
        if isinstance(value, Tensor):
            if id(value) not in names:
                name = names[id(value)] = f"{len(names):04d}"
                # safetensors refuses tensors that share memory.
                tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
            return {"tensor": names[id(value)]}
        if isinstance(value, Hypergradient):
            value = without_caches(value)
        if isinstance(value, (Hypergradient, Stats)):
            return {type(value).__name__: {f.name: walk(getattr(value, f.name)) for f in fields(value)}}
        if isinstance(value, Mapping):
            # The leaves of a dict are sorted by key, and those of an OrderedDict are not.
            kind = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
            return {kind: [[walk(key), walk(item)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [walk(item) for item in value]}
        raise BilevelError(
            f"A checkpoint cannot hold {type(value).__name__} ({value!s:.60}). It holds tensors, numbers, texts, "
            "dicts, lists and tuples: λ, w and the states of optimisers and schedulers must be made of these."
        )

    return tensors, walk(state)


def unpack(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """The inverse of `pack`."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind in RECORDS:
        return RECORDS[kind](**{name: unpack(tensors, item) for name, item in content.items()})
    if kind in ("dict", "OrderedDict"):
        pairs = [(unpack(tensors, key), unpack(tensors, item)) for key, item in content]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    items = [unpack(tensors, item) for item in content]
    return items if kind == "list" else tuple(items)
