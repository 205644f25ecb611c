"""Hyper-representations against the engine without `encode`, against plain torch, and against finite differences."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel as bl
from bilevel import trees
from bilevel.models.batch_norm import layers, using
from small_learner import SHAPE, WAYS, episodes, learner, network, one, torch_network


def written_out(hyper, mode, l2=0.0):
    """One episode's problem as anybody would write it: the representation inside both objectives, nothing encoded."""
    module = copy.deepcopy(hyper.module)

    def normalised(lam, images, by):
        with using(layers(module), by):
            return torch.func.functional_call(module, lam, (images,))

    def support_features(lam, images):
        return normalised(lam, images, "keep" if mode == "support" else "own")

    def both(lam, known, asked):
        """The features of a support and a query set."""
        if mode == "running":  # in training an episode is one batch
            return normalised(lam, torch.cat([known, asked]), "own").split([len(known), len(asked)])
        return support_features(lam, known), normalised(lam, asked, "kept" if mode == "support" else "own")

    def inner(w, lam, batch):
        (images, labels), asked = batch
        logits = both(lam, images, asked)[0] @ w["weight"] + w["bias"]
        penalty = sum(leaf.square().sum() for leaf in w.values())
        return F.cross_entropy(logits, labels) + l2 / 2 * penalty

    def outer(w, lam, batch):
        (images, labels), known = batch
        return F.cross_entropy(both(lam, known, images)[1] @ w["weight"] + w["bias"], labels)

    def init(lam):
        return {"weight": torch.zeros(hyper.features - 1, WAYS), "bias": torch.zeros(WAYS)}

    return bl.Problem(inner, outer, init)


@pytest.mark.parametrize("mode", ["episode", "support", "running"])
@pytest.mark.parametrize("l2", [0.0, 0.2])
@pytest.mark.parametrize("make", [network, torch_network])
def test_the_meta_batch_equals_the_generic_engine_without_encode(mode, l2, make):
    hyper, batch = learner(make(), batch_norm=mode, l2=l2, chunk=2), episodes()
    value, grads = hyper.hypergradient(batch)
    problem = written_out(hyper, mode, l2)
    tasks = [one(batch, i) for i in range(3)]
    tasks = [bl.Task((task.train, task.val[0]), (task.val, task.train[0])) for task in tasks]
    # A shift that the next batch norm or no loss can see has the gradient zero, in both.
    plain = bl.hypergradient(problem, hyper.lam, tasks, dynamics=bl.GradientDescent(0.3), steps=4, method=bl.Reverse())
    assert torch.allclose(value, plain.value, rtol=1e-12)
    for name, gradient in grads.items():
        assert (gradient - plain.grad[name]).norm() <= 1e-10 * max(plain.grad[name].norm(), 1e-3), name
    assert all(gradient.norm() > 0 for gradient in grads.values())


@pytest.mark.parametrize("bound", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["episode", "support"])
def test_the_hypergradient_equals_central_differences(mode, bound):
    hyper, batch = learner(batch_norm=mode, steps=6, inner_lr=3.0 if bound else 0.3, step_bound=bound), episodes()
    _, grads = hyper.hypergradient(batch)
    generator = torch.Generator().manual_seed(5)
    direction = {name: torch.randn(leaf.shape, generator=generator) for name, leaf in hyper.lam.items()}
    slope = sum((grads[name] * d).sum() for name, d in direction.items())

    def moved(size):
        with hyper.at({name: leaf + size * direction[name] for name, leaf in hyper.lam.items()}):
            return hyper.hypergradient(batch)[0]

    h = 1e-6
    assert torch.allclose((moved(h) - moved(-h)) / (2 * h), slope, rtol=1e-6)


@pytest.mark.parametrize("bound", [0.5, 1.5])
def test_the_certificate_finds_the_step_below_the_bound_over_nu(bound):
    """ν in the certificate comes from Lanczos on the Hessian; ours from a formula."""
    batch = episodes(count=1)
    for inner_lr, active in ((50.0, True), (1e-3, False)):
        hyper = learner(inner_lr=inner_lr, step_bound=bound)
        found = bl.certify(hyper.problem(1, WAYS), hyper.lam, batch, dynamics=hyper.dynamics, steps=0, mu=0.0)
        assert found.step_ok and inner_lr <= bound / found.nu * (1 + 1e-9)
        assert (abs(inner_lr * found.nu / bound - 1) < 1e-9) is active
        plain = learner(inner_lr=inner_lr)
        if not active:
            assert torch.equal(plain.hypergradient(batch)[0], hyper.hypergradient(batch)[0])


def test_a_bound_on_the_step_is_a_shorter_step():
    """Scaled features with one step size, or plain features with a step size of the episode's own: the same loss."""
    batch = episodes(count=1)
    bounded = learner(inner_lr=50.0, step_bound=1.0)
    plain = learner(inner_lr=50.0)
    sets = plain.represent_sets(plain.lam, batch.train[0][0], batch.val[0][0], training=True)
    nu = torch.linalg.eigvalsh(sets[0] @ sets[0].T / len(sets[0])).max() / WAYS
    plain.inner_lr = float(1 / nu)
    assert torch.allclose(bounded.hypergradient(batch)[0], plain.hypergradient(batch)[0], rtol=1e-10)
    assert torch.equal(bounded.accuracies(batch, 4), plain.accuracies(batch, 4))
    (images, labels), queries = one(batch, 0).train, batch.val[0][0]
    one_way, other_way = (hyper.adapt(images, labels).predict_proba(queries) for hyper in (bounded, plain))
    assert torch.allclose(one_way, other_way, rtol=1e-9)


def test_plain_torch_gives_the_same_in_twenty_lines():
    """Algorithm 1 with torch.autograd alone and torch's own batch norm: nothing of ours in it."""
    module, batch = torch_network(), episodes(count=2)
    hyper = learner(module)
    _, grads = hyper.hypergradient(batch)
    total = 0.0
    for i in range(2):
        (images, labels), (queries, answers) = one(batch, i).train, one(batch, i).val
        phi, psi = module(images), module(queries)  # in training mode: each set by its own statistics
        weight, bias = torch.zeros(phi.shape[1], WAYS, requires_grad=True), torch.zeros(WAYS, requires_grad=True)
        for _ in range(4):
            loss = F.cross_entropy(phi @ weight + bias, labels)
            slopes = torch.autograd.grad(loss, (weight, bias), create_graph=True)
            weight, bias = weight - 0.3 * slopes[0], bias - 0.3 * slopes[1]
        total = total + F.cross_entropy(psi @ weight + bias, answers) / 2
    total.backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, rtol=1e-9, atol=1e-13), name


@pytest.mark.parametrize("method", [bl.Unrolled(), bl.Reverse("sqrt"), bl.Truncated(4)])
def test_every_method_works_on_the_same_learner(method):
    batch = episodes()
    _, expected = learner().hypergradient(batch)
    _, grads = learner(method=method).hypergradient(batch)
    for name in expected:
        assert torch.allclose(grads[name], expected[name], rtol=1e-10, atol=1e-14)


def test_first_order_is_another_direction():
    batch = episodes()
    _, exact = learner().hypergradient(batch)
    _, rough = learner(method=bl.FirstOrder()).hypergradient(batch)
    assert max(float((rough[name] - exact[name]).norm() / exact[name].norm()) for name in exact) > 0.05


@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_chunks_change_nothing(chunk):
    batch = episodes(count=5)
    value, grads = learner(chunk=5).hypergradient(batch)
    again, same = learner(chunk=chunk).hypergradient(batch)
    assert torch.allclose(value, again, rtol=1e-13)
    for name in grads:
        assert torch.allclose(grads[name], same[name], rtol=1e-10, atol=1e-14)


def test_queries_stand_for_themselves_except_in_episode_mode():
    batch = episodes(count=1, queries=3)
    (images, labels), (queries, _) = one(batch, 0).train, one(batch, 0).val
    for mode, independent in (("episode", False), ("support", True), ("running", True)):
        classifier = learner(batch_norm=mode).adapt(images, labels)
        together = classifier.predict_proba(queries)
        apart = torch.cat([classifier.predict_proba(part) for part in queries.split(3)])
        assert torch.allclose(together, apart, rtol=1e-9) is independent, mode
        if independent:
            assert torch.allclose(classifier.predict_proba(queries[:1]), together[:1], rtol=1e-9)
        else:
            with pytest.raises(bl.BilevelError, match="batch_norm='support'"):
                classifier.predict(queries[:1])


def test_running_averages_follow_what_was_seen():
    hyper, batch = learner(torch_network(), batch_norm="running"), episodes()
    with hyper.recording_statistics() as seen:
        hyper.hypergradient(batch)
    images = [torch.cat([batch.train[0][i], batch.val[0][i]]) for i in range(3)]  # an episode is one batch
    first = [torch.func.functional_call(hyper.module[0], hyper_part(hyper, "0"), (x,)) for x in images]
    mean = torch.stack([x.mean((0, 2, 3)) for x in first]).mean(0)
    var = torch.stack([x.var((0, 2, 3), unbiased=False) for x in first]).mean(0)
    assert torch.allclose(seen()[0], mean) and torch.allclose(seen()[1], var)
    assert len(seen()) == 4 and [x.shape for x in seen()] == [x.shape for x in hyper.running()]


def hyper_part(hyper, prefix):
    return {name.removeprefix(prefix + "."): leaf for name, leaf in hyper.lam.items() if name.startswith(prefix + ".")}


def test_the_users_module_is_not_touched():
    module = torch_network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    hyper = learner(module, batch_norm="running")
    with hyper.recording_statistics():
        hyper.hypergradient(episodes())
    assert module.training and isinstance(module[1], nn.BatchNorm2d)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


def test_the_features_are_computed_once_however_many_steps():
    calls = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            calls.append(len(x))
            return self.body(x)

    for steps in (1, 30):
        hyper, batch = learner(Counting(), steps=steps), episodes()
        hyper.hypergradient(batch)  # the first call also checks the problem
        calls.clear()
        hyper.hypergradient(batch)
        assert sum(calls) == 3 * WAYS * (2 + 4)


def test_accuracies_follow_the_iterates_of_every_step():
    hyper, batch = learner(), episodes(count=2)
    table = hyper.accuracies(batch, 5)
    assert table.shape == (2, 5)
    for i in range(2):
        (images, labels), (queries, answers) = one(batch, i).train, one(batch, i).val
        for steps in (1, 5):
            predicted = torch.tensor(hyper.adapt(images, labels, steps=steps).predict(queries))
            assert table[i, steps - 1] == (predicted == answers).double().mean()


def test_single_precision_pictures_meet_double_precision_weights():
    batch = trees.map(lambda x: x.float() if x.is_floating_point() else x, episodes())
    value, _ = learner().hypergradient(batch)
    assert value.dtype == torch.float64


def test_mistakes_are_explained():
    with pytest.raises(bl.BilevelError, match="batch_norm='batch' is unknown"):
        learner(batch_norm="batch")
    with pytest.raises(bl.BilevelError, match="N×F features"):
        learner(nn.Conv2d(1, 2, 3))
    with pytest.raises(bl.BilevelError, match="no network 'resnet'"):
        bl.HyperRepresentation("resnet", SHAPE)
    with pytest.raises(bl.BilevelError, match="steps"):
        learner(steps=-1)
    with pytest.raises(bl.BilevelError, match="inner_lr"):
        learner(inner_lr=0.0)
    with pytest.raises(bl.BilevelError, match="no parameters"):
        learner(nn.Flatten())


class Twice(nn.Module):
    """One batch norm under two names, used twice, and a convolution between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm = self.same = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.same(self.two(self.norm(self.one(x)).relu())).relu().flatten(1)


def shared_layers():
    torch.manual_seed(3)
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    norm, conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, relu, conv, norm, relu, pool, conv, relu, pool, nn.Flatten())


@pytest.mark.parametrize("make", [Twice, shared_layers])
def test_layers_that_are_used_twice(make):
    module, batch = make(), episodes(count=1)
    hyper = learner(module)
    with torch.no_grad():
        for images in (batch.train[0][0], batch.val[0][0]):
            found = hyper.represent_sets(hyper.lam, images, images, training=True)
            assert torch.allclose(found[0][:, :-1], module(images), atol=1e-12)
        # By the statistics of a support set that is the query set too, both are the same.
        support = learner(module, batch_norm="support")
        known, asked = support.represent_sets(support.lam, batch.val[0][0], batch.val[0][0], training=False)
        assert torch.allclose(known, asked, atol=1e-12) and torch.allclose(asked[:, :-1], module(batch.val[0][0]))


def test_a_batch_norm_that_cannot_follow_is_refused():
    class Double(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    listened = nn.BatchNorm2d(4)
    listened.register_forward_hook(lambda *args: None)
    for layer in (Double(4), listened):
        with pytest.raises(bl.BilevelError, match=f"{type(layer).__name__}.*cannot follow a batch norm mode"):
            learner(nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_of_another_precision_than_the_default(dtype):
    batch = episodes(count=1)
    (images, labels), (queries, _) = one(batch, 0).train, one(batch, 0).val
    for mode in ("episode", "support", "running"):
        hyper = learner(torch_network().to(dtype), batch_norm=mode)
        assert hyper.hypergradient(batch)[0].dtype == dtype
        assert hyper.adapt(images, labels).predict_proba(queries).dtype == dtype


def test_a_copy_of_a_learner_is_another_learner():
    batch = episodes()
    first = learner()
    before = first.hypergradient(batch)[0]
    second = copy.deepcopy(first)
    second.l2, second.batch_norm = 0.5, "support"
    assert torch.equal(second.hypergradient(batch)[0], learner(l2=0.5, batch_norm="support").hypergradient(batch)[0])
    assert torch.equal(first.hypergradient(batch)[0], before)


def test_a_classifier_outlives_further_learning():
    batch = episodes(count=1)
    (images, labels), (queries, _) = one(batch, 0).train, one(batch, 0).val
    hyper = learner(torch_network(), batch_norm="running")
    classifier = hyper.adapt(images, labels)
    before = classifier.predict_proba(queries)
    for buffer in hyper.running():
        buffer.add_(1.0)
    assert torch.equal(classifier.predict_proba(queries), before)


def test_lists_of_tasks_are_stacked_and_other_shapes_explained():
    batch = episodes()
    tasks = [one(batch, i) for i in range(3)]
    assert torch.equal(learner().hypergradient(tasks)[0], learner().hypergradient(batch)[0])
    with pytest.raises(bl.BilevelError, match="this learner takes stacked episodes"):
        learner().hypergradient(tasks[0])
    with pytest.raises(bl.BilevelError, match="channels, height, width"):
        bl.HyperRepresentation("omniglot-net", (28, 28))


def test_the_bound_counts_the_l2_term():
    batch = episodes(count=1)
    hyper = learner(inner_lr=0.5, step_bound=1.0, l2=1.5)
    found = bl.certify(hyper.problem(1, WAYS), hyper.lam, batch, dynamics=hyper.dynamics, steps=0, mu=0.0)
    assert found.nu <= 2.0 * (1 + 1e-9)
    with pytest.raises(bl.BilevelError, match="Pass a smaller inner_lr"):
        learner(inner_lr=0.5, step_bound=1.0, l2=2.5).hypergradient(batch)
