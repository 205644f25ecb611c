"""Gradient descent on linear classifiers in the span of their examples: exact, and fast if examples are few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.engine.graphs import reached
from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Process, accumulate
from bilevel.errors import BilevelError
from bilevel.structures.data_checks import computes_as
from bilevel.structures.linear_classifiers import LinearClassifiers


@dataclass(frozen=True)
class DualDescent(Method):
    """Reverse mode for `LinearClassifiers` and gradient descent from w_0 = 0, in the span of the training features.

    Every iterate is a combination of the examples' features, w_t = ΦᵀA_t, and so are the adjoints, up to a multiple of
    α_T = ∇_w E. With K = ΦΦᵀ, P_t = softmax(K A_t), J_t the derivative of that softmax and d = 1 − lr·l2

        A_{t+1} = d A_t − lr/n (P_t − Y),      u_T = Φ α_T,   u_t = d u_{t+1} − lr/n K J_t u_{t+1}

    so a step costs examples² operations per class instead of examples × features: 25 in a 5-way 1-shot episode. ∇E in Φ
    takes three matrix products at the end. E may be any outer objective.
    """

    sees_dynamics = False
    structure = LinearClassifiers

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the outer objective"})

    def check(self, process: Process) -> None:
        inner, dynamics, task = process.problem.inner, process.bound.dynamics, process.bound.task
        if not computes_as(inner, LinearClassifiers):
            raise BilevelError(
                "DualDescent is for problems whose `inner` is a bilevel.structures.LinearClassifiers; this one is "
                "another function. Use Reverse(), or write inner=LinearClassifiers()."
            )
        if callable(task.train):
            raise BilevelError("DualDescent needs one batch for all steps; task.train is a function. Use Reverse().")
        for t in process.times:
            lr, momentum = dynamics.heavy_ball_form(t) or (None, None)
            if not isinstance(lr, (int, float)) or momentum != 0:
                raise BilevelError(
                    f"DualDescent supports gradient descent with numbers as step sizes, not {dynamics}. Use Reverse()."
                )
        start, labels = process.bound.start()[0], task.train[1]
        if bool(((labels < 0) | (labels >= start.shape[2])).any()):
            raise BilevelError(
                f"DualDescent takes labels from 0 to {start.shape[2] - 1}, and some are others. Use Reverse() if "
                "labels of −100 mark examples to ignore."
            )
        if process.previous is not None or bool(start.any()) or reached([start], process.variables):
            raise BilevelError("DualDescent begins at w_0 = 0, for every λ, and this run does not. Use Reverse().")

    def __call__(self, process: Process) -> Hypergradient:
        inner = process.problem.inner
        assert isinstance(inner, LinearClassifiers)
        (features, labels), times = process.bound.task.train, process.times
        with torch.no_grad():
            start = process.bound.start()
            phi, targets = features.detach(), F.one_hot(labels.long(), start[0].shape[2]).to(features)
            rates = [float(process.bound.dynamics.heavy_ball_form(t)[0]) / labels.shape[1] for t in times]
            decays = [1 - rate * labels.shape[1] * inner.l2 for rate in rates]
            products = phi @ phi.mT
            run = _DualRun(products, targets, rates, decays)
            state = (phi.mT @ run.coefficients[-1], start[1])
        value, (alpha,), direct, last = process.outer_gradients(state)
        gradients = list(direct)
        where = [i for i, variable in enumerate(process.variables) if variable is features]
        if where and alpha is not None:
            with torch.no_grad():
                of_features = run.back(phi, alpha)
            gradients[where[0]] = accumulate(gradients[where[0]], of_features)
        memory = 3 * run.coefficients.nbytes
        return self.result(process, value, last, gradients, steps=len(times), peak_memory=memory, continues=False)


class _DualRun:
    """The coefficients A_0…A_T of the iterates and the probabilities P_t of every step."""

    def __init__(self, products: Tensor, targets: Tensor, rates: list[float], decays: list[float]) -> None:
        self.products, self.rates, self.decays = products, rates, decays
        steps = len(rates)
        self.coefficients = products.new_zeros((steps + 1, *targets.shape))
        self.probabilities = products.new_empty((steps, *targets.shape))
        self.targets = targets
        for t in range(steps):
            torch.softmax(products @ self.coefficients[t], 2, out=self.probabilities[t])
            change = self.probabilities[t] - targets
            torch.sub(decays[t] * self.coefficients[t], change, alpha=rates[t], out=self.coefficients[t + 1])

    def back(self, phi: Tensor, alpha: Tensor) -> Tensor:
        """∇E in Φ through the steps, from α_T = ∇_w E.

        With α_t = (Π d) α_T − Φᵀ b_t, the part of step t is −lr/n [(P_t − Y) α_{t+1}ᵀ + J_t u_{t+1} w_tᵀ], and
        Σ −lr/n (Π d) (P_t − Y) = A_T.
        """
        steps = len(self.rates)
        u, b = phi @ alpha, torch.zeros_like(self.targets)
        slopes, later_b = (torch.empty_like(self.probabilities) for _ in range(2))
        for t in reversed(range(steps)):
            weighted = self.probabilities[t] * u
            torch.addcmul(weighted, self.probabilities[t], weighted.sum(2, keepdim=True), value=-1, out=slopes[t])
            slopes[t] *= self.rates[t]
            later_b[t] = b
            b = self.decays[t] * b + slopes[t]
            u = self.decays[t] * u - self.products @ slopes[t]
        rates = phi.new_tensor(self.rates)[:, None, None, None]
        changes = rates * (self.probabilities - self.targets)
        # One product for all steps: episodes × examples × (steps · classes) on both sides.
        left, right = (
            torch.cat([x.permute(1, 2, 0, 3).flatten(2) for x in pair], 2)
            for pair in ((changes, -slopes), (later_b, self.coefficients[:-1]))
        )
        return self.coefficients[-1] @ alpha.mT + (left @ right.mT) @ phi
