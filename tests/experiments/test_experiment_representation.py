"""What a representation finds alike, on a few scripts of Glyphs: pairs, distances, maps, and that they are what they
say."""

import json
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch

from bilevel import BilevelError
from bilevel.experiments import _class_names, _representation_picture, representation
from bilevel.experiments.base import reproduce, single_precision
from bilevel.learners import library
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from few_scripts import drawn

TRAINING = TrainingSettings(dataset="glyphs", queries=5, meta_batch=2, lr=0.002, average=0.99, iterations=70)


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory):
    with drawn(tmp_path_factory) as data:
        yield data


@pytest.fixture(scope="module")
def model(glyphs, tmp_path_factory):
    """A saved learner after a real training, but a short one."""
    path = tmp_path_factory.mktemp("models") / "short one"
    with single_precision():
        job = FewShotTraining(TRAINING, glyphs)
        for k in range(1, TRAINING.iterations + 1):
            job.step(k)
        job.learner.set_weights(job.weights())
        job.learner.save(path, {"settings": TRAINING.plain()})
    return str(path)


@pytest.fixture(scope="module")
def quick(model, tmp_path_factory):
    return reproduce(
        "representation",
        {"models": model, "episodes": "10"},
        quick=True,
        out=tmp_path_factory.mktemp("results"),
        progress=False,
    )


@pytest.fixture
def subject(model):
    settings = representation.RepresentationSettings(models=(model,), queries=4)
    with single_precision():
        return settings, representation._models(settings)[0]


# First, while the cache is still the user's own, in which Omniglot may be ready.
def test_the_zoos_omniglot_model(real, shared_cache, tmp_path):
    real("omniglot/images_background.zip", "omniglot/images_evaluation.zip")
    result, record = reproduce("representation", {"episodes": "3"}, quick=True, out=tmp_path, progress=False)
    assert record.command == "bilevel run representation --quick --set episodes=3"
    found = result.numbers["models"]["omniglot-5way-1shot"]
    assert found["separation"]["learned"]["ratio"]["mean"] > 1.6
    assert found["separation"]["learned"]["neighbours"]["mean"] > 0.9
    assert found["separation"]["pixels"]["neighbours"]["mean"] < 0.75
    assert set(found["kin"]) == {"learned", "untrained", "pixels"} and len(result.tables) == 3
    assert len(set(found["map"]["classes"])) == 8


def test_the_pairs_are_the_nearest_and_the_farthest_of_all(subject):
    settings, one = subject
    with single_precision():
        found = representation.draw_and_compare(settings, one, draws=2)
    streams = representation._streams(settings, one)
    learner = one.found.learner
    assert [pairs["nearest"].draw for pairs in found] == [0, 1]
    for number, pairs in enumerate(found):
        sets = []
        for stream in streams:
            task = stream.episode(number)
            # In this mode every set is normalised by itself, so the query set alone has the same features.
            sets.append(learner.represent(learner.lam, task.val[0])[:, :-1].double().numpy())
        table = {(i, j): np.sqrt(((a - b) ** 2).sum()) for i, a in enumerate(sets[0]) for j, b in enumerate(sets[1])}
        assert len(table) == 400
        for which, best in (("nearest", min(table.values())), ("farthest", max(table.values()))):
            pair = pairs[which]
            assert pair.distance == pytest.approx(best, rel=1e-4)
            assert pair.distance == pytest.approx(table[pair.numbers], rel=1e-4)
            for side in (0, 1):
                shown = sets[side][pair.numbers[side]][pair.components]
                np.testing.assert_allclose(pair.values[side], shown, atol=1e-4)
        assert pairs["nearest"].distance < pairs["nearest"].median < pairs["farthest"].distance


def test_images_and_names_belong_to_the_features(subject):
    settings, one = subject
    with single_precision():
        pair = representation.draw_and_compare(settings, one, draws=1)[0]["nearest"]
    for side, stream in enumerate(representation._streams(settings, one)):
        row = stream.sampler.draw(0)[0][:, stream.shots :].flatten()[pair.numbers[side]]
        np.testing.assert_allclose(pair.images[side], one.data.images[row] / 255, atol=1e-6)
        assert pair.titles[side] == one.data.classes[one.data.labels[row]]
        assert one.data.labels[row] in one.data.splits[("train", "test")[side]]


def test_the_components_are_a_random_subset(subject):
    settings, one = subject
    with single_precision():
        chosen = [
            representation.draw_and_compare(replace(settings, seed=seed, components=20), one, 1)[0]["nearest"]
            for seed in (0, 0, 1)
        ]
        every = representation.draw_and_compare(replace(settings, components=1000), one, 1)[0]["nearest"]
    assert chosen[0].components == chosen[1].components != chosen[2].components
    assert len(set(chosen[0].components)) == 20 and chosen[0].components == sorted(chosen[0].components)
    assert every.components == list(range(256))
    # With all of them shown, the bars are the distance.
    assert np.linalg.norm(every.values[0] - every.values[1]) == pytest.approx(every.distance)


def test_separation_of_points_on_a_line():
    found = representation.separation(
        torch.tensor([[0.0], [1.0], [10.0], [14.0], [2.5]]), torch.tensor([0, 0, 1, 1, 1])
    )
    assert found.within == pytest.approx((1 + 4 + 7.5 + 11.5) / 4)
    assert found.between == pytest.approx((10 + 14 + 2.5 + 9 + 13 + 1.5) / 6)
    assert found.ratio == pytest.approx(found.between / found.within)
    # 0 → 1, 1 → 0, 10 → 14 and 14 → 10 are right; 2.5 → 1 is not.
    assert found.neighbours == pytest.approx(4 / 5)


def test_separation_has_no_unit():
    points, labels = torch.randn(30, 5), torch.arange(30) % 3
    one, other = (representation.separation(scale * points, labels) for scale in (1, 1000))
    assert other.ratio == pytest.approx(one.ratio) and other.neighbours == one.neighbours
    assert 0.9 < one.ratio < 1.1  # labels that mean nothing


def test_learned_features_separate_unseen_classes_better_than_the_untrained_network_and_pixels(quick):
    found = quick[0].numbers["models"]["short-one"]["separation"]
    for other in ("untrained", "pixels"):
        for measure in ("ratio", "neighbours"):
            gap = found["learned"][measure]["mean"] - found[other][measure]["mean"]
            assert gap > found["learned"][measure]["interval"] + found[other][measure]["interval"]
    assert found["learned"]["neighbours"]["mean"] > found["pixels"]["neighbours"]["mean"] + 0.1


def test_what_is_written(quick):
    result, record = quick
    pictures = ["pairs-short-one.png", "map-short-one.png"]
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "table.md", *pictures}
    assert result.pictures == pictures
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    one = written["numbers"]["models"]["short-one"]
    assert one["data"] == "glyphs" and one["features"] == 256 and one["batch_norm"]["mode"] == "episode"
    assert "Figure 5" in written["paper"] and "fingerprint" in written["data"]["glyphs"]
    assert "transductive" in written["choices"]["batch norm"]
    # No two scripts of Glyphs are on both sides, so nothing can be said of kin.
    assert one["kin"] is None and len(result.tables) == 2
    pairs, apart = result.tables
    assert {"paper", "ours", "difference", "why"} <= set(pairs.columns)
    assert len(pairs.rows) == 2 and len(apart.rows) == 3
    for row, kind in zip(apart.rows, one["separation"], strict=True):
        found = one["separation"][kind]
        assert row[2].startswith(f"{found['ratio']['mean']:.3f} ±")
        assert row[3].startswith(f"{100 * found['neighbours']['mean']:.1f} ±")


def test_without_pictures_the_numbers_are_the_same_and_nothing_is_linked(quick, model, tmp_path):
    changes = {"models": model, "episodes": "10", "pictures": "no"}
    result, record = reproduce("representation", changes, quick=True, out=tmp_path, progress=False)
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "table.md"}
    assert result.numbers == quick[0].numbers and result.pictures == []
    assert ".png" not in (record.folder / "table.md").read_text(encoding="utf-8")


def test_the_map_is_of_unseen_classes(quick, subject):
    shown = quick[0].numbers["models"]["short-one"]["map"]
    assert len(set(shown["classes"])) == 8 and shown["images"] == 10
    assert all(name.startswith("hebrew ") for name in shown["classes"])
    settings, one = subject
    apart = representation.Separation(1, 2, 0.5)
    with single_precision():
        found = representation._map(replace(settings, map_ways=6), one, "learned", [apart], lambda doing: None)
    assert len(found.names) == len(found.thumbnails) == 6
    # All drawings but the one of the support set.
    assert np.bincount(found.labels).tolist() == [19] * 6 and found.points.shape == (6 * 19, 2)
    for name, thumbnail in zip(found.names, found.thumbnails, strict=True):
        titles = [label for label, title in enumerate(one.data.classes) if _class_names.readable(title) == name]
        drawings = one.data.images[one.data.labels == titles[0]] / 255
        assert min(np.abs(drawings - thumbnail).max((1, 2, 3))) < 1e-6


def test_the_map_keeps_classes_together_that_are_apart():
    centres = 20 * torch.randn(4, 10)
    labels = torch.arange(4).repeat_interleave(12)
    points = representation.flatten(centres[labels] + torch.randn(48, 10), perplexity=8, seed=3)
    assert points.shape == (48, 2)
    assert representation.separation(torch.from_numpy(points), labels).neighbours == 1


def test_the_map_does_not_depend_on_the_number_of_threads():
    from threadpoolctl import threadpool_limits

    features = torch.randn(60, 8)
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            found.append(representation.flatten(features, perplexity=8, seed=0))
    np.testing.assert_array_equal(*found)


def test_the_pictures_show_something_everywhere(quick):
    for name, parts in (("pairs-short-one.png", 6), ("map-short-one.png", 2)):
        image = matplotlib.image.imread(quick[1].folder / name)[..., :3]
        assert image.shape[1] > 1500
        assert all(part.std() > 0.05 for part in np.array_split(image, parts, axis=1))


def test_thumbnails_do_not_overlap_and_stay_on_the_map():
    generator = np.random.default_rng(0)
    centres = 0.5 + 0.02 * generator.standard_normal((20, 2))
    points = generator.random((300, 2))
    found = _representation_picture.places(centres, points, 0.08)
    gaps = np.abs(found[:, None] - found).max(2)[~np.eye(20, dtype=bool)]
    assert gaps.min() >= 0.08 and found.min() >= 0.04 and found.max() <= 0.96
    # Where nothing is in the way, the centre itself is taken.
    far = np.array([[0.2, 0.2], [0.8, 0.8]])
    np.testing.assert_array_equal(_representation_picture.places(far, np.array([[0.5, 0.5]]), 0.08), far)


def test_a_class_looks_the_same_in_all_maps_and_unlike_its_neighbours(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(_representation_picture, "_map", lambda axes, shown, looks: given.append(looks))
    labels = np.arange(20).repeat(3)
    one, other = (
        _representation_picture.ClassMap("x", points, labels, ["x"] * 20, [], 1.0, 1.0)
        for points in (np.stack([labels * 7 % 20, 0 * labels], 1), np.zeros((60, 2)))
    )
    _representation_picture.draw_maps(tmp_path / "x.png", [one, other])
    assert given[0] == given[1] and len(set(given[0])) == 20
    at = np.arange(20) * 7 % 20
    colours = [given[0][label][0] for label in at.argsort()]  # from left to right
    assert all(len(set(colours[i : i + 7])) == 7 for i in range(14))


def test_photographs_can_be_drawn(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.random((2, 8, 8, 3))
    bars = generator.random((2, 5))
    pair = _representation_picture.ImagePair(
        0, (0, 0), ("n02110063", "n04596742"), tuple(images), [0, 1, 2, 3, 4], tuple(bars), 1.0, 2.0
    )
    _representation_picture.draw_pairs(tmp_path / "x.png", [{"nearest": pair, "farthest": pair}])
    drawn = matplotlib.image.imread(tmp_path / "x.png")[..., :3]
    assert (drawn.std(axis=2) > 0.1).sum() > 10_000  # colours


def test_a_run_is_a_function_of_its_settings_and_seed(model, tmp_path):
    runs = []
    for seed, dtype in (("0", torch.float64), ("0", torch.float32), ("1", torch.float64)):
        torch.set_default_dtype(dtype)
        changes = {"models": model, "seed": seed, "episodes": "2", "map_ways": "5"}
        runs.append(reproduce("representation", changes, quick=True, out=tmp_path, progress=False)[0].numbers)
        assert torch.get_default_dtype() == dtype
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_kin_are_counted_where_classes_can_be_kin(subject, monkeypatch):
    settings, one = subject
    settings = replace(settings, episodes=5)
    with single_precision():
        assert representation.nearness(settings, one, lambda doing: None) is None
        # Everything is kin to everything; and one side's first class to all of the other's.
        monkeypatch.setattr(representation, "related", lambda a, b: True)
        found = representation.nearness(settings, one, lambda doing: None)
        assert found["pixels"]["nearest"]["mean"] == found["learned"]["any"]["mean"] == 1
        monkeypatch.setattr(representation, "related", lambda a, b: a.startswith("greek"))
        found = representation.nearness(settings, one, lambda doing: None)
    streams = representation._streams(settings, one)
    shares = []
    for number in range(5):
        left, right = (stream.episode(number).val[0].flatten(1).numpy() for stream in streams)
        greek = [title.startswith("greek") for title in representation._titles(streams[0], number)]
        shares.append(np.mean([greek[int(np.linalg.norm(left - x, axis=1).argmin())] for x in right]))
    assert found["pixels"]["nearest"]["mean"] == pytest.approx(np.mean(shares))
    assert 0 < found["pixels"]["any"]["mean"] < 1


def test_every_class_of_miniimagenet_has_a_name():
    assert len(_class_names.MINIIMAGENET) == len(set(_class_names.MINIIMAGENET.values())) == 100


def test_names_of_models_become_names_of_files(subject):
    _, one = subject
    name = representation._file_name
    assert name("zoo:omniglot-5way-1shot", []) == "omniglot-5way-1shot"
    assert name("runs/a b*c", []) == "a-b-c" and name("/", []) == "model"
    assert name("other/short-one", [one]) == "short-one-2"
    assert name("other/short-one", [one, replace(one, name="short-one-2")]) == "short-one-3"


def test_averages_from_training_are_used_where_a_model_has_them(glyphs, tmp_path):
    training = replace(TRAINING, batch_norm="running", iterations=2)
    with single_precision():
        job = FewShotTraining(training, glyphs)
        for k in (1, 2):
            job.step(k)
        job.learner.save(tmp_path / "r", {"settings": training.plain()})
        settings = representation.RepresentationSettings(models=(str(tmp_path / "r"),), queries=4)
        one = representation._models(settings)[0]
        task = representation._streams(settings, one)[0].episode(0)
        alone = replace(task, val=(task.val[0][:1], task.val[1][:1]))
        # An image stands for itself; in the untrained network, which has no averages, it does not.
        features = {kind: (one.features[kind](task)[0], one.features[kind](alone)[0]) for kind in one.features}
    torch.testing.assert_close(*features["learned"], atol=1e-4, rtol=1e-4)
    assert (features["untrained"][0] - features["untrained"][1]).abs().max() > 0.1
    assert "no averages" in representation._choices(settings, [one])["batch norm"]


def test_the_bar_ends_where_it_should(subject):
    settings, one = subject
    settings = replace(settings, episodes=2, map_ways=4, perplexity=5.0)
    calls = []
    with single_precision():
        representation.nearness(settings, one, calls.append)
        apart = representation.separations(settings, one, calls.append)
        for kind in representation.HEADINGS:
            representation._map(settings, one, kind, apart[kind], calls.append)
    assert len(calls) == representation._work(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("models", ""),
        ("seed", "-1"),
        ("ways", "1"),
        ("queries", "0"),
        ("draws", "0"),
        ("components", "0"),
        ("map_ways", "1"),
        ("map_images", "1"),
        ("episodes", "1"),
        ("perplexity", "0.5"),
        ("perplexity", "40"),
    ],
)
def test_senseless_settings_are_refused_before_any_work(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(library, "find", lambda *arguments: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=key + "="):
        reproduce("representation", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_named_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(representation, "draw_and_compare", lambda *arguments: pytest.fail("the run began"))
    for models, said in ((f"{model},nowhere", "no trained model 'nowhere'"), ("zoo:nothing", "The zoo has no")):
        with pytest.raises(BilevelError, match=said):
            reproduce("representation", {"models": models}, out=tmp_path, progress=False)


def test_more_classes_than_there_are_is_refused_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(representation, "draw_and_compare", lambda *arguments: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match="ways=500 needs 500 classes"):
        reproduce("representation", {"models": model, "map_ways": "500"}, out=tmp_path, progress=False)


def test_without_its_data_a_model_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "empty"))
    with pytest.raises(BilevelError, match="omniglot"):
        reproduce("representation", {}, quick=True, out=tmp_path / "results", progress=False)
