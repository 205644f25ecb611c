"""The hyper-representation in plain torch: an ordinary module, one episode after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.contract import Case, Run

# A function of support features, their labels, query features and their labels, which returns E after T steps.
Adapt = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain_module(case: Case) -> nn.Module:
    """Four convolutions with batch norm, which uses the statistics of the batch and learns a bias but no scale.

    The Omniglot network has strides, the other network has max-pooling.
    """
    stride = 2 if case.network == "omniglot-net" else 1
    weights = [torch.from_numpy(x) for x in case.lam]
    layers: list[nn.Module] = []
    for filters, shift in zip(weights[::2], weights[1::2], strict=True):
        outputs, inputs, size, _ = filters.shape
        convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=1, bias=False)
        norm = nn.BatchNorm2d(outputs, eps=1e-3, track_running_stats=False)
        with torch.no_grad():
            convolution.weight.copy_(filters)
            norm.bias.copy_(shift)
        norm.weight.requires_grad_(False)
        layers += [convolution, norm, nn.ReLU(inplace=True), *([nn.MaxPool2d(2)] if stride == 1 else [])]
    return nn.Sequential(*layers, nn.Flatten())


@dataclass(frozen=True)
class Representation:
    """A case as a module and its episodes."""

    module: nn.Module
    episodes: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    features: int
    ways: int
    lr: float
    steps: int

    @property
    def lam(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]


def representation(case: Case, layout: torch.memory_format = torch.contiguous_format) -> Representation:
    torch.set_num_threads(case.threads)
    (images, labels), (queries, answers) = ([torch.from_numpy(x) for x in group] for group in (case.train, case.val))
    module = plain_module(case).to(memory_format=layout)  # type: ignore[call-overload]
    images, queries = ([x.contiguous(memory_format=layout) for x in part] for part in (images, queries))
    episodes = list(zip(images, labels, queries, answers, strict=True))
    _, features, ways = case.start[0].shape
    return Representation(module, episodes, features - 1, ways, case.lr, case.steps)


def summed(parts: Iterator[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of the gradients over episodes."""
    total = [part.clone() for part in next(parts)]
    for part in parts:
        for one, other in zip(total, part, strict=True):
            one.add_(other)
    return total


def with_adaptation(
    adapt: Callable[[Representation], Adapt], layout: torch.memory_format = torch.contiguous_format
) -> Callable[[Case], Run]:
    """The `prepare` of a contestant that computes features once per episode and differentiates the adaptation of a
    head."""

    def prepare(case: Case) -> Run:
        p = representation(case, layout)
        run_episode = adapt(p)

        def gradients() -> Iterator[Sequence[Tensor]]:
            for images, labels, queries, answers in p.episodes:
                loss = run_episode(p.module(images), labels, p.module(queries), answers) / len(p.episodes)
                yield torch.autograd.grad(loss, p.lam)

        return lambda: summed(gradients())

    return prepare
