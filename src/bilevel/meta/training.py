"""Learning a representation over a stream of episodes: Algorithm 1 inside an outer optimiser, as a resumable job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel.certificate import certify
from bilevel.data import ImageDataset, load
from bilevel.errors import BilevelError
from bilevel.meta.evaluation import judge
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.settings import Settings
from bilevel.methods.first_order import FirstOrder
from bilevel.methods.reverse import Reverse
from bilevel.tasks.episodes import Episodes
from bilevel.training.distributed import World

METHODS = {"reverse": Reverse(), "first-order": FirstOrder()}
# Validation and test episodes must not be training's, and every split needs its own stream.
STREAMS = {"train": 0, "val": 1, "test": 2}
# How often, and on how many episodes, the inner problem's curvature is measured.
BOUND_EVERY, CURVATURE_EPISODES = 100, 16
RUNNING_MOMENTUM = 0.1


def open_data(settings: Settings, data_root: Path | None = None) -> ImageDataset:
    """The data set that the settings name."""
    extra: dict[str, Any] = {"size": settings.image_size} if settings.image_size else {}
    return load(settings.dataset, data_root, **extra)


def episodes(settings: Settings, data: ImageDataset, split: str, seed: int | None = None) -> Episodes:
    """The stream of a split; episode i is a function of the seed, the split and i."""
    seed = settings.seed if seed is None else seed
    return Episodes(
        data,
        split,
        settings.ways,
        settings.shots,
        settings.queries,
        seed=seed * len(STREAMS) + STREAMS[split],
        rotations=settings.rotations,
    )


def new_learner(settings: Settings, data: ImageDataset) -> HyperRepresentation:
    """A learner with fresh weights."""
    height, width, channels = data.shape
    return HyperRepresentation(
        settings.network,
        (channels, height, width),
        seed=settings.seed,
        steps=settings.steps,
        inner_lr=settings.inner_lr,
        l2=settings.l2,
        batch_norm=settings.batch_norm,
        method=METHODS[settings.method],
    )


class FewShotTraining:
    """The job of `bilevel train`: λ ← λ − Adam(mean over the meta-batch of ∇f_T), k = 1, 2, …

    Args:
        settings: what to do.
        data: where the episodes come from.
        world: the processes that share every meta-batch; the result does not depend on their number beyond rounding.
    """

    def __init__(self, settings: Settings, data: ImageDataset, world: World | None = None) -> None:
        self.settings, self.data, self.world = settings, data, world or World()
        self.learner = new_learner(settings, data)
        self.train, self.val = (episodes(settings, data, split) for split in ("train", "val"))
        self.optimizer = torch.optim.Adam(self.learner.lam.values(), lr=settings.lr)
        self.mean = {name: value.clone() for name, value in self.learner.lam.items()} if settings.average else {}

    # ------------------------------------------------------------------------------------------- the job

    def step(self, iteration: int, stop: bool) -> tuple[dict[str, float], bool]:
        settings, began = self.settings, time.perf_counter()
        if settings.step_bound and (iteration - 1) % BOUND_EVERY == 0:
            self._bound_step()
        first = (iteration - 1) * settings.meta_batch
        mine = self.world.share(range(first, first + settings.meta_batch))
        value, grads, statistics = self._hypergradient(mine)
        share = len(mine) / settings.meta_batch
        tensors = [share * x for x in (value, *grads.values(), *statistics)]
        flag = torch.tensor([float(stop)], dtype=value.dtype)
        value, *parts, flag = self.world.sum([*tensors, flag])
        self._update(dict(zip(grads, parts, strict=False)), parts[len(grads) :], iteration)
        seconds = time.perf_counter() - began
        numbers = {"loss": float(value), "images_per_second": settings.meta_batch * self._images() / seconds}
        return numbers, bool(flag > 0)

    def _hypergradient(self, mine: list[int]) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """This process's mean over its episodes, with the batch statistics that running averages are made of."""
        learner = self.learner
        if not mine:  # more processes than episodes
            zeros = {name: torch.zeros_like(value) for name, value in learner.lam.items()}
            return torch.zeros(()), zeros, [torch.zeros_like(x) for x in learner.running()]
        with learner.watching() as seen:
            value, grads = learner.hypergradient(self.train.batch(mine))
        return value, grads, seen()

    def _update(self, grads: Mapping[str, Tensor], statistics: list[Tensor], iteration: int) -> None:
        settings = self.settings
        for name, leaf in self.learner.lam.items():
            leaf.grad = grads[name].clamp_(-settings.clip, settings.clip) if settings.clip else grads[name]
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr / (1 + settings.decay * (iteration - 1))
        self.optimizer.step()
        for running, now in zip(self.learner.running(), statistics, strict=True):
            running.lerp_(now, RUNNING_MOMENTUM)
        if settings.average:
            # Young averages are plain means, so that the random start is forgotten.
            factor = min(settings.average, iteration / (iteration + 9))
            for name, leaf in self.learner.lam.items():
                self.mean[name].lerp_(leaf, 1 - factor)

    def validate(self, iteration: int) -> dict[str, float]:
        with self.learner.at(self.weights()):
            score = judge(self.learner, self.val, self.settings.validation_episodes, self.settings.steps, self.world)
        return {"score": score.means[-1], "interval": score.intervals[-1], "inner_lr": self.learner.inner_lr}

    def _bound_step(self) -> None:
        """Gradient descent converges below 2/ν only, and ν changes with the representation: measure it and keep away."""
        learner = self.learner
        with learner.at(self.weights()):
            batch = self.val.batch(range(CURVATURE_EPISODES))
            problem = learner.problem(CURVATURE_EPISODES, self.settings.ways)
            # At w_0 = 0 a logistic loss is most curved. μ is of no interest here, and given as 0 it is not looked for.
            found = certify(problem, learner.lam, batch, dynamics=learner.dynamics, steps=0, mu=0.0, products=30)
        learner.inner_lr = min(self.settings.inner_lr, self.settings.step_bound / found.nu)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"lam/{name}": value for name, value in self.learner.lam.items()}
        tensors |= {f"running/{i}": value for i, value in enumerate(self.learner.running())}
        tensors |= {f"mean/{name}": value for name, value in self.mean.items()}
        for name, leaf in self.learner.lam.items():
            for key, value in self.optimizer.state[leaf].items():
                tensors[f"adam/{key}/{name}"] = value
        return tensors, {"inner_lr": self.learner.inner_lr, "threads": torch.get_num_threads()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        try:
            for name, leaf in self.learner.lam.items():
                leaf.copy_(tensors[f"lam/{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq")
                found = {key: tensors.get(f"adam/{key}/{name}") for key in keys}
                if found["step"] is not None:
                    self.optimizer.state[leaf] = {key: _like(leaf, key, value) for key, value in found.items()}
            for i, running in enumerate(self.learner.running()):
                running.copy_(tensors[f"running/{i}"])
            for name, mean in self.mean.items():
                mean.copy_(tensors[f"mean/{name}"])
        except (KeyError, RuntimeError) as error:
            raise BilevelError(f"The checkpoint does not fit the settings: {error}.") from error
        self.learner.inner_lr = facts["inner_lr"]

    def weights(self) -> dict[str, Tensor]:
        return self.learner.with_running(self.mean or self.learner.lam)

    # ------------------------------------------------------------------------------------------- how long

    def _images(self) -> int:
        return self.settings.ways * (self.settings.shots + self.settings.queries)

    def estimate(self) -> Estimate:
        """Time and memory, measured on one chunk of episodes; nothing is learned from it."""
        chunk = min(self.learner.chunk, self.settings.meta_batch)
        batch = self.train.batch(range(chunk))
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.learner.hypergradient(batch)
        began = time.perf_counter()
        self.learner.hypergradient(batch)
        seconds = (time.perf_counter() - began) * self.settings.meta_batch / chunk / self.world.size
        state = 6 * sum(leaf.nbytes for leaf in self.learner.lam.values())
        return Estimate(seconds, sum(kept.values()) + state + batch.val[0].nbytes * self.settings.meta_batch // chunk)


@dataclass(frozen=True)
class Estimate:
    """What a run will need: seconds for a hyperiteration, and bytes beyond what torch itself takes."""

    seconds: float
    bytes: int

    def describe(self, iterations: int) -> str:
        return (
            f"about {self.seconds:.2f} s a hyperiteration, {duration(self.seconds * iterations)} for {iterations:,}, "
            f"and {self.bytes / 1e6:,.0f} MB of memory beyond torch's own"
        )


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
