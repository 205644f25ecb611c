"""The representation h_λ: a module whose weights are λ, and the statistics that its batch norms use."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bilevel.models import heads
from bilevel.models.batch_norm import BatchNorm, Mode, converted, layers, using
from bilevel.models.blocks import per_image
from bilevel.models.networks import networks
from bilevel.thread_pool import map_in_threads

Item = TypeVar("Item")
Result = TypeVar("Result")
# Leaves of λ in addition to the module's, with `normalise`: the centre, and the logarithm of the length.
CENTRE, LENGTH = "normalised.centre", "normalised.length"
# The initial length of normalised features; it is learned.
FIRST_LENGTH = 6.0
# The lower bound of the norm that features are divided by, which avoids a division by zero.
SHORTEST = 1e-6
# The bytes of images that pass through the network together, rounded down to whole episodes. More images make larger
# matrix products, but too many do not fit into the processor's cache.
TOGETHER_BYTES = 1024**2


def first_normalisation(features: int, like: Tensor) -> dict[str, Tensor]:
    """The leaves of λ that `normalise` adds, at the beginning of a training."""
    return {CENTRE: like.new_zeros(features), LENGTH: like.new_tensor(FIRST_LENGTH).log()}


class Representation:
    """The features of images for given weights. The last feature is the constant 1 of the bias.

    With `normalise`, the module's features φ are centred and scaled to one length, exp(ℓ)·(φ − c)/‖φ − c‖. The centre
    c and ℓ are leaves of λ and are differentiated like the module's weights. With `mirror`, φ is the mean of the
    module's features of an image and of its mirror image.

    Args:
        module: from images N×C×H×W to features N×F. It is copied, and runs in evaluation mode except for batch norm.
        batch_norm: see `bilevel.models.batch_norm.MEANING`.
        normalise: whether features are centred and scaled to one length.
        mirror: whether features are the mean over an image and its mirror image, which takes twice the time.
    """

    def __init__(self, module: nn.Module, batch_norm: Mode, normalise: bool = False, mirror: bool = False) -> None:
        own = converted(copy.deepcopy(module)).eval().requires_grad_(False)
        self.module: nn.Module = own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norms: dict[str, BatchNorm] = layers(self.module)
        self.batch_norm, self.normalise, self.mirror = batch_norm, normalise, mirror
        self.names = [name for name, _ in self.module.named_parameters()]
        self.parts = nn.ModuleDict()
        self._fuses = True
        self._local = threading.local()

    def raw(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The module's features, without a constant; with `mirror`, their mean over images and mirror images."""
        weights = {name: lam[name] for name in self.names}
        images = images.to(next(iter(weights.values()))) if weights else images
        features: Tensor = torch.func.functional_call(self.module, weights, (images,))
        if self.mirror:
            features = (features + torch.func.functional_call(self.module, weights, (images.flip(-1),))) / 2
        return features

    def add_part(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """Add another module, and return its parameters as leaves of λ called `name.…`.

        Its batch norms use the statistics of their batch.
        """
        self.parts[name] = converted(copy.deepcopy(module)).eval().requires_grad_(False)
        return {f"{name}.{key}": value.detach().clone() for key, value in self.parts[name].named_parameters()}

    def part(self, name: str, lam: Mapping[str, Tensor], *arguments: Any) -> Any:
        """Run the part of that name with the weights in λ."""
        module = self.parts[name]
        weights = {key: lam[f"{name}.{key}"] for key, _ in module.named_parameters()}
        return torch.func.functional_call(module, weights, arguments)

    def features(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images, N × (F + 1)."""
        features = self.raw(lam, images)
        if self.normalise:
            centred = features - lam[CENTRE]
            length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).clamp(min=SHORTEST)
            features = lam[LENGTH].exp() * centred / length
        return heads.with_one(features)

    def together(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images that batch norm normalises as one set."""
        with using(self.norms, "own", self._one_set(images)):
            return self.features(lam, images)

    def networks(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The features of networks × images, row i computed by network i.

        The leaves of `weights` have a first axis for the networks. Batch norm normalises the images of each network as
        one set.
        """
        together = networks(self.module, images)
        if together is not None and not self.normalise and not self.mirror:
            return heads.with_one(together(weights, images.to(next(iter(weights.values())))))
        leaves = zip(*(torch.unbind(weights[name]) for name in self.names), strict=True)
        pairs = zip(leaves, images, strict=True)
        return torch.stack([self.together(dict(zip(self.names, values, strict=True)), x) for values, x in pairs])

    def independent(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """`raw` of images, each by itself: batch norm uses its running averages."""
        with using(self.norms, "running"):
            return self.raw(lam, images)

    def mean(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The mean of `raw` over images that batch norm normalises as one set."""
        with using(self.norms, "own", self._one_set(images)):
            return self.raw(lam, images).mean(0)

    def _one_set(self, images: Tensor) -> list[int] | None:
        return [len(images)] if self._fuses and per_image(self.module) else None

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside the block, `together` uses torch's layers instead of the fused ones.

        torch's layers are faster if they are differentiated twice, because the fused ones compute their results again.
        """
        before, self._fuses = self._fuses, False
        try:
            yield
        finally:
            self._fuses = before

    def sets(
        self, lam: Mapping[str, Tensor], support: Tensor, query: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """The features of a support and a query set. The batch norm mode defines how the sets affect each other."""
        if self.batch_norm == "support" and self.norms:
            with using(self.norms, "keep"):
                support_features = self.features(lam, support)
            with using(self.norms, "kept"):
                return support_features, self.features(lam, query)
        if self.batch_norm == "running" and not training:
            with using(self.norms, "running"):
                return self.features(lam, support), self.features(lam, query)
        if self.batch_norm == "running":
            features = self.together(lam, torch.cat([support, query]))
            return features[: len(support)], features[len(support) :]
        if per_image(self.module):
            stacked = self.episodes(lam, support[None], query[None], training=training)
            return stacked[0][0], stacked[1][0]
        return self.features(lam, support), self.features(lam, query)

    def episodes(
        self, lam: Mapping[str, Tensor], images: Tensor, queries: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """`sets` for stacked episodes; the results are stacked too."""
        if (self.batch_norm == "support" and self.norms) or not per_image(self.module):
            pairs = (self.sets(lam, *pair, training=training) for pair in zip(images, queries, strict=True))
            support, query = (torch.stack(part) for part in zip(*pairs, strict=True))
            return support, query
        # Both sets pass together, because convolutions of many images are faster per image. If one tensor is both sets,
        # its features are computed once.
        parts = [images] if queries is images else [images, queries]
        sizes = [part.shape[1] for part in parts]
        stacks = torch.cat(parts, 1)
        by, sets = "own", sizes
        if self.batch_norm == "running":  # in training an episode is one batch; afterwards images are independent
            by, sets = ("own", [sum(sizes)]) if training else ("running", [])
        features = []
        for group in torch.split(stacks, max(1, TOGETHER_BYTES // max(1, stacks[0].nbytes))):
            with using(self.norms, by, sets * len(group) or None):
                features.append(self.features(lam, group.flatten(0, 1)).view(*group.shape[:2], -1))
        by_set = torch.split(torch.cat(features), sizes, 1)
        return by_set[0], by_set[-1]

    # ------------------------------------------------------------------------------------------- threads

    def of_this_thread(self) -> Representation:
        """The representation for this thread: the copy that `each` gave it, or `self`.

        Two threads cannot use one module at the same time, because batch norm changes its attributes.
        """
        representation: Representation = getattr(self._local, "copy", self)
        return representation

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Generator[Result, None, None]:
        """work(item) of every item, in order, computed on all of torch's threads if possible.

        `work` may use this representation through `of_this_thread`.
        """
        threads = torch.get_num_threads()
        if self.single_threaded():
            yield from map(work, items)
        else:
            yield from map_in_threads(self._with_copies(work, threads) if threads > 1 else work, items)

    def single_threaded(self) -> bool:
        """Whether `each` uses one thread only: on a graphics card, and under inference mode or autocast, which torch
        sets for one thread."""
        modes = torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
        return modes or any(x.device.type != "cpu" for x in self.module.parameters())

    def _with_copies(self, work: Callable[[Item], Result], copies: int) -> Callable[[Item], Result]:
        """The same work for several threads at a time, each with a copy of the representation."""
        free: SimpleQueue[Representation] = SimpleQueue()
        # The copies share parameters and buffers: λ is passed to every call, and running averages change in place.
        shared = {id(x): x for module in (self.module, self.parts) for x in (*module.parameters(), *module.buffers())}
        for _ in range(copies):
            duplicate = copy.copy(self)
            duplicate.module = copy.deepcopy(self.module, dict(shared))
            duplicate.parts = copy.deepcopy(self.parts, dict(shared))
            duplicate.norms = layers(duplicate.module)
            free.put(duplicate)

        def run(item: Item) -> Result:
            self._local.copy = free.get()
            try:
                return work(item)
            finally:
                free.put(self._local.copy)
                del self._local.copy

        return run

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()
