"""`method="auto"`: which way to the hypergradient fits the sizes at hand, and why."""

from __future__ import annotations

import torch

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.checks import check_process
from bilevel.methods.forward import Forward
from bilevel.methods.process import Process
from bilevel.methods.reverse import Reverse
from bilevel.methods.spectral import Spectral
from bilevel.methods.unrolled import Unrolled

# What a method may keep before the next thriftier one is taken.
BUDGET = 2 * 1024**3


def run_best(process: Process) -> tuple[Hypergradient, str]:
    """The hypergradient by the method that fits, and why; a closed form that turns out not to hold is given up."""
    method, reason = choose(process)
    try:
        return method(process), reason
    except BilevelError:
        if not isinstance(method, Spectral):
            raise
    method, reason = choose(process, closed_form=False)
    return method(process), reason


def choose(process: Process, budget: int = BUDGET, closed_form: bool = True) -> tuple[Method, str]:
    """The method and a sentence that says why.

    All candidates are exact, so the choice changes time and memory and nothing else.
    """
    steps = process.steps
    with torch.no_grad():
        state = process.bound.start()
    size, count = trees.size(state[0]), sum(v.numel() for v in process.variables[: process.outer_count])
    sizes = f"w has {size:,} numbers, λ {count:,}, T = {steps:,}"

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
    graph, iterates = steps * process.findings["graph bytes"] if steps else 0, steps * trees.nbytes(state)
    if graph <= budget:
        return Unrolled(), f"Unrolled: recording all steps takes about {_amount(graph)}, which fits ({sizes})."
    if iterates <= budget:
        return (
            Reverse(),
            f"Reverse: recording all steps would take about {_amount(graph)}, the iterates alone {_amount(iterates)} "
            f"({sizes}).",
        )
    if count <= 8:
        return (
            Forward(),
            f"Forward: the iterates alone would take {_amount(iterates)}, and λ has only {count} numbers ({sizes}).",
        )
    return (
        Reverse("sqrt"),
        f"Reverse('sqrt'): the iterates alone would take {_amount(iterates)}; √T checkpoints and one more forward pass "
        f"do ({sizes}).",
    )


def _amount(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
