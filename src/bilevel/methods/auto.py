"""`method="auto"`: choose a method by the sizes of w, λ and T, and give the reason."""

from __future__ import annotations

import torch

from bilevel import trees
from bilevel.engine.checks import check_process
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Process
from bilevel.engine.replay import format_bytes
from bilevel.errors import BilevelError
from bilevel.methods.forward import Forward
from bilevel.methods.implicit import Implicit
from bilevel.methods.reverse import Reverse
from bilevel.methods.spectral import Spectral
from bilevel.methods.unrolled import Unrolled

# A method that would take more memory than this is not chosen if another takes less.
BUDGET = 2 * 1024**3


def run_best(process: Process) -> tuple[Hypergradient, str]:
    """The hypergradient by the chosen method, and the reason. If `Spectral` turns out not to apply, another is used."""
    method, reason = choose(process)
    try:
        return method(process), reason
    except BilevelError:
        if not isinstance(method, Spectral):
            raise
    method, reason = choose(process, closed_form=False)
    return method(process), reason


def choose(process: Process, budget: int = BUDGET, closed_form: bool = True) -> tuple[Method, str]:
    """The method, and a sentence with the reason.

    All candidates are exact, so the choice changes only time and memory. The steps of a solver that runs to a tolerance
    have no derivative, and there `Implicit` is the only choice.
    """
    steps = process.steps
    with torch.no_grad():
        state = process.bound.start()
    size, count = trees.size(state[0]), sum(v.numel() for v in process.variables[: process.outer_count])
    sizes = f"w has {size:,} numbers, λ {count:,}, T = {steps:,}"

    if not process.bound.dynamics.differentiable:
        check_process(process, Implicit())
        name = type(process.bound.dynamics).__name__
        return Implicit(), f"Implicit: {name} runs to a tolerance, and its steps cannot be differentiated ({sizes})."

    if closed_form and size <= 1000 and steps >= 20:
        spectral = Spectral(largest=1000)
        try:
            check_process(process, spectral)
        except BilevelError:
            pass
        else:
            return (
                spectral,
                "Spectral: the inner objective is quadratic with constant steps, so the cost need not grow with T "
                f"({sizes}).",
            )

    check_process(process, Unrolled())
    graph, iterates = steps * process.check_results.graph_bytes if steps else 0, steps * trees.nbytes(state)
    if graph <= budget:
        return Unrolled(), f"Unrolled: recording all steps takes about {format_bytes(graph)}, which fits ({sizes})."
    if iterates <= budget:
        return (
            Reverse(),
            f"Reverse: recording all steps would take about {format_bytes(graph)}, the iterates alone "
            f"{format_bytes(iterates)} ({sizes}).",
        )
    if count <= 8:
        return (
            Forward(),
            f"Forward: the iterates alone would take {format_bytes(iterates)}, and λ has only {count} numbers "
            f"({sizes}).",
        )
    try:
        with_less = Reverse(memory=budget)
        plan = with_less.sizes(process).plan(budget, 1)
    except BilevelError:
        return (
            Reverse("sqrt"),
            f"Reverse('sqrt'): the iterates alone would take {format_bytes(iterates)}, and no plan takes less than "
            f"{format_bytes(budget)} ({sizes}).",
        )
    return (
        with_less,
        f"Reverse(memory={budget}): the iterates alone would take {format_bytes(iterates)}; {plan.kept} of them and "
        f"{plan.steps:,} steps to compute the others fit ({sizes}).",
    )
