"""What a learner's numbers are and how they are kept: λ, batch norm's averages, the settings beside them, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.meta.class_loss import PREFIX, ClassLoss
from bilevel.meta.representation import CENTRE, Representation
from bilevel.models.batch_norm import BatchNorm, Mode
from bilevel.training.files import read_json, read_tensors, write_json, write_tensors


class SavedLearner:
    """λ by name, and the representation that it belongs to."""

    representation: Representation
    lam: dict[str, Tensor]
    class_loss: ClassLoss | None

    def __init__(self, module: nn.Module | str, shape: tuple[int, int, int], **options: Any) -> None:
        raise TypeError("This is a part of learners, such as HyperRepresentation, and no learner of its own.")

    @property
    def module(self) -> nn.Module:
        return self.representation.module

    @property
    def norms(self) -> dict[str, BatchNorm]:
        return self.representation.norms

    @property
    def batch_norm(self) -> Mode:
        return self.representation.batch_norm

    @batch_norm.setter
    def batch_norm(self, mode: Mode) -> None:
        self.representation.batch_norm = mode

    @property
    def normalise(self) -> bool:
        return self.representation.normalise

    @torch.no_grad()
    def centre(self, images: Tensor) -> None:
        """Start c at the mean of these images' features, where features are centred."""
        self.lam[CENTRE].copy_(self.representation.mean(self.lam, images))

    @contextmanager
    def at(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Use these weights inside the block."""
        before = self.lam
        self.lam = {name: weights[name] for name in before}
        try:
            yield
        finally:
            self.lam = before

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

    def with_running(self, lam: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """λ and, where they are in use, batch norm's running averages, by name."""
        names = [f"{name}.running_{kind}" for name in self.norms for kind in ("mean", "var")]
        return {**lam, **dict(zip(names, self.running(), strict=False))}

    def settings(self) -> dict[str, Any]:
        """What is needed beside the weights to build this learner again."""
        names = ("network", "shape", "steps", "inner_lr", "step_bound", "l2", "batch_norm")
        options = {"normalise": False, "last_relu": True}  # said where they are not what they were before they came
        changed = {name: getattr(self, name) for name, usual in options.items() if getattr(self, name) != usual}
        return {**{name: getattr(self, name) for name in names}, **changed}

    def save(self, path: str | Path, card: Mapping[str, Any] | None = None) -> None:
        """Write `path.safetensors` and the card `path.json`; the card holds the settings and whatever is passed."""
        stem = Path(path)
        write_tensors(stem.with_name(stem.name + ".safetensors"), self.with_running(self.lam))
        write_json(stem.with_name(stem.name + ".json"), {"learner": self.settings(), **(card or {})})

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> Self:
        """A learner from `path.safetensors` and `path.json`; a module of your own has to be passed again."""
        stem = Path(path)
        card = read_json(stem.with_name(stem.name + ".json"))
        if not isinstance(card, dict) or "learner" not in card:
            raise BilevelError(f"{stem}.json is not the card of a learner.")
        learner = cls.from_settings(card["learner"], module)
        learner.set_weights(read_tensors(stem.with_name(stem.name + ".safetensors"))[0])
        return learner

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], module: nn.Module | None = None) -> Self:
        """A learner with fresh weights from what `settings()` said."""
        options = dict(settings)
        network = options.pop("network")
        if network is None and module is None:
            raise BilevelError(
                "This learner has a module of its own, like the Multiclass baseline of `bilevel run variants`; in "
                "Python, pass module=… with the same architecture."
            )
        return cls(module if module is not None else network, tuple(options.pop("shape")), **options)

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
            raise BilevelError(f"The weights do not fit the network: {', '.join(wrong)}.")
        for name, tensor in wanted.items():
            tensor.copy_(weights[name])
