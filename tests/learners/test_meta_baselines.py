"""Table 4's other trainings: the outer objective on the support set, Classic and Multiclass, against plain torch."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bilevel import BilevelError
from bilevel.experiments._table_4_trainings import ClassicTraining, PaperMulticlass
from bilevel.learners.runs import begin_or_resume, train_in
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import PART
from bilevel.learners.training import FewShotTraining
from bilevel.models import heads
from bilevel.models.heads import with_one
from bilevel.problem import Task
from bilevel.training.folder import RunFolder

SMALL = TrainingSettings(
    ways=3, shots=1, queries=2, meta_batch=2, validation_episodes=4, steps=3, step_bound=0, decay=0
)
TRAIN = replace(SMALL, outer="support", train_shots=4)
PRETRAINING = replace(
    SMALL,
    learner="multiclass",
    images=PART + 8,
    augment="flip,crop,zoom,colour",
    optimizer="sgd",
    weight_decay=5e-4,
    classifier="cosine",
    label_smoothing=0.1,
    normalise=True,
    last_relu=False,
    batch_norm="running",
)


def features(job, lam, images):
    return with_one(torch.func.functional_call(job.learner.module, lam, (images.double(),)))


def loss(w, phi, labels):
    return F.cross_entropy(phi @ w, labels)


def leaves(job):
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in job.learner.lam.items()}


@pytest.mark.parametrize("method", ["reverse", "first-order"])
def test_bilevel_train_and_approx_train_against_plain_torch(data, method):
    job = FewShotTraining(replace(TRAIN, method=method), data)
    episodes = job.stream.draw(range(2))
    assert episodes.val[0] is episodes.train[0] and episodes.train[0].shape[1] == 3 * 4
    value, grads = job.learner.hypergradient(episodes)
    lam, total = leaves(job), 0.0
    for images, labels in zip(*episodes.train, strict=True):
        phi = features(job, lam, images)
        w = torch.zeros(phi.shape[1], 3, requires_grad=True)
        for _ in range(3):
            (step,) = torch.autograd.grad(loss(w, phi, labels), w, create_graph=True)
            w = w - job.settings.inner_lr * step
        total = total + loss(w.detach() if method == "first-order" else w, phi, labels) / 2
    expected = torch.autograd.grad(total, list(lam.values()))
    assert float(value) == pytest.approx(float(total.detach()), rel=1e-10)
    for ours, theirs in zip(grads.values(), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_one_tensor_as_both_sets_is_two_equal_tensors_at_half_the_work(data, monkeypatch):
    job = FewShotTraining(TRAIN, data)
    episodes = job.stream.draw(range(3))
    images, labels = episodes.train
    rows = []
    job.learner.hypergradient(episodes)  # the first call checks the problem
    monkeypatch.setattr(heads, "with_one", lambda phi: rows.append(phi[..., 0].numel()) or with_one(phi))
    value, grads = job.learner.hypergradient(episodes)
    other, theirs = job.learner.hypergradient(Task((images, labels), (images.clone(), labels.clone())))
    assert rows == [3 * 12, 2 * 3 * 12]
    assert torch.allclose(value, other, rtol=1e-12)
    assert all(torch.allclose(grads[name], theirs[name], rtol=1e-9, atol=1e-12) for name in grads)


def test_classic_descends_in_both_at_once_and_draws_anew(data):
    job = ClassicTraining(TRAIN, data)
    w = None
    for k in range(1, 8):
        lam, numbers = leaves(job), (k - 1) // 3
        images, labels = job.stream.at(1).batch(range(2 * numbers, 2 * numbers + 2)).train
        if (k - 1) % 3 == 0:
            w = torch.zeros(2, job.learner.features, 3)
        w = w.detach().requires_grad_()
        each = [loss(w[j], features(job, lam, images[j]), labels[j]) for j in range(2)]
        joint = sum(each)
        step, *grads = torch.autograd.grad(joint, [w, *lam.values()])
        found, _ = job.step(k)
        assert found["loss"] == pytest.approx(float(joint.detach()) / 2, rel=1e-9)
        for leaf, grad in zip(job.learner.lam.values(), grads, strict=True):
            assert torch.allclose(leaf.grad, grad / 2, rtol=1e-8, atol=1e-12)
        w = w - TRAIN.inner_lr * step
        assert torch.allclose(job.heads, w.detach(), rtol=1e-9, atol=1e-12)


def test_multiclass_is_a_softmax_over_all_classes_of_meta_training(data):
    settings = replace(SMALL, rotations=True)
    job = PaperMulticlass(settings, data)
    images, labels = job.stream.draw(range(18))
    assert len(images) == 2 * 3 * 3 and labels.max() < 4 * 8 and job.learner.features - 1 == 4 * 8
    # A label is a class and a turn: turned back, the picture is one of that class.
    for image, label in zip(images[:6], labels[:6], strict=True):
        turn, number = divmod(int(label), 8)
        back = np.rot90((image[0].numpy() * 255).round().astype(np.uint8), -turn)
        assert any((back == one[..., 0]).all() for one in data.images[data.labels == number])
    lam = leaves(job)
    value = F.cross_entropy(torch.func.functional_call(job.learner.module, lam, (images.double(),)), labels)
    grads = torch.autograd.grad(value, list(lam.values()))
    found, _ = job.step(1)
    assert found["loss"] == pytest.approx(float(value.detach()), rel=1e-6)
    for leaf, grad in zip(job.learner.lam.values(), grads, strict=True):
        assert torch.allclose(leaf.grad, grad, rtol=1e-4, atol=1e-7)
    assert torch.equal(
        job.stream.draw(range(90, 108))[0], PaperMulticlass(settings, data).stream.draw(range(90, 108))[0]
    )
    assert not torch.equal(job.stream.draw(range(90, 108))[0], job.stream.draw(range(108, 126))[0])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(FewShotTraining, TRAIN), (ClassicTraining, TRAIN), (PaperMulticlass, SMALL), (FewShotTraining, PRETRAINING)],
    ids=["bilevel-train", "classic", "paper's multiclass", "multiclass"],
)
def test_they_learn_and_go_on_bit_for_bit(tmp_path, data, kind, settings):
    settings = replace(settings, validate_every=4, checkpoint_every=4, average=0.5, lr=3e-3)
    whole = kind(replace(settings, iterations=10), data)
    ending = train_in(tmp_path / "whole", whole, "test", "whole", progress=False)
    assert ending.outcome.kind == "finished" and 0 <= ending.best <= 1
    # 7 is inside a block of Classic's steps.
    train_in(tmp_path / "halves", kind(replace(settings, iterations=7), data), "test", "halves", progress=False)
    half = kind(replace(settings, iterations=10), data)
    train_in(tmp_path / "halves", half, "test", "halves", progress=False)
    assert all(
        torch.equal(one, other) for one, other in zip(whole.state().values(), half.state().values(), strict=True)
    )
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    assert losses and all(np.isfinite(losses))


def test_a_run_of_a_version_without_the_newer_settings_goes_on(tmp_path, data):
    job = FewShotTraining(replace(SMALL, iterations=2), data)
    train_in(tmp_path / "run", job, "test", "run", progress=False)
    folder = RunFolder(tmp_path / "run")
    config = folder.config()
    for name in ("outer", "train_shots"):
        del config["settings"][name]
    folder.config_file.write_text(json.dumps(config))
    begin_or_resume(folder, FewShotTraining(replace(SMALL, iterations=3), data), "test", resume=True)
    with pytest.raises(BilevelError, match="outer: query there, support here"):
        begin_or_resume(folder, FewShotTraining(TRAIN, data), "test", resume=True)


def test_wrong_settings():
    with pytest.raises(BilevelError, match="outer='both' is unknown; pass one of query, support"):
        TrainingSettings(outer="both")
    with pytest.raises(BilevelError, match="train_shots=-1"):
        TrainingSettings(train_shots=-1)
