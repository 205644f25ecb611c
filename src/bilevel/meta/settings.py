"""Everything that a few-shot training is a function of. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bilevel.errors import BilevelError


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The configuration of `bilevel train`; the defaults are the paper's for Omniglot, without its rotations."""

    dataset: str = _setting("omniglot", "A data set, or the path of a folder of class folders.")
    network: str = _setting("omniglot-net", "The representation h: omniglot-net, c4l, c4l-64 or rn.")
    image_size: int = _setting(0, "Pixels per side that a folder's images are brought to; 0: as the data set has them.")
    rotations: bool = _setting(False, "Whether quarter turns of a class are classes of their own.")
    ways: int = _setting(5, "Classes in an episode.")
    shots: int = _setting(1, "Support images of each class.")
    queries: int = _setting(15, "Query images of each class.")
    outer: Literal["query", "support"] = _setting(
        "query", "The set that training's outer objective is on; support is the paper's Bilevel-train, without queries."
    )
    train_shots: int = _setting(0, "Support images of each class in training alone; 0: as many as shots.")
    meta_batch: int = _setting(32, "Episodes in a hyperiteration.")
    steps: int = _setting(5, "T, the inner steps.")
    inner_lr: float = _setting(0.1, "The step size of the inner gradient descent.")
    step_bound: float = _setting(
        1.0,
        "Keep an episode's inner step at or below this over ν, its curvature at w = 0 (2/ν is where steps stop "
        "converging); 0: do not.",
    )
    l2: float = _setting(0.0, "Weight of ‖w‖²/2 in the inner objective.")
    batch_norm: Literal["episode", "support", "running"] = _setting("episode", "Whose statistics batch norm uses.")
    method: Literal["reverse", "first-order"] = _setting("reverse", "How the hypergradient is computed.")
    lr: float = _setting(1e-3, "Adam's step size on λ.")
    decay: float = _setting(1e-5, "It is lr/(1 + decay·k) in hyperiteration k.")
    clip: float = _setting(0.0, "Clip every element of the hypergradient to ± this; 0: do not.")
    average: float = _setting(0.0, "Keep λ's moving average with this factor and use it for every score; 0: do not.")
    iterations: int = _setting(100_000, "Hyperiterations at most.")
    validate_every: int = _setting(1000, "Hyperiterations between validations.")
    validation_episodes: int = _setting(600, "Episodes of a validation.")
    patience: int = _setting(40, "Validations without a new best after which to stop; 0: do not.")
    checkpoint_every: int = _setting(200, "Hyperiterations between checkpoints.")
    initial: str = _setting("", "Begin with the weights of this run or zoo:NAME instead of random ones.")
    seed: int = _setting(0, "Of the weights, the episodes and the split of classes.")

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Settings).items():
            _check_kind(name, getattr(self, name), hint)
        for name in ("shots", "queries", "meta_batch", "steps", "validate_every", "checkpoint_every"):
            _at_least(self, name, 1)
        for name in ("ways", "validation_episodes"):
            _at_least(self, name, 2)
        for name in ("iterations", "patience", "image_size", "train_shots", "seed"):
            _at_least(self, name, 0)
        for name in ("l2", "decay", "clip", "step_bound"):
            _at_least(self, name, 0)
        for name in ("inner_lr", "lr"):
            if not getattr(self, name) > 0:
                raise BilevelError(f"{name}={getattr(self, name)} would not move anything; pass a number > 0.")
        if not 0 <= self.average < 1:
            raise BilevelError(f"average={self.average} must be at least 0 and below 1; 0.999 is a good value.")
        if self.seed >= 2**60:
            raise BilevelError(f"seed={self.seed} is too large; pass a whole number below 2⁶⁰.")

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Settings:
        """From a `config.json`; what it does not know is an error, because it would be ignored."""
        known = {f.name for f in fields(cls)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise BilevelError(f"The configuration has settings of another version: {', '.join(unknown)}.")
        return cls(**values)


# Settings that may differ when a run is continued: they say how long to run and how often to look.
FREE_ON_RESUME = {"iterations", "validate_every", "validation_episodes", "patience", "checkpoint_every"}


def _at_least(settings: Settings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if not value >= least:
        raise BilevelError(f"{name}={value} must be at least {least}.")


def _check_kind(name: str, value: Any, hint: Any) -> None:
    """A setting from a file, or from Python, may be of any type."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise BilevelError(f"{name}={value!r} is unknown; pass one of {', '.join(get_args(hint))}.")
        return
    legal = (int, float) if hint is float else hint
    if not isinstance(value, legal) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise BilevelError(f"{name}={value!r} is not {words[hint]}.")
    if hint is float and not math.isfinite(value):
        raise BilevelError(f"{name}={value} is not finite.")
