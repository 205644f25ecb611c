"""The compiled form of `Reverse`: blocks of steps, forward and backward, as compiled functions of tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.kernels import Kernel, compile_function, form_of, structure
from bilevel.engine.process import Bound, Gradients, Process, State
from bilevel.errors import BilevelError
from bilevel.problem import Task


@dataclass(frozen=True)
class CompiledBlocks:
    """`length` steps forward, and the same steps backward. The state, λ, the data and the step number are inputs.

    Attributes:
        reached: which variables the backward block returns a gradient for.
        state_form: the structure, shapes and dtypes of the state that the code expects.
    """

    length: int
    forward: Kernel
    backward: Kernel
    reached: list[bool]
    state_form: Hashable

    def run(self, process: Process, start: State, times: range) -> list[State]:
        """The states between the blocks, including the first and the last."""
        if _form(start) != self.state_form:
            raise BilevelError(
                "init(lam) or the dynamics gave a state of another structure, shape or dtype than when this was "
                "compiled. Call bilevel.compile(...) again."
            )
        states, spec = [start], trees.flatten(start)[1]
        for i in range(0, len(times), self.length):
            inputs = _inputs(process, trees.leaves(states[-1]), times[i : i + self.length])
            states.append(spec.unflatten(self.forward(*inputs)))
        return states

    def pull_back(
        self, process: Process, state: State, times: range, alpha: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Gradients]:
        """α times the derivative of one block in the state before it and in the variables."""
        leaves = trees.leaves(state)
        filled = [torch.zeros_like(leaf) if a is None else a for leaf, a in zip(leaves, alpha, strict=True)]
        results = iter(self.backward(*_inputs(process, leaves, times), *filled))
        before: list[Tensor | None] = [next(results) for _ in leaves]
        return before, [next(results) if reached else None for reached in self.reached]


def compile_blocks(process: Process, length: int) -> CompiledBlocks:
    """Compile the first `length` steps of a process. The code serves all blocks of processes like it."""
    with torch.no_grad():
        state = process.bound.start()
    _check(process, state)
    times = process.times[:length]
    inputs = _inputs(process, trees.leaves(state), times)
    spec = trees.flatten(state)[1]
    size, count = spec.num_leaves, len(process.variables)
    reached = [False] * count
    task = process.bound.task
    # Batches are drawn before tracing, because a sampler is not part of a step.
    batches = [trees.flatten(process.bound.batch(t))[1] for t in times] if callable(task.train) else []

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

    return CompiledBlocks(
        length,
        compile_function(forward, inputs),
        compile_function(backward, [*inputs, *inputs[1 : 1 + size]]),
        reached,
        _form(state),
    )


def _inputs(process: Process, leaves: list[Tensor], times: range) -> list[Tensor]:
    task = process.bound.task
    data = trees.tensors([process.bound.batch(t) for t in times]) if callable(task.train) else process.data()
    # A float64 scalar: powers of it are exact, and as a scalar it does not promote float32 tensors.
    t = torch.tensor(float(times[0]), dtype=torch.float64, device="cpu")
    return [t, *leaves, *(variable.detach() for variable in process.variables), *data]


def _form(state: State) -> Hashable:
    return structure(state), tuple(form_of(leaf) for leaf in trees.leaves(state))


def _check(process: Process, state: State) -> None:
    if not all(trees.is_variable(leaf) for leaf in trees.leaves(state)):
        raise BilevelError(
            "Compiled steps need a state made of floating-point tensors only; this dynamics keeps other things in it. "
            "Call hypergradient(...) instead of bilevel.compile(...)."
        )
    if callable(process.bound.task.train) and process.encoded_count:
        raise BilevelError(
            "Compiled steps cannot differentiate minibatches of encoded data. Call hypergradient(...) instead of "
            "bilevel.compile(...), or encode to one batch."
        )
