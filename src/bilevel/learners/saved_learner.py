"""The tensors of a learner and its files: λ, running averages of batch norm, and the card with the settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.files import read_json, write_json
from bilevel.learners.class_loss import PREFIX, ClassLoss
from bilevel.learners.representation import CENTRE, Representation
from bilevel.models.batch_norm import BatchNorm, Mode
from bilevel.training.files import read_tensors, write_tensors

if TYPE_CHECKING:
    from bilevel.data.preparation import Preparation

# How many tensors an error message names. It counts the others.
NAMED = 8


class SavedLearner(ABC):
    """A learner as tensors and settings that can be saved, loaded and copied."""

    representation: Representation
    lam: dict[str, Tensor]
    class_loss: ClassLoss | None = None
    # How a picture becomes an input of the learner, for its card; None if it is unknown.
    preparation: Preparation | None = None

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings from which `from_settings` builds this learner again, without its weights."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Mapping[str, Any], module: nn.Module | None = None) -> Self:
        """A learner with new weights from the result of `settings()`."""

    @property
    def module(self) -> nn.Module:
        return self.representation.module

    @property
    def norms(self) -> dict[str, BatchNorm]:
        return self.representation.norms

    @property
    def batch_norm(self) -> Mode:
        return self.representation.batch_norm

    @property
    def normalise(self) -> bool:
        return self.representation.normalise

    @torch.no_grad()
    def centre(self, images: Tensor) -> None:
        """Set the centre c to the mean features of these images. For learners with `normalise`."""
        self.lam[CENTRE].copy_(self.representation.mean(self.lam, images))

    def to(self, device: torch.device | str) -> Self:
        """Move the learner to a device, and return it. Episodes are moved to that device when they are used."""
        self.module.to(device)
        self.lam = {name: value.to(device) for name, value in self.lam.items()}
        return self

    def running(self) -> list[Tensor]:
        """The running means and variances of batch norm, layer by layer; empty if the mode is not "running"."""
        if self.batch_norm != "running":
            return []
        return [buffer for layer in self.norms.values() for buffer in (layer.running_mean, layer.running_var)]

    @contextmanager
    def recording_statistics(self) -> Iterator[Callable[[], list[Tensor]]]:
        """Record the statistics of every set that batch norm normalises inside the block.

        After the block, the function that it yields returns their means, in the order of `running`.
        """
        norms = self.representation.of_this_thread().norms
        recorded_layers = norms.values() if self.batch_norm == "running" else ()
        for layer in recorded_layers:
            layer.seen = []
        means: list[Tensor] = []
        try:
            yield lambda: means
            for layer in recorded_layers:
                # A layer that was not used keeps its averages.
                pairs = layer.seen or [(layer.running_mean, layer.running_var)]
                means += [torch.stack(part).mean(0) for part in zip(*pairs, strict=True)]
        finally:
            for layer in recorded_layers:
                layer.seen = None

    def __getstate__(self) -> dict[str, Any]:
        # The problems hold references to this learner, so a copy builds its own.
        return {**self.__dict__, "_problems": {}}

    @contextmanager
    def at(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Use these weights inside the block."""
        before = self.lam
        self.lam = {name: weights[name] for name in before}
        try:
            yield
        finally:
            self.lam = before

    def with_running(self, lam: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """λ and the running averages of batch norm (in the mode "running"), by name."""
        names = [f"{name}.running_{kind}" for name in self.norms for kind in ("mean", "var")]
        return {**lam, **dict(zip(names, self.running(), strict=False))}

    def save(
        self, path: str | Path, card: Mapping[str, Any] | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        """Write `path.safetensors` and the card `path.json`.

        The card holds the settings, the `preparation` of pictures if it is known, and the items of `card`. The file has
        numbers of this `dtype`, of half precision for example; None: as they are.
        """
        stem = Path(path)
        preparation = {} if self.preparation is None else {"preparation": self.preparation.plain()}
        tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in self.with_running(self.lam).items()}
        write_tensors(stem.with_name(stem.name + ".safetensors"), tensors)
        facts = {"learner": self.settings(), **preparation, **(card or {})}
        write_json(stem.with_name(stem.name + ".json"), facts, sealed=True)

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> Self:
        """Load a learner from `path.safetensors` and `path.json`. A module of your own must be passed again."""
        stem = Path(path)
        card = read_json(stem.with_name(stem.name + ".json"))
        if not isinstance(card, dict) or "learner" not in card:
            raise BilevelError(f"{stem}.json is not the card of a learner. Pass a path that `learner.save` wrote.")
        learner = cls.from_settings(card["learner"], module)
        learner.set_weights(read_tensors(stem.with_name(stem.name + ".safetensors"))[0])
        learner.recall_preparation(card.get("preparation"))
        return learner

    def recall_preparation(self, recorded: Any) -> None:
        """Set `preparation` from the entry of a card; None if the card has none."""
        if recorded is not None:
            from bilevel.data.preparation import Preparation  # needs Pillow, which is optional

            self.preparation = Preparation.of(recorded)

    def round_to(self, dtype: torch.dtype) -> None:
        """Round λ and the running averages to the numbers of a shorter type, and keep their own type."""
        self.set_weights({name: tensor.to(dtype) for name, tensor in self.with_running(self.lam).items()})

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace λ, and the running averages in the mode "running", by tensors with the same names.

        If this learner has no classifier over all classes, the weights of one are ignored: episodes do not use them.
        """
        wanted = self.with_running(self.lam)
        if self.class_loss is None:
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
        wrong = [name for name in wanted if name not in weights or weights[name].shape != wanted[name].shape]
        wrong += [name for name in weights if name not in wanted]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise BilevelError(
                "The weights do not fit the network. Missing, unknown or of another shape: "
                f"{', '.join(wrong[:NAMED])}{more}."
            )
        for name in wanted:
            check_numbers(name, weights[name])
        for name, tensor in wanted.items():
            tensor.copy_(weights[name])


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise an error unless a tensor of a file has finite floating-point numbers."""
    if not tensor.is_floating_point():
        raise BilevelError(
            f"The weights {name} are {tensor.dtype}, not floating-point numbers, so the file cannot be used."
        )
    if not bool(tensor.float().isfinite().all()):
        raise BilevelError(f"The weights {name} are not finite, so the file cannot be used.")
