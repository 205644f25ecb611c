"""Forward mode: the derivative of w_t in λ is computed together with w_t."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Gradients, Process, live_copy
from bilevel.engine.products import are_transposed, jacobian_vector_products
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# Larger tangents do not fit into the processor's cache, and operations on them are limited by memory bandwidth.
CACHE_BYTES = 2 * 1024**2


@dataclass(frozen=True)
class Forward(Method):
    """Z_t = (∂Φ_t/∂w) Z_{t−1} + ∂Φ_t/∂λ, then ∇f_T = ∇_λ E + ∇_w E · Z_T (Franceschi et al., 2017).

    Memory does not grow with T but with the size of λ: Z has as many columns as λ has numbers, all propagated at once.
    It suits few hyperparameters and very many steps. Continued online, it is real-time hyperparameter optimisation.

    Args:
        chunk: propagate at most this many columns at once; None chooses as many as fit into the processor's cache.
    """

    chunk: int | None = None

    def check(self, process: Process) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise BilevelError(f"Forward(chunk={self.chunk}) propagates no column; pass chunk ≥ 1 or None.")
        previous = process.previous
        if previous is None or previous.tangents is None:
            return
        if [leaf.shape for leaf in trees.leaves(previous.grad)] != [leaf.shape for leaf in trees.leaves(process.lam)]:
            raise BilevelError(
                f"start= is a result for a λ of {trees.describe(previous.grad)}, and Forward goes on with the "
                f"derivatives of its w in that λ. Now λ is {trees.describe(process.lam)}. Pass start=result.inner, "
                "which has no derivatives, or go on with the same λ."
            )

    def prepare(self, process: Process) -> None:
        """Check that the Jacobian-vector products of this method agree with reverse mode."""
        if not process.problem.check_derivatives:
            return
        bound, variables = process.bound, process.variables
        with torch.enable_grad():
            start = bound.start()
            # After a step, because derivatives may be zero where w is 0.
            leaves, live = live_copy(bound.step(start, process.times[0]) if process.steps else start)
            after = bound.step(live, process.times[0]) if process.steps else ()
        inputs = [leaf for leaf in leaves if trees.is_variable(leaf)] + variables
        parts = {"encode": process.encoded, "init": trees.leaves(start), "dynamics": trees.leaves(after)}
        for name, outputs in parts.items():
            try:
                fine = are_transposed(outputs, variables[: process.outer_count] if name == "encode" else inputs)
            except RuntimeError as error:
                if name == "encode":
                    continue  # `push_forward` raises an error that says what is wrong
                raise BilevelError(
                    f"Forward cannot differentiate {name} twice, as it has to. torch says: {str(error).rstrip('.')}. "
                    "Use Reverse(), which differentiates it once."
                ) from error
            if not fine:
                raise BilevelError(
                    f"Forward cannot differentiate {name}: something in it can be differentiated once only and does "
                    "not say so, such as a custom autograd.Function with once_differentiable. Use Reverse(), which "
                    "differentiates it once."
                )

    def __call__(self, process: Process) -> Hypergradient:
        bound, variables = process.bound, process.variables
        directions = process.push_forward(_unit_directions(variables[: process.outer_count]))
        columns = sum(leaf.numel() for leaf in variables[: process.outer_count])

        previous = process.previous
        with torch.enable_grad():
            state = bound.start()
        if previous is not None and previous.tangents is not None:
            tangents: list[Tensor | None] = previous.tangents
        else:
            tangents = self._push(trees.leaves(state), variables, directions, columns)
        memory = 0
        for t in process.times:
            leaves, live = live_copy(state)
            with torch.enable_grad():
                state = bound.step(live, t)
            inputs = [(leaf, z) for leaf, z in zip(leaves, tangents, strict=True) if trees.is_variable(leaf)]
            sources = [leaf for leaf, _ in inputs] + variables
            tangents = self._push(trees.leaves(state), sources, [z for _, z in inputs] + directions, columns)
            memory = max(memory, trees.nbytes([z for z in tangents if z is not None]))

        state = trees.detach(state)
        value, alpha, direct, _ = process.outer_gradients(state)
        total: Tensor | None = None
        for cotangent, tangent in [*zip(alpha, tangents, strict=True), *zip(direct, directions, strict=True)]:
            if cotangent is not None and tangent is not None:
                part = tangent.reshape(columns, -1) @ cotangent.reshape(-1).to(tangent.dtype)
                total = part if total is None else total + part
        lam = variables[: process.outer_count]
        vector = lam[0].new_zeros(columns) if total is None else total
        pieces: Gradients = [piece.to(leaf) for piece, leaf in zip(trees.from_vector(vector, lam), lam, strict=True)]
        return self.result(
            process,
            value,
            state,
            pieces,
            pulled=True,
            extra={"tangents": tangents},
            steps=process.steps,
            replayed=process.steps,
            peak_memory=memory,
        )

    def _push(
        self, outputs: Tree, inputs: list[Tensor], tangents: list[Tensor | None], columns: int
    ) -> list[Tensor | None]:
        chunk = self.chunk or max(1, CACHE_BYTES // max(1, trees.nbytes(outputs)))
        if chunk >= columns:
            return jacobian_vector_products(outputs, inputs, tangents)
        pieces = [
            jacobian_vector_products(outputs, inputs, [None if z is None else z[i : i + chunk] for z in tangents])
            for i in range(0, columns, chunk)
        ]
        return [None if parts[0] is None else torch.cat(parts) for parts in zip(*pieces, strict=True)]

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(chunk=2)]


def _unit_directions(lam: list[Tensor]) -> list[Tensor | None]:
    """The identity in λ, as one batch of tangents per leaf."""
    columns = sum(leaf.numel() for leaf in lam)
    directions: list[Tensor | None] = []
    first = 0
    for leaf in lam:
        block = leaf.new_zeros(columns, leaf.numel())
        block[first : first + leaf.numel()].fill_diagonal_(1.0)
        directions.append(block.reshape(columns, *leaf.shape))
        first += leaf.numel()
    return directions
