"""Several networks of one architecture, computed together, against torch's own layers one network after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bilevel.learners.representation import Representation
from bilevel.models import _second_derivatives
from bilevel.models.batch_norm import converted
from bilevel.models.networks import networks, stacked

STRIDED = [nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU()]
POOLED = [nn.Conv2d(5, 3, (3, 2), padding=(1, 0), bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
BARE = [nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4, affine=False), nn.Identity(), nn.Flatten()]


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=[_second_derivatives.PATCH_BYTES, 0], ids=["products with patches", "torch's convolutions"])
def _patch_bytes(request, monkeypatch):
    monkeypatch.setattr(_second_derivatives, "PATCH_BYTES", request.param)


def module() -> nn.Module:
    torch.manual_seed(0)
    found = converted(nn.Sequential(nn.Sequential(*STRIDED), *POOLED, *BARE)).double()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if not name.endswith("0.weight"):
                parameter.normal_()  # negative scales too
    return found


def leaves(net: nn.Module, count: int) -> dict[str, Tensor]:
    copies = {name: stacked(value.detach(), count) for name, value in net.named_parameters()}
    return {name: (value + 0.1 * torch.randn_like(value)).requires_grad_() for name, value in copies.items()}


def one_by_one(net: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    own = [{name: value[i] for name, value in weights.items()} for i in range(len(images))]
    return torch.stack([torch.func.functional_call(net, w, (x,)) for w, x in zip(own, images, strict=True)])


def derivatives(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """A loss, its gradient, and the product of its Hessian and a fixed direction."""
    generator = torch.Generator().manual_seed(1)
    loss = (torch.randn(y.shape, generator=generator) * y.sin()).sum()
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    directions = [torch.randn(x.shape, generator=generator) for x in inputs]
    return [loss, *grads, *torch.autograd.grad(grads, inputs, directions)]


@pytest.mark.usefixtures("_patch_bytes")
@pytest.mark.parametrize("of_images", [False, True])
def test_values_and_two_derivatives_are_torchs(of_images):
    net, images = module(), torch.rand(3, 4, 2, 11, 10, requires_grad=of_images)
    weights = leaves(net, 3)
    inputs = [*weights.values(), *([images] if of_images else [])]
    together = networks(net, images)
    assert together is not None and len(together.blocks) == 3
    for one, other in zip(
        derivatives(together(weights, images), inputs),
        derivatives(one_by_one(net, weights, images), inputs),
        strict=True,
    ):
        assert float((one - other).detach().norm()) <= 1e-12 * max(1.0, float(other.detach().norm()))


@pytest.mark.usefixtures("_patch_bytes")
def test_the_third_derivative_is_that_of_differences():
    """torch's own third derivative of batch norm is not: it takes the statistics for constants there."""
    net, images = module(), torch.rand(2, 4, 2, 11, 10)
    weights = leaves(net, 2)
    together = networks(net, images)
    directions = [{name: torch.randn_like(value) for name, value in weights.items()} for _ in range(3)]

    def second(width: float, graph: bool) -> tuple[Tensor, list[Tensor]]:
        moved = {name: (value + width * directions[2][name]).detach() for name, value in weights.items()}
        inputs = [value.requires_grad_() for value in moved.values()]
        grads = torch.autograd.grad(together(moved, images).sin().sum(), inputs, create_graph=True)
        slope = sum((g * v).sum() for g, v in zip(grads, directions[0].values(), strict=True))
        products = torch.autograd.grad(slope, inputs, create_graph=graph)
        return sum((g * v).sum() for g, v in zip(products, directions[1].values(), strict=True)), inputs

    value, inputs = second(0.0, True)
    third = torch.autograd.grad(value, inputs)
    found = sum((g * v).sum() for g, v in zip(third, directions[2].values(), strict=True))
    differences = (second(1e-6, False)[0] - second(-1e-6, False)[0]) / 2e-6
    assert float(found) == pytest.approx(float(differences), rel=1e-6)


def test_batch_norms_note_the_statistics_of_every_network():
    net, images = module(), torch.rand(2, 4, 2, 11, 10)
    weights = leaves(net, 2)
    together = networks(net, images)
    for norm in together.norms:
        norm.seen = []
    together(weights, images)
    ours = [list(norm.seen) for norm in together.norms]
    for norm in together.norms:
        norm.seen = []
    one_by_one(net, weights, images)
    for norm, noted in zip(together.norms, ours, strict=True):
        for one, other in zip(noted, norm.seen, strict=True):
            assert all(map(torch.allclose, one, other))


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(*STRIDED[:2], nn.Tanh(), nn.Flatten()),
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()),  # a bias
        nn.Sequential(*STRIDED, nn.Flatten(), nn.Linear(5 * 36, 3)),
    ],
)
def test_other_networks_run_one_after_the_other(other):
    torch.manual_seed(0)
    representation = Representation(other.double(), "episode")
    images = torch.rand(2, 4, 2, 11, 11)
    assert networks(representation.module, images) is None
    weights = leaves(representation.module, 2)
    found = representation.networks(weights, images)
    assert torch.allclose(found[..., :-1], one_by_one(representation.module, weights, images))


def test_copies_of_filters_keep_their_order_in_memory():
    filters = torch.rand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    copies = stacked(filters, 2)
    assert torch.equal(copies[1], filters) and copies[1].stride() == filters.stride()


def test_a_layer_that_is_used_twice_has_the_right_second_derivative():
    """One input of the layer is computed from another then, which must not count twice."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
    representation = Representation(
        nn.Sequential(conv, norm, nn.ReLU(), conv, norm, nn.ReLU(), nn.Flatten()).double(), "episode"
    )
    images = torch.randn(5, 16, 8, 8)
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in representation.module.named_parameters()
    }
    fused = representation.together(weights, images)
    with representation.unfused():
        plain = representation.together(weights, images)
    pairs = [derivatives(y, list(weights.values())) for y in (fused, plain)]
    assert all(torch.allclose(*pair, rtol=1e-9) for pair in zip(*pairs, strict=True))
