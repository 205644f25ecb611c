"""Operations that torch cannot differentiate twice, replaced by equal ones that it can."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from bilevel.engine.memory import Memory

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
# torch.nn.utils.parametrizations.weight_norm calls this private function; a torch without it needs no replacement.
WEIGHT_NORM = getattr(torch, "_weight_norm", None)


class TwiceDifferentiable(TorchFunctionMode):
    """Inside this mode, the derivatives of a gradient exist and are correct.

    Fused attention has no second derivative; attention by matrix products has. The sparse gradient of an embedding
    loses its own derivative. The double backward of weight normalisation is wrong on CPUs (torch 2.13).

    Attributes:
        used: whether something had to be replaced. Every operation costs a few microseconds more inside this mode, so
            only the problems that need it are run in it.
    """

    used = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTION:
            self.used = True
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func is F.embedding and kwargs.get("sparse"):
            self.used = True
            return func(*args, **{**kwargs, "sparse": False})
        if func is WEIGHT_NORM:
            self.used = True
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def eagerly() -> AbstractContextManager[Any]:
    """Inside this context, functions compiled by `torch.compile`, which have first derivatives only, run uncompiled."""
    # If something is compiled, this module is already imported. Importing it takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _eagerly_twice_differentiable() -> Iterator[None]:
    with eagerly(), TwiceDifferentiable():
        yield


def differentiable_twice(memory: Memory) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which the functions of a problem have correct second derivatives, as its checks found."""
    if memory.runs_uncompiled:
        return _eagerly_twice_differentiable
    return TwiceDifferentiable if memory.replaces_operations else nullcontext
