"""What a learner's numbers are and how they are kept: λ, batch norm's averages, the settings beside them, files."""

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

# Errors name so many tensors, and count the rest.
NAMED = 8


class SavedLearner(ABC):
    """λ by name, and the representation that it belongs to."""

    representation: Representation
    lam: dict[str, Tensor]
    class_loss: ClassLoss | None = None
    # How a picture becomes what the learner takes, for its card; None where nobody has said it.
    preparation: Preparation | None = None

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What is needed beside the weights to build this learner again."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Mapping[str, Any], module: nn.Module | None = None) -> Self:
        """A learner with fresh weights from what `settings()` said."""

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
        """Start c at the mean of these images' features, where features are centred."""
        self.lam[CENTRE].copy_(self.representation.mean(self.lam, images))

    def to(self, device: torch.device | str) -> Self:
        """Move the learner there; episodes follow it. Returns the learner itself."""
        self.module.to(device)
        self.lam = {name: value.to(device) for name, value in self.lam.items()}
        return self

    def running(self) -> list[Tensor]:
        """The running averages of batch norm, where they are in use: means and variances, layer by layer."""
        if self.batch_norm != "running":
            return []
        return [buffer for layer in self.norms.values() for buffer in (layer.running_mean, layer.running_var)]

    @contextmanager
    def watching(self) -> Iterator[Callable[[], list[Tensor]]]:
        """Inside the block, note the statistics of every normalised set; the function returns their means."""
        norms = self.representation.here().norms
        watched = norms.values() if self.batch_norm == "running" else ()
        for layer in watched:
            layer.seen = []
        seen: list[Tensor] = []
        try:
            yield lambda: seen
            for layer in watched:
                # A layer that was not used keeps its averages.
                pairs = layer.seen or [(layer.running_mean, layer.running_var)]
                seen += [torch.stack(part).mean(0) for part in zip(*pairs, strict=True)]
        finally:
            for layer in watched:
                layer.seen = None

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
        """λ and, where they are in use, batch norm's running averages, by name."""
        names = [f"{name}.running_{kind}" for name in self.norms for kind in ("mean", "var")]
        return {**lam, **dict(zip(names, self.running(), strict=False))}

    def save(self, path: str | Path, card: Mapping[str, Any] | None = None) -> None:
        """Write `path.safetensors` and the card `path.json`.

        The card holds the settings, how pictures are prepared if `preparation` is known, and whatever is passed.
        """
        stem = Path(path)
        known = {} if self.preparation is None else {"preparation": self.preparation.plain()}
        write_tensors(stem.with_name(stem.name + ".safetensors"), self.with_running(self.lam))
        facts = {"learner": self.settings(), **known, **(card or {})}
        write_json(stem.with_name(stem.name + ".json"), facts, sealed=True)

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> Self:
        """A learner from `path.safetensors` and `path.json`; a module of your own has to be passed again."""
        stem = Path(path)
        card = read_json(stem.with_name(stem.name + ".json"))
        if not isinstance(card, dict) or "learner" not in card:
            raise BilevelError(f"{stem}.json is not the card of a learner.")
        learner = cls.from_settings(card["learner"], module)
        learner.set_weights(read_tensors(stem.with_name(stem.name + ".safetensors"))[0])
        learner.recall_preparation(card.get("preparation"))
        return learner

    def recall_preparation(self, recorded: Any) -> None:
        """Take over what a card says about the preparation of pictures; None: it says nothing."""
        if recorded is not None:
            from bilevel.data.preparation import Preparation  # needs Pillow, which other learners do without

            self.preparation = Preparation.of(recorded)

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace λ, and batch norm's averages where they are in use, by tensors with the same names.

        A classifier over the classes of meta-training is left out where this learner has none: episodes do without.
        """
        wanted = self.with_running(self.lam)
        if self.class_loss is None:
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
        wrong = [name for name in wanted if name not in weights or weights[name].shape != wanted[name].shape]
        wrong += [name for name in weights if name not in wanted]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise BilevelError(f"The weights do not fit the network: {', '.join(wrong[:NAMED])}{more}.")
        for name in wanted:
            check_numbers(name, weights[name])
        for name, tensor in wanted.items():
            tensor.copy_(weights[name])


def check_numbers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of a file that cannot be weights."""
    if not tensor.is_floating_point():
        raise BilevelError(f"The weights {name} are {tensor.dtype}; floating-point numbers are needed.")
    if not bool(tensor.float().isfinite().all()):
        raise BilevelError(f"The weights {name} are not finite, so every answer would be meaningless.")
