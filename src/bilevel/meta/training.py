"""Learning a representation over a stream of episodes: Algorithm 1 inside an outer optimiser, as a resumable job."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.data import ImageDataset, load
from bilevel.data.base import source
from bilevel.errors import BilevelError
from bilevel.meta import library
from bilevel.meta.class_loss import ClassLoss
from bilevel.meta.evaluation import GROUP, judge
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.representation import CENTRE
from bilevel.meta.settings import Settings
from bilevel.meta.stages import continued
from bilevel.methods.base import Method
from bilevel.methods.first_order import FirstOrder
from bilevel.problem import Task
from bilevel.side_by_side import one_thread
from bilevel.tasks.augmentation import Augmentation
from bilevel.tasks.episodes import Episodes
from bilevel.training.distributed import World
from bilevel.training.folder import RunFolder
from bilevel.training.stopping import StopRequest

# None is the learner's own choice among the exact methods.
METHODS: dict[str, Method | None] = {"reverse": None, "first-order": FirstOrder()}
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
                f"image_size={settings.image_size} is for folders of images and MiniImagenet; {settings.dataset} comes "
                "in one size. Leave it out."
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


def training_episodes(settings: Settings, data: ImageDataset, shots: int = 0) -> Episodes:
    """The stream that is learned from: other ways or shots, or no queries, where the settings say so."""
    return replace(
        episodes(settings, data, "train"),
        ways=settings.ways_in_training,
        shots=shots or settings.shots_in_training,
        queries=0 if settings.outer == "support" else settings.queries,
        augmentation=Augmentation.of(settings.augment),
        with_classes=settings.global_loss > 0,
    )


def training_classes(settings: Settings, data: ImageDataset) -> int:
    """How many classes meta-training has; quarter turns count where they are classes of their own."""
    return len(data.splits["train"]) * (4 if settings.rotations else 1)


def new_learner(settings: Settings, data: ImageDataset, module: nn.Module | None = None) -> HyperRepresentation:
    """A learner with fresh weights, or of a module of one's own."""
    height, width, channels = data.shape
    over_all = settings.learner == "multiclass" or settings.global_loss > 0
    classes = training_classes(settings, data)
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
            normalise=settings.normalise,
            last_relu=settings.last_relu,
            class_loss=ClassLoss(classes, settings.classifier, settings.label_smoothing) if over_all else None,
            class_weight=settings.global_loss,
            method=METHODS[settings.method],
        )
    except RuntimeError as error:  # what torch says of a picture that pooling has used up
        raise BilevelError(
            f"The network {settings.network} does not take images of {width}×{height} pixels ({error}). Choose another "
            "network or image_size."
        ) from error


class FewShotTraining:
    """The job of `bilevel train`: λ moves along the mean over the meta-batch of ∇f_T, by Adam or SGD, k = 1, 2, …

    Args:
        settings: what to do.
        data: where the episodes come from.
        world: the processes that share every meta-batch; the result is the same, bit for bit, for any number.
        folder: the run's own, if it has one: `settings.initial` may be relative to it. Where it holds a checkpoint, the
            weights come from there, and those that the run began with are not looked for.
    """

    def __init__(
        self, settings: Settings, data: ImageDataset, world: World | None = None, folder: Path | None = None
    ) -> None:
        self.settings, self.data, self.world = settings, data, world or World()
        self.learner = self._new_learner().to(self.world.device)
        if settings.initial and (folder is None or not RunFolder(folder).checkpoints.files()):
            continued(self.learner, settings, library.find(settings.initial, near=folder))
        if settings.normalise and not bool(self.learner.lam[CENTRE].any()):
            self.learner.centre(self._sample())
        self.streams = {shots: training_episodes(settings, data, shots) for shots in self._all_shots()}
        self.train, self.val = self.streams[self._shots(1)], episodes(settings, data, "val")
        self.optimizer = self._new_optimizer()
        self.mean = {name: value.clone() for name, value in self.learner.lam.items()} if settings.average else {}

    def _new_learner(self) -> HyperRepresentation:
        return new_learner(self.settings, self.data)

    def _sample(self, count: int = 256) -> Tensor:
        """Images of meta-training, the same at every start, to centre features on."""
        rows = np.flatnonzero(np.isin(self.data.labels, self.data.splits["train"]))
        chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
        return Augmentation()(torch.from_numpy(self.data.images[chosen]), 0, 0).to(self.world.device)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        settings, leaves = self.settings, self.learner.lam.values()
        # Shifts, centres and temperatures are not pulled to zero.
        groups = [
            {"params": [leaf for leaf in leaves if leaf.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [leaf for leaf in leaves if leaf.ndim <= 1], "weight_decay": 0.0},
        ]
        if settings.optimizer == "sgd":
            nesterov = settings.momentum > 0
            return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
        kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
        return kind(groups, lr=settings.lr)

    def _all_shots(self) -> range:
        least = self.settings.shots_in_training
        return range(least, max(least, self.settings.most_shots) + 1)

    def _shots(self, iteration: int) -> int:
        """The support images of each class in a hyperiteration; a function of the seed and its number."""
        some = self._all_shots()
        if len(some) == 1:
            return some[0]
        bits = np.random.Philox(key=np.array([self.settings.seed, iteration], np.uint64)).random_raw()
        return some[int(bits) % len(some)]

    # ------------------------------------------------------------------------------------------- the job

    def step(self, iteration: int, stop: StopRequest | bool = False) -> tuple[dict[str, float], bool]:
        began = time.perf_counter()
        groups = self._groups(iteration)
        mine = self.world.share(groups)
        total, count = (
            self._flat(torch.zeros(()), self.learner.lam, self.learner.running()).zero_(),
            sum(map(len, groups)),
        )
        # Group by group and in their order, so that the sum does not depend on who computed which.
        with closing(self._sums(mine)) as sums:
            for row in self.world.gather(sums, len(groups), like=total):
                total += row
        self._update(total / count, iteration)
        rate = self._images(iteration) / (time.perf_counter() - began)
        return {"loss": float(total[0]) / count, "images_per_second": rate}, self.world.any(bool(stop))

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
        drawn = self.streams[self._shots(group.start // self.settings.meta_batch + 1)].batch(group)
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
            group["lr"] = settings.rate(iteration)
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
                if value is not None:
                    tensors[f"{self.settings.optimizer}/{key}/{name}"] = value
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        try:
            for name, leaf in self.learner.lam.items():
                leaf.copy_(state[f"lam/{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
                found = {key: state.get(f"{self.settings.optimizer}/{key}/{name}") for key in keys}
                kept = {key: _like(leaf, key, value) for key, value in found.items() if value is not None}
                if kept:
                    self.optimizer.state[leaf] = kept
            for i, running in enumerate(self.learner.running()):
                running.copy_(state[f"running/{i}"])
            for name, mean in self.mean.items():
                mean.copy_(state[f"mean/{name}"])
        except (KeyError, RuntimeError) as error:
            raise BilevelError(f"The checkpoint does not fit the settings: {error}.") from error

    def weights(self) -> dict[str, Tensor]:
        return self.learner.with_running(self.mean or self.learner.lam)

    # ------------------------------------------------------------------------------------------- how long

    def _images(self, iteration: int) -> int:
        stream = self.streams[self._shots(iteration)]
        return self.settings.meta_batch * stream.ways * (stream.shots + stream.queries)

    def estimate(self) -> Estimate:
        """Time and memory, measured on one group of episodes; nothing is learned from it."""
        settings, groups = self.settings, self._groups(1)
        looked = self.val.batch(range(self.learner.chunk))
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        side_by_side = self.world.size * (1 if self.learner.representation.alone() else torch.get_num_threads())
        with one_thread() if side_by_side > self.world.size else nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                self._sum(groups[0])
            step = _seconds(lambda: self._sum(groups[0])) * ceil(len(groups) / side_by_side)
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


def _like(leaf: Tensor, key: str, value: Tensor) -> Tensor:
    return value.clone() if key == "step" else torch.empty_like(leaf).copy_(value)
