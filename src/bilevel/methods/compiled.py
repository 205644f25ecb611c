"""Algorithm 1 in compiled blocks of steps: the optional fast path of `Reverse`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import Dynamics, DynamicsLike
from bilevel.errors import BilevelError
from bilevel.methods.kernels import Kernel, build_once, compile_function, identity, structure
from bilevel.methods.process import Bound, Gradients, Process, State, accumulate
from bilevel.methods.watch import Watch
from bilevel.problem import Task

if TYPE_CHECKING:
    from bilevel.methods.reverse import Sweep


@dataclass
class Blocks:
    """`length` steps forward, and the same steps backward, each as one compiled function of tensors.

    The state, λ, the data and the step number are inputs. `reached` says which variables the backward block returns a
    gradient for, `watch` whether the inner objective and the dynamics are still those that were compiled.
    """

    forward: Kernel
    backward: Kernel
    reached: list[bool]
    watch: Watch

    def current(self) -> bool:
        return self.watch.unchanged() and self.forward.current() and self.backward.current()


def run_blocks(process: Process, length: int, start: State, times: range) -> list[State]:
    """The states at the borders of the blocks, the first and the last included."""
    blocks = _blocks(process, length, start, times)
    states = [start]
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
    inputs = _inputs(process, trees.leaves(state), times[:length])
    key = ("blocks", length, structure(state), identity(process.source))
    return build_once(process, key, inputs, lambda: _compile(process, length, state, times[:length], inputs))


def _compile(process: Process, length: int, state: State, times: range, inputs: list[Tensor]) -> Blocks:
    _check(process, state)
    spec = trees.flatten(state)[1]
    size, count = spec.num_leaves, len(process.variables)
    reached = [False] * count
    watch = Watch(process.problem.inner, *_functions(process.source))
    task = process.bound.task
    # Drawn before anything is traced: what a sampler does is no part of a step.
    batches = [trees.flatten(task.batch(t))[1] for t in times] if callable(task.train) else []

    def bounds(variables: list[Tensor], data: list[Tensor]) -> list[Bound]:
        """The process at each step of a block, with its tensors taken from the block's inputs."""
        if not batches:
            return [process.bind(variables, data)] * len(times)
        bound, found = process.bind(variables), []
        for spec in batches:
            batch, data = data[: spec.num_leaves], data[spec.num_leaves :]
            found.append(Bound(process, bound.lam, Task(spec.unflatten(batch), bound.task.val)))
        return found

    def run(flat: tuple[Tensor, ...], leaves: list[Tensor], variables: list[Tensor]) -> list[Tensor]:
        state = spec.unflatten(leaves)
        for i, bound in enumerate(bounds(variables, list(flat[1 + size + count :]))):
            state = bound.step(state, flat[0] + i)  # type: ignore[arg-type]
        return trees.leaves(state)

    def forward(*flat: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return run(flat, list(flat[1 : 1 + size]), list(flat[1 + size : 1 + size + count]))

    def backward(*flat: Tensor) -> list[Tensor]:
        live = [x.detach().requires_grad_() for x in flat[1 : 1 + size + count]]
        with torch.enable_grad():
            outputs = run(flat[:-size], live[:size], live[size:])
        recorded = [(out, a) for out, a in zip(outputs, flat[-size:], strict=True) if out.requires_grad]
        heads, cotangents = zip(*recorded, strict=True)
        parts = torch.autograd.grad(heads, live, cotangents, allow_unused=True)
        reached[:] = [part is not None for part in parts[size:]]
        alpha = [torch.zeros_like(x) if g is None else g for x, g in zip(live[:size], parts[:size], strict=True)]
        return alpha + [part for part in parts[size:] if part is not None]

    instead = "Reverse() without `compiled`"
    return Blocks(
        compile_function(forward, inputs, instead),
        compile_function(backward, [*inputs, *inputs[1 : 1 + size]], instead),
        reached,
        watch,
    )


def _functions(source: DynamicsLike) -> list[Any]:
    """The dynamics as what can be watched: itself, where it is a function, or its schedules."""
    return [getattr(source, f.name) for f in fields(source)] if isinstance(source, Dynamics) else [source]


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
