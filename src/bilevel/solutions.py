"""`inner_solution`: w_T as tensors in the caller's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.engine.any_order import any_order, check_higher_derivatives
from bilevel.engine.calls import own_saved_tensors, refuse_changed_data, refuse_other_result, versions
from bilevel.engine.checks import check_arguments, check_problem_and_steps, check_process
from bilevel.engine.diagnosis import explain_divergence
from bilevel.engine.memory import Memory, memory_of
from bilevel.engine.method import Method
from bilevel.engine.recomputed import PullBack, recomputed, refuse_forward_mode, under_torch_func
from bilevel.errors import BilevelError
from bilevel.hypergradients import Evaluator, as_method, with_live_data
from bilevel.methods.unrolled import Unrolled, record_state
from bilevel.problem import Problem, Task
from bilevel.trees import Spec, Tree


def inner_solution(
    problem: Problem,
    lam: Tree,
    task: Task | Sequence[Task],
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | None = None,
    allow_unused: bool = False,
) -> Tree:
    """w_T as a function of λ that torch can differentiate: a layer of a network, or the input of several losses.

    `problem.outer` is not used and may be left out. A backward pass computes v ∂w_T/∂λ, for the cotangent v of w_T, by
    the method: it is the hypergradient of ⟨v, w_T⟩. With an exact method the result can be differentiated any number of
    times; an inexact one has a first derivative only. Tensors of the task that require grad are differentiated like λ.

    Args:
        problem: the inner objective and the start.
        lam: λ; leaves that require grad, or the output of a network.
        task: the data, or a list of tasks.
        dynamics: Φ, as for `hypergradient`.
        steps: T.
        method: how ∂w_T/∂λ is computed; `Reverse()` by default.
        allow_unused: give a leaf of λ that does not reach w_T the gradient 0 instead of raising.

    Returns:
        A tree like w, or a list of trees for a list of tasks.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - lam) ** 2, init=lambda lam: torch.zeros_like(lam)
    ... )
    >>> lam = torch.tensor(3.0, requires_grad=True)
    >>> w = bl.inner_solution(problem, lam, bl.Task(None, None), dynamics=bl.GradientDescent(0.5), steps=1)
    >>> (w**2 + lam).backward()
    >>> w.item(), lam.grad.item()
    (3.0, 7.0)
    """
    if under_torch_func():
        raise BilevelError(
            "inner_solution(...) was called within torch.func.grad, vmap or another transform, which it does not "
            "support. Write objective(...) there, or use torch.autograd.grad."
        )
    check_problem_and_steps(problem, steps)
    refuse_forward_mode((lam, task))
    chosen = as_method(method)
    memory = memory_of(problem).related
    if "solution" not in memory:
        memory["solution"] = Memory()
    evaluator = Evaluator(problem, dynamics, steps, allow_unused, memory["solution"])
    tasks = check_arguments(problem, trees.detach(lam), task, steps)
    solutions = [_solution(evaluator, lam, one, chosen) for one in tasks]
    return solutions if isinstance(task, (list, tuple)) else solutions[0]


def _solution(evaluator: Evaluator, lam: Tree, task: Task, method: Method | None) -> Tree:
    evaluator, lam, task = with_live_data(evaluator, lam, task)
    leaves, spec = trees.flatten(lam)
    state = _run(evaluator, trees.detach(lam), task)
    values, w_spec = trees.flatten(state)
    if not (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)):
        return state
    call = _Solution(evaluator, spec, task, method, w_spec, versions(task))
    return w_spec.unflatten(_InGraph.apply(call, len(leaves), *leaves, *values))  # type: ignore[no-untyped-call]


def _run(evaluator: Evaluator, lam: Tree, task: Task) -> Tree:
    """w_T, without a graph."""
    # v is not known before the backward pass.
    with own_saved_tensors():
        process = _with_product(evaluator, None).process(lam, task, allow_unused=True)
        check_process(process, Unrolled(), value_only=True)
        w = process.run()[0]
    if not all(bool(torch.isfinite(leaf).all()) for leaf in trees.leaves(w)):
        explain_divergence(process)
    return trees.detach(w)


def _with_product(evaluator: Evaluator, v: Tree) -> Evaluator:
    """The evaluator with the outer objective ⟨v, w⟩, whose hypergradient is v ∂w_T/∂λ; without v, ⟨w, w⟩."""
    outer = lambda w, lam, batch: trees.dot(w if v is None else v, w)  # noqa: E731
    return replace(evaluator, problem=replace(evaluator.problem, outer=outer))


@dataclass(frozen=True)
class _Solution:
    """w_T as a function of the leaves of λ, with its derivatives."""

    evaluator: Evaluator
    spec: Spec
    task: Task
    method: Method | None
    w_spec: Spec
    data_versions: tuple[int, ...]

    def pull_back(
        self, leaves: Sequence[Tensor], cotangents: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """v ∂w_T/∂λ by the method, at the w_T with these values."""
        refuse_changed_data(self.task, self.data_versions)
        lam, v = self.spec.unflatten(trees.detach(list(leaves))), self.w_spec.unflatten(trees.detach(list(cotangents)))
        method = "auto" if self.method is None else self.method
        with torch.enable_grad():
            result = _with_product(self.evaluator, v).gradient(lam, self.task, method)
        # Some methods go on from w_T to the minimiser.
        if self.method is None or (self.method.structure is None and getattr(self.method, "newton", None) is None):
            refuse_other_result(values, trees.leaves(result.inner))
        return trees.leaves(result.grad)

    def record(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """w_T with all steps in one graph: its derivatives beyond the first are the same for every exact method."""
        if self.method is not None and not self.method.exact:
            raise BilevelError(
                f"inner_solution(…, method={self.method!r}) was asked for a second derivative, and has none: its first "
                "derivative is an approximation. Pass method=Reverse() or another exact method."
            )
        refuse_changed_data(self.task, self.data_versions)
        lam = self.spec.unflatten(leaves)
        check_higher_derivatives(_with_product(self.evaluator, None).process(trees.detach(lam), self.task))
        with any_order():
            process = self.evaluator.process(lam, self.task, live=True)
            return tuple(trees.leaves(record_state(process)[0]))


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch, as in `torch.autograd.grad(…, is_grads_batched=True)`."""
    # There is no public way to ask.
    asked = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return asked is not None and bool(asked(tensor))


class _InGraph(Function):
    """`_InGraph.apply(solution, count, *leaves, *values)`: the values of w_T, in the graph of λ's `count` leaves."""

    @staticmethod
    def forward(ctx: Any, solution: _Solution, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.solution, ctx.count = solution, count
        ctx.save_for_backward(*tensors)
        return tuple(value.clone() for value in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if any(map(_is_batched, cotangents)):
            raise BilevelError(
                "inner_solution(…) cannot be differentiated for a batch of cotangents at once (is_grads_batched=True, "
                "or vectorize=True of torch.autograd.functional). Leave it out; torch then takes one after the other."
            )
        saved = ctx.saved_tensors  # inside torch.utils.checkpoint they can be read once
        leaves, values = saved[: ctx.count], saved[ctx.count :]
        rest = [None] * len(cotangents)
        slopes = ctx.solution.pull_back(leaves, cotangents, values)
        if torch.is_grad_enabled():
            pull_back = PullBack(ctx.solution.record, 0, ctx.count)
            slopes = recomputed(pull_back, 0, len(slopes), *leaves, *cotangents, *slopes)
        return None, None, *slopes, *rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise BilevelError("inner_solution(…) has no forward-mode derivative. Use reverse mode: torch.autograd.grad.")
