"""The contract of few-shot learners: what a strategy must define to be trained, evaluated and saved."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.representation import Representation, first_normalisation
from bilevel.learners.saved_learner import SavedLearner
from bilevel.learners.settings import TrainingSettings, check_values
from bilevel.models import build
from bilevel.models.batch_norm import MODES, Mode
from bilevel.problem import Problem, Task

if TYPE_CHECKING:
    from bilevel.data import ImageDataset
    from bilevel.learners.streams import TrainingStream

Logits = Callable[[Tensor], Tensor]
# The largest number of values (channels × height × width) that an image may have.
LARGEST = 2**24


@dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """The settings of a learner, with types, defaults and bounds (`settings.setting`), which the constructor checks.

    In `bilevel train`, a field that `TrainingSettings` has too (`steps`, `inner_lr`, `network`, …) is set by the option
    of that name, and any other field by `--set name=value`.
    """

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(LearnerOptions):
    """The settings of every learner with a network.

    Args:
        network: the name of the network; empty for a module of your own.
        last_relu: whether a network that is given by its name ends with a ReLU.
        batch_norm: see `bilevel.models.batch_norm.MEANING`.
        mirror: whether features are the mean over an image and its mirror image, which takes twice the time.
    """

    network: str = ""
    last_relu: bool = True
    batch_norm: Mode = "episode"
    mirror: bool = False


def option(name: str) -> Any:
    """A property of a learner that reads and sets one of its options."""
    return property(lambda self: getattr(self.options, name), lambda self, value: self.change(**{name: value}))


class Learner(SavedLearner, ABC):
    """A strategy for learning classes from a few images: λ, and how an episode uses it.

    Subclass `ScoringLearner` for a strategy that computes scores of queries directly (metric and memory strategies),
    and `BilevelLearner` for one that solves an inner problem in every episode. Both implement the three abstract
    methods below.

    Args:
        module: the network, from images N×C×H×W to features N×F, or the name of one of `bilevel.models`. It is copied.
            Its parameters are leaves of λ. Pass None to a learner whose options have no `network`.
        shape: (C, H, W) of the images.
        seed: the seed of the weights.
        chunk: how many episodes have their features in memory at the same time.
        options: the learner's settings, the fields of its class `Options`.

    Attributes:
        lam: λ, tensors by name.
        options: the settings.
        representation: the network as a function of λ.
    """

    name: ClassVar[str] = ""
    options: Any
    Options: ClassVar[type[LearnerOptions]] = NetworkOptions
    # Fields of `TrainingSettings` that the learner reads although they are not among its options.
    also_uses: ClassVar[frozenset[str]] = frozenset()
    # What is meta-learned, as one word for tables: representation, initialisation, optimisation, metric, memorisation
    # or baseline.
    strategy: ClassVar[str] = "other"
    # Whether there is something to train.
    trains: ClassVar[bool] = True
    # Whether `hypergradient` returns the derivative of its value. False for first-order strategies.
    exact: bool = True
    # Whether the training objective is the cross-entropy of the adapted classifier on the queries.
    trains_on_cross_entropy: bool = True
    # Whether training draws episodes. If not, override `stream`.
    episodic: ClassVar[bool] = True
    # Whether renumbering the classes only renumbers the predictions.
    symmetric: bool = True
    # Whether an adapted classifier is linear in the features of h_λ; `adapted(…).matrix` then holds its weights.
    linear: ClassVar[bool] = False
    # Whether an episode uses images only through h_λ, so that evaluations may compute the features of an image once.
    features_only: ClassVar[bool] = False
    # The batch norm modes that the strategy can follow.
    batch_norm_modes: ClassVar[tuple[Mode, ...]] = MODES

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(
        self,
        module: nn.Module | str | None,
        shape: tuple[int, int, int],
        *,
        seed: int = 0,
        chunk: int = 4,
        **options: Any,
    ) -> None:
        if len(shape) != 3 or any(type(size) is not int or size < 1 for size in shape) or prod(shape) > LARGEST:
            raise BilevelError(
                f"shape={shape} must be (channels, height, width), (1, 28, 28) for example: whole numbers ≥ 1 whose "
                f"product is at most {LARGEST:,}."
            )
        if not isinstance(chunk, int) or chunk < 1:
            raise BilevelError(f"chunk={chunk} must be a whole number ≥ 1.")
        self.shape, self.chunk = tuple(shape), chunk
        self._problems: dict[Any, Problem] = {}
        names = [f.name for f in fields(self.Options)]
        if "network" in names:
            options["network"] = module if isinstance(module, str) else ""
        self._refuse_unknown(options, names)
        self.options = self.Options(**options)
        mode: Mode = getattr(self.options, "batch_norm", "support")
        self._check_mode(mode)
        if isinstance(module, str):
            module = build(module, shape[0], seed, self.options.last_relu)
        normalise, mirror = (getattr(self.options, name, False) for name in ("normalise", "mirror"))
        self.representation = Representation(nn.Flatten() if module is None else module, mode, normalise, mirror)
        self.lam = {key: value.detach().clone() for key, value in self.module.named_parameters()}
        if module is not None and not self.lam:
            raise BilevelError(
                "The module has no parameters, so there is no representation to learn. Pass one with parameters."
            )
        self.features = self._count_features()
        if normalise:
            self.lam |= first_normalisation(self.features - 1, like=next(iter(self.lam.values())))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.build()

    # ------------------------------------------------------------------------------------------- to implement

    def build(self) -> None:
        """Add leaves to λ beside those of the network: call `add_part`, or set items of `self.lam`. torch is seeded."""

    @abstractmethod
    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean training objective of stacked episodes, and its gradient with respect to λ."""

    @abstractmethod
    def chunk_accuracies(self, task: Task, steps: int) -> Tensor:
        """Episodes × steps: accuracies after 1…steps inner steps; episodes × 1 for learners without inner steps."""

    def chunk_last_accuracies(self, task: Task, steps: int) -> Tensor:
        """The last column of `chunk_accuracies`. Override this method if one column is less work than all of them."""
        return self.chunk_accuracies(task, steps)[:, -1:]

    @abstractmethod
    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> Logits:
        """Adapt to labelled images, and return a function from query images to logits N×ways; `adapt` calls it."""

    def group_size(self, meta_batch: int) -> int:
        """How many episodes of a meta-batch are differentiated together; by default four processes can share them."""
        return max(1, min(self.chunk, meta_batch // 4))

    def chunk_size(self, count: int) -> int:
        """How many of `count` episodes are computed together."""
        return self.chunk

    def check_episode(self, ways: int, shots: int) -> None:
        """Raise a `BilevelError` if the learner cannot use such episodes. It is called before any work begins."""

    def inner_size(self, ways: int) -> int:
        """How many numbers w has in an episode; 0 if there is no inner problem."""
        return 0

    def certifiable(self, episodes: Task) -> tuple[Problem, Task] | None:
        """The inner problem with λ fixed, for `certify`; None if the learner has no convex inner problem."""
        return None

    @classmethod
    def stream(cls, settings: TrainingSettings, data: ImageDataset) -> TrainingStream:
        """The data that a training of this learner draws: episodes, unless a subclass overrides this method."""
        from bilevel.learners.streams import EpisodeStream

        return EpisodeStream(settings, data)

    @classmethod
    def for_training(cls, settings: Any, data: ImageDataset, module: nn.Module | None = None, **more: Any) -> Self:
        """A learner with new weights for a training, with the network of the settings or a module of your own."""
        height, width, channels = data.shape
        options = {"seed": settings.seed, **cls.options_of(settings), **more}
        network = options.pop("network", None)
        return cls(network if module is None else module, (channels, height, width), **options)

    # ------------------------------------------------------------------------------------------- parts of λ

    def kept_problem(self, key: Any, build: Callable[[], Problem]) -> Problem:
        """`build()`, called once for each key, because the engine checks every new problem at its first use."""
        if key not in self._problems:
            self._problems[key] = build()
        return self._problems[key]

    def add_part(self, name: str, module: nn.Module) -> None:
        """Add a module whose parameters are leaves of λ, called `name.…`. `self.part(name, lam, …)` runs it."""
        added = self.representation.add_part(name, module)
        like = next(iter(self.lam.values()), None)
        self.lam |= {key: value if like is None else value.to(like) for key, value in added.items()}

    def part(self, name: str, lam: Mapping[str, Tensor], *arguments: Any) -> Any:
        """Run the part of that name with the weights in λ."""
        return self.representation.of_this_thread().part(name, lam, *arguments)

    # ------------------------------------------------------------------------------------------- options

    @classmethod
    def options_of(cls, settings: TrainingSettings) -> dict[str, Any]:
        """The learner's options in the settings of a training: fields of `TrainingSettings`, and its own `options`."""
        shared = {f.name for f in fields(TrainingSettings)}
        cls._refuse_unknown(settings.options, {f.name for f in fields(cls.Options)} - shared)
        common = {f.name: getattr(settings, f.name) for f in fields(cls.Options) if f.name in shared}
        return {**common, **settings.options}

    @classmethod
    def describe_options(cls) -> str:
        """The names of the settings, for error messages."""
        return f"its settings are {', '.join(f.name for f in fields(cls.Options)) or 'none'}"

    @classmethod
    def _refuse_unknown(cls, options: Iterable[str], known: Container[str]) -> None:
        unknown = [key for key in options if key not in known]
        if unknown:
            raise BilevelError(f"{cls.name} has no setting {', '.join(unknown)}; {cls.describe_options()}.")

    def change(self, **options: Any) -> None:
        """Change some of the options. Options that determine the shape of λ must not be changed."""
        self._refuse_unknown(options, vars(self.options))
        changed = replace(self.options, **options)
        if "batch_norm" in options:
            self._check_mode(options["batch_norm"])
            self.representation.batch_norm = options["batch_norm"]
        if "mirror" in options:
            self.representation.mirror = options["mirror"]
        self.options = changed

    def _check_mode(self, mode: str) -> None:
        if mode not in self.batch_norm_modes:
            raise BilevelError(
                f"{self.name} has no batch_norm={mode!r}; pass {' or '.join(map(repr, self.batch_norm_modes))}."
            )

    @property
    def has_batch_norm(self) -> bool:
        """Whether the learner has a batch norm mode."""
        return hasattr(self.options, "batch_norm")

    @property
    def has_steps(self) -> bool:
        """Whether the learner has a number of inner steps T."""
        return hasattr(self.options, "steps")

    @property
    def steps(self) -> int:
        """T; 1 for learners without inner steps."""
        return int(getattr(self.options, "steps", 1))

    @steps.setter
    def steps(self, steps: int) -> None:
        if not self.has_steps:
            raise BilevelError(f"{self.name} takes no inner steps; leave steps out.")
        self.change(steps=steps)

    @property
    def batch_norm(self) -> Mode:
        return self.representation.batch_norm

    @batch_norm.setter
    def batch_norm(self, mode: Mode) -> None:
        self.change(batch_norm=mode)

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "shape": self.shape, **asdict(self.options)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], module: nn.Module | None = None) -> Self:
        """A learner with new weights from the result of `settings()`; its `name` must be this learner's."""
        options = dict(settings)
        shape = tuple(options.pop("shape"))
        name = options.pop("name", None)  # a card of version 0.1 has no name
        if name is not None and name != cls.name:
            raise BilevelError(
                f"These are the settings of the learner {name}, not of {cls.name}. Use {name}, or other settings."
            )
        network = options.pop("network", None)
        network = network if module is None else module
        if not isinstance(network, (str, nn.Module, type(None))):
            raise BilevelError(f"network={network!r:.60} is not the name of a network.")
        if not network and "network" in {f.name for f in fields(cls.Options)}:
            raise BilevelError(
                "This learner was built with a module and not with the name of a network. Load it in Python, and pass "
                "module=… with the same architecture."
            )
        return cls(network, shape, **options)

    # ------------------------------------------------------------------------------------------- use

    def hypergradient(self, episodes: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The training objective and its gradient with respect to λ, both as means over the episodes.

        Args:
            episodes: stacked tensors (`Episodes.batch`), a list of tasks, or whatever the learner's `stream` draws.
        """
        chunks = self._chunks(episodes)
        count, total = sum(len(chunk.train[0]) for chunk in chunks), dict[str, Tensor]()
        value = next(iter(self.lam.values())).new_zeros(())
        with closing(self.representation.each(self.chunk_hypergradient, chunks)) as results:
            for chunk, (chunk_value, grads) in zip(chunks, results, strict=True):
                share = len(chunk.train[0]) / count
                value = value + share * chunk_value
                for name, grad in grads.items():
                    total[name] = total[name].add_(grad, alpha=share) if name in total else share * grad
        return value, total

    def accuracies(
        self, episodes: Task | Sequence[Task], steps: int | None = None, *, only_last: bool = False
    ) -> Tensor:
        """Accuracy on the query sets after 1…steps inner steps: episodes × steps.

        It is episodes × 1 for a learner without inner steps, and with `only_last`: after the last step.
        """
        work = self.chunk_last_accuracies if only_last else self.chunk_accuracies
        work = partial(work, steps=self.steps if steps is None or not self.has_steps else steps)
        return torch.cat(list(self.representation.each(work, self._chunks(episodes))))

    def adapt(self, images: Any, labels: Any, steps: int | None = None) -> FewShotClassifier:
        """A classifier from a few labelled images, computed as in an episode.

        Args:
            images: floats N×C×H×W in [0, 1], or bytes N×H×W×C.
            labels: one hashable label per image. Different labels are different classes.
            steps: the number of inner steps; None: the learner's own.
        """
        return FewShotClassifier(self, images, labels, steps)

    def _stacked_episodes(self, episodes: Task | Sequence[Task]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Support and query sets of the episodes, stacked and on the learner's device."""
        device = next((leaf.device for leaf in self.lam.values()), torch.device("cpu"))
        if not isinstance(episodes, Task) and not episodes:
            raise BilevelError("The list of episodes is empty; pass at least one.")
        task = episodes if isinstance(episodes, Task) else trees.map(lambda *parts: torch.stack(parts), *episodes)
        (images, labels), (queries, *answers) = task.train, task.val
        if not len(images):
            raise BilevelError(f"The images are {list(images.shape)}, which is no episode; pass at least one.")
        if images.shape[2:] != self.shape or queries.shape[2:] != self.shape:
            wanted = " × ".join(map(str, self.shape))
            raise BilevelError(
                f"The images are {list(images.shape)} and {list(queries.shape)}; this learner takes stacked episodes, "
                f"episodes × images × {wanted}, as Episodes.batch returns them, or a list of tasks."
            )
        return (images.to(device), labels.to(device)), (queries.to(device), *(x.to(device) for x in answers))

    def _chunks(self, episodes: Task | Sequence[Task]) -> list[Task]:
        sets = support, query = self._stacked_episodes(episodes)
        parts = [list(zip(*(torch.split(x, self.chunk_size(len(x))) for x in part), strict=True)) for part in sets]
        if query[0] is support[0]:  # if one tensor is both sets, a part of it is both sets too
            parts[1] = [(images, *answers) for (images, _), (_, *answers) in zip(*parts, strict=True)]
        return [Task(*pair) for pair in zip(*parts, strict=True)]

    def _count_features(self) -> int:
        """The number of features, including the constant feature of the bias."""
        with torch.no_grad():
            images = torch.zeros((2, *self.shape)).to(next(iter(self.lam.values()), torch.zeros(())))
            features = self.representation.raw(self.lam, images)
        if features.ndim != 2:
            raise BilevelError(
                f"The module maps images {list(images.shape)} to {list(features.shape)}; it must return N×F features. "
                "End it with nn.Flatten()."
            )
        return features.shape[1] + 1
