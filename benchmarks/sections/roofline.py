"""The least time that this machine needs for a pass of the networks, and the time that they take.

As a program: `python -m sections.roofline ROUNDS`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness import probe

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.pictures import Picture
    from harness.section import Bench
    from harness.tables import Table

ORDER = 54
TITLE = "Roofline"
WHAT = """
"At the roof" is the least time of a forward and a backward pass of a network for any program that multiplies matrices.
It is the number of operations of the pass, divided by the speed of large matrix products on this machine.
Multiplications by the zeros around an image are not counted. "Products alone" is the time of the matrix products and
convolutions of the pass, without batch norm, ReLU, pooling and Python. One thread, processor time, the fastest of all
rounds.
"""
# The size of the matrices whose product measures the largest speed of the processor.
SIZE = 512
NETWORKS = {"omniglot-net": (16, (1, 28, 28)), "c4l": (4, (3, 84, 84))}
SETS = 5, 75
Run = Callable[[], Any]


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass of a network on a meta-batch.

    Attributes:
        operations: floating-point operations of its products and convolutions.
        products: seconds of these products and convolutions alone.
        whole: seconds of the whole pass.
    """

    network: str
    episodes: int
    operations: float
    products: float
    whole: float


def measure(bench: Bench) -> dict[str, Any]:
    answer = probe.ask("roofline", bench.pick(quick=3, full=12))
    bench.tick("roofline", 1.0)
    return answer


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table, milliseconds

    rows = [
        [
            f"{row.network}, {row.episodes} episodes",
            f"{row.operations / 1e9:.1f}",
            milliseconds(row.operations / figures["peak"]),
            milliseconds(row.products),
            milliseconds(row.whole),
            f"{row.operations / figures['peak'] / row.whole:.0%}",
        ]
        for row in figures.rows(Pass, "passes")
    ]
    columns = ["pass", "GFLOP", "at the roof, ms", "products alone, ms", "as bilevel runs it, ms", "share of the roof"]
    note = f"The roof: {figures['peak'] / 1e9:.0f} GFLOP/s in a product of {SIZE} × {SIZE} float32 matrices."
    yield Table("Passes", columns, rows, note)


def pictures(figures: Figures) -> Iterator[Picture]:
    import matplotlib.pyplot as plt

    from harness.pictures import COLOURS, Picture

    found = figures.rows(Pass, "passes")
    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 1.9), squeeze=False)
    for axis, row in zip(axes[0], found, strict=True):
        times = {
            "as bilevel runs it": row.whole,
            "products alone": row.products,
            "at the roof": row.operations / figures["peak"],
        }
        colours = [COLOURS["bilevel"], COLOURS["by hand"], COLOURS["floor"]]
        bars = axis.barh(list(times), [seconds * 1e3 for seconds in times.values()], color=colours, height=0.6)
        axis.bar_label(bars, fmt="%.0f ms", padding=3, fontsize=8)
        axis.set_xlim(0, 1.2e3 * row.whole)
        axis.set_title(f"{row.network}, {row.episodes} episodes")
    figure.tight_layout()
    yield Picture("roofline.png", "A pass of the networks against the machine's matrix products", figure)


# ------------------------------------------------------------------------------------------------- as a program


def main() -> None:
    import sys

    import torch

    torch.set_num_threads(1)
    one, other, place = torch.randn(3, SIZE, SIZE).unbind()
    work: dict[str, Run] = {"peak": lambda: torch.mm(one, other, out=place)}
    operations = {}
    for name, (episodes, shape) in NETWORKS.items():
        whole, products, operations[name] = pass_of(name, episodes, shape)
        work |= {f"{name} whole": whole, f"{name} products": products}
    least = dict.fromkeys(work, float("inf"))
    for turn in range(int(sys.argv[1]) + 1):
        for name, run in work.items():
            for _ in range(20 if name == "peak" else 1):
                began = time.process_time()
                run()
                if turn:
                    least[name] = min(least[name], time.process_time() - began)
    passes = [
        Pass(name, episodes, operations[name], least[f"{name} products"], least[f"{name} whole"])
        for name, (episodes, _) in NETWORKS.items()
    ]
    print(json.dumps({"peak": 2 * SIZE**3 / least["peak"], "passes": [asdict(row) for row in passes]}))


def pass_of(
    name: str, episodes: int, shape: tuple[int, int, int]
) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """A function that runs the whole pass, one that runs its products alone, and the number of operations."""
    import torch
    from torch import nn

    from bilevel.cli._allocator import keep_freed_memory
    from bilevel.learners.catalogue.hyper_representation import HyperRepresentation

    keep_freed_memory()
    learner = HyperRepresentation(name, shape)
    lam = {key: value.clone().requires_grad_() for key, value in learner.lam.items()}
    images = [torch.rand(episodes, size, *shape) for size in SETS]
    chunks = list(zip(*(torch.split(part, learner.chunk) for part in images), strict=True))

    def whole() -> None:
        for support, query in chunks:
            outputs = learner.representation.episodes(lam, support, query, training=True)
            torch.autograd.grad(outputs, list(lam.values()), [torch.ones_like(x) for x in outputs])

    count, operations, runs = sum(SETS), 0.0, []
    height, width = shape[1:]
    pooled = any(isinstance(layer, nn.MaxPool2d) for layer in learner.module)
    for index, conv in enumerate(layer for layer in learner.module if isinstance(layer, nn.Conv2d)):
        operations += episodes * count * convolution_operations(conv, height, width, first=index == 0)
        together = 1 if pooled else min(learner.chunk, episodes)
        runs += [products_of(conv, together * count, height, width, index == 0)] * (episodes // together)
        height, width = (n if pooled else (n + 1) // 2 for n in (height, width))
        height, width = (n // 2 if pooled else n for n in (height, width))
    return whole, lambda: [run() for run in runs], operations


def convolution_operations(conv: Any, height: int, width: int, *, first: bool) -> float:
    """The operations of one layer on one image.

    They are the forward pass, the gradient of the filters and, except in the first layer, the gradient of the input.
    """
    size, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    rows, columns = (seen(n, size, stride, padding) for n in (height, width))
    return (2 if first else 3) * 2.0 * rows * columns * conv.in_channels * conv.out_channels


def seen(pixels: int, size: int, stride: int, padding: int) -> int:
    """How many times a filter's row meets a row of the image, and not of the padding around it."""
    begins = range(-padding, pixels + padding - size + 1, stride)
    return sum(0 <= begin + row < pixels for begin in begins for row in range(size))


def products_of(conv: Any, images: int, height: int, width: int, first: bool) -> Run:
    """The products of one layer: torch's convolutions, and matrix products for a first layer with a stride."""
    import torch

    from bilevel.models._layers import outputs_of

    aten = torch.ops.aten
    weight = conv.weight
    if first and conv.stride[0] > 1:
        size, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
        high, wide = (outputs_of(n, size, stride, padding) for n in (height, width))
        patches, filters = torch.rand(size**2 + 1, high * images * wide), torch.rand(size**2 + 1, conv.out_channels)
        result = torch.empty(high * images * wide, conv.out_channels)
        return lambda: (torch.mm(patches.t(), filters, out=result), patches @ result)
    x = torch.rand(images, conv.in_channels, height, width).contiguous(memory_format=torch.channels_last)
    settings = list(conv.stride), list(conv.padding), [1, 1], False, [0, 0], 1

    def kernels() -> None:
        y = torch.nn.functional.conv2d(x, weight, None, conv.stride, conv.padding)
        aten.convolution_backward(y, x, weight, None, *settings, [not first, True, False])

    return kernels


if __name__ == "__main__":
    main()
