"""The layers that are computed together, against torch's own: values, gradients, gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from bilevel.models import _allocator
from bilevel.models._blocks import folded
from bilevel.models._functions import normalise, rectified_products
from bilevel.models._strided import applies, convolve
from bilevel.models.batch_norm import BatchNorm

SIZES = (2, 3)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def normalised(rectify: bool):
    return lambda x, weight, bias: normalise(x, weight, bias, 1e-3, SIZES, rectify)[0]


@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 2, 4), (5, 3)])
def test_batch_norm_of_sets(rectify, shape):
    x, weight, bias = draw(*shape), draw(3), draw(3)
    plain = torch.cat([F.batch_norm(part, None, None, weight, bias, True, 0.0, 1e-3) for part in x.split(SIZES)])
    plain = plain.relu() if rectify else plain
    ours = normalised(rectify)(x, weight, bias)
    assert torch.allclose(ours, plain, rtol=1e-13, atol=1e-13)
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), (x, weight, bias)) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rectify", [True, False])
def test_batch_norm_of_sets_is_differentiable_twice(rectify):
    inputs = draw(5, 2, 2, 3), draw(2), draw(2)
    assert gradcheck(normalised(rectify), inputs)
    assert gradgradcheck(normalised(rectify), inputs)


def test_statistics_of_sets():
    x = draw(5, 3, 4, 4).detach()
    _, means, scales = normalise(x, None, None, 1e-3, SIZES)
    for part, mean, scale in zip(x.split(SIZES), means, scales, strict=True):
        var, expected = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected)
        assert torch.allclose(scale, torch.rsqrt(var + 1e-3))


def test_rectified_products_are_differentiable_twice():
    columns = draw(3, 10).detach()
    assert gradcheck(lambda w: rectified_products(w, columns, (4, 6)), draw(2, 3, 5))
    assert gradgradcheck(lambda w: rectified_products(w, columns, (4, 6)), draw(2, 3, 5))


# ------------------------------------------------------------------------------------- the first convolution


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("scale", [True, False])
def test_a_folded_convolution_is_convolution_batch_norm_relu(channels, scale):
    layer = nn.Conv2d(channels, 8, (3, 2), stride=(2, 1), padding=(1, 0), bias=False)
    norm = BatchNorm(8, scale=scale)
    nn.init.normal_(norm.bias)
    x = 40 + torch.rand(5, channels, 9, 8)  # a large common brightness must not cost digits
    norm.sizes, norm.seen = SIZES, []
    ours = folded(layer, norm, x)
    raw = layer(x).split(SIZES)
    weight = norm.weight if scale else torch.ones(8)
    plain = torch.cat([F.batch_norm(part, None, None, weight, norm.bias, True, 0.0, 1e-3) for part in raw]).relu()
    assert torch.allclose(ours, plain, rtol=1e-10, atol=1e-10)
    parameters = [*layer.parameters(), *norm.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-8)
    for part, (mean, variance) in zip(raw, norm.seen, strict=True):
        var, expected = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected)
        assert torch.allclose(variance, var)


# ------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (3, 3, 1), (2, 2, 0), (5, 2, 2), (4, 3, 2), (3, 2, 2)]
)
@pytest.mark.parametrize("shape", [(4, 4), (7, 7), (9, 6), (14, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_a_convolution_with_stride(size, stride, padding, shape, layout):
    layer = nn.Conv2d(16, 17, size, stride=stride, padding=padding, bias=False).to(memory_format=layout)
    x = draw(3, 16, *shape).detach().contiguous(memory_format=layout).requires_grad_()
    assert applies(layer, x)
    ours, plain = convolve(x, layer), layer(x)
    assert torch.equal(ours, plain)
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), (x, layer.weight)) for y in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_only_the_gradients_that_are_asked_for():
    layer = nn.Conv2d(16, 16, 3, stride=2, bias=False)
    x = draw(2, 16, 5, 5)
    layer.weight.requires_grad_(False)
    (of_x,) = torch.autograd.grad(convolve(x, layer).sum(), x)
    assert torch.allclose(of_x, torch.autograd.grad(layer(x).sum(), x)[0])


def test_a_convolution_with_stride_is_differentiable_twice():
    layer = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False)
    mix, unmix = draw(2, 16).detach() / 4, draw(16, 2).detach() / 4

    def narrow(x: Tensor) -> Tensor:
        """Two channels, so that finite differences are cheap."""
        wide = torch.einsum("nchw,cd->ndhw", x, mix)
        return torch.einsum("nchw,cd->ndhw", convolve(wide, layer), unmix).sin()

    assert gradcheck(narrow, draw(2, 2, 4, 3))
    assert gradgradcheck(narrow, draw(2, 2, 4, 3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(16, 16, 3, stride=2, bias=True),
        nn.Conv2d(16, 16, 3, stride=2, bias=False, groups=2),
        nn.Conv2d(16, 16, 3, stride=2, bias=False, dilation=2),
        nn.Conv2d(16, 16, 3, stride=(2, 1), bias=False),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False),
        nn.Conv2d(4, 16, 3, stride=2, bias=False),
        nn.Conv2d(16, 16, 1, stride=2, bias=False),
    ],
)
def test_other_convolutions_are_left_to_torch(layer):
    assert not applies(layer, torch.zeros(1, 16, 5, 5))


# ------------------------------------------------------------------------------------- memory


def test_a_users_setting_of_malloc_is_respected(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert _allocator.keep_freed_memory.__wrapped__() is False


def test_without_glibc_nothing_happens(monkeypatch):
    for name in list(_allocator.os.environ):
        if name.startswith(("MALLOC_", "GLIBC_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(_allocator.ctypes, "CDLL", lambda name: object())
    assert _allocator.keep_freed_memory.__wrapped__() is False
