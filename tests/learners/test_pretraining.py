"""Pretraining on all classes, normalised features and a loss of all classes beside the episodes' one."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel as bl
from bilevel import BilevelError
from bilevel.distributed import World
from bilevel.learners.class_loss import ClassLoss
from bilevel.learners.representation import CENTRE, LENGTH
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import PART
from bilevel.learners.training import FewShotTraining
from bilevel.methods.reverse import Reverse
from bilevel.tasks.augmentation import ImageAugmentation
from small_learner import episodes, learner, torch_network

SMALL = TrainingSettings(
    learner="multiclass",
    ways=3,
    queries=2,
    images=PART + 8,
    steps=3,
    step_bound=0,
    validation_episodes=4,
    optimizer="sgd",
    lr=0.1,
    weight_decay=0.01,
)


def leaves(lam):
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in lam.items()}


def centred(lam, phi):
    phi = phi - lam[CENTRE]
    return lam[LENGTH].exp() * phi / phi.norm(dim=-1, keepdim=True)


def with_classes(batch, seed=2):
    """The episodes with the classes of their queries among ten."""
    generator = torch.Generator().manual_seed(seed)
    return bl.Task(batch.train, (*batch.val, torch.randint(10, batch.val[1].shape, generator=generator)))


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("mode", ["episode", "support", "running"])
def test_normalised_features_and_the_class_loss_by_every_way(kind, normalise, mode):
    options = {
        "batch_norm": mode,
        "normalise": normalise,
        "class_loss": ClassLoss(10, kind, 0.1),
        "class_weight": 0.25,
        "chunk": 2,
    }
    hyper, batch = learner(torch_network(), **options), with_classes(episodes())
    if normalise:
        hyper.centre(batch.train[0].flatten(0, 1))
    value, grads = hyper.hypergradient(batch)
    # Any other method goes through the engine; group_bytes changes how steps are grouped, not what is computed.
    generic = learner(torch_network(), **options, method=Reverse(group_bytes=0))
    generic.set_weights(hyper.with_running(hyper.lam))
    same, theirs = generic.hypergradient(batch)
    assert torch.allclose(value, same, rtol=1e-12)
    for name, grad in grads.items():
        assert (grad - theirs[name]).norm() <= 1e-10 * max(theirs[name].norm(), 1e-3), name
    # And against differences along a direction.
    torch.manual_seed(0)
    direction = {name: torch.randn_like(leaf) for name, leaf in hyper.lam.items()}
    slope = sum((grads[name] * direction[name]).sum() for name in grads)
    step, values = 1e-5, []
    for sign in (1, -1):
        with hyper.at({name: leaf + sign * step * direction[name] for name, leaf in hyper.lam.items()}):
            values.append(hyper.hypergradient(batch)[0])
    assert torch.allclose((values[0] - values[1]) / (2 * step), slope, rtol=1e-6)


def test_normalised_features_are_what_they_say():
    hyper, images = learner(torch_network(), normalise=True), episodes().train[0][0]
    hyper.centre(images)
    phi = hyper.represent(hyper.lam, images)
    plain = torch.func.functional_call(hyper.module, {n: hyper.lam[n] for n in hyper.representation.names}, (images,))
    assert torch.allclose(hyper.lam[CENTRE], plain.mean(0), rtol=1e-10)
    assert torch.allclose(phi[:, :-1], centred(hyper.lam, plain), rtol=1e-10)
    assert torch.allclose(phi[:, :-1].norm(dim=1), hyper.lam[LENGTH].exp().expand(len(images)), rtol=1e-10)
    # All features at the centre have no direction; they become zero and not NaN.
    hyper.lam[CENTRE].copy_(plain[0])
    assert bool(hyper.represent(hyper.lam, images).isfinite().all())


class WithMirrorImage(nn.Module):
    """The same features, as a module that torch differentiates."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return (self.module(images) + self.module(images.flip(-1))) / 2


@pytest.mark.parametrize("mode", ["episode", "support", "running"])
def test_features_of_mirror_images(mode):
    batch = episodes()
    ours = learner(torch_network(), batch_norm=mode, normalise=True, mirror=True)
    theirs = learner(WithMirrorImage(torch_network()), batch_norm=mode, normalise=True)
    value, grads = ours.hypergradient(batch)
    same, expected = theirs.hypergradient(batch)
    assert torch.allclose(value, same, rtol=1e-12)
    for name, grad in grads.items():
        other = expected[name if name in expected else f"module.{name}"]
        assert (grad - other).norm() <= 1e-10 * max(other.norm(), 1e-3), name
    # A picture and its mirror image are the same to it, and the option can be changed.
    pictures = batch.val[0][0]
    if mode == "running":
        classify = ours.adapt(batch.train[0][0], batch.train[1][0].tolist())
        assert torch.allclose(classify.predict_proba(pictures), classify.predict_proba(pictures.flip(-1)))
    ours.change(mirror=False)
    plain = learner(torch_network(), batch_norm=mode, normalise=True)
    assert torch.equal(ours.hypergradient(batch)[0], plain.hypergradient(batch)[0])


def test_a_class_loss_needs_classes():
    hyper = learner(torch_network(), class_loss=ClassLoss(10), class_weight=0.5)
    with pytest.raises(BilevelError, match="with_classes=True"):
        hyper.hypergradient(episodes())
    with pytest.raises(BilevelError, match=r"class_weight=1\.0 must be at least 0, and above 0 it needs a class_loss"):
        learner(torch_network(), class_weight=1.0)
    with pytest.raises(BilevelError, match="classifier='square' is unknown; pass one of linear, cosine"):
        ClassLoss(10, "square")


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_step_of_pretraining_is_plain_torch(data, kind):
    settings = replace(SMALL, classifier=kind, label_smoothing=0.1, normalise=True, batch_norm="running")
    job = FewShotTraining(settings, data)
    lam, buffers = leaves(job.learner.lam), {}
    for k in (1, 2):
        parts = job._groups(k)
        assert [len(part) for part in parts] == [PART, 8]
        total = 0.0
        for part in parts:
            images, labels = job.stream.draw(part)
            # The conftest's data set has 8 classes of meta-training; each part is a batch to batch norm.
            x = images.double()
            for conv, norm in ((0, 1), (3, 4), (6, 7), (9, 10)):
                x = F.conv2d(x, lam[f"{conv}.weight"], stride=2, padding=1)
                x = F.relu(F.batch_norm(x, None, None, None, lam[f"{norm}.bias"], True, 0.0, 1e-3))
            phi = centred(lam, x.flatten(1))
            if kind == "cosine":
                cosines = F.normalize(phi) @ F.normalize(lam["classifier.weight"]).T
                logits = lam["classifier.temperature"].exp() * cosines
            else:
                logits = phi @ lam["classifier.weight"].T + lam["classifier.bias"]
            total = total + F.cross_entropy(logits, labels, label_smoothing=0.1) * len(part) / settings.images
        found, _ = job.step(k)
        assert found["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
        grads = torch.autograd.grad(total, list(lam.values()), allow_unused=True, materialize_grads=True)
        for (name, leaf), grad in zip(lam.items(), grads, strict=True):
            grad = grad + (settings.weight_decay * leaf.detach() if leaf.ndim > 1 else 0)
            buffers[name] = grad if k == 1 else settings.momentum * buffers[name] + grad
            step = grad + settings.momentum * buffers[name]
            leaf.data -= settings.rate(k) * step
            assert torch.allclose(job.learner.lam[name].double(), leaf.data, rtol=1e-4, atol=1e-5), name


@pytest.fixture
def single():
    """float32 as torch's default, because autocast leaves float64 as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("network", ["omniglot-net", "c4l", "rn"])
def test_bfloat16_pretraining_is_close_to_float32(single, network):
    torch.manual_seed(0)
    batch = torch.rand(48, 3, 32, 32), torch.randint(8, (48,))
    values, gradients, statistics = {}, {}, {}
    for precision in ("float32", "bfloat16"):
        options = {"batch_norm": "running", "class_loss": ClassLoss(8)}
        pretraining = bl.learners.get("multiclass")(network, (3, 32, 32), **options)
        pretraining.precision = precision
        with pretraining.recording_statistics() as seen:
            values[precision], gradient = pretraining.hypergradient(batch)
        assert all(part.dtype == torch.float32 for part in (*gradient.values(), *seen()))
        gradients[precision] = torch.cat([part.flatten() for part in gradient.values()])
        statistics[precision] = torch.cat(seen())
    exact, rounded = gradients["float32"], gradients["bfloat16"]
    assert not torch.equal(exact, rounded)
    assert values["bfloat16"] == pytest.approx(float(values["float32"]), rel=1e-2)
    assert F.cosine_similarity(exact, rounded, dim=0) > 0.97
    assert (statistics["bfloat16"] - statistics["float32"]).norm() < 0.02 * statistics["float32"].norm()


def test_bfloat16_is_for_pretraining_only(data):
    with pytest.raises(BilevelError, match="hyper-representation does not use precision=bfloat16"):
        FewShotTraining(replace(SMALL, learner="hyper-representation", precision="bfloat16"), data)
    with pytest.raises(BilevelError, match="precision='float16' is unknown; pass one of float32, bfloat16"):
        replace(SMALL, precision="float16")


def test_a_training_in_bfloat16_is_resumed_bit_for_bit(single, data):
    settings = replace(SMALL, precision="bfloat16", batch_norm="running")
    whole, half = FewShotTraining(settings, data), FewShotTraining(settings, data)
    for k in (1, 2, 3, 4):
        whole.step(k)
    for k in (1, 2):
        half.step(k)
    saved = {name: tensor.clone() for name, tensor in half.state().items()}
    resumed = FewShotTraining(settings, data)
    resumed.restore(saved)
    for k in (3, 4):
        resumed.step(k)
    assert all(torch.equal(value, resumed.state()[name]) for name, value in whole.state().items())


def test_every_image_comes_once_in_an_epoch(data):
    job = FewShotTraining(replace(SMALL, images=12), data)
    epoch = [
        torch.cat(x) for x in zip(*(job.stream.draw(part) for k in range(1, 5) for part in job._groups(k)), strict=True)
    ]
    wanted = torch.from_numpy(data.images[data.labels < 8]).permute(0, 3, 1, 2).float() / 255
    assert len(epoch[0]) == len(wanted) == 48
    assert sorted(epoch[0].flatten(1).tolist()) == sorted(wanted.flatten(1).tolist())
    assert torch.bincount(epoch[1]).tolist() == [6] * 8


def test_parts_shared_by_processes_add_up_to_the_same(data):
    job = FewShotTraining(replace(SMALL, images=3 * PART), data)
    rows = [job._sum(part) for part in job._groups(1)]
    shares = [World(rank, 2).share(job._groups(1)) for rank in (0, 1)]
    assert [len(share) for share in shares] == [2, 1]
    assert torch.equal(sum(rows), rows[0] + rows[1] + rows[2])


def test_augmentation_is_a_function_of_seed_and_number():
    images = torch.randint(256, (50, 20, 16, 3), dtype=torch.uint8)
    plain = images.permute(0, 3, 1, 2).float() / 255
    assert torch.equal(ImageAugmentation()(images, 0, 0), plain)
    every = ImageAugmentation.of("flip, crop, zoom, colour")
    assert torch.equal(every(images, 1, 2), every(images, 1, 2))
    assert not torch.equal(every(images, 1, 2), every(images, 1, 3))
    assert not torch.equal(every(images, 1, 2), every(images, 2, 2))
    flipped = ImageAugmentation.of("flip")(images, 0, 0)
    same = (flipped == plain).flatten(1).all(1)
    assert 10 < int(same.sum()) < 40 and torch.equal(flipped[~same], plain.flip(3)[~same])
    shifted = ImageAugmentation.of("crop")(images, 0, 0)
    places = {
        (dy, dx)
        for one, other in zip(shifted, plain, strict=True)
        for dy in (-2, -1, 0, 1, 2)
        for dx in (-2, -1, 0, 1, 2)
        if torch.equal(one[:, 4:-4, 4:-4], other[:, 4 + dy : 16 + dy, 4 + dx : 12 + dx])
    }
    assert len(places) > 5
    coloured = ImageAugmentation.of("colour")(images, 0, 0)
    assert float(coloured.min()) >= 0 and float(coloured.max()) <= 1 and not torch.equal(coloured, plain)
    with pytest.raises(BilevelError, match="turn is unknown; pass some of flip, crop, zoom, colour"):
        ImageAugmentation.of("flip,turn")


def test_rates_fall_as_the_schedule_says():
    steps = TrainingSettings(lr=1.0, schedule="steps", iterations=100)
    assert [steps.rate(k) for k in (1, 50, 51, 76, 91)] == pytest.approx([1, 1, 0.1, 0.01, 0.001])
    cosine = TrainingSettings(lr=1.0, schedule="cosine", iterations=100)
    assert cosine.rate(1) == 1 and cosine.rate(26) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert "iterations" in TrainingSettings().free_on_resume and "iterations" not in cosine.free_on_resume


def test_the_bilevel_problem_goes_on_from_pretraining(data, tmp_path):
    first = FewShotTraining(replace(SMALL, classifier="cosine", batch_norm="running"), data)
    first.step(1)
    from bilevel.files import write_json
    from bilevel.training.files import write_tensors

    write_tensors(tmp_path / "first.safetensors", first.weights())
    card = {"settings": first.settings.plain(), "learner": first.learner.settings()}
    write_json(tmp_path / "first.json", card)
    settings = replace(
        SMALL,
        learner="hyper-representation",
        initial=str(tmp_path / "first"),
        batch_norm="running",
        normalise=True,
        global_loss=0.25,
        classifier="cosine",
        meta_batch=2,
        train_ways=4,
        most_shots=3,
        augment="flip",
    )
    second = FewShotTraining(settings, data)
    for name, leaf in first.learner.lam.items():
        assert torch.equal(leaf, second.learner.lam[name]), name
    for one, other in zip(first.learner.running(), second.learner.running(), strict=True):
        assert torch.equal(one, other)
    assert bool(second.learner.lam[CENTRE].any())
    assert {second.stream.at(k).shots for k in range(1, 30)} == {1, 2, 3}
    shapes = {second.stream.draw(group).train[0].shape[1] for k in range(1, 30) for group in second._groups(k)}
    assert shapes == {4, 8, 12}
    second.step(1)
    assert all(bool(leaf.isfinite().all()) for leaf in second.learner.lam.values())
    with pytest.raises(BilevelError, match="classifier over 8 training classes, and this training has 32"):
        FewShotTraining(replace(settings, rotations=True), data)


def test_classes_of_queries_are_those_of_pretraining(data):
    settings = replace(SMALL, learner="hyper-representation", global_loss=1.0, meta_batch=2, rotations=True)
    job = FewShotTraining(settings, data)
    images, _, classes = job.stream.draw(range(2)).val
    multi = FewShotTraining(replace(SMALL, rotations=True), data)
    known, labels = multi.stream.draw(range(multi.stream.turns * len(multi.stream.rows)))
    table = {tuple(image.flatten().tolist()): int(label) for image, label in zip(known, labels, strict=True)}
    for image, number in zip(images.flatten(0, 1), classes.flatten(), strict=True):
        assert table[tuple(image.flatten().tolist())] == int(number)


def test_networks_without_their_last_relu():
    from bilevel.models import build

    for name in ("c4l", "omniglot-net", "rn"):
        with_relu, without = build(name, 3), build(name, 3, last_relu=False)
        assert with_relu.state_dict().keys() == without.state_dict().keys()
        images = torch.randn(4, 3, 32, 32)
        with torch.no_grad():
            assert float(with_relu(images).min()) >= 0 > float(without(images).min()), name
        one, other = ([isinstance(part, nn.Identity) for part in net.modules()] for net in (with_relu, without))
        assert sum(other) == sum(one) + 1
