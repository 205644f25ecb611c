"""Training and validation data as batches that are pure functions of the step number."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree
from bilevel.tuning.randomness import seeded

# What a replayed loader may remember of the batches it has made.
MEMORY = 512 * 1024**2


@dataclass(frozen=True)
class Batch:
    """Inputs, targets, and which examples they are.

    Args:
        inputs: what the model is called with.
        targets: what the loss compares its output with.
        index: the positions of the examples in the data set.
        t: the step, for what is random in it; None where every step has the same batch.
        seed: likewise.
    """

    inputs: Tree
    targets: Tree
    index: Tensor
    t: int | None = None
    seed: int = 0


trees.register(Batch, ["inputs", "targets", "index"])


class Replay:
    """A `DataLoader` replayed by step number: `replay(t)` is the batch of step t = 1, 2, …, whenever it is asked for.

    Which examples are in it comes from the loader's own sampler, run once per epoch with generators seeded by (seed,
    epoch); what is random in the data set, by (seed, t). Both leave the global generators, and the loader's, as they
    were. Workers are not used. Batches are remembered up to half a gigabyte, since they do not change.

    >>> loader = DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), batch_size=4, shuffle=True)
    >>> replay = Replay(loader, seed=1, like=torch.zeros(()), steps=3)
    >>> bool((replay(2).inputs == replay(2).inputs).all()), [len(replay(t).index) for t in (1, 2, 3)]
    (True, [4, 2, 4])
    """

    def __init__(self, loader: DataLoader[Any], seed: int, like: Tensor, steps: int, name: str = "train") -> None:
        self.loader, self.seed, self.like, self.name = loader, seed, like, name
        self._steps = max(steps, 1)
        self._tensors = tensors_of(loader) if loader.collate_fn is default_collate else None
        # The batches of every epoch so far, and the last step of each.
        self._epochs: list[list[Any]] = []
        self._ends: list[int] = []
        self._known: dict[int, Batch] = {}
        self._bytes = 0
        self.examples = len(loader.dataset)  # type: ignore[arg-type]
        self._add_epoch()
        if not self._epochs[0]:
            raise BilevelError(
                f"The {name} loader gives no batches: it has {self.examples} examples, batch_size="
                f"{loader.batch_size} and drop_last={loader.drop_last}. Pass more examples or a smaller batch."
            )
        if self._order(0) != self._epochs[0]:
            raise BilevelError(
                f"The sampler of the {name} loader, {type(loader.sampler).__name__}, gives another order each time, "
                "although torch, numpy and random were seeded: it keeps a state of its own. Training is replayed step "
                "by step, so pass shuffle=True or a sampler that draws from a torch.Generator attribute `generator`."
            )

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has (no more are counted than are needed)."""
        return len(self._epochs[0])

    def __call__(self, t: int) -> Batch:
        if t in self._known:
            return self._known[t]
        epoch, place = self._place(t)
        batch = self._fetch(self._epochs[epoch][place], t)
        size = trees.nbytes(batch)
        if self._tensors is None and self._bytes + size <= MEMORY:
            self._known[t] = batch
            self._bytes += size
        return batch

    def _place(self, t: int) -> tuple[int, int]:
        """The epoch of step t, and its place there; epochs of a sampler need not be equally long."""
        while self._ends[-1] < t:
            self._add_epoch()
        epoch = bisect.bisect_left(self._ends, t)
        return epoch, t - 1 - (self._ends[epoch - 1] if epoch else 0)

    def _add_epoch(self) -> None:
        self._epochs.append(self._order(len(self._epochs)))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epochs[-1]))

    def _order(self, epoch: int) -> list[Any]:
        sampler = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        with seeded(self.seed, "order", epoch), _own_generators(self.loader, self.seed, epoch):
            return [_places(chosen) for chosen in itertools.islice(sampler, self._steps)]

    def _fetch(self, chosen: Any, t: int) -> Batch:
        index = torch.tensor(chosen if isinstance(chosen, list) else [chosen])
        if self._tensors is not None and isinstance(chosen, list):
            pair: Any = tuple(x[index.to(x.device)] for x in self._tensors)
        else:
            with seeded(self.seed, "batch", t):
                pair = _collated(self.loader, chosen)
        return replace(as_batch(pair, index, self.like, self.name), t=t, seed=self.seed)


@dataclass(frozen=True)
class SameBatch:
    """One batch for all steps, with the number of the step on it, for what is random in a step."""

    batch: Batch
    seed: int

    def __call__(self, t: int) -> Batch:
        return replace(self.batch, t=t, seed=self.seed)


def training_data(given: Any, seed: int, like: Tensor, steps: int) -> tuple[Batch | Replay, int]:
    """The training batches, and how many examples there are."""
    if isinstance(given, DataLoader):
        refuse_iterable(given.dataset, "train")
        replay = Replay(given, seed, like, steps)
        return replay, replay.examples
    batch = whole(given, seed, like, "train")
    return batch, len(batch.index)


def whole(given: Any, seed: int, like: Tensor, name: str) -> Batch:
    """All examples as one batch, in the order of the data set; of a loader those that its sampler shows."""
    if isinstance(given, Dataset):
        given = DataLoader(given)
    if isinstance(given, DataLoader):
        refuse_iterable(given.dataset, name)
        count = len(given.dataset)  # type: ignore[arg-type]
        if not count:
            raise BilevelError(f"The {name} data has no examples.")
        shown = shown_by(given, seed)
        if not shown:
            raise BilevelError(f"The sampler of the {name} loader, {type(given.sampler).__name__}, shows no examples.")
        index = torch.tensor(shown)
        tensors = tensors_of(given) if given.collate_fn is default_collate else None
        if tensors is not None:
            if shown != list(range(count)):
                tensors = tuple(x[index.to(x.device)] for x in tensors)
            return as_batch(tensors, index, like, name)
        with seeded(seed, f"all of {name}", 0):
            if given.batch_sampler is None:
                # The data set gives batches already.
                parts = [_collated(given, i) for i in shown]
                joined = trees.map(lambda *leaves: torch.cat(leaves), *parts)
                return as_batch(joined, torch.arange(_count(joined)), like, name)
            return as_batch(_collated(given, shown), index, like, name)
    tensors_given = trees.tensors(given)
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and tensors_given):
        raise BilevelError(
            f"{name}={_kind(given)} is not data. Pass a DataLoader over a map-style data set, such a data set, or a "
            "pair of tensors (inputs, targets)."
        )
    return as_batch(given, torch.arange(_count(given[0])), like, name)


def as_batch(pair: Any, index: Tensor, like: Tensor, name: str) -> Batch:
    """The pair as a batch on the device and, where it is floating, with the dtype of the model (of `like`)."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise BilevelError(
            f"A batch of the {name} data is {_kind(pair)}; it must be a pair (inputs, targets). Let the data set give "
            "pairs, or pass the loader a collate_fn that makes them."
        )
    inputs, targets = (trees.map(lambda x: _as_like(x, like), part) for part in pair)
    if not any(x.ndim and len(x) for x in trees.tensors(inputs)):
        raise BilevelError(f"The {name} data has no examples: its inputs are {trees.describe(inputs)}.")
    return Batch(inputs, targets, index.to(like.device))


def shown_by(loader: DataLoader[Any], seed: int) -> list[int]:
    """The positions of the examples that an epoch of the loader shows, sorted.

    Two loaders over one data set are often told apart by their samplers alone, so a sampler must not be passed over.
    One that merely orders or shuffles shows everything, and what `drop_last` drops is not left out.

    >>> from torch.utils.data import SubsetRandomSampler
    >>> data = TensorDataset(torch.arange(6), torch.arange(6))
    >>> shown_by(DataLoader(data, sampler=SubsetRandomSampler([5, 1])), seed=0)
    [1, 5]
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        return list(range(count))
    # A sampler without an end must not be asked for one.
    limit = len(sampler) if hasattr(sampler, "__len__") else count
    with seeded(seed, "shown", 0), _own_generators(loader, seed, 0):
        chosen = [_places(one) for one in itertools.islice(sampler, limit)]
    return sorted(itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in chosen))


def tensors_of(loader: DataLoader[Any]) -> tuple[Tensor, ...] | None:
    """The tensors behind a `TensorDataset` or a `Subset` of one: they are indexed at once, not example by example."""
    dataset, rows = loader.dataset, None
    while type(dataset) is Subset:
        chosen = torch.as_tensor(list(dataset.indices))
        rows = chosen if rows is None else chosen[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    return dataset.tensors if rows is None else tuple(x[rows.to(x.device)] for x in dataset.tensors)


def refuse_iterable(dataset: Any, name: str) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise BilevelError(
            f"The {name} loader reads {type(dataset).__name__}, a stream that cannot be asked for its tenth example "
            "twice, and training is replayed step by step. Pass a map-style data set, one with __getitem__ and __len__."
        )


def _places(chosen: Any) -> Any:
    """What a sampler gave, the position of an example or those of a batch, as an int or a list of them."""
    if isinstance(chosen, (Tensor, np.ndarray)):
        chosen = chosen.tolist()
    return list(chosen) if isinstance(chosen, (list, tuple)) else int(chosen)


def _count(inputs: Tree) -> int:
    """How many examples there are: the length of the first tensor that has one."""
    return next((len(x) for x in trees.tensors(inputs) if x.ndim), 0)


def _collated(loader: DataLoader[Any], chosen: Any) -> Any:
    """What the loader would give for these examples."""
    dataset: Any = loader.dataset
    collate: Callable[[Any], Any] = loader.collate_fn
    if not isinstance(chosen, list):
        return collate(dataset[chosen])
    many = getattr(dataset, "__getitems__", None)
    return collate(many(chosen) if many else [dataset[i] for i in chosen])


@contextmanager
def _own_generators(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[None]:
    """Generators that the loader or its samplers hold, seeded for the moment and put back afterwards."""
    samplers = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = {id(g): g for g in (getattr(x, "generator", None) for x in samplers) if isinstance(g, torch.Generator)}
    with ExitStack() as stack:
        for generator in found.values():
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield


def _as_like(leaf: Any, like: Tensor) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(like) if leaf.is_floating_point() else leaf.to(like.device)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
