"""Whether an answer is right: against central differences of runs that are written out here, without the engine."""

import contextlib
import io
import warnings
from dataclasses import replace

import torch

import bilevel as bl
from bilevel import trees
from bilevel.dynamics import as_function_of_lam
from bilevel.errors import BilevelWarning
from search.drawing import IMPLICIT, METHODS, Built, Case

# Enough for most of the drawn problems to come to rest with the longest step.
LIMIT = 120
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-2}


class Defect(Exception):
    """A hypergradient that is wrong without a word, or a crash that no `BilevelError` explains."""


def judge(case: Case) -> str:
    """ "right", "refused", "warned", or "skipped: …" where differences do not know either; raises `Defect`."""
    if case.method in IMPLICIT:
        case = replace(case, steps=LIMIT, lr=0.3)
    built, steps = Built(case, torch.float32 if case.single else torch.float64), case.steps
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", BilevelWarning)
            value, grad = answer(built, steps)
    except bl.BilevelError:
        return "refused"
    except BilevelWarning:
        return "warned"
    except Exception as error:
        raise Defect(f"{case}: {type(error).__name__}: {error}") from error
    exact = Built(case, torch.float64)
    # Behind a projection or a sign the noise may not show.
    if case.hazard == "random noise" and not torch.equal(*(run(exact, exact.lam, steps)[0] for _ in range(2))):
        raise Defect(f"{case}: an answer for a run that is random")
    direction = trees.map(lambda leaf: torch.randn_like(leaf), exact.lam)
    return compare(case, exact, steps, value, trees.map(torch.Tensor.double, grad), direction)


def answer(built, steps):
    """f_T and ∇f_T by the engine."""
    lam = trees.map(lambda leaf: leaf.clone().requires_grad_(), built.lam)
    problem, task, dynamics = built.build(lam)
    method = METHODS[built.case.method]
    if built.case.method == "objective":
        value = bl.objective(problem, lam, task, dynamics=dynamics, steps=steps, method=method)
        value.backward()
        return float(value.detach()), trees.map(lambda leaf: leaf.grad, lam)
    result = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method)
    return float(result.value), result.grad


def compare(case, exact, steps, value, grad, direction):
    first_order, tolerance = case.method == "FirstOrder", TOLERANCE[torch.float32 if case.single else torch.float64]
    last, earlier = run(exact, exact.lam, steps)
    if case.method in IMPLICIT:
        if max(distance(last, v) for v in earlier) > 1e-6:
            return "skipped: not at rest"
        # The derivative of w_t comes to rest later than w_t.
        tolerance = max(tolerance, 2e-3)
    if case.single:
        single = Built(case, torch.float32)
        if distance(run(single, single.lam, steps)[0], last) > 1e-4:
            return "skipped: rounding"
    here = outer(exact, last, exact.lam)
    if abs(value - here) > tolerance * max(abs(here), 1e-3):
        raise Defect(f"{case}: the value is {value:.8g} instead of {here:.8g}")

    def at(h):
        lam = trees.map(lambda leaf, d: leaf + h * d, exact.lam, direction)
        return outer(exact, last if first_order else run(exact, lam, steps)[0], lam)

    found, slopes = float(trees.dot(grad, direction)), []
    length = float(trees.norm(grad)) * float(trees.norm(direction))
    for width in (2.5e-5, 1e-4, 5e-6):
        slopes.append((at(width) - at(-width)) / (2 * width))
        scale = max(abs(slopes[0]), length, 1e-3 * (1 + abs(here)) if case.single else 1e-6)
        if abs(found - slopes[-1]) <= tolerance * scale:
            return "right" if len(slopes) == 1 else "skipped: near a kink"
        if not abs(slopes[-1] - slopes[0]) <= 0.1 * tolerance * scale:
            return "skipped: near a kink"
    raise Defect(f"{case}: the slope is {found:.8g} instead of {slopes[0]:.8g}, ‖∇f‖ is {length:.3g}")


def run(built, lam, steps):
    """w_T, and w after three quarters of the steps and one step before the end, as vectors."""
    problem, task, dynamics = built.build(lam)
    dynamics = as_function_of_lam(dynamics)(lam)
    with torch.no_grad():
        w = trees.map(torch.clone, problem.init(lam))
        state, earlier = dynamics.init(w), [w]
        for t in range(1, steps + 1):
            batch = task.batch(t)
            w, state = dynamics.step(lambda w, batch=batch: problem.inner(w, lam, batch), w, state, t)
            earlier += [w] if t in (3 * steps // 4, steps - 1) else []
    return built.vector(w), [built.vector(w) for w in earlier[1:]]


def outer(built, v, lam):
    problem, task, _ = built.build(lam)
    with torch.no_grad():
        return float(problem.outer(built.pack(v), lam, task.val))


def distance(one, two):
    return float((one.double() - two.double()).norm() / (1e-3 + two.double().norm()))
