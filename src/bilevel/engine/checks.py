"""All checks of a user's arguments. They are made once, at the public boundary; the code inside relies on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.engine.calls import check_continued
from bilevel.engine.closures import refuse_closures, refuse_views_of_lam
from bilevel.engine.derivatives import check_derivatives
from bilevel.engine.diagnosis import refuse_non_finite_data
from bilevel.engine.double_backward import TwiceDifferentiable, differentiable_twice
from bilevel.engine.graphs import reached
from bilevel.engine.hidden_derivatives import check_part, has_code_of_the_user
from bilevel.engine.limits import calls_loss
from bilevel.engine.memory import kind_of
from bilevel.engine.method import Method
from bilevel.engine.process import Process, live_copy
from bilevel.engine.purity import check_purity
from bilevel.engine.reach import FIRST, check_reach, needs_inner_gradient
from bilevel.engine.recorded import counted, run_uncompiled
from bilevel.engine.samplers import check_sampler, check_task
from bilevel.engine.user_functions import call_user, changing_nothing, refuse_hidden_tensors, what_is
from bilevel.errors import BilevelError, DivergenceError
from bilevel.problem import Problem, Task
from bilevel.tasks.shards import ShardedSampler, Shards
from bilevel.trees import Tree


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
            advice = "Pass a tensor or a dict, list or tuple of tensors."
            if isinstance(leaf, (int, float, np.ndarray, np.generic)):
                advice = f"Write torch.tensor({leaf!r}) with a floating dtype instead."
            raise BilevelError(f"λ{trees.paths(lam)[index]} is {what_is(leaf)}, which is no tensor. {advice}")
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
        if leaf.is_meta or leaf.is_nested or leaf.layout != torch.strided:
            kind = "on the meta device" if leaf.is_meta else "a nested tensor" if leaf.is_nested else "a sparse tensor"
            raise BilevelError(
                f"λ{trees.paths(lam)[index]} is {kind}. Pass plain tensors with numbers in them: a dict or list of "
                "tensors in the place of a nested one; in that of a sparse one its values, from which the functions "
                "make it by torch.sparse_coo_tensor(indices, lam, size)."
            )
        if not trees.all_finite(leaf):
            bad = int((~torch.isfinite(leaf)).sum())
            raise DivergenceError(
                f"λ{trees.paths(lam)[index]} has {bad} of {leaf.numel()} entries NaN or Inf. Start from finite values; "
                "nothing was computed."
            )
    if not any(leaf.numel() for leaf in leaves):
        raise BilevelError(f"λ has no numbers in it: it is {trees.describe(lam)}. Pass at least one number to tune.")


def check_process(process: Process, method: Method, *, value_only: bool = False) -> None:
    """Run Φ_0, one step and E once, and check their results against what the method needs.

    The results are kept in `process.memory`, so that the calls of a loop are checked once. With `value_only`
    derivatives are not used, and not checked.
    """
    refuse_inference_mode()
    task = process.bound.task
    if process.problem.encode is not None:
        check_task(task)
    check_continued(process)
    check_sampler(process)
    if not value_only:
        if not process.live:
            refuse_data_made_of_lam(process.lam, process.task)
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
        _follow_memory(process)
        return
    with TwiceDifferentiable() as mode:
        state = _check_start(process)
        _check_objectives(process, method, state)
        recorded = method.second_derivatives and not value_only
        after = _check_step(process, state, recorded)
        if torch.is_grad_enabled() or not value_only:
            _check_closures(process, method, state, recorded)
    memory.replaces_operations |= mode.used
    _follow_memory(process)
    check_purity(process, state, after)
    # A method that uses only values of f_T has its own test of which leaves of λ matter.
    if not value_only and method.outer_derivatives:
        check_reach(process, method, state)
        _check_derivatives(process, method, state, after)
    process.check_results.prepared = method.prepare(process)
    memory.check_results[key] = process.check_results


def _follow_memory(process: Process) -> None:
    """Run the functions in the context that the memory says, also if this or another thread's call has just decided on
    it."""
    if process.bound.user_context is not differentiable_twice(process.memory):
        process.bound = process.bind(process.variables)


def refuse_data_made_of_lam(lam: Tree, tasks: Tree) -> None:
    """Refuse data that were computed from λ outside of the problem: that part of the gradient would be lost."""
    made = [leaf for leaf in trees.tensors(tasks) if leaf.requires_grad]
    if made and reached(made, [leaf for leaf in trees.leaves(lam) if leaf.requires_grad]):
        raise BilevelError(
            "The task holds a tensor that was computed from λ, and its derivative would be lost. Compute it inside the "
            "problem, with encode=lambda lam, task: …, or use bilevel.objective, which differentiates it. If it is a "
            "constant, write .detach()."
        )


def _check_differentiable(process: Process, method: Method) -> None:
    """Refuse a method that differentiates the steps of a solver that runs to a tolerance."""
    dynamics = process.bound.dynamics
    if method.sees_dynamics and not dynamics.differentiable:
        smooth = "a dynamics whose steps are differentiable: GradientDescent(lr), Until(LineSearch(), tol)"
        implicit = "Implicit(), which differentiates the condition that its solution satisfies"
        if method.outer_derivatives:
            reason = f"differentiates the steps, but a step of {dynamics}"
            result, advice = " and cannot be differentiated", f"{implicit}, or {smooth}"
        else:
            reason = f"compares values of f_T at λ that differ little, but a step of {dynamics}"
            result = ", so that the values differ by the errors that it leaves too"
            advice = f"{smooth}. If the outer objective has a gradient, use {implicit}"
        raise BilevelError(
            f"{type(method).__name__} {reason} is a whole solver that stops at a tolerance{result}. Use {advice}."
        )


def _check_start(process: Process) -> Any:
    name = "init(lam)" if process.start is None else "the given start"
    with torch.no_grad(), changing_nothing("init", {"λ": process.bound.lam}):
        state = call_user("init", process.bound.start)
    leaves = trees.leaves(state[0])
    if not trees.size(state[0]):
        what = f"a w of {trees.describe(state[0])}, without numbers" if leaves else "no tensors"
        raise BilevelError(f"{name} gave {what}, so there is nothing for the inner problem to learn.")
    for path, leaf in zip(trees.paths(state[0]), leaves, strict=True):
        if leaf.is_meta or leaf.is_nested or leaf.layout != torch.strided:
            raise BilevelError(f"{name} gave a w{path} that is sparse, nested or on the meta device. Let it be dense.")
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
    if process.steps or needs_inner_gradient(method, seen):
        batch = bound.batch((process.times or FIRST)[0])
        calls.insert(0, ("inner(w, lam, batch)", lambda: bound.inner(w, bound.lam, batch), batch))
    for name, call, batch in calls:
        arguments = {"w": points, "λ": bound.lam, "the batch": batch}
        with torch.enable_grad(), changing_nothing(name, arguments):
            value = call_user(
                name,
                call,
                context=f"λ is {trees.describe(process.lam)}; w is {trees.describe(state[0])}; "
                f"the batch is {trees.describe(batch)}",
            )
        if name.startswith("inner"):
            run_uncompiled(process, value)
        _look_for_gradients(process, name, state, batch)
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


def _look_for_gradients(process: Process, name: str, state: Any, batch: Tree) -> None:
    """Find out whether an objective takes gradients in w itself: with a w that does not require grad it fails."""
    objective = process.bound.inner if name.startswith("inner") else process.bound.outer_objective
    try:
        with torch.no_grad(), process.bound.user_context():
            objective(state[0], process.bound.lam, batch)
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
        process.memory.takes_gradients = True
        process.bound = process.bind(process.variables)


def _check_derivatives(process: Process, method: Method, state: Any, after: Any) -> None:
    """Compare derivatives with differences, once for all dynamics and all methods that need them."""
    used = bool(process.steps) or needs_inner_gradient(method, method.sees(process))
    second = method.second_derivatives and used and process.check_results.uses_inner
    task, known = process.bound.task, process.memory.derivatives
    kinds = kind_of(process.variables), kind_of([task.train, task.val])
    if not process.problem.check_derivatives:
        return
    if (second, kinds) not in known:
        check_derivatives(process, state, after, second)
        known[second, kinds] = True
    encode, parts = process.problem.encode, dict[str, Any]()
    if encode is not None and not getattr(encode, "keeps_statistics", False):
        parts["encode"] = None
    if method.sees_dynamics and process.start is None and process.previous is None:
        parts["init"] = None
    # A run may be differentiated with constants in its steps. A fixed point has the derivative of the whole step.
    run = method.sees_dynamics
    of_user = not isinstance(process.source, Dynamics) or has_code_of_the_user(process.source)
    if (run or "the fixed point" in method.sees(process)) and process.steps and of_user:
        parts["dynamics"] = run, kind_of(process.source)
    for name, kind in parts.items():
        if (name, kind, kinds) not in known:
            check_part(process, state, after, name, detach_in_steps=run)
            known[name, kind, kinds] = True


def _check_step(process: Process, state: Any, recorded: bool) -> Any:
    """The state after one step."""
    if not process.steps:
        return state
    with torch.enable_grad():
        run_uncompiled(process, process.bound.start())
    t = process.times[0]
    bound = process.bound
    context = f"w is {trees.describe(state[0])}"
    arguments = {"w": state[0], "its state": state[1], "λ": bound.lam, "the batch": bound.task}
    with torch.set_grad_enabled(recorded), changing_nothing("The dynamics", arguments):
        after, process.check_results.graph_bytes = counted(
            lambda: call_user("dynamics.step", lambda: bound.step(state, t), context=context),
            trees.tensors([process.variables, bound.task, state]),
        )
    run_uncompiled(process, after)
    if not (isinstance(after, tuple) and len(after) == 2):
        raise BilevelError(f"A dynamics' step must return the pair (w, state), but it returned {what_is(after)}.")
    refuse_hidden_tensors((state[1], after[1]))
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
        if process.steps or needs_inner_gradient(method, method.sees(process)):
            t = (process.times or FIRST)[0]
            refuse_closures(process, "inner", lambda: bound.loss(t)(live[0]), leaves)
            if recorded:
                refuse_closures(process, "dynamics", lambda: bound.step(live, t), leaves)
