"""Products with Jacobians: forward mode by reverse mode applied twice, and batches of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def jacobian_vector_products(
    outputs: Sequence[Any], inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """A batch of forward-mode products ∂outputs/∂inputs · tangents, from reverse mode applied twice.

    u ↦ uᵀJ is linear in u, so its derivative in u along a tangent is J·tangent, at any point u. Tangents have one
    leading batch axis; None stands for zero.
    """
    heads = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    with torch.enable_grad():
        dummies = [torch.zeros_like(head, requires_grad=True) for head in heads]
        pulled = torch.autograd.grad(heads, inputs, dummies, create_graph=True, allow_unused=True) if heads else ()
    used = [
        (p, v)
        for p, v in zip(pulled, tangents, strict=bool(heads))
        if p is not None and v is not None and p.requires_grad
    ]
    if not used:
        return [None] * len(outputs)
    forms, directions = zip(*used, strict=True)
    pushed = iter(batched_grad(forms, dummies, directions, retain_graph=True))
    return [next(pushed) if isinstance(out, Tensor) and out.requires_grad else None for out in outputs]


def are_transposed(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    """Whether `jacobian_vector_products` and reverse mode use the same Jacobian: ⟨u, J v⟩ = ⟨uᵀJ, v⟩ for random u, v.

    They do not if an operation can be differentiated once only and raises no error.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)

    heads = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not heads:
        return True
    u, v = [noise(head) for head in heads], [noise(leaf) for leaf in inputs]
    pushed = jacobian_vector_products(heads, inputs, [part.unsqueeze(0) for part in v])
    pulled = torch.autograd.grad(heads, inputs, u, allow_unused=True, retain_graph=True)
    sides = [
        [float((a * b).sum()) for a, b in zip(side, noises, strict=True) if a is not None]
        for side, noises in ((pushed, u), (pulled, v))
    ]
    size = sum(abs(term) for side in sides for term in side)
    lower = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    eps = max(torch.finfo(dtype).eps for dtype in (*(tensor.dtype for tensor in (*heads, *inputs)), *lower))
    return not abs(sum(sides[0]) - sum(sides[1])) > eps**0.5 * size


def batched_grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], **options: Any
) -> tuple[Any, ...]:
    """`torch.autograd.grad` for a batch of cotangents at once, or one by one if an operation, such as a product with a
    sparse matrix, has no batched form. The options must retain the graph."""
    options = {"allow_unused": True, **options}
    try:
        return torch.autograd.grad(outputs, inputs, cotangents, is_grads_batched=True, **options)
    except RuntimeError:
        rows = [torch.autograd.grad(outputs, inputs, row, **options) for row in zip(*cotangents, strict=True)]
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True))
