"""Learning a representation over a stream of episodes: Algorithm 1 inside an outer optimiser, as a resumable job."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.data import ImageDataset, load
from bilevel.data.base import source
from bilevel.errors import BilevelError
from bilevel.meta import library
from bilevel.meta.evaluation import GROUP, judge
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.settings import Settings
from bilevel.methods.first_order import FirstOrder
from bilevel.methods.reverse import Reverse
from bilevel.problem import Task
from bilevel.side_by_side import one_thread
from bilevel.tasks.episodes import Episodes
from bilevel.training.distributed import World
from bilevel.training.stopping import StopRequest

METHODS = {"reverse": Reverse(), "first-order": FirstOrder()}
# Validation and test episodes must not be training's, and every split needs its own stream.
STREAMS = {"train": 0, "val": 1, "test": 2}
RUNNING_MOMENTUM = 0.1
# Shares of the classes for train, val and test where a data set is just a folder of classes.
FRACTIONS = (0.64, 0.16, 0.2)


def open_data(settings: Settings, data_root: Path | None = None) -> ImageDataset:
    """The data set that the settings name; its classes are split by their seed where the data bring no split."""
    wanted = source(settings.dataset, {})
    known = {f.name for f in fields(wanted)}
    extra: dict[str, Any] = {"seed": settings.seed} if "seed" in known else {}
    if "fractions" in known:
        extra["fractions"] = FRACTIONS
    if settings.image_size:
        if "size" not in known:
            raise BilevelError(
                f"image_size={settings.image_size} is for folders of images; {settings.dataset} comes in one size. "
                "Leave it out."
            )
        extra["size"] = settings.image_size
    return load(settings.dataset, data_root, **extra)


def episodes(settings: Settings, data: ImageDataset, split: str, seed: int | None = None) -> Episodes:
    """The stream of a split; episode i is a function of the seed, the split and i."""
    settings = settings if seed is None else replace(settings, seed=seed)
    return Episodes(
        data,
        split,
        settings.ways,
        settings.shots,
        settings.queries,
        seed=settings.seed * len(STREAMS) + STREAMS[split],
        rotations=settings.rotations,
    )


def training_episodes(settings: Settings, data: ImageDataset) -> Episodes:
    """The stream that is learned from: more shots, or no queries, where the settings say so."""
    shots = settings.train_shots or settings.shots
    queries = 0 if settings.outer == "support" else settings.queries
    return replace(episodes(settings, data, "train"), shots=shots, queries=queries)


def new_learner(settings: Settings, data: ImageDataset, module: nn.Module | None = None) -> HyperRepresentation:
    """A learner with fresh weights, or of a module of one's own."""
    height, width, channels = data.shape
    try:
        return HyperRepresentation(
            settings.network if module is None else module,
            (channels, height, width),
            seed=settings.seed,
            steps=settings.steps,
            inner_lr=settings.inner_lr,
            step_bound=settings.step_bound,
            l2=settings.l2,
            batch_norm=settings.batch_norm,
            method=METHODS[settings.method],
        )
    except RuntimeError as error:  # what torch says of a picture that pooling has used up
        raise BilevelError(
            f"The network {settings.network} does not take images of {width}×{height} pixels ({error}). Choose another "
            "network or image_size."
        ) from error


class FewShotTraining:
    """The job of `bilevel train`: λ ← λ − Adam(mean over the meta-batch of ∇f_T), k = 1, 2, …

    Args:
        settings: what to do.
        data: where the episodes come from.
        world: the processes that share every meta-batch; the result is the same, bit for bit, for any number.
    """

    def __init__(self, settings: Settings, data: ImageDataset, world: World | None = None) -> None:
        self.settings, self.data, self.world = settings, data, world or World()
        self.learner = self._new_learner().to(self.world.device)
        if settings.initial:
            self.learner.set_weights({**self.learner.with_running({}), **library.find(settings.initial).learner.lam})
        self.train, self.val = training_episodes(settings, data), episodes(settings, data, "val")
        self.optimizer = torch.optim.Adam(self.learner.lam.values(), lr=settings.lr)
        self.mean = {name: value.clone() for name, value in self.learner.lam.items()} if settings.average else {}

    def _new_learner(self) -> HyperRepresentation:
        return new_learner(self.settings, self.data)

    # ------------------------------------------------------------------------------------------- the job

    def step(self, iteration: int, stop: StopRequest | bool = False) -> tuple[dict[str, float], bool]:
        settings, began = self.settings, time.perf_counter()
        groups = self._groups(iteration)
        mine = self.world.share(groups)
        total = torch.zeros_like(self._flat(torch.zeros(()), self.learner.lam, self.learner.running()))
        # Group by group and in their order, so that the sum does not depend on who computed which.
        with closing(self._sums(mine)) as sums:
            for row in self.world.gather(sums, len(groups), like=total):
                total += row
        self._update(total / settings.meta_batch, iteration)
        seconds = time.perf_counter() - began
        rate = settings.meta_batch * self._images() / seconds
        return {"loss": float(total[0]) / settings.meta_batch, "images_per_second": rate}, self.world.any(bool(stop))

    def _groups(self, iteration: int) -> list[range]:
        """The episodes of a hyperiteration, in groups whose classifiers take their steps together.

        Larger groups are faster; four of them can still be shared by four processes.
        """
        count = self.settings.meta_batch
        size = max(1, min(self.learner.chunk, count // 4))
        numbers = range((iteration - 1) * count, iteration * count)
        return [numbers[begin : begin + size] for begin in range(0, count, size)]

    def _sums(self, groups: Sequence[range]) -> Generator[Tensor, None, None]:
        return self.learner.representation.each(self._sum, groups)

    def _sum(self, group: range) -> Tensor:
        """f_T, ∇f_T and the statistics that batch norm's running averages are made of, added up, in one vector."""
        with self.learner.watching() as seen:
            value, grads = self.learner.hypergradient(self._episodes(group))
        return self._flat(value, grads, seen()) * len(group)

    def _episodes(self, group: range) -> Task:
        """The episodes of a group; where the outer objective is on the support set, that is both their sets."""
        drawn = self.train.batch(group)
        return Task(drawn.train, drawn.train) if self.settings.outer == "support" else drawn

    def _flat(self, value: Tensor, grads: Mapping[str, Tensor], statistics: list[Tensor]) -> Tensor:
        leaves = list(grads.values())
        return torch.cat([x.to(leaves[0]).reshape(-1) for x in (value, *leaves, *statistics)])

    def _update(self, mean: Tensor, iteration: int) -> None:
        settings, lam, running = self.settings, self.learner.lam, self.learner.running()
        targets = [*lam.values(), *running]
        parts = mean[1:].split_with_sizes([x.numel() for x in targets])
        grads = [part.view(x.shape) for part, x in zip(parts, targets, strict=True)]
        for leaf in lam.values():
            grad = grads.pop(0)
            leaf.grad = grad.clamp(-settings.clip, settings.clip) if settings.clip else grad
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr / (1 + settings.decay * (iteration - 1))
        self.optimizer.step()
        for average, now in zip(running, grads, strict=True):
            average.lerp_(now, RUNNING_MOMENTUM)
        if settings.average:
            # Young averages are plain means, so that the random start is forgotten.
            factor = min(settings.average, iteration / (iteration + 9))
            for name, leaf in self.learner.lam.items():
                self.mean[name].lerp_(leaf, 1 - factor)

    def validate(self, iteration: int, stop: StopRequest | bool = False) -> dict[str, float]:
        count, steps = self.settings.validation_episodes, self.settings.steps
        with self.learner.at(self.weights()):
            score = judge(self.learner, self.val, count, steps, self.world, stop=stop)
        return {"score": score.means[-1], "interval": score.intervals[-1]}

    def state(self) -> dict[str, Tensor]:
        tensors = {f"lam/{name}": value for name, value in self.learner.lam.items()}
        tensors |= {f"running/{i}": value for i, value in enumerate(self.learner.running())}
        tensors |= {f"mean/{name}": value for name, value in self.mean.items()}
        for name, leaf in self.learner.lam.items():
            for key, value in self.optimizer.state[leaf].items():
                tensors[f"adam/{key}/{name}"] = value
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        try:
            for name, leaf in self.learner.lam.items():
                leaf.copy_(state[f"lam/{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq")
                found = {key: state.get(f"adam/{key}/{name}") for key in keys}
                if found["step"] is not None:
                    self.optimizer.state[leaf] = {key: _like(leaf, key, value) for key, value in found.items()}
            for i, running in enumerate(self.learner.running()):
                running.copy_(state[f"running/{i}"])
            for name, mean in self.mean.items():
                mean.copy_(state[f"mean/{name}"])
        except (KeyError, RuntimeError) as error:
            raise BilevelError(f"The checkpoint does not fit the settings: {error}.") from error

    def weights(self) -> dict[str, Tensor]:
        return self.learner.with_running(self.mean or self.learner.lam)

    # ------------------------------------------------------------------------------------------- how long

    def _images(self) -> int:
        return self.settings.ways * (self.train.shots + self.train.queries)

    def estimate(self) -> Estimate:
        """Time and memory, measured on one group of episodes; nothing is learned from it."""
        settings, groups = self.settings, self._groups(1)
        batch, looked = self._episodes(groups[0]), self.val.batch(range(self.learner.chunk))
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        side_by_side = self.world.size * (1 if self.learner.representation.alone() else torch.get_num_threads())
        with one_thread() if side_by_side > self.world.size else nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                self.learner.hypergradient(batch)
            step = _seconds(lambda: self.learner.hypergradient(batch)) * ceil(len(groups) / side_by_side)
            look = _seconds(lambda: self.learner.accuracies(looked, settings.steps)) / self.learner.chunk
        weights = sum(leaf.nbytes for leaf in self.learner.lam.values())
        copies = 6 + (len(groups) if self.world.size > 1 else 0)  # λ, its gradient, Adam's; what is gathered
        images = GROUP * (looked.train[0].nbytes + looked.val[0].nbytes) // self.learner.chunk
        return Estimate(
            seconds=step,
            validation_seconds=look * settings.validation_episodes / side_by_side,
            # Going back needs about as much as was kept on the way, and episodes are cut from a copy of their images.
            bytes=2 * sum(kept.values()) * (side_by_side // self.world.size) + copies * weights + 2 * images,
        )


@dataclass(frozen=True)
class Estimate:
    """What a run will need: seconds for a hyperiteration and a validation, and bytes beyond what torch itself takes."""

    seconds: float
    validation_seconds: float
    bytes: int

    def total(self, iterations: int, validate_every: int) -> float:
        """Seconds for so many hyperiterations, with the validations before, between and after them."""
        return self.seconds * iterations + self.validation_seconds * (1 + ceil(iterations / validate_every))

    def describe(self, iterations: int, validate_every: int) -> str:
        return (
            f"about {self.seconds:.2f} s a hyperiteration and {self.validation_seconds:.1f} s a validation, "
            f"{duration(self.total(iterations, validate_every))} for {iterations:,} hyperiterations, and "
            f"{self.bytes / 1e6:,.0f} MB of memory beyond torch's own"
        )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def duration(seconds: float) -> str:
    """A time that people can read.

    >>> duration(90), duration(9000), duration(7)
    ('1.5 minutes', '2.5 hours', '7 seconds')
    """
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _like(leaf: Tensor, key: str, value: Tensor | None) -> Tensor:
    assert value is not None
    return value.clone() if key == "step" else torch.empty_like(leaf).copy_(value)
