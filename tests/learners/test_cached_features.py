"""Heads on features of any network: held against scikit-learn and a closed form, and used from the shell."""

import json

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestCentroid
from torch import nn
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.errors import BilevelError
from bilevel.learners.features import HEADS, CachedFeatures, FeatureTrial, adapt, head


def blobs(classes=12, each=8, features=10, noise=0.7, seed=0):
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    return random.normal(size=(classes, features))[labels] + noise * random.normal(size=(len(labels), features)), labels


def lengthened(table, centre):
    moved = table - centre
    return 6 * moved / np.linalg.norm(moved, axis=1, keepdims=True)


@pytest.fixture
def split():
    table, labels = blobs(classes=4, each=20)
    first = np.concatenate([np.flatnonzero(labels == k)[:5] for k in range(4)])
    rest = np.setdiff1d(np.arange(len(labels)), first)
    return CachedFeatures.of(table[first], labels[first]), CachedFeatures.of(table[rest], labels[rest])


@pytest.mark.parametrize("name", ["prototypical", "nearest-centroid"])
def test_the_nearest_mean_is_that_of_scikit_learn(split, name):
    known, asked = split
    centre = known.features.mean(0).numpy()
    rival = NearestCentroid().fit(lengthened(known.features.numpy(), centre), known.labels)
    expected = rival.predict(lengthened(asked.features.numpy(), centre)).tolist()
    assert adapt(known, name).predict(asked) == expected


def test_ridge_regression_is_its_closed_form(split):
    known, asked = split
    centre = known.features.mean(0).numpy()
    x, new = (np.c_[lengthened(part.features.numpy(), centre), np.ones(len(part.features))] for part in split)
    targets = np.eye(4)[np.array(known.labels, int)]
    weights = np.linalg.solve(x.T @ x + np.eye(11), x.T @ targets)
    expected = torch.tensor(10 * new @ weights).softmax(1)
    assert torch.allclose(adapt(known, "ridge-head").predict_proba(asked), expected, atol=1e-8)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_tells_clear_classes_apart(split, name):
    known, asked = split
    said = adapt(known, name)
    p = said.predict_proba(asked)
    assert torch.allclose(p.sum(1), torch.ones(len(p)))
    right = np.mean([one == true for one, true in zip(said.predict(asked), asked.labels, strict=True)])
    assert right > 0.8


def test_scores_are_of_classes_that_chose_nothing_and_chance_is_chance():
    trial = FeatureTrial(ways=3, shots=2, queries=4, episodes=60)
    table, labels = blobs(noise=0.3)
    scores = trial.compare(CachedFeatures.of(table, labels), HEADS)
    assert list(scores) == list(HEADS) and all(final.accuracy > 0.9 for final in scores.values())
    again = trial.compare(CachedFeatures.of(table, labels), ("ridge-head",))
    assert again["ridge-head"].accuracy == scores["ridge-head"].accuracy  # the same episodes for every head
    noise = CachedFeatures.of(np.random.default_rng(0).normal(size=table.shape), labels)
    final = trial.compare(noise, ("ridge-head",))["ridge-head"]
    assert abs(final.accuracy - 1 / 3) < 3 * final.interval


def test_any_network_computes_them_once_and_stays_as_it_was(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))
    net.train()
    net[2].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    images = torch.rand(130, 1, 9, 9)
    cached = CachedFeatures.computed(net, images, [str(k % 3) for k in range(130)])
    assert [part.training for part in net] == [True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net.eval()
    with torch.no_grad():
        assert torch.allclose(cached.features, net(images).flatten(1), atol=1e-5)
    cached.save(tmp_path / "a.npz")
    again = CachedFeatures.load(tmp_path / "a.npz")
    assert torch.equal(again.features.float(), cached.features.float()) and again.labels == cached.labels


def invoke(*words):
    torch.set_default_dtype(torch.float32)
    return CliRunner().invoke(build(), ["heads", *map(str, words)])


def test_the_command_compares_and_classifies(tmp_path):
    table, labels = blobs(noise=0.3)
    np.savez(tmp_path / "all.npz", features=table.astype(np.float32), labels=labels)
    np.savez(tmp_path / "new.npz", features=table[::4].astype(np.float32), labels=labels[::4])
    given = ["--features", tmp_path / "all.npz"]
    how = ["--ways", 3, "--queries", 4, "--episodes", 20, "--learner", "ridge-head", "--learner", "prototypical"]
    done = invoke(*given, *how, "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["heads"]) == ["ridge-head", "prototypical"]
    assert "3-way 1-shot" in invoke(*given, *how).stdout
    done = invoke(*given, "--query", tmp_path / "new.npz", "--csv", tmp_path / "out.csv")
    assert done.exit_code == 0 and "Accuracy" in done.stdout
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + len(labels[::4])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((2, 2))}, "no array `features`"),
        ({"features": np.ones((2, 2), int)}, "floating-point"),
        ({"features": np.ones(4)}, "floating-point"),
        ({"features": np.full((2, 2), np.nan)}, "not finite"),
        ({"features": np.ones((2, 2)), "labels": np.arange(3)}, "one label per row"),
        ({"features": np.ones((2, 2))}, "no labels"),
        ({"features": np.ones((4, 2)), "labels": np.arange(4)}, "need 10 classes"),
        ({"features": np.array([[object()]])}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    done = invoke("--features", tmp_path / "a.npz")
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_other_files_heads_and_widths_are_refused(tmp_path, split):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    np.save(tmp_path / "b.npy", np.ones((2, 2)))
    (tmp_path / "c.npz").write_text("no archive")
    for file in ("a.npz", "b.npy", "c.npz", "missing.npz"):
        done = invoke("--features", tmp_path / file)
        assert done.exit_code == 2 and done.stderr.startswith("Error: ") and "pickle" not in done.stderr, done.output
    with pytest.raises(BilevelError, match="Pass one of the heads hyper-representation"):
        head("maml", 3)
    with pytest.raises(BilevelError, match="compute both with the same network"):
        adapt(split[0]).predict(CachedFeatures.of(np.ones((2, 3))))


def test_labels_whose_name_is_damaged_are_not_left_out_in_silence(tmp_path):
    file = tmp_path / "features.npz"
    CachedFeatures.of(np.ones((2, 3)), ["a", "b"]).save(file)
    before, _, after = file.read_bytes().rpartition(b"labels")  # in the directory at the end of the archive
    file.write_bytes(before + b"tables" + after)
    with pytest.raises(BilevelError, match=r"cannot be read as \.npz"):
        CachedFeatures.load(file)
