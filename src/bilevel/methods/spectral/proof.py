"""A proof that an inner objective is quadratic: ∇L is traced once, and the degree in w of every tensor is followed.

Comparing gradients at some points cannot tell a quadratic from a piecewise quadratic: a squared hinge is quadratic near
almost every point. The operations that compute ∇L can: sums, products and squares of polynomials are polynomials,
whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel import trees
from bilevel.engine.graphs import graph_nodes
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# Operations by the degree of their result. An operation that is not listed is assumed not to be a polynomial.
_CONSTANT = "ones_like zeros_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided"
_LINEAR = """
    add sub rsub neg sum mean cat stack copy clone detach alias lift_fresh _to_copy _conj _unsafe_view _reshape_alias
    view reshape permute t transpose unsqueeze squeeze expand repeat as_strided select slice narrow split
    split_with_sizes unbind unfold unfold_backward diagonal diagonal_copy diagonal_backward movedim flip roll tril triu
    trace cumsum constant_pad_nd select_backward slice_backward index index_select gather masked_fill index_fill
    index_add index_put _unsafe_index_put index_copy scatter scatter_add select_scatter slice_scatter diagonal_scatter
    as_strided_scatter where embedding embedding_dense_backward diag_embed fill zero real imag view_as_real
    view_as_complex _fft_r2c _fft_c2r _fft_c2c avg_pool1d avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward
"""
_PRODUCT = "mul mm bmm mv dot vdot ger"
_RULES: dict[str, Callable[..., float | tuple[float, ...]]] = {
    **dict.fromkeys(_CONSTANT.split(), lambda *degrees: 0.0),
    **dict.fromkeys(_LINEAR.split(), lambda *degrees: max(degrees)),
    **dict.fromkeys(_PRODUCT.split(), lambda *degrees: sum(degrees)),
    **dict.fromkeys(
        ("addmm", "addmv", "addr", "addbmm", "baddbmm", "addcmul", "_sparse_addmm"),
        lambda added, one, two: max(added, one + two),
    ),
    "convolution": lambda image, weight, bias=0.0: max(image + weight, bias),
    "convolution_backward": lambda slope, image, weight: (slope + weight, slope + image, slope),
    "div": lambda above, below=0.0: above if below == 0 else math.inf,
    "mse_loss": lambda one, two: 2 * max(one, two),
    "mse_loss_backward": lambda slope, one, two: slope + max(one, two),
    "square": lambda degree: 2 * degree,
    "var": lambda degree: 2 * degree,
}

_EXPORTS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)


def refuse_unless_quadratic(loss: Callable[[Tree], Tensor], w: Tree) -> None:
    """Raise a `BilevelError` unless ∇L is proved to be affine in w. It takes a few times as long as ∇L."""
    reason = why_not_quadratic(loss, w)
    if reason is not None:
        raise BilevelError(
            f"Spectral needs an inner objective that is quadratic in w, but {reason}. Write it with sums, products and "
            "squares where it is one, or use Reverse(), or Implicit() once the inner problem converges."
        )


def why_not_quadratic(loss: Callable[[Tree], Tensor], w: Tree) -> str | None:
    """None if ∇L is proved to be affine in w, for the branches that Python takes in this call; otherwise the reason why
    not.

    >>> why_not_quadratic(lambda w: ((3 * w - 1) ** 2).sum(), torch.ones(2))
    >>> why_not_quadratic(lambda w: (torch.relu(w - 1) ** 2).sum(), torch.ones(2))
    '`relu` of something that depends on w is not known to be a polynomial'
    """
    leaves, spec = trees.flatten(w)
    points = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad(), _Degrees(points) as degrees, _Reads(degrees):
        value = loss(spec.unflatten(points))
        parts = torch.autograd.grad(value, points, allow_unused=True)
    custom = next((node for node in graph_nodes([value]) if isinstance(node, BackwardCFunction)), None)
    if custom is not None:
        return f"what the custom function {type(custom).__name__} computes is not known"
    highest = max((degrees.of(part, unknown=math.inf) for part in parts if part is not None), default=0.0)
    if highest <= 1 and not degrees.read:
        return None
    return degrees.why_not or f"its gradient is a polynomial of degree {highest:g}, not 1"


class _Degrees(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The degree in w of every tensor computed inside this mode, from the operation and the degrees of its inputs.

    A degree belongs to a storage, so that views and in-place results share it. All tensors are kept until the end, so
    that no storage is reused.
    """

    def __init__(self, points: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_memory(point): 1.0 for point in points}
        self._kept: list[Tensor] = []
        self.why_not: str | None = None
        # Python has read a number that depends on w, and may branch on it.
        self.read = False

    def note_read(self) -> None:
        self.read, self.why_not = True, "Python reads numbers that depend on w, and may branch on them"

    def of(self, tensor: Tensor, unknown: float = 0.0) -> float:
        return self._known.get(_memory(tensor), unknown)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        degrees = [self.of(x) for x in _tensors((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        found = self._degree(func, args, kwargs, degrees) if any(degrees) else 0.0
        for out, degree in zip(outputs, found if isinstance(found, tuple) else (found,) * len(outputs), strict=True):
            if isinstance(out, Tensor):
                self._kept.append(out)
                # The result of a comparison, or of rounding to an integer, is not a polynomial.
                real = not degree or out.is_floating_point() or out.is_complex()
                self._known[_memory(out)] = max(self.of(out), degree if real else math.inf)
            elif degree and out is not None:
                self.note_read()
        return result

    def _degree(self, func: Any, args: Any, kwargs: Any, degrees: list[float]) -> float | tuple[float, ...]:
        name = func.overloadpacket.__name__.removesuffix("_")
        degree: float | tuple[float, ...] = math.inf
        # Division may round, and scattering may multiply.
        if func.namespace == "aten" and not (kwargs.get("rounding_mode") or kwargs.get("reduce")):
            if name == "pow" and isinstance(args[1], (int, float)) and args[1] in (0, 1, 2, 3, 4):
                degree = degrees[0] * args[1]
            elif name in _RULES:
                degree = _RULES[name](*degrees)
        if degree == math.inf and math.inf not in degrees:
            self.why_not = self.why_not or f"`{name}` of something that depends on w is not known to be a polynomial"
        return degree


class _Reads(TorchFunctionMode):
    """Note tensors that leave torch as an array or a list, which the dispatcher does not see."""

    def __init__(self, degrees: _Degrees) -> None:
        super().__init__()
        self._degrees = degrees

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXPORTS and self._degrees.of(args[0]):
            self._degrees.note_read()
        return func(*args, **(kwargs or {}))


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _memory(tensor: Tensor) -> int:
    """An identifier of the tensor's storage. A tensor without strides, such as a sparse one, identifies itself."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
