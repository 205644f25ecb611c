"""Meta-learned starts of networks of many kinds: layers, recurrences, attention, normalisation, shared weights.

λ is the start of every parameter, w takes three steps of gradient descent from it on one half of the data, and the
outer objective is the loss on the other half. The reference writes the steps out in plain torch; central differences
along random directions say that torch's own second derivatives are right.
"""

import pytest
import torch
from comparing import agree, along, classification, regression, slope, unrolled
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import bilevel as bl

METHODS = (bl.Unrolled(), bl.Reverse(), bl.Reverse("sqrt", group_bytes=0))
VECTORS, CLASSES = regression(8, 3), classification(8, 4, 3)


def sequences(seed=0):
    """Short sequences of three numbers and one target for each."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 5, 3, generator=generator), torch.randn(8, generator=generator)
    return bl.Task((x[:4], y[:4]), (x[4:], y[4:]))


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 2, 6, 6, generator=generator), torch.arange(8) % 3
    return bl.Task((x[:4], y[:4]), (x[4:], y[4:]))


def words(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(7, (8, 5), generator=generator), torch.randn(8, generator=generator)
    return bl.Task((x[:4], y[:4]), (x[4:], y[4:]))


def error(output, target):
    return mse_loss(output.squeeze(-1), target)


def meta_learn(network, task, loss=error, lr=0.1, steps=3, methods=METHODS, tolerance=1e-9, **settings):
    """The gradient in the start of all parameters, against steps written out and against differences."""
    network = network.double()
    lam, apply = bl.functional(network)
    problem = bl.Problem(
        lambda w, lam, data: loss(apply(w, data[0]), data[1]),
        lambda w, lam, data: loss(apply(w, data[0]), data[1]),
        lambda lam: lam,
    )
    buffers = {name: value.clone() for name, value in network.named_buffers()}

    def forward(w, data):
        return loss(functional_call(network, {**w, **{k: v.clone() for k, v in buffers.items()}}, (data[0],)), data[1])

    def plain(lam):
        return forward(unrolled(lambda w, t: forward(w, task.train), lam, steps, lr), task.val)

    used = {name for name, value in slope_of_each(plain, lam).items() if value is not None}
    expected = slope(lambda part: plain({**lam, **part}), {name: lam[name] for name in used})
    full = expected._replace(grad={name: expected.grad.get(name, torch.zeros_like(lam[name])) for name in lam})
    agree(
        full,
        problem,
        lam,
        task,
        dynamics=bl.GradientDescent(lr),
        steps=steps,
        methods=methods,
        tolerance=tolerance,
        **settings,
    )
    along(plain, lam, full.grad)


def slope_of_each(f, lam):
    leaves = {name: value.clone().requires_grad_() for name, value in lam.items()}
    grads = torch.autograd.grad(f(leaves), list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


class Tied(nn.Module):
    """Two layers that are one."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = self.encoder
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.decoder(torch.tanh(self.encoder(x)))))


class Partial(nn.Module):
    """A layer that the forward pass does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x).tanh()


class Last(nn.Module):
    """The last output of a recurrent layer, through a linear one."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Attending(nn.Module):
    """Attention written out: softmax(QKᵀ/√d)V."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(3, 12), nn.Linear(4, 1)

    def forward(self, x):
        q, k, v = self.mix(x).chunk(3, dim=-1)
        return self.head((torch.softmax(q @ k.transpose(1, 2) / 2, dim=-1) @ v).mean(1))


class Recomputed(nn.Module):
    """A hidden layer whose activations are recomputed in the backward pass."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        # The weights are arguments: a module that is recomputed in the backward pass would find its own, not λ's.
        return self.head(checkpoint(_hidden, x, self.hidden.weight, self.hidden.bias, use_reentrant=False))


def _hidden(x, weight, bias):
    return torch.tanh(x @ weight.T + bias)


class Bag(nn.Module):
    """The mean of embedded words."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.words(x).mean(1).tanh())


class Residual(nn.Module):
    """x + f(x), with a scale that is a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.inside, self.scale, self.head = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.3)), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x + self.scale * self.inside(x).sin())


def orthogonal():
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1))


def spectrally_normed():
    network = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))
    return network.eval()  # in train mode torch itself treats the singular vectors as constants


def deep(*middle):
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 1))


REGRESSION = {
    "a linear model": lambda: nn.Linear(3, 1),
    "a network with one hidden layer": lambda: deep(nn.Tanh()),
    "a network with smooth rectifiers": lambda: deep(nn.GELU(), nn.Linear(4, 4), nn.SiLU()),
    "a network with learned slopes": lambda: deep(nn.PReLU()),
    "layer norm": lambda: deep(nn.LayerNorm(4), nn.Tanh()),
    "batch norm while training": lambda: deep(nn.BatchNorm1d(4), nn.Tanh()),
    "batch norm with its running averages": lambda: deep(nn.BatchNorm1d(4), nn.Tanh()).eval(),
    "a residual block": Residual,
    "two layers that share their weights": Tied,
    "an orthogonal layer": orthogonal,
    "spectral norm in eval mode": spectrally_normed,
    "activations that are recomputed": Recomputed,
}
SEQUENCES = {
    "a recurrent network": lambda: Last(nn.RNN(3, 4, batch_first=True)),
    "two recurrent layers": lambda: Last(nn.RNN(3, 4, num_layers=2, batch_first=True)),
    "an LSTM": lambda: Last(nn.LSTM(3, 4, num_layers=2, batch_first=True)),
    "a GRU": lambda: Last(nn.GRU(3, 4, num_layers=2, batch_first=True)),
    "attention": Attending,
    "a convolution over time": lambda: nn.Sequential(nn.Conv1d(5, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 1)),
}
IMAGES = {
    "a convolutional network with group norm and max-pooling": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ),
    "a convolutional network with batch norm and average pooling": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ),
    "strided and transposed convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 3)
    ),
}


@pytest.mark.parametrize("name", REGRESSION)
def test_a_network_for_vectors(name):
    torch.manual_seed(1)
    meta_learn(REGRESSION[name](), VECTORS)


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_network_for_sequences(name):
    torch.manual_seed(1)
    meta_learn(SEQUENCES[name](), sequences())


@pytest.mark.parametrize("name", IMAGES)
def test_a_network_for_images(name):
    torch.manual_seed(1)
    meta_learn(IMAGES[name](), images(), cross_entropy)


def test_embedded_words():
    meta_learn(Bag(), words())


def test_label_smoothing_and_class_weights():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]))
    meta_learn(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), CLASSES, loss)


def test_a_layer_that_is_not_used_gets_zero_if_that_is_allowed():
    meta_learn(Partial(), VECTORS, allow_unused=True)
    with pytest.raises(bl.BilevelError, match="unused"):
        meta_learn(Partial(), VECTORS)


def test_attention_of_torch_with_its_mathematical_kernel():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Linear(3, 4), layer, nn.Flatten(), nn.Linear(20, 1))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        meta_learn(network, sequences(), allow_unused=True, tolerance=1e-7)


@pytest.mark.parametrize(
    "method", [bl.Unrolled(), bl.Reverse(3, group_bytes=0), bl.Forward()], ids=lambda m: type(m).__name__
)
def test_dropout_whose_masks_are_a_function_of_the_step(method):
    """The mask of step t is drawn from t and comes with the batch."""
    task, lam = VECTORS, torch.full((3,), -1.0)

    def mask(t):
        return (torch.rand(8, 3, generator=torch.Generator().manual_seed(t)) > 0.3).double() / 0.7

    def loss(w, lam, x, y):
        return ((x @ w - y) ** 2).mean() + (lam.exp() * w**2).sum()

    problem = bl.Problem(
        lambda w, lam, data: loss(w, lam, data[0], data[1]),
        lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean(),
        lambda lam: torch.zeros(3),
    )

    def plain(lam):
        w = unrolled(lambda w, t: loss(w, lam, task.train[0] * mask(t), task.train[1]), torch.zeros(3), 5, 0.1)
        return ((task.val[0] @ w - task.val[1]) ** 2).mean()

    agree(
        slope(plain, lam),
        problem,
        lam,
        bl.Task(lambda t: (task.train[0] * mask(t), task.train[1]), task.val),
        dynamics=bl.GradientDescent(0.1),
        steps=5,
        tolerance=1e-10,
    )


def test_a_frozen_backbone_is_not_learned():
    """A backbone with requires_grad=False stays what it was; only the head is an inner variable."""
    backbone, head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1)
    network = nn.Sequential(backbone, nn.Tanh(), head)
    w, _ = bl.functional(network)
    assert sorted(w) == ["2.bias", "2.weight"]
    meta_learn(network, VECTORS)


def test_a_scripted_module_is_refused():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    w, apply = bl.functional(torch.jit.script(network))
    problem = bl.Problem(
        lambda w, lam, data: error(apply(w, data[0]), data[1]),
        lambda w, lam, data: error(apply(w, data[0]), data[1]),
        lambda lam: lam,
    )
    with pytest.raises(bl.BilevelError, match="Jitted"):
        bl.hypergradient(problem, w, VECTORS, dynamics=bl.GradientDescent(0.1), steps=2)
