"""Calibration: the temperature is the minimiser, errors are those of the definition, thresholds have their rate."""

import re

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from bilevel import learners
from bilevel.data.arrays import from_arrays
from bilevel.errors import BilevelError
from bilevel.learners import calibration, library
from bilevel.learners.calibration import (
    Calibration,
    calibrate,
    calibration_error,
    nearest,
    temperature,
    threshold_from_support,
)
from bilevel.learners.catalogue.prototypical import Prototypical
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.recognition import choose
from bilevel.tasks.episodes import Episodes


def draws(count=4000, factor=3.0, seed=0):
    """Logits that are `factor` times too large, with answers drawn from what they should be."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(count, 5, generator=generator, dtype=torch.float64) * 2
    return factor * right, torch.multinomial(right.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("factor", [0.1, 1.0, 12.0])
def test_the_temperature_minimises_the_cross_entropy_and_finds_the_right_one(factor):
    logits, answers = draws(factor=factor)
    tau = temperature(logits, answers)

    wrong = 1 / (4000 + 5)
    targets = F.one_hot(answers, 5) * (1 - 5 * wrong) + wrong

    def loss(t):
        return float(F.cross_entropy(logits / t, targets))

    assert all(loss(tau) <= loss(tau * change) for change in (0.999, 1.001, 0.5, 2))
    assert tau == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("count", [20, 1000])
def test_without_an_error_answers_are_not_certain(count):
    logits = 30 * F.one_hot(torch.arange(count) % 2, 2).double()
    tau = temperature(logits, logits.argmax(1))
    assert (logits / tau).softmax(1).max(1).values.tolist() == pytest.approx([1 - 1 / (count + 2)] * count)


def test_the_calibration_error_is_that_of_the_definition():
    logits, answers = draws()
    p = logits.softmax(1)
    confidence, said = p.max(1)
    right = (said == answers).double()
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            expected += float(inside.double().mean()) * abs(float(right[inside].mean() - confidence[inside].mean()))
    assert calibration_error(p, answers) == pytest.approx(expected, abs=1e-9)
    assert calibration_error((logits / 3).softmax(1), answers) < 0.03 < 0.1 < calibration_error(p, answers)


def blobs(seed=0, classes=16, each=12, noise=0.12):
    """Images of classes that are a random picture each, with noise."""
    generator = torch.Generator().manual_seed(seed)
    middles = torch.rand(classes, 1, 6, 6, 1, generator=generator)
    images = (middles + noise * torch.randn(classes, each, 6, 6, 1, generator=generator)).clamp(0, 1)
    labels = torch.arange(classes)[:, None].expand(classes, each).flatten()
    splits = {
        "train": range(classes - 12),
        "val": range(classes - 12, classes - 6),
        "test": range(classes - 6, classes),
    }
    return from_arrays(images.flatten(0, 1).numpy(), labels.numpy(), splits=splits)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 16), torch.nn.Tanh())


def test_calibrating_a_learner_and_taking_the_nearest_card():
    data, learner = blobs(), Prototypical(net(), (1, 6, 6))
    val, test = (Episodes(data, split, 3, 2, 5) for split in ("val", "test"))
    made = calibrate(learner, val, test, 30, 1)
    assert made.error < made.error_before and made.error < 0.1 and made.accuracy > 0.8
    assert abs(made.false_alarms["0.05"] - 0.05) < 0.05 and made.found["0.2"] > made.false_alarms["0.2"] + 0.2
    assert Calibration.of(made.plain()) == made
    other = {**made.plain(), "ways": 20, "temperature": 2.0}
    assert nearest([made.plain(), other], 4, 2, made.batch_norm) == made
    assert nearest([made.plain(), other], 30, 2, made.batch_norm).temperature == 2
    assert nearest([made.plain()], 4, 2, "running") is None
    with pytest.raises(BilevelError, match="Evaluate the model again"):
        Calibration.of({**made.plain(), "temperature": float("nan")})
    with pytest.raises(BilevelError, match=r"card has no threshold for --none .* Pass one of"):
        made.threshold(0.07)
    with pytest.raises(BilevelError, match="there is no score 'x'"):
        Calibration.of({**made.plain(), "score": "x"})
    for wrong in (0.5, [1.0], {"0.05": "x"}, {"0.05": float("inf")}):  # a card that a stranger wrote
        with pytest.raises(BilevelError, match="calibration in the card cannot be used"):
            Calibration.of({**made.plain(), "found": wrong})
    older = {name: value for name, value in made.plain().items() if name != "score"}
    assert Calibration.of(older).score == "logit"


def test_the_score_that_finds_more_strangers_on_meta_validation_is_taken(monkeypatch):
    data, learner = blobs(), bl.HyperRepresentation(net(), (1, 6, 6), steps=5)
    episodes = [Episodes(data, split, 3, 2, 5) for split in ("val", "test")]
    found = {}
    for name, score in calibration.SCORES.items():
        with monkeypatch.context() as patch:
            patch.setattr(calibration, "SCORES", {name: score})
            found[name] = calibrate(learner, *episodes, 30, 5).found["0.05"]
    made = calibrate(learner, *episodes, 30, 5)
    assert made.score == "distance" and made.found["0.05"] == found["distance"] > found["logit"] + 0.2, found


def test_distances_to_classes_are_those_to_their_mean_features():
    learner, images = Prototypical(net(), (1, 6, 6)), torch.rand(209, 1, 6, 6)  # more than a group
    classifier = learner.adapt(images[:5], list("abbab"))
    features = learner.representation.features(learner.lam, images)[:, :-1]
    means = torch.stack([features[[0, 3]].mean(0), features[[1, 2, 4]].mean(0)])
    wanted = (features[:, None] - means).norm(dim=2)
    torch.testing.assert_close(classifier.class_distances(images), wanted)
    torch.testing.assert_close(calibration.SCORES["distance"](classifier, images), -wanted.min(1).values.double())


@pytest.mark.parametrize("score", calibration.SCORES)
def test_none_of_these_from_the_labelled_pictures_has_its_rate(score):
    learner = Prototypical(net(), (1, 6, 6))
    alarms, found = [], []
    for seed in range(6):
        data = blobs(seed, classes=16, each=25)
        images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
        known = (torch.arange(len(labels)) % 25 < 10) & (labels < 4)
        classifier = learner.adapt(images[known], labels[known])
        bound, count = threshold_from_support(classifier, 0.1, score)
        assert count == 40
        best = calibration.SCORES[score](classifier, images)
        alarms.append((best[~known & (labels < 4)] < bound).double().mean())
        found.append((best[labels >= 4] < bound).double().mean())
    assert 0.02 < float(torch.stack(alarms).mean()) < 0.18 and float(torch.stack(found).mean()) > 0.6
    few = learner.adapt(images[[0, 1, 25, 26]], labels[[0, 1, 25, 26]])
    assert threshold_from_support(few, 0.1) is None and threshold_from_support(few, 0.2) is not None
    assert threshold_from_support(learner.adapt(images[[0, 25]], labels[[0, 25]]), 0.4) is None


@pytest.mark.parametrize("name", learners.names())
def test_every_learner_is_kept_and_loaded(name, tmp_path):
    kind = learners.get(name)
    network = "omniglot-net" if "network" in kind.Options.__dataclass_fields__ else None
    learner = kind(network, (1, 28, 28))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 28, 28, 1), generator=generator, dtype=torch.uint8)
    classifier = learner.adapt(images[:10], list("abcde") * 2)
    classifier.temperature = 0.5
    classifier.save(tmp_path / "kept.safetensors", {"more": [1]})
    again, facts = FewShotClassifier.load(tmp_path / "kept.safetensors")
    assert facts == {"more": [1]} and again.classes == list("abcde") and again.temperature == 0.5
    torch.testing.assert_close(
        again.predict_proba(images[10:]), classifier.predict_proba(images[10:]), rtol=1e-3, atol=1e-4
    )
    for both, alone in zip(
        classifier.scores_and_class_distances(images[10:]),
        (classifier.scores(images[10:]), classifier.class_distances(images[10:])),
        strict=True,
    ):
        torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_kept_or_loaded(tmp_path):
    learner = Prototypical(net(), (1, 6, 6))
    classifier = learner.adapt(torch.rand(4, 1, 6, 6), [("a", 1), ("b", 2)] * 2)
    with pytest.raises(BilevelError, match="Use strings or numbers as labels"):
        classifier.save(tmp_path / "kept.safetensors")
    learner.save(tmp_path / "model")
    with pytest.raises(BilevelError, match="does not hold a classifier"):
        FewShotClassifier.load(tmp_path / "model.safetensors")
    learner.adapt(torch.rand(4, 1, 6, 6), [0, 1] * 2).save(tmp_path / "own.safetensors")
    with pytest.raises(BilevelError, match="module"):
        FewShotClassifier.load(tmp_path / "own.safetensors")
    assert FewShotClassifier.load(tmp_path / "own.safetensors", net())[0].classes == [0, 1]


def test_the_zoo_is_calibrated_and_chosen_from():
    assert choose(30, 30, 5, 1).spec == "zoo:omniglot-5way-1shot"
    assert choose(9, 10, 30, 1).spec == "zoo:omniglot-20way-1shot"
    photos = choose(3, 30, 5, 4)
    assert photos.spec == "zoo:miniimagenet-rn-staged" and "3 of 30 pictures look like drawings" in photos.why
    for name, card in library.zoo().items():
        for one in card["calibrations"]:
            assert 0.1 < one["temperature"] < 10 and one["error"] < 0.05 and one["false_alarms"]["0.05"] < 0.08, name
            # Letters of other alphabets are found, photographs of other classes are not (docs/which_model.md).
            assert one["found"]["0.05"] > (0.6 if card["preparation"]["kind"] == "drawing" else 0.04), name


@pytest.mark.parametrize("drawn", [0, 30])
@pytest.mark.parametrize(("ways", "shots"), [(2, 1), (5, 1), (5, 5), (10, 2), (20, 5), (40, 3)])
def test_no_model_that_is_clearly_better_is_passed_over(drawn, ways, shots):
    chosen = choose(drawn, 30, ways, shots)
    like = [int(number) for number in re.search(r"(\d+)-way (\d+)-shot episodes", chosen.why).groups()]
    scores = {
        f"zoo:{name}": one["accuracy"]
        for name, card in library.zoo().items()
        for one in card["calibrations"]
        if (card["preparation"]["kind"] == "drawing") == bool(drawn) and [one["ways"], one["shots"]] == like
    }
    assert scores[chosen.spec] >= max(scores.values()) - 0.01
