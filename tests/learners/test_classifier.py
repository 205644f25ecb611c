"""`learner.adapt`: a classifier from a few labelled pictures."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import bilevel as bl
from bilevel import learners
from bilevel.learners import library
from bilevel.learners.classifier import GROUP
from bilevel.learners.settings import TrainingSettings
from bilevel.problem import Task

SHAPE = (1, 8, 8)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU(), nn.Flatten())


def make(**options):
    return bl.HyperRepresentation(
        network(), SHAPE, **{"steps": 5, "inner_lr": 0.05, "batch_norm": "support", **options}
    )


def pictures(labels, seed=0, noise=0.25):
    """Noisy copies of one pattern per label."""
    generator = torch.Generator().manual_seed(seed)
    patterns = {label: torch.rand(SHAPE, generator=torch.Generator().manual_seed(100 + label)) for label in set(labels)}
    clean = torch.stack([patterns[label] for label in labels])
    return (clean + noise * torch.randn(clean.shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 4, 2), (3, 1)])
@pytest.mark.parametrize(("mode", "l2"), [("support", 0.0), ("episode", 0.3)])
def test_probabilities_are_those_of_the_steps_written_out(counts, mode, l2):
    labels = [c for c, n in enumerate(counts) for _ in range(n)]
    images, queries = pictures(labels), pictures([0, 1, 1, 0], seed=1)
    learner = make(batch_norm=mode, l2=l2)

    net = network()
    norm = net[1]
    before = net[0](images).detach()
    norm.running_mean.copy_(before.mean((0, 2, 3)))
    norm.running_var.copy_(before.var((0, 2, 3), correction=0))
    # torch's own layer: in training it normalises by the batch, in evaluation by what was put there, the support's.
    h = net.eval()(images).detach()
    q = net.train(mode == "episode")(queries).detach()
    h, q = (torch.cat([x, torch.ones(len(x), 1)], 1) for x in (h, q))
    answers = torch.eye(len(counts))[labels]
    share = torch.tensor([1 / (len(counts) * counts[label]) for label in labels])[:, None]
    w = torch.zeros(h.shape[1], len(counts))
    for _ in range(5):
        w = w - 0.05 * (h.T @ (share * ((h @ w).softmax(1) - answers)) + l2 * w)

    classifier = learner.adapt(images, labels)
    assert torch.allclose(classifier.logits.weights, w, rtol=1e-10, atol=1e-14)
    assert torch.allclose(classifier.predict_proba(queries), (q @ w).softmax(1), rtol=1e-10)


def test_unequal_shots_do_not_favour_the_larger_class():
    """Showing every picture of a class twice changes nothing."""
    learner = make(batch_norm="running")  # whose features do not depend on which others there are
    images, queries = pictures([0, 1, 2]), pictures([0, 1, 2, 2], seed=3)
    once = learner.adapt(images, "abc").predict_proba(queries)
    twice = learner.adapt(images[[0, 1, 1, 2, 2, 2]], "abbccc").predict_proba(queries)
    assert torch.allclose(once, twice, rtol=1e-10)


@pytest.mark.parametrize("ways", [2, 3, 20])
def test_any_number_of_classes_and_labels_of_any_kind(ways):
    labels = [c for c in range(ways) for _ in range(1 + c % 3)]
    images, queries = pictures(labels, noise=0.02), pictures(range(ways), seed=5, noise=0.02)
    learner = make(inner_lr=0.3, steps=20)
    names = [f"class {c}" for c in labels]
    classifier = learner.adapt(images, names)
    assert classifier.classes == [f"class {c}" for c in range(ways)]
    proba = classifier.predict_proba(queries)
    assert proba.shape == (ways, ways) and torch.allclose(proba.sum(1), torch.ones(ways))
    assert classifier.predict(queries) == [f"class {c}" for c in range(ways)]
    for same in (labels, torch.tensor(labels), np.array(labels), tuple(labels)):
        assert learner.adapt(images, same).predict(queries) == list(range(ways))


def test_bytes_are_floats_times_255_in_either_order_of_axes():
    data = (pictures([0, 1, 0, 1]) * 255).to(torch.uint8)
    learner = make()
    expected = learner.adapt(data / 255, "abab").predict_proba(data / 255)
    last = data.movedim(1, -1)
    for given in (last, last[..., 0], data, last.numpy(), list(last.numpy()), list(last), (data / 255).float()):
        # The last ones went through single precision.
        assert torch.allclose(learner.adapt(given, "abab").predict_proba(given), expected, rtol=1e-5)


def test_arrays_mapped_from_files_are_taken_without_a_warning(tmp_path):
    np.save(tmp_path / "a.npy", (pictures([0, 1]).movedim(1, -1) * 255).to(torch.uint8).numpy())
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert len(make().adapt(mapped, "ab").predict(mapped)) == 2


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(4, 1, 9, 8), "abab", r"\[4, 1, 9, 8\]; this learner takes floats N×1×8×8"),
        (torch.rand(4, 3, 8, 8), "abab", "bytes N×8×8×1"),
        (torch.rand(1, 8, 8), "a", "this learner takes"),
        (torch.zeros(4, 8, 8, 3, dtype=torch.uint8), "abab", r"\[4, 3, 8, 8\]"),
        (torch.ones(4, 1, 8, 8, dtype=torch.int64), "abab", "int64"),
        (torch.rand(0, 1, 8, 8), "", "The array of images is empty"),
        (torch.full((2, 1, 8, 8), float("nan")), "ab", "not finite"),
        ([np.zeros((8, 8)), np.zeros((9, 9))], "ab", "cannot be made into one array"),
        (torch.rand(4, 1, 8, 8), "aba", "There are 4 images and 3 labels"),
        (torch.rand(2, 1, 8, 8), "aa", "All images are labelled 'a'; a classifier needs images of at least two"),
        (torch.rand(2, 1, 8, 8), [["a"], ["b"]], "one string or number per image"),
    ],
)
def test_what_cannot_be_taken_is_one_message(images, labels, message):
    with pytest.raises(bl.BilevelError, match=message):
        make().adapt(images, labels)


def test_steps_are_the_learners_own_unless_given():
    images = pictures([0, 1])
    learner = make()
    assert learner.adapt(images, "ab").steps == 5
    assert torch.equal(learner.adapt(images, "ab", steps=5).logits.weights, learner.adapt(images, "ab").logits.weights)
    assert not torch.equal(
        learner.adapt(images, "ab", steps=1).logits.weights, learner.adapt(images, "ab").logits.weights
    )
    with pytest.raises(bl.BilevelError, match="steps=0"):
        learner.adapt(images, "ab", steps=0)


def test_floats_that_go_to_255_are_warned_about():
    with pytest.warns(bl.BilevelWarning, match="Divide them by 255"):
        make().adapt(pictures([0, 1]) * 255, "ab")


def test_many_queries_are_taken_in_parts_and_a_classifier_outlives_further_learning():
    learner = make()
    classifier = learner.adapt(pictures([0, 1, 2]), "abc")
    queries = pictures([0, 1, 2] * (GROUP // 3 + 5), seed=2)
    before = classifier.predict_proba(queries)
    assert torch.allclose(before[-7:], classifier.predict_proba(queries[-7:]), rtol=1e-9)
    for value in learner.lam.values():
        value.mul_(3)
    learner.batch_norm = "episode"
    assert torch.equal(before, classifier.predict_proba(queries))


def test_a_learner_that_has_learned_beats_chance_on_classes_it_has_not_seen():
    learner = make(inner_lr=0.1)

    def episode(classes, shots, seed):
        labels = [c for c in classes for _ in range(shots)]
        return pictures(labels, seed, noise=0.6), torch.arange(len(classes)).repeat_interleave(shots)

    def accuracy():
        right = []
        for k in range(20):
            classes = range(200 + 5 * k, 205 + 5 * k)
            (images, labels), (queries, answers) = episode(classes, 1, k), episode(classes, 6, 1000 + k)
            right += [a == b for a, b in zip(learner.adapt(images, labels).predict(queries), answers, strict=True)]
        return float(np.mean(right))

    untrained = accuracy()
    optimizer = torch.optim.Adam(learner.lam.values(), lr=0.02)
    for k in range(60):
        classes = range(5 * (k % 30), 5 * (k % 30) + 5)
        task = Task(*((x[None], y[None]) for x, y in (episode(classes, 1, 2 * k), episode(classes, 6, 2 * k + 1))))
        for name, gradient in learner.hypergradient(task)[1].items():
            learner.lam[name].grad = gradient
        optimizer.step()
    trained = accuracy()
    # 600 queries: three standard errors above chance are 0.25.
    assert trained > 0.4 and trained > untrained


def test_save_and_load_round_trip_with_its_card(tmp_path):
    learner = bl.HyperRepresentation("omniglot-net", (1, 28, 28), seed=4, steps=3, inner_lr=0.07, l2=0.01)
    images = torch.rand(4, 1, 28, 28)
    card = {
        "settings": TrainingSettings(dataset="glyphs").plain(),
        "score": {"test": {"accuracy": 0.5, "interval": 0.01}},
    }
    learner.save(tmp_path / "model.v1", card)
    again = bl.HyperRepresentation.load(tmp_path / "model.v1")
    assert again.settings() == learner.settings()
    assert torch.equal(
        again.adapt(images, "abab").predict_proba(images), learner.adapt(images, "abab").predict_proba(images)
    )
    found = library.find(str(tmp_path / "model.v1"))
    assert found.card["score"] == card["score"] and found.settings.dataset == "glyphs"


def test_a_pickle_under_that_name_is_refused_and_not_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    learner = bl.HyperRepresentation("omniglot-net", (1, 28, 28))
    learner.save(tmp_path / "model", {"settings": TrainingSettings().plain()})
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(bl.BilevelError, match=r"model\.safetensors is damaged"):
        bl.HyperRepresentation.load(tmp_path / "model")
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(bl.BilevelError, match=r"model\.safetensors is damaged"):
        bl.HyperRepresentation.load(tmp_path / "model")
    assert not (tmp_path / "exploded").exists()


LINEAR = [name for name in learners.names() if learners.get(name).linear]


def test_which_learners_have_a_linear_head():
    assert set(LINEAR) >= {"hyper-representation", "anil", "ridge-head", "svm-head", "logistic-head", "proximal-head"}
    assert not {"maml", "matching", "prototypical", "pixels", "relation"} & set(LINEAR)


@pytest.mark.parametrize("mode", ["support", "running"])
@pytest.mark.parametrize("name", LINEAR)
def test_matrix_of_a_linear_head_gives_the_logits(name, mode):
    """h(x)ᵀW with W = `logits.matrix`: factors on features, the scale and the bias are all in it."""
    kind = learners.get(name)
    options = {"head_ways": 3} if name == "anil" else {}
    if "step_bound" in {f.name for f in fields(kind.Options)}:
        options = {"step_bound": 0.5, "inner_lr": 2.0}
    learner = kind(network(), SHAPE, batch_norm=mode, **options)
    generator = torch.Generator().manual_seed(1)
    learner.lam = {key: leaf + 0.1 * torch.randn(leaf.shape, generator=generator) for key, leaf in learner.lam.items()}
    classifier = learner.adapt(pictures([0, 0, 0, 1, 2, 2]), [0, 0, 0, 1, 2, 2])
    queries = pictures([0, 1, 2, 1], seed=1)
    h = learner.representation.sets(learner.lam, classifier.support, queries, training=False)[1]
    expected = classifier.scores(queries)
    assert expected.std() > 1e-3
    assert torch.allclose(h @ classifier.logits.matrix, expected, rtol=1e-9, atol=1e-11)
