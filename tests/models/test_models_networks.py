"""The networks of the paper: sizes, start, and sets that pass through them together."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from bilevel import models
from bilevel.errors import BilevelError
from bilevel.models.batch_norm import BatchNorm, converted, layers, using
from bilevel.models.blocks import FusedSequential, per_image

SHAPES = {"omniglot-net": (1, 28, 28), "c4l": (3, 84, 84), "c4l-64": (3, 84, 84), "rn": (3, 84, 84)}
SPATIAL = {"omniglot-net": [14, 7, 4, 2], "c4l": [84, 42, 42, 21, 21, 10, 10, 5]}


def small(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network that a test can differentiate quickly."""
    if name == "rn":
        from bilevel.models.rn import build

        return build(3, filters=(4, 5, 6, 7), tail=(9, 8)), (3, 21, 21)
    if name.startswith("c4l"):
        from bilevel.models.c4l import build as c4l

        return c4l(3, filters=6), (3, 32, 32)
    return models.build(name, 1), (1, 28, 28)


def test_every_network_is_covered_here():
    assert set(models.find()) == set(SHAPES)


@pytest.mark.parametrize(
    ("name", "weights"), [("omniglot-net", 111_424), ("c4l", 28_640), ("c4l-64", 112_576), ("rn", 3_753_760 + 51_936)]
)
def test_numbers_of_weights(name, weights):
    assert sum(p.numel() for p in models.build(name, SHAPES[name][0]).parameters()) == weights


def test_the_residual_network_has_its_skips_apart():
    named = dict(models.build("rn", 3).named_parameters())
    assert sum(p.numel() for name, p in named.items() if ".skip." in name) == 51_936


@pytest.mark.parametrize(("name", "features"), [("omniglot-net", 256), ("c4l", 800), ("c4l-64", 1600), ("rn", 512)])
def test_numbers_of_features(name, features):
    with torch.no_grad():
        assert models.build(name, SHAPES[name][0])(torch.rand(2, *SHAPES[name])).shape == (2, features)


@pytest.mark.parametrize("name", SPATIAL)
def test_sizes_of_the_maps(name):
    seen = []
    net = models.build(name, SHAPES[name][0])
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            layer.register_forward_hook(lambda *args: seen.append(args[2].shape[2:]))
    with torch.no_grad():
        net(torch.rand(2, *SHAPES[name]))
    assert seen == [(size, size) for size in SPATIAL[name]]


def test_sizes_of_the_residual_maps():
    seen = []
    net = models.build("rn", 3)
    for block in list(net)[:4]:
        block.register_forward_hook(lambda *args: seen.append(tuple(args[2].shape[1:])))
    with torch.no_grad():
        net(torch.rand(2, 3, 84, 84))
    assert seen == [(64, 42, 42), (96, 21, 21), (128, 11, 11), (256, 6, 6)]


@pytest.mark.parametrize("name", SHAPES)
def test_glorot_start_and_zero_biases(name):
    for layer in models.build(name, SHAPES[name][0]).modules():
        if isinstance(layer, nn.Conv2d):
            outputs, inputs, *size = layer.weight.shape
            bound = math.sqrt(6 / ((inputs + outputs) * math.prod(size)))
            assert layer.weight.abs().max() <= bound
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.2)
            assert layer.bias is None or not layer.bias.any()
        if isinstance(layer, BatchNorm):
            assert layer.weight is None
            assert not layer.bias.any()


def test_the_seed_decides_and_torch_is_left_alone():
    before = torch.random.get_rng_state()
    one, again, other = (next(models.build("c4l", 3, seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_network_is_refused_with_the_names():
    with pytest.raises(BilevelError, match="c4l, c4l-64, omniglot-net, rn"):
        models.build("resnet", 3)


# --------------------------------------------------------------------------------------------- sets together


def apart_and_together(net: nn.Module, sets: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Features and gradients, set by set through the plain network and at once through the converted one."""
    plain = torch.cat([net(x) for x in sets])
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
    one = [plain, *torch.autograd.grad(plain, list(net.parameters()), weights)]
    ours = converted(net)
    with using(layers(ours), "own", [len(x) for x in sets]):
        joint = ours(torch.cat(sets))
    return one, [joint, *torch.autograd.grad(joint, list(ours.parameters()), weights)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_sets_that_pass_together_give_what_each_gives_by_itself(name, layout):
    torch.manual_seed(4)
    net, shape = small(name)
    sets = [torch.rand(n, *shape).contiguous(memory_format=layout) for n in (3, 7)]
    for one, other in zip(*apart_and_together(net.to(memory_format=layout), sets), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12 * float(one.detach().abs().max()))


def users_network(scale: bool, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(8, affine=scale, track_running_stats=False)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 40, 3, padding=(1, 0), bias=False), nn.BatchNorm2d(40, eps=0.1), nn.ReLU()),
        nn.Conv2d(40, 16, (3, 2), stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        activation(),
        nn.Conv2d(16, 32, 3, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 8, 3, bias=True),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.BatchNorm1d(5),
    ).train()
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return net


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.LeakyReLU])
def test_a_users_network_with_torchs_batch_norms(scale, activation):
    net = users_network(scale, activation)
    assert per_image(converted(users_network(scale, activation)))
    for one, other in zip(*apart_and_together(net, [torch.rand(n, 1, 14, 15) for n in (4, 2, 5)]), strict=True):
        # The bias before a batch norm has no effect; its gradient is what rounding leaves of 0.
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-11)


def test_conversion_keeps_names_values_and_averages():
    net = users_network(scale=True)
    with torch.no_grad():
        net(torch.rand(4, 1, 14, 15))
    names = {name: value.clone() for name, value in net.named_parameters()}
    means = [m.running_mean.clone() for m in net.modules() if getattr(m, "running_mean", None) is not None]
    ours = converted(net)
    assert isinstance(ours, FusedSequential)
    assert {name: value.shape for name, value in ours.named_parameters()} == {k: v.shape for k, v in names.items()}
    assert all(torch.equal(value, names[name]) for name, value in ours.named_parameters())
    kept = [norm.running_mean for norm in layers(ours).values() if norm.running_mean.any()]
    assert len(kept) == len(means)
    assert all(torch.equal(a, b) for a, b in zip(kept, means, strict=True))


def test_a_sequence_that_somebody_listens_to_stays_as_it_is():
    net = nn.Sequential(nn.Conv2d(1, 36, 3, bias=False), nn.BatchNorm2d(36), nn.ReLU(), nn.Flatten())
    seen = []
    net[0].register_forward_hook(lambda *args: seen.append(args[2].shape))
    ours = converted(net)
    assert not isinstance(ours, FusedSequential)
    ours(torch.rand(2, 1, 5, 5))
    assert seen == [(2, 36, 3, 3)]


def test_a_module_of_unknown_kind_is_not_taken_to_treat_images_one_by_one():
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    assert per_image(converted(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())))
    assert not per_image(converted(nn.Sequential(nn.Conv2d(1, 2, 3), Mixing(), nn.Flatten())))


def test_gradients_of_gradients_through_layers_of_every_kind():
    """A folded layer, one with a stride, one with pooling, and an operation in place after it."""
    torch.manual_seed(6)
    net = nn.Sequential(
        *(nn.Conv2d(1, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.LeakyReLU(inplace=True)),
        nn.Flatten(),
    ).train()
    sets, found = [torch.rand(n, 1, 17, 17) for n in (3, 4)], []
    for module in (net, converted(copy.deepcopy(net))):
        parameters = list(module.parameters())
        if module is net:
            features = torch.cat([module(x) for x in sets])
        else:
            with using(layers(module), "own", [3, 4]):
                features = module(torch.cat(sets))
        loss = features.square().sum()
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        again = torch.autograd.grad(loss, parameters, create_graph=True)
        for one, other in zip(first, again, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in again), parameters)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-8 * float(one.abs().max()))
