"""h_λ: a module whose weights are λ, and what its batch norms normalise by."""

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
from bilevel.models._blocks import per_image
from bilevel.models._networks import networks
from bilevel.models.batch_norm import BatchNorm, Mode, converted, layers, using
from bilevel.thread_pool import map_in_threads

Item = TypeVar("Item")
Result = TypeVar("Result")
# Leaves of λ beside the module's, where features are normalised: what is subtracted, and the logarithm of their length.
CENTRE, LENGTH = "normalised.centre", "normalised.length"
# Below this length a feature vector has no direction worth the name, and dividing by it would blow it up.
SHORTEST = 1e-6
# Pictures that pass through the network together, whole episodes of them. More of them make larger matrix products;
# too many leave the processor's cache.
TOGETHER_BYTES = 1024**2


class Representation:
    """Features of images for given weights, with the constant feature of the bias at the end.

    With `normalise`, the module's features φ are centred and brought to one length, exp(ℓ)·(φ − c)/‖φ − c‖. The centre
    c and ℓ are leaves of λ and differentiated like the module's weights. With `mirror`, φ is the mean of the module's
    features of a picture and of its mirror image.

    Args:
        module: from images N×C×H×W to features N×F; it is copied, and runs as in evaluation except for batch norm.
        batch_norm: see `bilevel.models.batch_norm.MEANING`.
        normalise: whether features are centred and of one length.
        mirror: whether features are the mean over a picture and its mirror image; it takes twice the time.
    """

    def __init__(self, module: nn.Module, batch_norm: Mode, normalise: bool = False, mirror: bool = False) -> None:
        ours = converted(copy.deepcopy(module)).eval().requires_grad_(False)
        self.module: nn.Module = ours.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norms: dict[str, BatchNorm] = layers(self.module)
        self.batch_norm, self.normalise, self.mirror = batch_norm, normalise, mirror
        self.names = [name for name, _ in self.module.named_parameters()]
        self.parts = nn.ModuleDict()
        self._fuses = True
        self._lent = threading.local()

    def raw(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The module's own features, or their mean over the pictures and their mirror images."""
        weights = {name: lam[name] for name in self.names}
        images = images.to(next(iter(weights.values()))) if weights else images
        features: Tensor = torch.func.functional_call(self.module, weights, (images,))
        if self.mirror:
            features = (features + torch.func.functional_call(self.module, weights, (images.flip(-1),))) / 2
        return features

    def add_part(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """Hold another module, whose parameters are leaves of λ under `name.…`; the leaves. Its batch norms normalise
        by the batch at hand."""
        self.parts[name] = converted(copy.deepcopy(module)).eval().requires_grad_(False)
        return {f"{name}.{key}": value.detach().clone() for key, value in self.parts[name].named_parameters()}

    def part(self, name: str, lam: Mapping[str, Tensor], *arguments: Any) -> Any:
        """The part of that name with the weights in λ."""
        module = self.parts[name]
        weights = {key: lam[f"{name}.{key}"] for key, _ in module.named_parameters()}
        return torch.func.functional_call(module, weights, arguments)

    def features(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images."""
        features = self.raw(lam, images)
        if self.normalise:
            centred = features - lam[CENTRE]
            length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).clamp(min=SHORTEST)
            features = lam[LENGTH].exp() * centred / length
        return heads.with_one(features)

    def together(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images that batch norm takes for one set."""
        with using(self.norms, "own", self._one_set(images)):
            return self.features(lam, images)

    def networks(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The features of networks × images, each set by the network of that number: the leaves of `weights` have a
        first axis for the networks. Batch norm takes the images of a network for one set."""
        together = networks(self.module, images)
        if together is not None and not self.normalise and not self.mirror:
            return heads.with_one(together(weights, images.to(next(iter(weights.values())))))
        leaves = zip(*(torch.unbind(weights[name]) for name in self.names), strict=True)
        rows = [
            self.together(dict(zip(self.names, own, strict=True)), x) for own, x in zip(leaves, images, strict=True)
        ]
        return torch.stack(rows)

    def mean(self, lam: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The mean of the module's own features over images that batch norm takes for one set."""
        with using(self.norms, "own", self._one_set(images)):
            return self.raw(lam, images).mean(0)

    def _one_set(self, images: Tensor) -> list[int] | None:
        return [len(images)] if self._fuses and per_image(self.module) else None

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside the block `together` uses torch's own layers, which are faster where they are differentiated twice:
        the fused ones then compute their results again."""
        before, self._fuses = self._fuses, False
        try:
            yield
        finally:
            self._fuses = before

    def sets(
        self, lam: Mapping[str, Tensor], support: Tensor, query: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """The features of a support and a query set; batch norm decides what one may know of the other."""
        if self.batch_norm == "support" and self.norms:
            with using(self.norms, "keep"):
                known = self.features(lam, support)
            with using(self.norms, "kept"):
                return known, self.features(lam, query)
        if self.batch_norm == "running" and not training:
            with using(self.norms, "running"):
                return self.features(lam, support), self.features(lam, query)
        if self.batch_norm == "running":
            known, asked = torch.split(self.together(lam, torch.cat([support, query])), [len(support), len(query)])
            return known, asked
        if per_image(self.module):
            known, asked = self.episodes(lam, support[None], query[None], training=training)
            return known[0], asked[0]
        return self.features(lam, support), self.features(lam, query)

    def episodes(
        self, lam: Mapping[str, Tensor], images: Tensor, queries: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """`sets` of stacked episodes, stacked."""
        if (self.batch_norm == "support" and self.norms) or not per_image(self.module):
            pairs = (self.sets(lam, *pair, training=training) for pair in zip(images, queries, strict=True))
            support, query = (torch.stack(part) for part in zip(*pairs, strict=True))
            return support, query
        # Both sets together, because a convolution of a few images is far from as fast as one of many. Where one tensor
        # is both sets, its features are computed once.
        parts = [images] if queries is images else [images, queries]
        sizes = [part.shape[1] for part in parts]
        stacks = torch.cat(parts, 1)
        by, sets = "own", sizes
        if self.batch_norm == "running":  # in training an episode is one batch; afterwards every image stands alone
            by, sets = ("own", [sum(sizes)]) if training else ("running", [])
        features = []
        for group in torch.split(stacks, max(1, TOGETHER_BYTES // max(1, stacks[0].nbytes))):
            with using(self.norms, by, sets * len(group) or None):
                features.append(self.features(lam, group.flatten(0, 1)).view(*group.shape[:2], -1))
        found = torch.split(torch.cat(features), sizes, 1)
        return found[0], found[-1]

    # ------------------------------------------------------------------------------------------- threads

    def here(self) -> Representation:
        """Itself, or the copy that this thread was lent: a module cannot be used by two threads at a time."""
        mine: Representation = getattr(self._lent, "mine", self)
        return mine

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Generator[Result, None, None]:
        """work(item) of every item, which may use this representation, on all of torch's threads where possible."""
        threads = torch.get_num_threads()
        if self.alone():
            yield from map(work, items)
        else:
            yield from map_in_threads(self.lending(work, threads) if threads > 1 else work, items)

    def alone(self) -> bool:
        """Whether one thread at a time uses it: a graphics card needs no more, and modes of torch hold for the thread
        that chose them."""
        modes = torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
        return modes or any(x.device.type != "cpu" for x in self.module.parameters())

    def lending(self, work: Callable[[Item], Result], copies: int) -> Callable[[Item], Result]:
        """The same work, for so many threads at a time: each finds a copy `here`."""
        free: SimpleQueue[Representation] = SimpleQueue()
        # λ is passed to every call, and averages change in place, so copies share both.
        shared = {id(x): x for module in (self.module, self.parts) for x in (*module.parameters(), *module.buffers())}
        for _ in range(copies):
            mine = copy.copy(self)
            mine.module = copy.deepcopy(self.module, dict(shared))
            mine.parts = copy.deepcopy(self.parts, dict(shared))
            mine.norms = layers(mine.module)
            free.put(mine)

        def lent(item: Item) -> Result:
            self._lent.mine = free.get()
            try:
                return work(item)
            finally:
                free.put(self._lent.mine)
                del self._lent.mine

        return lent

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lent"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lent = threading.local()
