"""Training and validation data as batches that are pure functions of the step number.

The data are loaders, data sets, or pairs of tensors, numpy arrays or DataFrames.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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

# The size of the cache of a replayed loader.
CACHE_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Batch:
    """Inputs, targets, and the positions of their examples in the data set.

    Args:
        inputs: the argument of the model.
        targets: what the loss compares the model's output with.
        index: the positions of the examples in the data set.
        t: the step. It seeds the random numbers of the step; None if every step has the same batch.
        seed: the seed of the random numbers of the step.
    """

    inputs: Tree
    targets: Tree
    index: Tensor
    t: int | None = None
    seed: int = 0

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.index)


trees.register(Batch, ["inputs", "targets", "index"])


class Examples:
    """`examples[positions]` is the batch that the loader would make of the examples at these positions.

    The tensors behind a `TensorDataset`, or a `Subset` of one, are indexed at once instead of example by example.
    """

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise BilevelError(
                f"The {name} loader reads {type(self.dataset).__name__}, a stream without random access, and training "
                "is replayed step by step. Pass a map-style data set, one with __getitem__ and __len__."
            )
        self._collate: Any = loader.collate_fn
        self.tensors = _tensors_of(self.dataset) if self._collate is default_collate else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, positions: int | list[int]) -> Any:
        if not isinstance(positions, list):
            return self._collate(self.dataset[positions])
        if self.tensors is not None:
            all_positions = len(positions) == len(self) and positions == list(range(len(self)))
            return (
                self.tensors
                if all_positions
                else tuple(x[torch.tensor(positions, device=x.device)] for x in self.tensors)
            )
        get_items = getattr(self.dataset, "__getitems__", None)
        return self._collate(get_items(positions) if get_items else [self.dataset[i] for i in positions])


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    rows = None
    while type(dataset) is Subset:
        chosen = torch.as_tensor(list(dataset.indices), device="cpu")
        rows = chosen if rows is None else chosen[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    return dataset.tensors if rows is None else tuple(x[rows.to(x.device)] for x in dataset.tensors)


class ReplayedLoader:
    """A `DataLoader` replayed by step number: `replayed(t)` is the batch of step t = 1, 2, …, the same at every call.

    The loader's own sampler chooses the examples. It runs once per epoch with generators seeded by (seed, epoch).
    Random transforms of the data set are seeded by (seed, t). The generators are restored afterwards. Workers are not
    used. Up to half a gigabyte of batches is cached.

    >>> from torch.utils.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), batch_size=4, shuffle=True)
    >>> replayed = ReplayedLoader(loader, seed=1, like=torch.zeros(()), steps=3)
    >>> bool((replayed(2).inputs == replayed(2).inputs).all()), [replayed(t).count for t in (1, 2, 3)]
    (True, [4, 2, 4])
    """

    def __init__(self, loader: DataLoader[Any], seed: int, like: Tensor, steps: int, name: str = "train") -> None:
        self.loader, self.seed, self.like, self.name = loader, seed, like, name
        self.examples = Examples(loader, name)
        self._steps = max(steps, 1)
        # The batches of every epoch so far, and the last step of each.
        self._epochs: list[list[Any]] = []
        self._ends: list[int] = []
        self._cache: dict[int, Batch] = {}
        self._cached_bytes = 0
        self._add_epoch()
        if not self._epochs[0]:
            raise BilevelError(
                f"The {name} loader gives no batches: it has {self.count} examples, batch_size="
                f"{loader.batch_size} and drop_last={loader.drop_last}. Pass more examples or a smaller batch."
            )
        if self._order(0) != self._epochs[0]:
            raise BilevelError(
                f"The sampler of the {name} loader, {type(loader.sampler).__name__}, gives a different order each "
                "time, although torch, numpy and random were seeded: it has its own state. Training is replayed step "
                "by step, so pass shuffle=True or a sampler that draws from a torch.Generator attribute `generator`."
            )

    @property
    def count(self) -> int:
        """The number of examples in the data set."""
        return len(self.examples)

    @property
    def per_epoch(self) -> int:
        """The number of batches in an epoch, but at most T."""
        return len(self._epochs[0])

    def __call__(self, t: int) -> Batch:
        if t in self._cache:
            return self._cache[t]
        while self._ends[-1] < t:
            self._add_epoch()
        # The epochs of a sampler may differ in length.
        epoch = bisect.bisect_left(self._ends, t)
        chosen = self._epochs[epoch][t - 1 - (self._ends[epoch - 1] if epoch else 0)]
        # Tensors are indexed without drawing random numbers.
        with seeded(self.seed, "batch", t) if self.examples.tensors is None else nullcontext():
            pair = self.examples[chosen]
        index = torch.tensor(chosen if isinstance(chosen, list) else [chosen], device="cpu")
        batch = replace(_as_batch(pair, index, self.like, self.name), t=t, seed=self.seed)
        size = trees.nbytes(batch)
        if self.examples.tensors is None and self._cached_bytes + size <= CACHE_BYTES:
            self._cache[t] = batch
            self._cached_bytes += size
        return batch

    def _add_epoch(self) -> None:
        self._epochs.append(self._order(len(self._epochs)))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epochs[-1]))

    def _order(self, epoch: int) -> list[Any]:
        sampler = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        with seeded(self.seed, "order", epoch), _seeded_generators(self.loader, self.seed, epoch):
            return [_positions(chosen) for chosen in itertools.islice(sampler, self._steps)]


@dataclass(frozen=True)
class RepeatedBatch:
    """One batch for all steps, with the number of the step. The number seeds the random numbers of the step."""

    batch: Batch
    seed: int

    def __call__(self, t: int) -> Batch:
        return replace(self.batch, t=t, seed=self.seed)


def training_data(given: Any, seed: int, like: Tensor, steps: int) -> Batch | ReplayedLoader:
    """The batches of a loader by step number, or all examples of other data as one batch."""
    if isinstance(given, DataLoader):
        return ReplayedLoader(given, seed, like, steps)
    return whole_batch(given, seed, like, "train")


def whole_batch(given: Any, seed: int, like: Tensor, name: str) -> Batch:
    """All examples as one batch, in the order of the data set. For a loader, those that its sampler shows."""
    if isinstance(given, Dataset):
        given = DataLoader(given)
    if isinstance(given, DataLoader):
        examples, shown = Examples(given, name), shown_by(given, seed)
        if not len(examples):
            raise BilevelError(f"The {name} data has no examples. Pass at least one.")
        if not shown:
            raise BilevelError(
                f"The sampler of the {name} loader, {type(given.sampler).__name__}, shows no examples. Pass another "
                "sampler."
            )
        with seeded(seed, f"all of {name}", 0):
            if given.batch_sampler is not None:
                return _as_batch(examples[shown], torch.tensor(shown, device="cpu"), like, name)
            # Without a batch sampler, each item of the data set is a batch.
            pair = trees.map(lambda *leaves: torch.cat(leaves), *(examples[i] for i in shown))
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        pair = as_tensors(given, name)
    else:
        raise BilevelError(
            f"{name}={describe_type(given)} is not data. Pass a DataLoader over a map-style data set, such a data set, "
            "or a pair (inputs, targets) of tensors, numpy arrays or DataFrames."
        )
    lengths = [len(x) for x in trees.tensors(pair[0]) if x.ndim]
    return _as_batch(pair, torch.arange(lengths[0] if lengths else 0, device="cpu"), like, name)


def as_tensors(pair: Any, name: str) -> Any:
    """The pair (inputs, targets) with numpy arrays, DataFrames and Series converted to tensors.

    >>> as_tensors((np.array([[True]]), {"label": np.array([0, 1])}), "train")
    (tensor([[True]]), {'label': tensor([0, 1])})
    """

    def converted(leaf: Any) -> Any:
        if hasattr(leaf, "toarray"):
            raise BilevelError(f"The {name} data has a sparse {type(leaf).__name__}. Pass its .toarray().")
        if isinstance(leaf, np.ma.MaskedArray):
            raise BilevelError(
                f"The {name} data has a masked array, and torch has no masks: masked entries would be used as numbers. "
                "Pass .filled(value), or leave these rows out."
            )
        if not hasattr(leaf, "__array__") or isinstance(leaf, Tensor):
            return leaf
        # A copy, because pandas gives arrays that must not be written to, and torch cannot read negative strides.
        array = np.array(leaf, order="C")
        if array.dtype.kind not in "biuf":
            text = [str(c) for c in getattr(leaf, "columns", []) if np.asarray(leaf[c]).dtype.kind not in "biuf"]
            where = f" (columns {', '.join(text)})" if text else ""
            raise BilevelError(
                f"The {name} data has a {type(leaf).__name__} of {array.dtype}{where}, and torch takes numbers. Encode "
                "text and categories as numbers first, and convert nullable numbers of pandas by .astype(float)."
            )
        return torch.from_numpy(array)

    return trees.map(converted, pair)


def describe_type(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind


def _as_batch(pair: Any, index: Tensor, like: Tensor, name: str) -> Batch:
    """The pair as a batch on the model's device. Floating-point tensors get the model's dtype."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise BilevelError(
            f"A batch of the {name} data is {describe_type(pair)}, but it must be a pair (inputs, targets). Let the "
            "data set return pairs, or pass the loader a collate_fn that makes them."
        )

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided:
            raise BilevelError(f"The {name} data has a tensor of layout {leaf.layout}. Pass its .to_dense().")
        return leaf.to(like) if leaf.is_floating_point() else leaf.to(like.device)

    inputs, targets = (trees.map(converted, part) for part in pair)
    if not any(x.ndim and len(x) for x in trees.tensors(inputs)):
        raise BilevelError(f"The {name} data has no examples: its inputs are {trees.describe(inputs)}.")
    return Batch(inputs, targets, index.to(like.device))


def shown_by(loader: DataLoader[Any], seed: int) -> list[int]:
    """The positions of the examples that an epoch of the loader shows, sorted.

    Two loaders over one data set often differ only in their samplers. Sequential and random samplers show all examples,
    including those that `drop_last` leaves out.

    >>> from torch.utils.data import SubsetRandomSampler, TensorDataset
    >>> data = TensorDataset(torch.arange(6), torch.arange(6))
    >>> shown_by(DataLoader(data, sampler=SubsetRandomSampler([5, 1])), seed=0)
    [1, 5]
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        return list(range(count))
    # A sampler may be infinite.
    limit = len(sampler) if hasattr(sampler, "__len__") else count
    with seeded(seed, "shown", 0), _seeded_generators(loader, seed, 0):
        chosen = [_positions(one) for one in itertools.islice(sampler, limit)]
    return sorted(itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in chosen))


def _positions(chosen: Any) -> Any:
    """A sampler's item as an int (the position of an example) or a list of ints (those of a batch)."""
    if hasattr(chosen, "tolist"):
        chosen = chosen.tolist()
    return list(chosen) if isinstance(chosen, (list, tuple)) else int(chosen)


@contextmanager
def _seeded_generators(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[None]:
    """Seed the generators that the loader or its samplers own, and restore them afterwards."""
    owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    owned = {id(g): g for g in (getattr(x, "generator", None) for x in owners) if isinstance(g, torch.Generator)}
    with ExitStack() as stack:
        for generator in owned.values():
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield
