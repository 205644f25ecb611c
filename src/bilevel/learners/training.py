"""Training a few-shot learner: a job that updates λ with the learner's hypergradients, and that can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.distributed import World
from bilevel.errors import BilevelError, DivergenceError
from bilevel.learners import library
from bilevel.learners.base import Learner
from bilevel.learners.evaluation import GROUP, evaluate
from bilevel.learners.representation import CENTRE
from bilevel.learners.saved_learner import check_numbers
from bilevel.learners.settings import LEARNER_FIELDS, TrainingSettings
from bilevel.learners.streams import episodes
from bilevel.tasks.augmentation import ImageAugmentation
from bilevel.thread_pool import one_thread
from bilevel.training.folder import RunFolder
from bilevel.training.stopping import Interrupted, StopRequest

# The weight of new statistics in the running averages of batch norm.
RUNNING_MOMENTUM = 0.1
# If λ has a larger entry than this, an error is reported as divergence.
DIVERGED = 1e6


def new_learner(settings: TrainingSettings, data: ImageDataset, module: nn.Module | None = None) -> Any:
    """The learner that the settings name, with new weights; `module` replaces its network."""
    kind = learners.get(settings.learner)
    check_settings(kind, settings)
    height, width, _ = data.shape
    try:
        return kind.for_training(settings, data, module)
    except RuntimeError as error:  # torch raises it if pooling leaves no pixels
        raise BilevelError(
            f"The network {settings.network} cannot process images of {width}×{height} pixels ({error}). Choose "
            "another network or image_size."
        ) from error


def check_settings(kind: type[Learner], settings: TrainingSettings) -> None:
    """Refuse settings that this learner would ignore."""
    used = {f.name for f in fields(kind.Options)} | set(kind.also_uses)
    defaults = TrainingSettings()
    ignored = [name for name in LEARNER_FIELDS - used if getattr(settings, name) != getattr(defaults, name)]
    if ignored:
        listed = ", ".join(f"{name}={getattr(settings, name)}" for name in sorted(ignored))
        raise BilevelError(f"{kind.name} does not use {listed}; {kind.describe_options()}.")


class FewShotTraining:
    """The job of `bilevel train`: hyperiteration k updates λ by Adam or SGD with the mean of ∇f_T over a meta-batch.

    Args:
        settings: the settings of the training.
        data: the data set of the episodes.
        world: the processes that share every meta-batch. The result is the same, bit for bit, for any number of them.
        folder: the folder of the run, if it has one. `settings.initial` may be relative to it. If the folder holds a
            checkpoint, the weights come from the checkpoint, and `settings.initial` is not loaded.
        learner: the learner to train; by default a new one with the name in the settings.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        data: ImageDataset,
        world: World | None = None,
        folder: Path | None = None,
        learner: Any = None,
    ) -> None:
        self.settings, self.data, self.world = settings, data, world or World()
        self.learner = (self._new_learner() if learner is None else learner).to(self.world.device)
        if data.preparation is not None:
            self.learner.preparation = data.preparation
        if not self.learner.trains:  # the run is one validation
            self.settings = replace(settings, iterations=0)
        self.stream, self.val = self.learner.stream(settings, data), episodes(settings, data, "val")
        for ways, shots in [*self.stream.shapes(), (settings.ways, settings.shots)]:
            self.learner.check_episode(ways, shots)
        if settings.initial and (folder is None or not RunFolder(folder).checkpoints.files()):
            library.begin_with_weights(self.learner, settings, library.find(settings.initial, near=folder))
        if CENTRE in self.learner.lam and not bool(self.learner.lam[CENTRE].any()):
            self.learner.centre(self._sample())
        self.optimizer = self._new_optimizer()
        self.mean = {name: value.clone() for name, value in self.learner.lam.items()} if settings.average else {}

    def _new_learner(self) -> Any:
        return new_learner(self.settings, self.data)

    def _sample(self, count: int = 256) -> Tensor:
        """Images of meta-training, always the same, to compute the initial centre of features."""
        rows = np.flatnonzero(np.isin(self.data.labels, self.data.splits["train"]))
        chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
        return ImageAugmentation()(torch.from_numpy(self.data.images[chosen]), 0, 0).to(self.world.device)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        settings, leaves = self.settings, self.learner.lam.values()
        # Biases, centres and temperatures have no weight decay.
        groups = [
            {"params": [leaf for leaf in leaves if leaf.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [leaf for leaf in leaves if leaf.ndim <= 1], "weight_decay": 0.0},
        ]
        if settings.optimizer == "sgd":
            nesterov = settings.momentum > 0
            return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
        kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
        return kind(groups, lr=settings.lr)

    # ------------------------------------------------------------------------------------------- the job

    def step(self, iteration: int, stop: StopRequest | bool = False) -> tuple[dict[str, float], bool]:
        began, processor = time.perf_counter(), time.process_time()
        groups = self._groups(iteration)
        mine = self.world.share(groups)
        total, count = (
            self._flat(torch.zeros(()), self.learner.lam, self.learner.running()).zero_(),
            sum(map(len, groups)),
        )
        stopped = False

        def until_stopped(sums: Iterator[Tensor]) -> Iterator[Tensor]:
            nonlocal stopped
            for _ in mine:
                stopped = stopped or bool(stop)
                # The other processes wait for a tensor. They get zeros, and the sum is not used.
                yield torch.zeros_like(total) if stopped else next(sums)

        # The groups are added in their order, so that the sum does not depend on which process computed which group.
        with closing(self._sums(mine)) as sums:
            for row in self.world.gather(until_stopped(sums), len(groups), like=total):
                total += row
        if self.world.any(stopped):
            raise Interrupted
        self._update(total / count, iteration)
        numbers = {
            "loss": float(total[0]) / count,
            "images_per_second": self.stream.images(iteration) / (time.perf_counter() - began),
            "processor_seconds": time.process_time() - processor,
        }
        return numbers, self.world.any(bool(stop))

    def _groups(self, iteration: int) -> list[range]:
        """The positions in the stream of a hyperiteration, in groups that are computed together."""
        return self.stream.groups(iteration, self.learner.group_size(self.settings.meta_batch))

    def _sums(self, groups: Sequence[range]) -> Generator[Tensor, None, None]:
        return self.learner.representation.each(self._sum, groups)

    def _sum(self, group: range) -> Tensor:
        """The sums over a group of f_T, of ∇f_T and of batch norm's statistics, as one vector."""
        with self._diverging(), self.learner.recording_statistics() as statistics:
            value, grads = self.learner.hypergradient(self.stream.draw(group))
        return self._flat(value, grads, statistics()) * len(group)

    @contextmanager
    def _diverging(self) -> Iterator[None]:
        """Turn an error inside the block into a `DivergenceError` if λ has grown very large."""
        try:
            yield
        except (BilevelError, RuntimeError) as error:
            largest = max(
                (float(leaf.abs().max().nan_to_num(torch.inf)) for leaf in self.learner.lam.values()), default=0
            )
            if largest < DIVERGED:
                raise
            raise DivergenceError(
                f"The training diverged: an entry of λ has grown to {largest:.1e}. Pass a smaller lr than "
                f"{self.settings.lr:g}, or set clip. ({error})"
            ) from error

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
            # At the beginning the average is close to a plain mean, so that it forgets the random start.
            factor = min(settings.average, iteration / (iteration + 9))
            for name, leaf in self.learner.lam.items():
                self.mean[name].lerp_(leaf, 1 - factor)

    def validate(self, iteration: int, stop: StopRequest | bool = False) -> dict[str, float]:
        with self._diverging(), self.learner.at(self.weights()):
            count = self.settings.validation_episodes
            score = evaluate(self.learner, self.val, count, None, self.world, stop=stop)
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
                leaf.copy_(_like(leaf, f"lam/{name}", state[f"lam/{name}"]))
                keys = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
                saved = {key: state.get(f"{self.settings.optimizer}/{key}/{name}") for key in keys}
                restored = {
                    key: _like(_count(value) if key == "step" else leaf, f"{key}/{name}", value)
                    for key, value in saved.items()
                    if value is not None
                }
                if restored:
                    self.optimizer.state[leaf] = restored
            for i, running in enumerate(self.learner.running()):
                running.copy_(_like(running, f"running/{i}", state[f"running/{i}"]))
            for name, mean in self.mean.items():
                mean.copy_(_like(mean, f"mean/{name}", state[f"mean/{name}"]))
        except (KeyError, RuntimeError, BilevelError) as error:
            raise BilevelError(f"The checkpoint does not fit the settings: {str(error).removesuffix('.')}.") from error

    def weights(self) -> dict[str, Tensor]:
        return self.learner.with_running(self.mean or self.learner.lam)

    # ------------------------------------------------------------------------------------------- estimate

    def estimate(self) -> Estimate:
        """The time and memory of the run, measured on one group of episodes. λ is not changed."""
        settings, groups = self.settings, self._groups(1) if self.learner.trains else []
        validated = self.val.batch(range(self.learner.chunk))
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parallel = self.world.size * (1 if self.learner.representation.single_threaded() else torch.get_num_threads())
        with one_thread() if parallel > self.world.size else nullcontext():
            step = 0.0
            if groups:
                with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                    self._sum(groups[0])
                step = _seconds(lambda: self._sum(groups[0])) * ceil(len(groups) / parallel)
            episode = _seconds(lambda: self.learner.accuracies(validated, only_last=True)) / self.learner.chunk
        weights = sum(leaf.nbytes for leaf in self.learner.lam.values())
        copies = 6 + (len(groups) if self.world.size > 1 else 0)  # λ, gradients, moments; gathered vectors
        images = GROUP * (validated.train[0].nbytes + validated.val[0].nbytes) // self.learner.chunk
        return Estimate(
            seconds=step,
            validation_seconds=episode * settings.validation_episodes / parallel,
            # The backward pass needs about as much as the saved tensors, and drawing episodes copies their images.
            bytes=2 * sum(saved.values()) * (parallel // self.world.size) + copies * weights + 2 * images,
        )


@dataclass(frozen=True)
class Estimate:
    """The estimated cost: seconds for a hyperiteration and a validation, and bytes in addition to torch's own."""

    seconds: float
    validation_seconds: float
    bytes: int

    def total(self, iterations: int, validate_every: int) -> float:
        """Seconds for this number of hyperiterations, with the validations before, between and after them."""
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
    """A duration as text.

    >>> duration(90), duration(9000), duration(7)
    ('1.5 minutes', '2.5 hours', '7 seconds')
    """
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _like(leaf: Tensor, name: str, value: Tensor) -> Tensor:
    """A copy of a tensor from a checkpoint with the memory layout of `leaf`. Shape and type must be the same."""
    check_numbers(name, value)
    if (value.shape, value.dtype) != (leaf.shape, leaf.dtype):
        saved, needed = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (value, leaf))
        raise BilevelError(f"{name} is {saved} in the checkpoint, and {needed} is needed")
    return torch.empty_like(leaf).copy_(value)


def _count(value: Tensor) -> Tensor:
    """A tensor like an optimiser's counter of steps, which has torch's default type at its creation."""
    return torch.zeros((), dtype=value.dtype if value.dtype == torch.float64 else torch.float32)
