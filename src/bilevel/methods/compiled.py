"""Algorithm 1 in compiled blocks of steps: the optional fast path of `Reverse`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.errors import BilevelError
from bilevel.methods.process import Bound, Gradients, Process, State, accumulate
from bilevel.problem import Problem, Task

if TYPE_CHECKING:
    from bilevel.methods.reverse import Sweep

Kernel = Callable[..., list[Tensor]]


@dataclass
class Blocks:
    """`length` steps forward, and the same steps backward, each as one compiled function of tensors.

    A block is traced once, with everything that may change from call to call as an input: the state, λ, the data, the
    step number. Python numbers that the objectives or the dynamics hold are baked in.
    """

    forward: Kernel
    backward: Kernel
    # Which variables the backward block returns a gradient for.
    reached: list[bool]


# Compiled code belongs to a problem and dies with it.
_COMPILED: WeakKeyDictionary[Problem, dict[Any, tuple[Any, Blocks]]] = WeakKeyDictionary()


def run_blocks(process: Process, length: int, start: State, times: range) -> list[State]:
    """The states at the borders of the blocks, the first and the last included."""
    blocks = _blocks(process, length, start, times)
    states = [start]
    with torch.no_grad():
        for i in range(0, len(times), length):
            inputs = _inputs(process, trees.leaves(states[-1]), times[i : i + length])
            states.append(trees.flatten(start)[1].unflatten(blocks.forward(*inputs)))
    return states


def sweep_blocks(sweep: Sweep, length: int, states: list[State], times: range) -> None:
    """Carry the adjoint from the last of `states` to the first, a block at a time."""
    process = sweep.process
    blocks = _blocks(process, length, states[0], times)
    for i in reversed(range(0, len(times), length)):
        states.pop()
        leaves = trees.leaves(states[-1])
        alpha = [torch.zeros_like(leaf) if a is None else a for leaf, a in zip(leaves, sweep.alpha, strict=True)]
        with torch.no_grad():
            results = iter(blocks.backward(*_inputs(process, leaves, times[i : i + length]), *alpha))
        sweep.alpha = [next(results) for _ in leaves]
        parts: Gradients = [next(results) if reached else None for reached in blocks.reached]
        sweep.gradients = [accumulate(total, part) for total, part in zip(sweep.gradients, parts, strict=True)]


def _inputs(process: Process, leaves: list[Tensor], times: range) -> list[Tensor]:
    task = process.bound.task
    data = trees.tensors([task.batch(t) for t in times]) if callable(task.train) else process.data()
    # A float64 scalar: powers of it are exact, and as a scalar it does not promote float32 tensors.
    t = torch.tensor(float(times[0]), dtype=torch.float64)
    return [t, *leaves, *(variable.detach() for variable in process.variables), *data]


def _blocks(process: Process, length: int, state: State, times: range) -> Blocks:
    cache = _COMPILED.setdefault(process.problem, {})
    inputs = _inputs(process, trees.leaves(state), times[:length])
    key = (
        length,
        _identity(process.source),
        str(trees.flatten(state)[1]),
        tuple((x.shape, x.dtype, x.device) for x in inputs),
    )
    if key not in cache:
        # The source is kept beside its code, so that its identity cannot be taken over by another object.
        cache[key] = (process.source, _compile(process, length, state, times[:length], inputs))
    return cache[key][1]


def _identity(source: Any) -> Any:
    """Two dynamics may share compiled code only if every number that was baked in is the same."""
    if isinstance(source, Dynamics):
        values = [getattr(source, f.name) for f in fields(source)]
        if all(isinstance(value, (int, float, tuple)) for value in values):
            return type(source), tuple(values)
    return id(source)


def _compile(process: Process, length: int, state: State, times: range, inputs: list[Tensor]) -> Blocks:
    _check(process, state)
    spec = trees.flatten(state)[1]
    size, count = spec.num_leaves, len(process.variables)
    reached = [False] * count

    def steps(first: Tensor, state: State, bounds: list[Bound]) -> State:
        for i, bound in enumerate(bounds):
            state = bound.step(state, first + i)  # type: ignore[arg-type]
        return state

    def unpack(flat: tuple[Tensor, ...], variables: list[Tensor]) -> list[Bound]:
        data = list(flat[1 + size + count :])
        if not callable(process.bound.task.train):
            return [process.bind(variables, data)] * length
        bound = process.bind(variables)
        batches = [process.bound.task.batch(t) for t in times]
        position = 0
        bounds = []
        for batch in batches:
            leaves, batch_spec = trees.flatten(batch)
            bounds.append(
                Bound(
                    process,
                    bound.lam,
                    Task(batch_spec.unflatten(data[position : position + len(leaves)]), bound.task.val),
                )
            )
            position += len(leaves)
        return bounds

    def forward(*flat: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return trees.leaves(
                steps(
                    flat[0], spec.unflatten(flat[1 : 1 + size]), unpack(flat, list(flat[1 + size : 1 + size + count]))
                )
            )

    def backward(*flat: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in flat[1 : 1 + size]]
        variables = [x.detach().requires_grad_() for x in flat[1 + size : 1 + size + count]]
        alpha = flat[-size:]
        with torch.enable_grad():
            outputs = trees.leaves(steps(flat[0], spec.unflatten(leaves), unpack(flat[:-size], variables)))
        recorded = [(out, a) for out, a in zip(outputs, alpha, strict=True) if out.requires_grad]
        heads, cotangents = zip(*recorded, strict=True)
        parts = torch.autograd.grad(heads, leaves + variables, cotangents, allow_unused=True)
        reached[:] = [part is not None for part in parts[size:]]
        first = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, parts, strict=False)]
        return first + [part for part in parts[size:] if part is not None]

    # Tracing tells inputs apart by identity, so every one of them must be a tensor of its own.
    inputs = [x.clone() for x in inputs]
    cases = (forward, inputs), (backward, [*inputs, *(x.clone() for x in inputs[1 : 1 + size])])
    kernels = []
    try:
        for function, arguments in cases:
            kernels.append(torch.compile(make_fx(function)(*arguments), dynamic=False))
            with torch.no_grad():
                kernels[-1](*arguments)
    except BilevelError:
        raise
    except Exception as error:
        raise BilevelError(
            f"The steps could not be compiled: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. In a compiled block t is a tensor, so schedules "
            "must be arithmetic "
            "in t (no `if t < 10`, no indexing with t), and a C++ compiler must be installed. Use Reverse() without "
            "`compiled`."
        ) from error
    return Blocks(kernels[0], kernels[1], reached)


def _check(process: Process, state: State) -> None:
    if not all(trees.is_variable(leaf) for leaf in trees.leaves(state)):
        raise BilevelError(
            "Reverse(compiled=…) needs a state made of floating-point tensors only; this dynamics keeps other things "
            "in it. Use Reverse()."
        )
    if callable(process.bound.task.train) and process.encoded_count:
        raise BilevelError(
            "Reverse(compiled=…) cannot differentiate minibatches of encoded data. Use Reverse(), or encode to one "
            "batch."
        )
