"""The settings of a few-shot training, which determine its result. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bilevel.errors import BilevelError

# Settings that some learners have and others do not.
LEARNER_FIELDS = {
    "network",
    "last_relu",
    "normalise",
    "mirror",
    "steps",
    "inner_lr",
    "step_bound",
    "l2",
    "batch_norm",
    "method",
    "global_loss",
    "classifier",
    "label_smoothing",
    "images",
    "precision",
}
# The largest number in single precision, and the largest number of inner steps.
LARGEST_FLOAT, MOST_STEPS = 3.4e38, 10_000


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of `bilevel train`. The defaults are the paper's for Omniglot, without rotations."""

    learner: str = _setting("hyper-representation", "The strategy; `bilevel list learners` lists them.")
    dataset: str = _setting("omniglot", "A data set, or the path of a folder of class folders.")
    network: str = _setting("omniglot-net", "The representation h: omniglot-net, c4l, c4l-64 or rn.")
    last_relu: bool = _setting(True, "Whether the network ends with a ReLU.")
    normalise: bool = _setting(
        False, "Whether features are centred and scaled to one length; centre and length are learned."
    )
    mirror: bool = _setting(False, "Whether features are the mean over a picture and its mirror image.")
    image_size: int = _setting(
        0, "Pixels per side to which images of a folder or of MiniImagenet are scaled; 0: the size of the data set."
    )
    channels: Literal["", "gray", "rgb"] = _setting(
        "",
        "Channels of a folder's images. By default those of --initial; without it, gray for drawings, else rgb.",
    )
    prepare: Literal["", "photograph", "drawing", "gray-drawing"] = _setting(
        "",
        "How a folder's pictures are prepared: drawings are cleaned and cropped to their ink. By default as for "
        "--initial; without it, as photographs.",
    )
    invert: bool = _setting(
        False, "Whether to swap light and dark in a folder's pictures. For drawings this is found automatically."
    )
    split: str = _setting(
        "",
        "Shares of a folder's classes for meta-training, meta-validation and meta-test; 0.64,0.16,0.2 if not given. A "
        "folder with train/, val/ and test/ needs none.",
    )
    strict: bool = _setting(False, "Whether an unreadable picture of a folder is an error; if not, it is left out.")
    augment: str = _setting(
        "", "Random changes of training images: some of flip, crop, zoom, colour, separated by commas."
    )
    rotations: bool = _setting(False, "Whether rotations of a class by 90, 180 and 270 degrees are classes too.")
    ways: int = _setting(5, "Classes in an episode.")
    shots: int = _setting(1, "Support images of each class.")
    queries: int = _setting(15, "Query images of each class.")
    outer: Literal["query", "support"] = _setting(
        "query", "The set of the outer objective in training; support is the paper's Bilevel-train, without queries."
    )
    train_ways: int = _setting(0, "Classes in a training episode; 0: as many as ways.")
    train_shots: int = _setting(0, "Support images of each class in a training episode; 0: as many as shots.")
    most_shots: int = _setting(
        0, "Draw the number of shots at random in every hyperiteration of training, up to this number; 0: do not."
    )
    global_loss: float = _setting(
        0.0, "Weight of the loss of one classifier over all training classes, which is added to that of the episodes."
    )
    classifier: Literal["linear", "cosine"] = _setting(
        "linear", "The kind of the classifier over all training classes."
    )
    label_smoothing: float = _setting(0.0, "Label smoothing of the classifier over all training classes.")
    images: int = _setting(0, "Images in a hyperiteration of multiclass; 0: as many as a meta-batch of episodes has.")
    precision: Literal["float32", "bfloat16"] = _setting(
        "float32",
        "The precision of multiclass's convolutions. bfloat16 is faster on processors that have instructions for it.",
    )
    meta_batch: int = _setting(32, "Episodes in a hyperiteration.")
    steps: int = _setting(5, "T, the inner steps.")
    inner_lr: float = _setting(0.1, "The step size of the inner gradient descent.")
    step_bound: float = _setting(
        1.0,
        "Bound the inner step size of an episode by step_bound/ν, where ν is the curvature of its inner objective at "
        "w = 0. Steps above 2/ν do not converge. 0: no bound.",
    )
    l2: float = _setting(0.0, "Weight of ‖w‖²/2 in the inner objective.")
    batch_norm: Literal["episode", "support", "running"] = _setting(
        "episode", "The images whose statistics batch norm uses."
    )
    method: Literal["reverse", "reverse-sqrt", "unrolled", "first-order"] = _setting(
        "reverse", "How the hypergradient is computed. reverse is the default method of the learner."
    )
    optimizer: Literal["adam", "sgd"] = _setting("adam", "The optimiser of λ; sgd is with Nesterov's momentum.")
    momentum: float = _setting(0.9, "The momentum of sgd.")
    weight_decay: float = _setting(
        0.0, "The weight decay of λ's matrices and filters; with adam it is decoupled from the gradient (AdamW)."
    )
    lr: float = _setting(1e-3, "The optimiser's step size on λ.")
    schedule: Literal["inverse", "cosine", "steps"] = _setting(
        "inverse",
        "How lr falls: inverse, as lr/(1 + decay·k); cosine, as half a cosine to 0 at the last hyperiteration; steps, "
        "by a factor of 10 after 1/2, 3/4 and 9/10 of the hyperiterations.",
    )
    warmup: int = _setting(0, "Hyperiterations at the beginning in which lr rises from 0.")
    decay: float = _setting(1e-5, "The decay of the schedule inverse, lr/(1 + decay·k) in hyperiteration k.")
    clip: float = _setting(0.0, "Clip every element of the hypergradient to ± this number; 0: do not.")
    average: float = _setting(
        0.0, "Use a moving average of λ with this factor for validation and for the result; 0: do not."
    )
    iterations: int = _setting(100_000, "The largest number of hyperiterations.")
    validate_every: int = _setting(1000, "Hyperiterations between validations.")
    validation_episodes: int = _setting(600, "Episodes of a validation.")
    patience: int = _setting(40, "Validations without a new best after which to stop; 0: do not.")
    checkpoint_every: int = _setting(200, "Hyperiterations between checkpoints.")
    initial: str = _setting("", "Begin with the weights of this run or of zoo:NAME instead of random weights.")
    seed: int = _setting(0, "The seed of the weights, the episodes and the split of classes.")
    options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata={"help": "Settings that only this learner has."}
    )

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            check_kind(name, getattr(self, name), hint)
        for name in ("shots", "queries", "meta_batch", "steps", "validate_every", "checkpoint_every"):
            _at_least(self, name, 1)
        for name in ("ways", "validation_episodes"):
            _at_least(self, name, 2)
        counts = ("iterations", "patience", "image_size", "train_ways", "train_shots", "most_shots", "images", "warmup")
        for name in (*counts, "seed", "l2", "decay", "clip", "step_bound", "global_loss", "weight_decay"):
            _at_least(self, name, 0)
        for name in ("momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise BilevelError(f"{name}={getattr(self, name)} must be at least 0 and below 1.")
        for name in ("inner_lr", "lr"):
            if not getattr(self, name) > 0:
                raise BilevelError(f"{name}={getattr(self, name)} must be positive.")
        if not 0 <= self.average < 1:
            raise BilevelError(f"average={self.average} must be at least 0 and below 1; 0.999 is a good value.")
        self.fractions()
        if self.seed >= 2**60:
            raise BilevelError(f"seed={self.seed} is too large; pass a whole number below 2⁶⁰.")

    def plain(self) -> dict[str, Any]:
        """All settings as JSON types. Empty `options` are left out, as in files of earlier versions."""
        plain = asdict(self)
        return plain if self.options else {name: value for name, value in plain.items() if name != "options"}

    def fractions(self) -> tuple[float, float, float] | None:
        """The numbers in `split`; None if it is empty.

        >>> TrainingSettings(split="0.6,0.2,0.2").fractions()
        (0.6, 0.2, 0.2)
        """
        if not self.split:
            return None
        try:
            train, val, test = map(float, self.split.split(","))
        except ValueError:
            train = val = test = math.nan
        if not (min(train, val, test) >= 0 and math.isclose(train + val + test, 1, abs_tol=1e-6)):
            raise BilevelError(
                f"split={self.split!r} must be three numbers ≥ 0 that sum to 1, separated by commas: the shares of "
                "classes for meta-training, meta-validation and meta-test. For example: 0.6,0.2,0.2."
            )
        return train, val, test

    @property
    def images_in_iteration(self) -> int:
        """Images that pass through the network in a hyperiteration; their mean if shots are random."""
        if self.learner == "multiclass" and self.images:
            return self.images
        shots = (self.shots_in_training + max(self.shots_in_training, self.most_shots)) / 2
        queries = 0 if self.outer == "support" else self.queries
        return round(self.meta_batch * self.ways_in_training * (shots + queries))

    @property
    def shots_in_training(self) -> int:
        return self.train_shots or self.shots

    @property
    def ways_in_training(self) -> int:
        return self.train_ways or self.ways

    def rate(self, iteration: int) -> float:
        """The optimiser's step size in hyperiteration 1, 2, …

        >>> settings = TrainingSettings(lr=0.1, schedule="cosine", iterations=100, warmup=10)
        >>> [round(settings.rate(k), 4) for k in (1, 10, 51, 100)]
        [0.01, 0.098, 0.05, 0.0]
        """
        done = (iteration - 1) / max(1, self.iterations)
        rate = self.lr * min(1.0, iteration / self.warmup) if self.warmup else self.lr
        if self.schedule == "cosine":
            return rate * (1 + math.cos(math.pi * min(1.0, done))) / 2
        if self.schedule == "steps":
            return rate * 0.1 ** sum(done >= share for share in (0.5, 0.75, 0.9))
        return rate / (1 + self.decay * (iteration - 1))

    @property
    def free_on_resume(self) -> set[str]:
        """Settings that may differ when a run is resumed: its length, and how often it validates and saves."""
        free = {"validate_every", "validation_episodes", "patience", "checkpoint_every"}
        # In other schedules the step size depends on the number of hyperiterations.
        return free | {"iterations"} if self.schedule == "inverse" else free

    @classmethod
    def of(cls, values: Any) -> TrainingSettings:
        """From a `config.json`. A setting that is unknown is an error, because it would be ignored."""
        if not isinstance(values, dict):
            raise BilevelError(
                f"The settings of a training are {values!r:.60}; they must be a JSON object of settings by name."
            )
        known = {f.name for f in fields(cls)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise BilevelError(
                f"The configuration has settings of another version: {', '.join(unknown)}. Use that version of bilevel."
            )
        return cls(**values)


def _at_least(settings: TrainingSettings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if not value >= least:
        raise BilevelError(f"{name}={value} must be at least {least}.")


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Raise an error unless a setting, from a file or from Python, has the type of its annotation."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise BilevelError(f"{name}={value!r:.80} is unknown; pass one of {', '.join(get_args(hint))}.")
        return
    if hint == dict[str, Any]:
        if not isinstance(value, dict):
            raise BilevelError(f"{name}={value!r:.80} is not a dictionary of settings.")
        return
    legal = (int, float) if hint is float else hint
    if not isinstance(value, legal) or (isinstance(value, bool) and hint is not bool):
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise BilevelError(f"{name}={value!r:.80} is not {expected[hint]}.")
    if hint is float and not -math.inf < value < math.inf:  # math.isfinite raises for large whole numbers
        raise BilevelError(f"{name}={value} is not finite.")
    if hint is float and abs(value) > LARGEST_FLOAT:
        raise BilevelError(
            f"{name}={value!r:.80} is infinite in single precision; pass a number below {LARGEST_FLOAT:.1e}."
        )
    if name == "steps" and value > MOST_STEPS:
        raise BilevelError(f"steps={value:,} would take too long; pass at most {MOST_STEPS:,} inner steps.")
