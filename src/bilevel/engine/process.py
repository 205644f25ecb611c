"""The inner problem of one task, ready to run: what a method differentiates.

A state is the pair (w, auxiliary variables), which the paper calls w throughout (the footnote to Eq. 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike, as_function_of_lam
from bilevel.dynamics.base import EquationLoss
from bilevel.engine.double_backward import differentiable_twice
from bilevel.engine.graphs import reached
from bilevel.engine.memory import CheckResults, Memory
from bilevel.engine.products import jacobian_vector_products
from bilevel.engine.user_functions import call_user, changing_nothing, what_is
from bilevel.errors import BilevelError
from bilevel.problem import Objective, Problem, Task
from bilevel.trees import Tree

if TYPE_CHECKING:
    from bilevel.engine.method import Hypergradient

State: TypeAlias = tuple[Tree, Tree]
Gradients: TypeAlias = list[Tensor | None]


@dataclass
class Process:
    """w_0 = Φ_0(λ), w_t = Φ_t(w_{t−1}, λ), f_T(λ) = E(w_T, λ) (Eqs. 5 and 6) for one task.

    A method takes gradients with respect to the `variables`: the leaves of λ, then the encoded tensors of the task that
    depend on λ. The graph is cut there, so that `encode` is differentiated once: `pull_back` carries the gradient of a
    method through it.

    Args:
        start: begin at this w instead of init(λ) (a warm start).
        previous: continue from this result, with its auxiliary variables and step number (online runs).
        adjoint: the start of an implicit method's linear solver.
        drawn: the number of training batches that earlier runs used: step t uses batch `drawn + t` of a sampler.
        live: do not cut the graph of λ: `variables` are functions of λ's leaves. For a run that is recorded as a
            whole and differentiated more than once.
        memory: the checks that this problem has passed.
        check_results: what the checks found about the process, for use by the methods.
    """

    problem: Problem
    lam: Tree
    task: Task
    source: DynamicsLike
    steps: int
    start: Tree | None = None
    previous: Hypergradient | None = None
    adjoint: Tensor | None = None
    drawn: int = 0
    allow_unused: bool = False
    live: bool = False
    memory: Memory = field(default_factory=Memory)
    check_results: CheckResults = field(default_factory=CheckResults)

    variables: list[Tensor] = field(init=False)
    outer_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.dynamics = as_function_of_lam(self.source)
        values, self.lam_spec = trees.flatten(self.lam)
        # Copies, so that in-place operations of the user's functions do not change the user's λ.
        lam_leaves = [value.clone() if self.live else value.detach().clone().requires_grad_() for value in values]
        self.outer_count = len(lam_leaves)
        task, self.encoded = self.task, []
        if self.problem.encode is not None:
            lam = self.lam_spec.unflatten(lam_leaves)
            # Later calls of a problem that has passed the checks are not asked again.
            arguments = {} if self.live or self.memory.check_results else {"λ": lam, "the task": self.task}
            with torch.enable_grad(), changing_nothing("encode(lam, task)", arguments):
                task = call_user("encode", self.problem.encode, lam, self.task)
            if not isinstance(task, Task):
                raise BilevelError(f"encode(lam, task) returned {what_is(task)}; it must return a bilevel.Task.")
        self._task_leaves, self.task_spec = trees.flatten(task)
        self._encoded_at = [i for i, x in enumerate(self._task_leaves) if isinstance(x, Tensor) and x.requires_grad]
        if self.problem.encode is not None:
            self.encoded = [self._task_leaves[i] for i in self._encoded_at]
            cut = self.encoded if self.live else [tensor.detach().requires_grad_() for tensor in self.encoded]
        else:
            # A tensor of the task that requires grad counts as data.
            cut = []
            self._task_leaves = [x.detach() if isinstance(x, Tensor) else x for x in self._task_leaves]
            self._encoded_at = []
        self.variables = lam_leaves + cut
        self.bound = self.bind(self.variables)

    @property
    def times(self) -> range:
        """The step numbers of this run."""
        first = self.previous.t if self.previous is not None else 0
        return range(first + 1, first + self.steps + 1)

    def bind(self, variables: Sequence[Tensor], data: Sequence[Tensor] | None = None) -> Bound:
        """The process at given values of its variables, and of its other tensors if `data`, in the order of `data()`,
        is given."""
        lam = self.lam_spec.unflatten(variables[: self.outer_count])
        leaves = self._task_leaves
        if self._encoded_at or data is not None:
            leaves = list(leaves)
            for index, tensor in zip(self._encoded_at, variables[self.outer_count :], strict=True):
                leaves[index] = tensor
            for index, tensor in zip(self._data_at() if data is not None else (), data or (), strict=True):
                leaves[index] = tensor
        return Bound(self, lam, self.task_spec.unflatten(leaves))

    def data(self) -> list[Tensor]:
        """The tensors of the task that do not depend on λ."""
        return [self._task_leaves[index] for index in self._data_at()]

    def constants(self) -> list[Any]:
        """The numbers, arrays and functions in the task."""
        return [leaf for leaf in self._task_leaves if not isinstance(leaf, Tensor)]

    def _data_at(self) -> list[int]:
        return [i for i, leaf in enumerate(self._task_leaves) if isinstance(leaf, Tensor) and i not in self._encoded_at]

    def run(self) -> State:
        """The state after all steps, without a graph."""
        with torch.no_grad():
            state = self.bound.start()
            for t in self.times:
                if self.bound.dynamics.finished(state[1]):
                    break
                state = self.bound.step(state, t)
        return state

    def outer_gradients(
        self, state: State, times: range = range(0)
    ) -> tuple[Tensor, list[Tensor | None], Gradients, State]:
        """`outer_gradients` of this process at its own variables."""
        return outer_gradients(self.bound, self.variables, state, times)

    def pull_back(self, gradients: Gradients) -> Gradients:
        """The gradient in the leaves of λ, from the gradient in all variables: one reverse pass through `encode`."""
        direct, through = gradients[: self.outer_count], gradients[self.outer_count :]
        reached = [(tensor, g) for tensor, g in zip(self.encoded, through, strict=True) if g is not None]
        if reached:
            tensors, cotangents = zip(*reached, strict=True)
            parts = torch.autograd.grad(
                tensors, self.variables[: self.outer_count], cotangents, allow_unused=True, retain_graph=True
            )
            direct = [accumulate(g, part) for g, part in zip(direct, map(_dense, parts), strict=True)]
        return direct

    def push_forward(self, directions: list[Tensor | None]) -> list[Tensor | None]:
        """Batches of tangents of all variables, from batches of tangents of λ's leaves: one forward pass through
        `encode`."""
        if not self.encoded:
            return list(directions)
        lam = self.variables[: self.outer_count]
        try:
            return list(directions) + jacobian_vector_products(self.encoded, lam, list(directions))
        except RuntimeError as error:
            if "double backward" not in str(error):
                raise
            raise BilevelError(
                "encode was compiled by torch.compile, and torch cannot differentiate such code twice, as forward mode "
                "does here. Use Reverse(), which differentiates it once, or pass the function that is not compiled."
            ) from error

    def encode_again(self) -> Tree:
        """The result of calling `encode` once more."""
        assert self.problem.encode is not None
        return self.problem.encode(self.lam_spec.unflatten(self.variables[: self.outer_count]), self.task)

    def reached_by_encoded(self, index: int) -> set[int]:
        """The indices of the leaves of λ that the encoded variable `index` depends on."""
        return reached([self.encoded[index]], self.variables[: self.outer_count])

    def recorded_bytes(self, state: State) -> int:
        """The bytes that a step adds to the graph of a recorded run: its own tensors and the next w."""
        return self.check_results.graph_bytes + trees.nbytes(state[0])

    @property
    def encoded_count(self) -> int:
        return len(self.encoded)


class Bound:
    """The maps Φ_0, Φ_t and E of a process at fixed variables.

    It holds no reference to the process: the two would form a cycle, and everything that `encode` recorded would stay
    in memory until Python's garbage collector happens to run.
    """

    def __init__(self, process: Process, lam: Tree, task: Task) -> None:
        self.lam, self.task = lam, task
        problem = process.problem
        self.inner, self.outer_objective, self._init = problem.inner, problem.outer, problem.init
        if process.memory.takes_gradients:
            self.inner, self.outer_objective = _with_live_w(self.inner), _with_live_w(self.outer_objective)
        self._fixed_point, self._residual = problem.fixed_point, problem.residual
        self._start, self._previous, self._drawn = process.start, process.previous, process.drawn
        # The context in which the user's functions run. The first check of the problem decides on it.
        self.user_context = differentiable_twice(process.memory)
        with torch.enable_grad():
            self.dynamics = call_user("the function of λ passed as dynamics", process.dynamics, self.lam)

    def start(self) -> State:
        """Φ_0(λ) with new auxiliary variables, or the state from which the process continues."""
        if self._previous is not None:
            return trees.detach(self._previous.state)
        with self.user_context():
            w = self._init(self.lam) if self._start is None else trees.detach(self._start)
        # If w_0 is a leaf of λ itself, w and λ must still be two tensors: ∇_w L must not contain ∂L/∂λ.
        w = _own_copy(w) if isinstance(w, Tensor) else trees.map(_own_copy, w)
        return w, self.dynamics.init(w)

    def batch(self, t: int) -> Tree:
        """The training data of step t."""
        return self.task.batch(self._drawn + t)

    def loss(self, t: int) -> Callable[[Tree], Tensor]:
        """L_λ on the batch of step t, as a function of w."""
        inner, lam, batch, user_context = self.inner, self.lam, self.batch(t), self.user_context

        def loss(w: Tree) -> Tensor:
            with user_context():
                return inner(w, lam, batch)

        return loss if self._residual is None else self._with_equations(loss, batch)

    def _with_equations(self, loss: Callable[[Tree], Tensor], batch: Tree) -> EquationLoss:
        """The loss with the functions that it is made of, for dynamics that iterate or solve the equations."""
        lam, user_context = self.lam, self.user_context

        def of(function: Callable[[Tree, Tree, Tree], Tree]) -> Callable[[Tree], Tree]:
            def evaluate(w: Tree) -> Tree:
                with user_context():
                    return function(w, lam, batch)

            return evaluate

        assert self._residual is not None
        fixed_point = None if self._fixed_point is None else of(self._fixed_point)
        return EquationLoss(loss, of(self._residual), fixed_point)

    def step(self, state: State, t: int) -> State:
        w = state[0]
        if not self.dynamics.leafwise and torch.is_grad_enabled():
            # The previous step may have computed a leaf of w from another leaf, or from λ. ∇_w L must not see that.
            w = w.view_as(w) if isinstance(w, Tensor) else trees.map(lambda leaf: leaf.view_as(leaf), w)
        with self.user_context():
            return self.dynamics.step(self.loss(t), w, state[1], t)

    def outer(self, state: State) -> Tensor:
        with self.user_context():
            return self.outer_objective(state[0], self.lam, self.task.val)


def _with_live_w(objective: Objective) -> Objective:
    """The objective, called with gradients enabled and a w that requires grad."""

    def evaluate(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            live = trees.map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), w)
            value = objective(live, lam, batch)
        return value if recorded else value.detach()

    return evaluate


def _own_copy(leaf: Any) -> Tensor:
    if not trees.is_variable(leaf):
        kind = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else what_is(leaf)
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise BilevelError(
                f"The start w_0 holds {kind}, and the variables of a problem must be real. Let w hold "
                "torch.view_as_real(w_0), and write w = torch.view_as_complex(w) in the objectives; they may compute "
                "with complex numbers."
            )
        raise BilevelError(f"The start w_0 holds {kind}, which has no gradient. Every leaf must be a floating tensor.")
    return leaf.clone()


def live_copy(state: State) -> tuple[list[Any], State]:
    """The state detached from its graph, with tensors that require grad, and those tensors as a flat list."""
    leaves, spec = trees.flatten(state)
    live = [leaf.detach().requires_grad_() if trees.is_variable(leaf) else leaf for leaf in leaves]
    return live, spec.unflatten(live)


def accumulate(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """A sum in which None is zero."""
    if total is None or part is None:
        return part if total is None else total
    return total + part


def outer_gradients(
    bound: Bound, variables: list[Tensor], state: State, times: range = range(0)
) -> tuple[Tensor, list[Tensor | None], Gradients, State]:
    """Run the steps `times` from a state and evaluate E.

    Returns E, its gradients in the leaves of the state (None where there is none) and in the variables, and the last
    state.
    """
    leaves, before = live_copy(state)
    after = before
    with torch.enable_grad():
        for t in times:
            after = bound.step(after, t)
    # E has a graph of its own, which is not retained: code compiled by torch.compile cannot retain its graph.
    ends, last = live_copy(after) if times else (leaves, before)
    with torch.enable_grad():
        value = bound.outer(last)
    alpha, direct = _gradients((value,), None, ends, variables)
    if times:
        alpha, through = _pull_through(leaves, after, alpha, variables)
        direct = [accumulate(one, two) for one, two in zip(direct, through, strict=True)]
    return value.detach(), alpha, direct, trees.detach(last)


def steps_vjp(
    bound: Bound, state: State, times: range, alpha: list[Tensor | None], variables: list[Tensor]
) -> tuple[list[Tensor | None], Gradients, State]:
    """Algorithm 1's second loop over `times`: (α A_t, α B_t) with A_t = ∂Φ_t/∂w and B_t = ∂Φ_t/∂λ, for a few steps at
    once.

    The steps are replayed from the state before them, so that only that state is kept. Also returns the state after
    them.
    """
    leaves, after = live_copy(state)
    with torch.enable_grad():
        for t in times:
            after = bound.step(after, t)
    return *_pull_through(leaves, after, alpha, variables), after


def _pull_through(
    leaves: list[Any], after: State, alpha: list[Tensor | None], variables: list[Tensor]
) -> tuple[list[Tensor | None], Gradients]:
    """α times the derivative of recorded steps in the leaves of the state before them and in the variables."""
    paired = [
        (out, a) for out, a in zip(trees.leaves(after), alpha, strict=True) if a is not None and out.requires_grad
    ]
    if not paired:
        return [None] * len(leaves), [None] * len(variables)
    heads, cotangents = zip(*paired, strict=True)
    # The graph from λ to the dynamics' settings is shared by all steps, so it must be retained.
    return _gradients(heads, cotangents, leaves, variables, retain_graph=True)


def _gradients(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None,
    leaves: list[Any],
    variables: list[Tensor],
    retain_graph: bool = False,
) -> tuple[list[Tensor | None], Gradients]:
    """The gradients in the leaves of a `live_copy`, None where a leaf is not a variable, and in the variables."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [leaves[i] for i in places] + variables
    found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)
    parts: Gradients = [_dense(part) for part in found]
    alpha: Gradients = [None] * len(leaves)
    for i, part in zip(places, parts[: len(places)], strict=True):
        alpha[i] = part
    return alpha, parts[len(places) :]


def _dense(part: Tensor | None) -> Tensor | None:
    """The gradient of an embedding may be sparse."""
    return part if part is None or part.layout == torch.strided else part.to_dense()


def start_vjp(bound: Bound, alpha: list[Tensor | None], variables: list[Tensor]) -> Gradients:
    """α ∂Φ_0/∂λ."""
    with torch.enable_grad():
        outputs = trees.leaves(bound.start())
    paired = [(out, a) for out, a in zip(outputs, alpha, strict=True) if a is not None and out.requires_grad]
    if not paired:
        return [None] * len(variables)
    heads, cotangents = zip(*paired, strict=True)
    return list(torch.autograd.grad(heads, variables, cotangents, allow_unused=True, retain_graph=True))
