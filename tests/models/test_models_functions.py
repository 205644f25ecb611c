"""The layers that are computed together, against torch's own: values, gradients, gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from bilevel.models import _pooled
from bilevel.models._folded import folded, patches, rectified_products
from bilevel.models._sets import Sets
from bilevel.models._strided import applies, layer
from bilevel.models.batch_norm import BatchNorm

SIZES = (2, 3)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_rectified_products_are_differentiable_twice():
    columns = [draw(3, images, 4).detach() for images in SIZES]
    assert gradcheck(lambda w: rectified_products(w, columns), draw(2, 3, 5))
    assert gradgradcheck(lambda w: rectified_products(w, columns), draw(2, 3, 5))


# ------------------------------------------------------------------------------------- the first convolution


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("scale", [True, False])
def test_a_folded_convolution_is_convolution_batch_norm_relu(channels, scale):
    conv = nn.Conv2d(channels, 8, (3, 2), stride=(2, 1), padding=(1, 0), bias=False)
    norm = BatchNorm(8, scale=scale)
    nn.init.normal_(norm.bias)
    x = 40 + torch.rand(5, channels, 9, 8)  # a large common brightness must not cost digits
    norm.seen = []
    ours = folded(x, conv, norm, Sets(SIZES))
    raw = conv(x).split(SIZES)
    weight = norm.weight if scale else torch.ones(8)
    plain = torch.cat([F.batch_norm(part, None, None, weight, norm.bias, True, 0.0, 1e-3) for part in raw]).relu()
    assert torch.allclose(ours, plain, rtol=1e-10, atol=1e-10)
    parameters = [*conv.parameters(), *norm.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-8)
    for part, (mean, variance) in zip(raw, norm.seen, strict=True):
        var, expected = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected)
        assert torch.allclose(variance, var)


def test_patches_are_what_unfold_finds():
    conv, x = nn.Conv2d(2, 1, (3, 2), stride=(2, 3), padding=(1, 2)), draw(4, 2, 7, 6).detach()
    plain = F.unfold(x, (3, 2), stride=(2, 3), padding=(1, 2)).transpose(0, 1)
    assert torch.equal(patches(x, conv)[:-1], plain)
    assert bool((patches(x, conv)[-1] == 1).all())


# ------------------------------------------------------------------------------------- strides


def plain_layer(x: Tensor, conv: nn.Conv2d, norm: BatchNorm) -> Tensor:
    weight = torch.ones(conv.out_channels) if norm.weight is None else norm.weight
    raw = conv(x).split(SIZES)
    return torch.cat([F.batch_norm(part, None, None, weight, norm.bias, True, 0.0, norm.eps) for part in raw]).relu()


def our_layer(x: Tensor, conv: nn.Conv2d, norm: BatchNorm) -> Tensor:
    return layer(x, conv, norm, Sets(SIZES))


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (3, (1, 3), 1), ((2, 3), 2, (0, 1)), (5, 2, 2), (1, 2, 0)]
)
@pytest.mark.parametrize("shape", [(5, 5), (9, 6), (14, 5)])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_layer_with_stride_is_convolution_batch_norm_relu(size, stride, padding, shape, scale, layout):
    conv = nn.Conv2d(4, 5, size, stride=stride, padding=padding, bias=False)
    norm = BatchNorm(5, scale=scale)
    nn.init.normal_(norm.bias)
    norm.seen = []
    x = draw(5, 4, *shape).detach().contiguous(memory_format=layout).requires_grad_()
    assert applies(conv, x)
    ours, plain = our_layer(x, conv, norm), plain_layer(x, conv, norm)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(ours, plain, rtol=1e-12, atol=1e-12)
    inputs = [x, conv.weight, *norm.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)
    for part, (mean, variance) in zip(conv(x).split(SIZES), norm.seen, strict=True):
        var, expected = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected)
        assert torch.allclose(variance, var)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_gradients_that_are_asked_for(wanted):
    conv, norm, x = nn.Conv2d(16, 16, 3, stride=2, bias=False), BatchNorm(16), draw(5, 16, 5, 5).detach()
    x.requires_grad_(wanted[0])
    conv.weight.requires_grad_(wanted[1])
    leaf = x if wanted[0] else conv.weight
    ours, plain = (torch.autograd.grad(make(x, conv, norm).sin().sum(), leaf)[0] for make in (our_layer, plain_layer))
    assert torch.allclose(ours, plain, rtol=1e-11, atol=1e-12)


def test_a_layer_with_stride_is_differentiable_twice():
    conv, norm = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), BatchNorm(16)
    mix, unmix = draw(2, 16).detach() / 4, draw(16, 2).detach() / 4

    def narrow(x: Tensor) -> Tensor:
        """Two channels, so that finite differences are cheap."""
        wide = torch.einsum("nchw,cd->ndhw", x, mix)
        return torch.einsum("nchw,cd->ndhw", our_layer(wide, conv, norm), unmix).sin()

    assert gradcheck(narrow, draw(5, 2, 4, 3))
    assert gradgradcheck(narrow, draw(5, 2, 4, 3))


def test_a_gradient_may_come_as_a_view():
    conv, norm, x = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), BatchNorm(16), draw(5, 16, 6, 6)

    def slope(make):
        twice = torch.stack([x, 2 * x])[1]  # begins in the middle of its storage
        return torch.autograd.grad(make(twice, conv, norm)[..., 1:].sum(), x)[0]

    ours, plain = slope(our_layer), slope(plain_layer)
    assert torch.allclose(ours, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(16, 16, 3, stride=2, bias=True),
        nn.Conv2d(16, 16, 3, stride=2, bias=False, groups=2),
        nn.Conv2d(16, 16, 3, stride=2, bias=False, dilation=2),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False),
        nn.Conv2d(16, 16, 3, stride=2, padding="valid", bias=False),
    ],
)
def test_other_convolutions_are_left_to_torch(conv):
    assert not applies(conv, torch.zeros(1))


# ------------------------------------------------------------------------------------- pooling


def plain_pooled(x: Tensor, conv: nn.Conv2d, norm: BatchNorm, pool: nn.MaxPool2d) -> Tensor:
    return pool(plain_layer(x, conv, norm))


@pytest.fixture(params=[1, 10**9])
def tiles(request, monkeypatch):
    """An image at a time, or all of a set."""
    monkeypatch.setattr(_pooled, "TILE_BYTES", request.param)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d((2, 3), ceil_mode=True)])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_first_is_convolution_batch_norm_relu_pooling(pool, scale, layout, tiles):
    conv = nn.Conv2d(3, 4, 3, stride=(1, 2), padding=1, bias=False).to(memory_format=layout)
    norm = BatchNorm(4, scale=scale)
    nn.init.normal_(norm.bias)
    norm.sizes, norm.seen = SIZES, []
    if scale:
        nn.init.uniform_(norm.weight, 0.5, 2)
    x = (40 + draw(5, 3, 9, 12).detach()).contiguous(memory_format=layout)  # brightness must not cost digits
    if layout == torch.channels_last:
        x[:, :, :4] = 40.0  # and the largest may be several; other kernels break ties by rounding
    x.requires_grad_()
    layers = conv, norm, nn.ReLU(), pool
    assert _pooled.applies(layers, x)
    ours, plain = _pooled.pooled(x, layers), plain_pooled(x, conv, norm, pool)
    assert torch.allclose(ours, plain, rtol=1e-11, atol=1e-11)
    inputs = [x, conv.weight, *norm.parameters()]
    weights = draw(*plain.shape).detach()
    for one, other in zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)
    for part, (mean, variance) in zip(conv(x).split(SIZES), norm.seen, strict=True):
        var, expected = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected)
        assert torch.allclose(variance, var)


@pytest.mark.parametrize("relu", [nn.ReLU(), nn.Identity()])
def test_pooling_first_is_differentiable_twice(relu):
    layers = conv, norm, _, _ = nn.Conv2d(1, 2, 3, padding=1, bias=False), BatchNorm(2), relu, nn.MaxPool2d(2)
    norm.sizes = SIZES

    def function(x: Tensor, weight: Tensor) -> Tensor:
        settings = [1, 1], [1, 1], 1e-3, ([2, 2], [2, 2], [0, 0], [1, 1], False), type(relu) is nn.ReLU
        return _pooled._Pooled.apply(x, weight, torch.ones(2), norm.bias, Sets(SIZES), settings)[0].sin()

    x = draw(5, 1, 4, 4)
    assert torch.equal(function(x, conv.weight), _pooled.pooled(x, layers).sin())
    plain = [pool_last(part, layers) for part in x.split(list(SIZES))]
    assert torch.allclose(function(x, conv.weight), torch.cat(plain).sin(), rtol=1e-12)
    assert gradcheck(function, (draw(5, 1, 4, 4), draw(2, 1, 3, 3)))
    assert gradgradcheck(function, (draw(5, 1, 4, 4), draw(2, 1, 3, 3)))


def pool_last(x, layers):
    conv, norm, relu, pool = layers
    return pool(relu(nn.functional.batch_norm(conv(x), None, None, None, norm.bias, True, 0.0, norm.eps)))


def test_what_does_not_grow_is_pooled_last():
    conv, norm, relu, pool = nn.Conv2d(1, 2, 3, bias=False), BatchNorm(2, scale=True), nn.ReLU(), nn.MaxPool2d(2)
    norm.sizes = SIZES
    assert _pooled.applies((conv, norm, relu, pool), torch.zeros(1))
    assert not _pooled.applies((conv, norm, nn.GELU(), pool), torch.zeros(1))
    assert not _pooled.applies((conv, norm, relu, nn.MaxPool2d(2, dilation=2)), torch.zeros(1))
    assert not _pooled.applies((conv, norm, relu, pool), torch.zeros(1, dtype=torch.bfloat16))
    with torch.no_grad():
        norm.weight[0] = -1.0
    assert not _pooled.applies((conv, norm, relu, pool), torch.zeros(1))
