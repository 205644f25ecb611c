"""All checks of a user's arguments. They are made once, at the public boundary; the code inside relies on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.closures import refuse_closures, refuse_views_of_lam
from bilevel.engine.derivatives import check_derivatives
from bilevel.engine.diagnosis import refuse_non_finite_data
from bilevel.engine.double_backward import TwiceDifferentiable
from bilevel.engine.graphs import reached
from bilevel.engine.limits import calls_loss, reached_at_rest
from bilevel.engine.memory import kind_of
from bilevel.engine.method import EVERYTHING, Method, Part
from bilevel.engine.process import Process, call_user, live_copy, what_is
from bilevel.engine.purity import check_purity
from bilevel.engine.recorded import counted, run_uncompiled
from bilevel.engine.samplers import check_sampler, check_task
from bilevel.errors import BilevelError, DivergenceError
from bilevel.problem import Problem, Task
from bilevel.tasks.shards import ShardedSampler, Shards
from bilevel.trees import Tree

# The step whose objective is checked if there are no steps.
FIRST = range(1, 2)


def check_arguments(problem: Any, lam: Tree, tasks: Any, steps: Any) -> list[Task]:
    """The checks that run nothing. Returns the tasks as a list."""
    refuse_inference_mode()
    check_problem_and_steps(problem, steps)
    check_lam(lam)
    listed = list(tasks) if isinstance(tasks, (list, tuple)) else [tasks]
    if not listed:
        raise BilevelError(
            "The list of tasks is empty, so there is no outer objective to average. Pass at least one "
            "bilevel.Task(train, val)."
        )
    for task in listed:
        check_task(task)
        refuse_shards(task)
    return listed


def refuse_shards(task: Task) -> None:
    """Refuse data that `shards` has cut: only single-loop algorithms take them."""
    for name, given in (("train", task.train), ("val", task.val)):
        if isinstance(given, (Shards, ShardedSampler)):
            raise BilevelError(
                f"task.{name} is cut into shards, which single-loop algorithms, such as solve(algorithm=SOBA()), share "
                "between processes. A hypergradient through inner steps takes whole batches: pass them uncut. "
                "Processes share the tasks of a list."
            )


def check_problem_and_steps(problem: Any, steps: Any) -> None:
    """Check the types of the problem and of T."""
    if not isinstance(problem, Problem):
        raise BilevelError(
            f"The first argument must be a bilevel.Problem(inner, outer, init), but it is {what_is(problem)}."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise BilevelError(
            f"steps={steps!r} is not a number of inner steps: pass an int T ≥ 0 (0 evaluates the outer objective at "
            "init(λ))."
        )


def refuse_inference_mode() -> None:
    """Refuse inference mode: torch.enable_grad has no effect in it, and inner steps need gradients."""
    if torch.is_inference_mode_enabled():
        raise BilevelError(
            "This was called under torch.inference_mode(), where torch records no gradients, but the inner steps "
            "need them. Write torch.no_grad() instead; in Lightning, Trainer(inference_mode=False)."
        )


def check_lam(lam: Tree) -> None:
    """λ must be real tensors with finite values."""
    leaves = trees.leaves(lam)
    if not leaves:
        raise BilevelError("λ has no tensors in it. Pass a tensor or a dict, list or tuple of tensors.")
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.nn.Module):
            raise BilevelError(
                "λ is an nn.Module. Pass its parameters, as lam, apply = bilevel.functional(module) gives them."
            )
        if not isinstance(leaf, Tensor):
            raise BilevelError(
                f"λ{trees.paths(lam)[index]} is {what_is(leaf)}. Write torch.tensor({leaf!r}) with a floating dtype "
                "instead."
            )
        if leaf.is_complex():
            raise BilevelError(
                f"λ{trees.paths(lam)[index]} is complex ({leaf.dtype}), and an outer variable must be real. Pass real "
                "and imaginary parts as two leaves."
            )
        if not leaf.is_floating_point():
            raise BilevelError(
                f"λ{trees.paths(lam)[index]} holds {leaf.dtype} and cannot be differentiated. Write .double() or "
                ".float(), or move a discrete choice out of λ."
            )
        if not trees.all_finite(leaf):
            bad = int((~torch.isfinite(leaf)).sum())
            raise DivergenceError(
                f"λ{trees.paths(lam)[index]} has {bad} of {leaf.numel()} entries NaN or Inf. Start from finite values; "
                "nothing was computed."
            )


def check_process(process: Process, method: Method, *, value_only: bool = False) -> None:
    """Run Φ_0, one step and E once, and check their results against what the method needs.

    The results are kept in `process.memory`, so that the calls of a loop are checked once. With `value_only`
    derivatives are not used, and not checked.
    """
    refuse_inference_mode()
    task = process.bound.task
    if process.problem.encode is not None:
        check_task(task)
    if process.previous is not None and process.previous.state is None:
        raise BilevelError(
            f"A result of {process.previous.stats.method} cannot be continued: it has no velocities. Compute it "
            "with Reverse() or Forward()."
        )
    check_sampler(process)
    if not value_only:
        _check_differentiable(process, method)
    method.check(process)
    key = (
        method.check_key(),
        process.steps,
        process.allow_unused,
        value_only and (value_only, torch.is_grad_enabled()),
        process.previous is None or process.previous.tangents is None,
        kind_of(process.source),
        method.kind_of_data(process),
    )
    memory = process.memory
    if key in memory.check_results:
        process.check_results = memory.check_results[key]
        return
    with TwiceDifferentiable() as mode:
        state = _check_start(process)
        _check_objectives(process, method, state)
        recorded = method.second_derivatives and not value_only
        after = _check_step(process, state, recorded)
        if torch.is_grad_enabled() or not value_only:
            _check_closures(process, method, state, recorded)
    if mode.used and not memory.replaces_operations:
        memory.replaces_operations = True
        process.bound = process.bind(process.variables)
    check_purity(process, state)
    # A method that uses only values of f_T has its own test of which leaves of λ matter.
    if not value_only and method.outer_derivatives:
        _check_reach(process, method, state)
        _check_derivatives(process, method, state, after)
    process.check_results.prepared = method.prepare(process)
    memory.check_results[key] = process.check_results


def _check_differentiable(process: Process, method: Method) -> None:
    """Refuse a method that differentiates the steps of a solver that runs to a tolerance."""
    dynamics = process.bound.dynamics
    if method.sees_dynamics and not dynamics.differentiable:
        raise BilevelError(
            f"{type(method).__name__} differentiates the steps, but a step of {dynamics} is a whole solver that stops "
            "at a tolerance and cannot be differentiated. Use Implicit(), which differentiates the condition that its "
            "solution satisfies, or a dynamics whose steps are differentiable: GradientDescent(lr), "
            "Until(LineSearch(), tol)."
        )


def _check_start(process: Process) -> Any:
    name = "init(lam)" if process.start is None else "the given start"
    with torch.no_grad():
        state = call_user("init", process.bound.start)
    leaves = trees.leaves(state[0])
    if not leaves:
        raise BilevelError(f"{name} gave no tensors, so there is nothing for the inner problem to learn.")
    for path, leaf in zip(trees.paths(state[0]), leaves, strict=True):
        if not bool(torch.isfinite(leaf).all()):
            raise DivergenceError(f"{name} gave NaN or Inf in w{path}; nothing was computed.", step=0)
    return state


def _check_objectives(process: Process, method: Method, state: Any) -> None:
    bound, seen = process.bound, method.sees(process)
    points, spec = trees.flatten(state[0])
    points = [point.detach().requires_grad_() for point in points]
    w = spec.unflatten(points)
    calls: list[tuple[str, Callable[[], Tensor], Tree]] = [
        ("outer(w, lam, batch)", lambda: bound.outer((w, ())), bound.task.val)
    ]
    if process.steps or _needs_inner_gradient(method, seen):
        batch = bound.batch((process.times or FIRST)[0])
        calls.insert(0, ("inner(w, lam, batch)", lambda: bound.inner(w, bound.lam, batch), batch))
    for name, call, batch in calls:
        with torch.enable_grad():
            value = call_user(
                name,
                call,
                context=f"λ is {trees.describe(process.lam)}; w is {trees.describe(state[0])}; "
                f"the batch is {trees.describe(batch)}",
            )
        if name.startswith("inner"):
            run_uncompiled(process, value)
        if not isinstance(value, Tensor):
            raise BilevelError(
                f"{name} returned {what_is(value)}; it must return a scalar tensor, without .item() or float()."
            )
        if value.is_complex():
            raise BilevelError(
                f"{name} returned a complex number; an objective must be real. Take .abs() or .real of it."
            )
        if value.ndim != 0:
            raise BilevelError(
                f"{name} returned a tensor of shape {list(value.shape)}; an objective is one number. Add .mean() or "
                ".sum()."
            )
        if name.startswith("outer") and not method.outer_derivatives:
            pass
        elif not value.requires_grad or not reached([value], points):
            if name.startswith("inner") and "the fixed point" in seen and not calls_loss(bound, state[0]):
                process.check_results.uses_inner = False
                continue
            raise BilevelError(
                f"{name} is not differentiable in w: its result has no graph that leads back to w. Look for .detach(), "
                ".item(), torch.no_grad(), comparisons or argmax in it; an accuracy cannot be an objective, a "
                "cross-entropy can."
            )
        if not bool(torch.isfinite(value)):
            refuse_non_finite_data(name, batch)
            raise DivergenceError(
                f"{name} is {value.item()} at the start w_0, although λ, w_0 and the data are finite. Check it for "
                "log(0), 0/0 or overflow.",
                step=0,
            )


def _check_derivatives(process: Process, method: Method, state: Any, after: Any) -> None:
    """Compare derivatives with differences, once for all dynamics and all methods that need them."""
    used = bool(process.steps) or _needs_inner_gradient(method, method.sees(process))
    second = method.second_derivatives and used and process.check_results.uses_inner
    task = process.bound.task
    key, known = (second, kind_of(process.variables), kind_of([task.train, task.val])), process.memory.derivatives
    if process.problem.check_derivatives and key not in known:
        check_derivatives(process, state, after, second)
        known[key] = True


def _check_step(process: Process, state: Any, recorded: bool) -> Any:
    """The state after one step."""
    if not process.steps:
        return state
    with torch.enable_grad():
        run_uncompiled(process, process.bound.start())
    t = process.times[0]
    bound = process.bound
    context = f"w is {trees.describe(state[0])}"
    with torch.set_grad_enabled(recorded):
        after, process.check_results.graph_bytes = counted(
            lambda: call_user("dynamics.step", lambda: bound.step(state, t), context=context),
            trees.tensors([process.variables, bound.task, state]),
        )
    run_uncompiled(process, after)
    if not (isinstance(after, tuple) and len(after) == 2):
        raise BilevelError(f"A dynamics' step must return the pair (w, state), but it returned {what_is(after)}.")
    if trees.flatten(after[0])[1] != trees.flatten(state[0])[1]:
        raise BilevelError(
            f"The dynamics changed the structure of w: it was {trees.describe(state[0])} and became "
            f"{trees.describe(after[0])}."
        )
    for path, old, new in zip(trees.paths(state[0]), trees.leaves(state[0]), trees.leaves(after[0]), strict=True):
        if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
            raise BilevelError(
                f"The dynamics changed w{path} from {trees.describe(old)} to {trees.describe(new)}. Do its settings or "
                "λ have another shape, dtype or device than w? A value per weight must have w's shape."
            )
    return after


def _check_closures(process: Process, method: Method, state: Any, recorded: bool) -> None:
    """Refuse tensors that require grad and come from a closure."""
    bound = process.bound
    leaves, live = live_copy(state)
    refuse_views_of_lam(process)
    with torch.enable_grad():
        if process.encoded:
            refuse_closures(process, "encode", process.encode_again, outputs=process.encoded)
        refuse_closures(process, "init", bound.start)
        refuse_closures(process, "outer", lambda: bound.outer(live), leaves)
        if process.steps or _needs_inner_gradient(method, method.sees(process)):
            t = (process.times or FIRST)[0]
            refuse_closures(process, "inner", lambda: bound.loss(t)(live[0]), leaves)
            if recorded:
                refuse_closures(process, "dynamics", lambda: bound.step(live, t), leaves)


def _check_reach(process: Process, method: Method, state: Any) -> None:
    """Refuse a leaf of λ that reaches no objective, or only on a path that the method does not differentiate."""
    seen = method.sees(process)
    if process.start is not None or (process.previous is not None and process.previous.tangents is None):
        # init(λ) is not used; a continued run depends on it only through the tangents of forward mode.
        seen -= {"the start"}
    reach = _reach(process, method, state)
    paths = trees.paths(process.lam)
    for index, path in enumerate(paths):
        parts = {part for part, leaves in reach.items() if index in leaves}
        if parts & seen:
            continue
        name = type(method).__name__
        if parts:
            others = " and ".join(sorted(parts))
            advice = "Use Reverse() or Forward(), which differentiate the steps."
            if process.start is not None and parts == {"the start"}:
                advice = f"init(λ) is not used when the run begins at a given w: remove λ{path}, or use a cold start."
            elif name == "Truncated":
                advice = "Use Reverse(), which differentiates all steps."
            raise BilevelError(
                f"{name} cannot see λ{path}: it enters through {others} only, and {name} differentiates "
                f"{' and '.join(sorted(seen))}. The gradient would silently be 0. {advice}"
            )
        if not process.allow_unused:
            raise BilevelError(
                f"λ{path} reaches neither the inner nor the outer "
                f"objective{' (with steps=0 the inner one is never used)' if not process.steps else ''}, so its "
                "gradient would always be zero. Remove it from λ, use it, or pass allow_unused=True. (A .detach(), "
                ".item() or torch.no_grad() on the way cuts it off too.)"
            )


def _needs_inner_gradient(method: Method, seen: frozenset[Part]) -> bool:
    """Whether a method needs the gradient of the inner objective at w_T, even if there are no steps."""
    return not method.sees_dynamics and "the inner objective" in seen


def _reach(process: Process, method: Method, state: Any) -> dict[Part, set[int]]:
    """The leaves of λ that enter each part, read from the autograd graphs of Φ_0, ∇L, Φ_t and E."""
    bound, variables = process.bound, process.variables
    reach: dict[Part, set[int]] = {part: set() for part in EVERYTHING}

    def note(part: Part, outputs: Tree, indices: set[int] | None = None) -> None:
        for index in reached(trees.leaves(outputs), variables) if indices is None else indices:
            if index < process.outer_count:
                reach[part].add(index)
            else:
                reach[part] |= process.reached_by_encoded(index - process.outer_count)

    with torch.enable_grad():
        note("the start", process.problem.init(bound.lam))
        note("the outer objective", bound.outer(state))
        all_leaves = set(range(process.outer_count))
        # A leaf that the first step does not reach may be reached by a later one. With allow_unused this is not tested.
        times = process.times or (FIRST if _needs_inner_gradient(method, method.sees(process)) else FIRST[:0])
        for t in times[:1] if process.allow_unused else times:
            if not method.second_derivatives:
                # The step need not be differentiable: the result is read from the objective and the settings.
                note("the inner objective", bound.loss(t)(state[0]))
                note("the dynamics", list(vars(bound.dynamics).values()))
                break
            if process.check_results.uses_inner:
                note("the inner objective", gradient(bound.loss(t), state[0]))
            at_rest = bound.dynamics.stationary_step(bound.loss(t), state[0], t)
            found = reached_at_rest(bound, variables, state[0], t) if at_rest is None and not method.exact else None
            note("the fixed point", at_rest, found)
            everything = {i for i in reached(trees.leaves(bound.step(state, t)), variables) if i < process.outer_count}
            reach["the dynamics"] |= everything - reach["the inner objective"]
            # A setting with a value per step is reached by a later step; usually the first step is enough.
            if set().union(*reach.values()) >= all_leaves:
                break
    return reach
