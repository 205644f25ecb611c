"""The settings of a few-shot training, which determine its result. Does not import torch."""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bilevel.errors import BilevelError

# Settings that some learners have and others do not.
LEARNER_FIELDS = {
    *("network", "last_relu", "normalise", "mirror", "batch_norm", "steps", "inner_lr", "step_bound", "l2", "method"),
    *("global_loss", "classifier", "label_smoothing", "images", "precision"),
}
# The largest number in single precision, and the largest number of inner steps.
LARGEST_FLOAT, MOST_STEPS = 3.4e38, 10_000
# The bounds of a setting: the comparison of a value with the bound, and the words of the error.
BOUNDS = {"least": (operator.ge, "at least"), "above": (operator.gt, "above"), "below": (operator.lt, "below")}


def setting(default: Any, text: str = "", **bounds: float) -> Any:
    """A field with a help text and the bounds of its value: `least`, `above` and `below`; see `check_values`."""
    return field(default=default, metadata={"help": text, **bounds})


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of `bilevel train`. The defaults are the paper's for Omniglot, without rotations."""

    learner: str = setting("hyper-representation", "The strategy; `bilevel list learners` lists them.")
    dataset: str = setting("omniglot", "A data set, or the path of a folder of class folders.")
    network: str = setting("omniglot-net", "The representation h: omniglot-net, c4l, c4l-64 or rn.")
    last_relu: bool = setting(True, "Whether the network ends with a ReLU.")
    normalise: bool = setting(
        False, "Whether features are centred and scaled to one length; centre and length are learned."
    )
    mirror: bool = setting(False, "Whether features are the mean over a picture and its mirror image.")
    image_size: int = setting(
        0,
        "Pixels per side to which images of a folder or of MiniImagenet are scaled; 0: the size of the data set.",
        least=0,
    )
    channels: Literal["", "gray", "rgb"] = setting(
        "",
        "Channels of a folder's images. By default those of --initial; without it, gray for drawings, else rgb.",
    )
    prepare: Literal["", "photograph", "drawing", "gray-drawing"] = setting(
        "",
        "How a folder's pictures are prepared: drawings are cleaned and cropped to their ink. By default as for "
        "--initial; without it, as photographs.",
    )
    invert: bool = setting(
        False, "Whether to swap light and dark in a folder's pictures. For drawings this is found automatically."
    )
    split: str = setting(
        "",
        "Shares of a folder's classes for meta-training, meta-validation and meta-test; 0.64,0.16,0.2 if not given. A "
        "folder with train/, val/ and test/ needs none.",
    )
    strict: bool = setting(False, "Whether an unreadable picture of a folder is an error; if not, it is left out.")
    augment: str = setting(
        "", "Random changes of training images: some of flip, crop, zoom, colour, separated by commas."
    )
    rotations: bool = setting(False, "Whether rotations of a class by 90, 180 and 270 degrees are classes too.")
    ways: int = setting(5, "Classes in an episode.", least=2)
    shots: int = setting(1, "Support images of each class.", least=1)
    queries: int = setting(15, "Query images of each class.", least=1)
    outer: Literal["query", "support"] = setting(
        "query", "The set of the outer objective in training; support is the paper's Bilevel-train, without queries."
    )
    train_ways: int = setting(0, "Classes in a training episode; 0: as many as ways.", least=0)
    train_shots: int = setting(0, "Support images of each class in a training episode; 0: as many as shots.", least=0)
    most_shots: int = setting(
        0,
        "Draw the number of shots at random in every hyperiteration of training, up to this number; 0: do not.",
        least=0,
    )
    global_loss: float = setting(
        0.0,
        "Weight of the loss of one classifier over all training classes, which is added to that of the episodes.",
        least=0,
    )
    classifier: Literal["linear", "cosine"] = setting("linear", "The kind of the classifier over all training classes.")
    label_smoothing: float = setting(
        0.0, "Label smoothing of the classifier over all training classes.", least=0, below=1
    )
    images: int = setting(
        0, "Images in a hyperiteration of multiclass; 0: as many as a meta-batch of episodes has.", least=0
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        "The precision of multiclass's convolutions. bfloat16 is faster on processors that have instructions for it.",
    )
    meta_batch: int = setting(32, "Episodes in a hyperiteration.", least=1)
    steps: int = setting(5, "T, the inner steps.", least=1)
    inner_lr: float = setting(0.1, "The step size of the inner gradient descent.", above=0)
    step_bound: float = setting(
        1.0,
        "Bound the inner step size of an episode by step_bound/ν, where ν is the curvature of its inner objective at "
        "w = 0. Steps above 2/ν do not converge. 0: no bound.",
        least=0,
    )
    l2: float = setting(0.0, "Weight of ‖w‖²/2 in the inner objective.", least=0)
    batch_norm: Literal["episode", "support", "running"] = setting(
        "episode", "The images whose statistics batch norm uses."
    )
    method: Literal["reverse", "reverse-sqrt", "unrolled", "first-order"] = setting(
        "reverse", "How the hypergradient is computed. reverse is the default method of the learner."
    )
    optimizer: Literal["adam", "sgd"] = setting("adam", "The optimiser of λ; sgd is with Nesterov's momentum.")
    momentum: float = setting(0.9, "The momentum of sgd.", least=0, below=1)
    weight_decay: float = setting(
        0.0,
        "The weight decay of λ's matrices and filters; with adam it is decoupled from the gradient (AdamW).",
        least=0,
    )
    lr: float = setting(1e-3, "The optimiser's step size on λ.", above=0)
    schedule: Literal["inverse", "cosine", "steps"] = setting(
        "inverse",
        "How lr falls: inverse, as lr/(1 + decay·k); cosine, as half a cosine to 0 at the last hyperiteration; steps, "
        "by a factor of 10 after 1/2, 3/4 and 9/10 of the hyperiterations.",
    )
    warmup: int = setting(0, "Hyperiterations at the beginning in which lr rises from 0.", least=0)
    decay: float = setting(1e-5, "The decay of the schedule inverse, lr/(1 + decay·k) in hyperiteration k.", least=0)
    clip: float = setting(0.0, "Clip every element of the hypergradient to ± this number; 0: do not.", least=0)
    average: float = setting(
        0.0,
        "Use a moving average of λ with this factor for validation and for the result; 0: do not.",
        least=0,
        below=1,
    )
    iterations: int = setting(100_000, "The largest number of hyperiterations.", least=0)
    validate_every: int = setting(1000, "Hyperiterations between validations.", least=1)
    validation_episodes: int = setting(600, "Episodes of a validation.", least=2)
    patience: int = setting(40, "Validations without a new best after which to stop; 0: do not.", least=0)
    checkpoint_every: int = setting(200, "Hyperiterations between checkpoints.", least=1)
    initial: str = setting("", "Begin with the weights of this run or of zoo:NAME instead of random weights.")
    seed: int = setting(0, "The seed of the weights, the episodes and the split of classes.", least=0)
    options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata={"help": "Settings that only this learner has."}
    )

    def __post_init__(self) -> None:
        check_values(self)
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


def check_values(settings: Any) -> None:
    """Raise an error unless every field of a dataclass has the type of its annotation and is within its bounds."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        check_kind(f.name, value, hints[f.name])
        bounds = [(*BOUNDS[name], f.metadata[name]) for name in BOUNDS if name in f.metadata]
        if not all(holds(value, bound) for holds, _, bound in bounds):
            listed = " and ".join(f"{words} {bound}" for _, words, bound in bounds)
            raise BilevelError(f"{f.name}={value} must be {listed}.")


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
