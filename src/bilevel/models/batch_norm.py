"""Batch norm whose statistics are an explicit choice, because scores depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.errors import BilevelError

Mode = Literal["episode", "support", "running"]
MODES: tuple[Mode, ...] = get_args(Mode)
MEANING = {
    "episode": "each set by its own statistics, so queries are classified together (transductive)",
    "support": "the query set by the support set's statistics, so each query is classified independently",
    "running": "by averages kept in training, so every image is classified independently",
}

Statistics = tuple[Tensor, Tensor]
THEIRS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BatchNorm(nn.Module):
    """y = (x − mean)/√(var + eps) · weight + bias over all axes but channels.

    `using` sets which mean and variance the layer uses: "own", the statistics of the batch; "keep", the same, which are
    stored with their graph; "kept", the stored ones; "running", the running averages. With "own" the batch may consist
    of several sets one after the other, with the numbers of images `sizes`, and each set has its own statistics.

    Args:
        channels: the number of channels.
        scale: whether there is a learned weight; the paper's networks have none.
        eps: added to the variance.
    """

    running_mean: Tensor
    running_var: Tensor
    _ones: Tensor

    def __init__(self, channels: int, *, scale: bool = False, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels)) if scale else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("_ones", torch.ones(channels), persistent=False)
        self.by = "own"
        self.sizes: Sequence[int] | None = None
        self.kept: list[Statistics] = []
        self.seen: list[Statistics] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not take over the mode and the statistics of the block that this layer is in.
        return {**self.__dict__, "by": "own", "sizes": None, "kept": [], "seen": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "kept":
            return self._affine(x, *self.kept.pop(0))
        if self.by == "keep":
            self.kept.append(statistics(x))
            return self._affine(x, *self.kept[-1])
        # torch's kernel needs a weight if it has a bias.
        weight = self._ones if self.weight is None and self.bias is not None else self.weight
        if self.by == "running":
            return F.batch_norm(x, self.running_mean, self.running_var, weight, self.bias, False, 0.0, self.eps)
        sets = self._sets(x)
        refuse_single_values(min(part[:, 0].numel() for part in sets))
        parts = [self._normalised(part, weight) for part in sets]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The values normalised by their own statistics, which are appended to `seen` if that is a list."""
        if self.seen is None:
            return F.batch_norm(x, None, None, weight, self.bias, True, 0.0, self.eps)
        # With momentum 1, torch's kernel writes its statistics into the averages; the variance has n − 1 in place of n.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = F.batch_norm(x, mean, variance, weight, self.bias, True, 1.0, self.eps)
        count = x[:, 0].numel()
        self.seen.append((mean, variance * ((count - 1) / count)))
        return y

    def _sets(self, x: Tensor) -> Sequence[Tensor]:
        """The sets that are normalised by their own statistics."""
        # `torch.split` would copy the gradient of a single set.
        return [x] if self.sizes is None or len(self.sizes) == 1 else torch.split(x, list(self.sizes))

    def scale_and_shift(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """weight and bias; ones and zeros, of the type of `like`, for those that the layer does not have."""
        ones = like.new_ones(len(self._ones))
        return ones if self.weight is None else self.weight, 0 * ones if self.bias is None else self.bias

    def note(self, means: Tensor, variances: Tensor) -> None:
        """Append the statistics of every set to `seen`, if that is a list."""
        if self.seen is not None:
            self.seen += zip(means.detach(), variances.detach(), strict=True)

    def _affine(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = [1, -1, *[1] * (x.ndim - 2)]
        return x * scale.view(shape) + shift.view(shape)


def statistics(x: Tensor) -> Statistics:
    """Mean and biased variance of every channel, which batch norm uses."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean = x.mean(axes, keepdim=True)
    # torch.var_mean is slow if channels come last.
    return mean.flatten(), (x - mean).square().mean(axes)


def refuse_single_values(count: int) -> None:
    """Refuse to normalise a set by itself if it has a single value of every channel."""
    if count == 1:
        raise BilevelError(
            "One value per channel has no statistics of its own, so a single image of this size cannot be normalised "
            "by its own set. Pass more images at a time, or use batch_norm='support'."
        )


def has_hooks(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def layers(module: nn.Module) -> dict[str, BatchNorm]:
    """The batch norms of a converted module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}


@contextmanager
def using(norms: dict[str, BatchNorm], by: str, sizes: Sequence[int] | None = None) -> Iterator[None]:
    """Inside the block all layers use these statistics (see `BatchNorm`), set by set if sizes are given."""
    for layer in norms.values():
        layer.by, layer.sizes = by, sizes
        if by == "keep":
            layer.kept = []
    try:
        yield
    finally:
        for layer in norms.values():
            layer.by, layer.sizes = "own", None
            if by == "kept":  # they are used once, and this releases their graph
                layer.kept = []


def converted(module: nn.Module, known: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """The module with torch's batch norms and sequences replaced by ours. Parameters keep their names and values.

    The module is changed in place, unless it is itself a batch norm or a sequence.

    >>> net = converted(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    >>> [name for name, _ in net.named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    known = {} if known is None else known
    if module not in known:
        known[module] = _converted(module, known)
    return known[module]


def _converted(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _ours(module)
    # named_children() lists a layer that has two names only once.
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = converted(child, known)
    from bilevel.models.blocks import fused  # imported here, because that module imports this one

    return fused(module) if isinstance(module, nn.Sequential) else module


def _ours(theirs: nn.modules.batchnorm._BatchNorm) -> BatchNorm:
    if type(theirs) not in THEIRS or has_hooks(theirs):
        raise BilevelError(
            f"{type(theirs).__name__}, a batch norm of your own or one with hooks, cannot follow a batch norm mode. "
            "Use torch's nn.BatchNorm2d as it is, or bilevel.models.batch_norm.BatchNorm."
        )
    ours = BatchNorm(theirs.num_features, scale=theirs.affine, eps=theirs.eps)
    like = theirs.weight if theirs.affine else theirs.running_mean
    if like is not None:
        ours.to(like)
    ours.weight, ours.bias = theirs.weight, theirs.bias
    if theirs.running_mean is not None and theirs.running_var is not None:
        ours.running_mean.copy_(theirs.running_mean)
        ours.running_var.copy_(theirs.running_var)
    return ours
