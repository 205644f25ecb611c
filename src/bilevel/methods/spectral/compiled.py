"""The compiled form of `Spectral`: the whole derivative as one function of λ, w_0, the settings and the data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from bilevel.engine.kernels import Kernel, compile_function, form_of, key_orders
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.spectral.gradients import QuadraticDerivative, Start, differentiate


@dataclass(frozen=True)
class CompiledDerivative:
    """`differentiate` for starts of one form.

    Attributes:
        reached: which variables the code returns a gradient for.
        start_form: the shapes and dtypes of w_0 and the settings that the code expects.
    """

    kernel: Kernel
    reached: list[bool]
    start_form: Hashable

    def __call__(self, process: Process, start: Start) -> QuadraticDerivative:
        if _form(start) != self.start_form:
            raise BilevelError(
                "init(lam) or the dynamics gave a w_0 or settings of another shape, dtype or dependence on λ than when "
                "this was compiled. Call bilevel.compile(...) again."
            )
        results = iter(self.kernel(*_inputs(process, start)))
        value, misfit = next(results), next(results)
        leaves = [next(results) for _ in start.leaves]
        gradients = [next(results) if reached else None for reached in self.reached]
        cotangents = [next(results) if start.depends_on_lam else None for _ in leaves]
        if start.learned:
            cotangents += [next(results) for _ in start.settings]
        return QuadraticDerivative(value, leaves, misfit, gradients, cotangents)


def compile_derivative(process: Process, start: Start, axis: int | None) -> CompiledDerivative:
    """Compile the two objectives. w_0 and the settings of the dynamics are inputs, computed at every call."""
    count, size = len(process.variables), len(start.leaves)
    rest = count + size + len(start.settings)
    reached = [False] * count

    def function(*flat: Tensor) -> list[Tensor]:
        variables = [x.detach().requires_grad_() for x in flat[:count]]
        settings = [x.detach().requires_grad_(start.learned) for x in flat[count + size : rest]]
        begin = Start([x.detach() for x in flat[count : count + size]], start.spec, settings)
        bound = process.bind(variables, flat[rest:])
        found = differentiate(bound, variables, begin, process.steps, axis)
        reached[:] = [g is not None for g in found.gradients]
        cotangents = found.cotangents[0 if start.depends_on_lam else size :]
        parts = [g for g in (*found.gradients, *cotangents) if g is not None]
        return [found.value, found.misfit, *found.leaves, *parts]

    return CompiledDerivative(compile_function(function, _inputs(process, start)), reached, _form(start))


def _inputs(process: Process, start: Start) -> list[Tensor]:
    return [*process.variables, *start.leaves, *start.settings, *process.data()]


def _form(start: Start) -> Hashable:
    forms = [form_of(tensor) for tensor in (*start.leaves, *start.settings)]
    orders = key_orders(start.spec.unflatten(start.leaves))
    return start.spec, orders, tuple(forms), start.depends_on_lam, start.learned
