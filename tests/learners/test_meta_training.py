"""The job of `bilevel train`: Adam on the hypergradient, what is kept beside λ, and scores."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from bilevel import BilevelError, certify
from bilevel.distributed import World
from bilevel.learners.evaluation import EpisodeScore, evaluate
from bilevel.learners.presets import PRESETS, preset
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes, open_data
from bilevel.learners.training import Estimate, FewShotTraining, new_learner
from bilevel.training.stopping import Interrupted

SMALL = TrainingSettings(
    rotations=False, ways=3, shots=1, queries=2, meta_batch=2, validation_episodes=4, steps=3, step_bound=0, decay=0.5
)


@pytest.fixture(autouse=True)
def single_precision():
    """What episodes and trainings are in."""
    torch.set_default_dtype(torch.float32)


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def meta_gradient(settings, data, lam, iteration):
    """∇f_T of the hyperiteration's meta-batch, at λ."""
    learner = new_learner(settings, data)
    first = (iteration - 1) * settings.meta_batch
    with learner.at(lam):
        return learner.hypergradient(episodes(settings, data, "train").batch(range(first, first + settings.meta_batch)))


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_a_hyperiteration_is_a_step_of_adam_with_a_decaying_rate(data, clip):
    settings = replace(SMALL, clip=clip)
    job = FewShotTraining(settings, data)
    m = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in job.learner.lam.items()}
    v = {name: torch.zeros_like(moment) for name, moment in m.items()}
    for k in (1, 2, 3):
        before = copied(job.learner.lam)
        value, grads = meta_gradient(settings, data, before, k)
        numbers, stopped = job.step(k)
        assert numbers["loss"] == pytest.approx(float(value), rel=1e-5) and not stopped
        rate = settings.lr / (1 + settings.decay * (k - 1))
        for name, leaf in job.learner.lam.items():
            g = grads[name].double()
            g = g.clamp(-clip, clip) if clip else g
            assert not clip or g.abs().max() <= clip
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            change = rate * (m[name] / (1 - 0.9**k)) / ((v[name] / (1 - 0.999**k)).sqrt() + 1e-8)
            # Where g is rounding noise Adam makes a whole step of it, so elements are compared where it is not.
            sure = g.abs() > 1e-4 * g.abs().max()
            assert torch.allclose((before[name] - leaf).double()[sure], change[sure], rtol=1e-2, atol=1e-7)
            assert leaf.grad.abs().max() <= (clip or float("inf"))


def test_episodes_of_training_validation_and_test_are_different_streams(data):
    settings = replace(SMALL, seed=1)
    seeds = {split: episodes(settings, data, split).seed for split in ("train", "val", "test")}
    others = {split: episodes(replace(SMALL, seed=2), data, split).seed for split in ("train", "val", "test")}
    assert len({*seeds.values(), *others.values()}) == 6
    assert episodes(settings, data, "val", seed=2).seed == others["val"]
    with pytest.raises(BilevelError, match="seed=-3 must be at least 0"):
        episodes(settings, data, "val", seed=-3)


def test_the_average_is_used_for_scores_and_begins_as_a_mean(data):
    job = FewShotTraining(replace(SMALL, average=0.95), data)
    mean = copied(job.learner.lam)
    for k in (1, 2, 3):
        job.step(k)
        factor = min(0.95, k / (k + 9))
        for name, leaf in job.learner.lam.items():
            mean[name] = factor * mean[name] + (1 - factor) * leaf
    assert all(torch.allclose(job.weights()[name], mean[name], atol=1e-6) for name in mean)
    assert not same(job.weights(), job.learner.lam)
    learner = new_learner(SMALL, data)
    learner.set_weights(job.weights())
    expected = evaluate(learner, episodes(SMALL, data, "val"), 4, 3)
    assert job.validate(3)["score"] == expected.means[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"average": 0.9},
        {"batch_norm": "running"},
        {"batch_norm": "support", "method": "first-order"},
        {"step_bound": 1},
    ],
    ids=str,
)
def test_a_restored_job_goes_on_bit_for_bit(data, changes):
    settings = replace(SMALL, inner_lr=0.5, **changes)
    whole = FewShotTraining(settings, data)
    for k in range(1, 7):
        whole.step(k)
        if k == 3:
            kept = copied(whole.state())
    resumed = FewShotTraining(settings, data)
    resumed.restore(kept)
    for k in range(4, 7):
        resumed.step(k)
    assert same(whole.weights(), resumed.weights()) and same(whole.state(), resumed.state())
    assert whole.validate(6) == resumed.validate(6)


def test_running_averages_are_of_the_training_sets_statistics(data):
    job = FewShotTraining(replace(SMALL, batch_norm="running", meta_batch=1), data)
    mean, var = (buffer.clone() for buffer in job.learner.running()[:2])
    layer = next(iter(job.learner.norms.values()))
    convolution = job.learner.module[0]
    task = job.stream.at(1).batch([0])
    seen = convolution(torch.cat([task.train[0][0], task.val[0][0]]))  # an episode is one batch
    job.step(1)
    expected, spread = seen.mean((0, 2, 3)), seen.var((0, 2, 3), correction=0)
    assert torch.allclose(layer.running_mean, 0.9 * mean + 0.1 * expected, atol=1e-5)
    assert torch.allclose(layer.running_var, 0.9 * var + 0.1 * spread, atol=1e-5)
    assert any(name.endswith("running_mean") for name in job.weights())


def test_a_checkpoint_of_something_else_is_refused(data):
    state = FewShotTraining(SMALL, data).state()
    with pytest.raises(BilevelError, match="does not fit the settings"):
        FewShotTraining(replace(SMALL, average=0.9), data).restore(state)


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_the_inner_step_stays_below_the_bound_over_nu(data, bound):
    def step_times_nu(job, number):
        learner = job.learner
        problem, batch = learner.problem(1, SMALL.ways), job.stream.at(1).batch([number])
        return learner.inner_lr * certify(problem, learner.lam, batch, dynamics=learner.dynamics, steps=0, mu=0.0).nu

    # With steps that are far too long, each episode's is cut to the bound; short ones stay as they are.
    long = FewShotTraining(replace(SMALL, inner_lr=100.0, step_bound=bound), data)
    short = FewShotTraining(replace(SMALL, inner_lr=1e-3, step_bound=bound), data)
    free = FewShotTraining(replace(SMALL, inner_lr=1e-3, step_bound=0), data)
    for k in (1, 2):
        assert step_times_nu(long, k) == pytest.approx(bound, rel=1e-3)
        assert step_times_nu(short, k) == pytest.approx(step_times_nu(free, k), rel=1e-5)
        assert step_times_nu(short, k) < bound
        for job in (long, short, free):
            job.step(k)
    assert same(short.weights(), free.weights())


def test_threads_change_no_bit_of_a_training(data):
    def weights(threads):
        torch.set_num_threads(threads)
        try:
            job = FewShotTraining(replace(SMALL, meta_batch=6), data)
            losses = [job.step(k)[0]["loss"] for k in (1, 2, 3)]
            return losses, job.validate(3), copied(job.learner.lam)
        finally:
            torch.set_num_threads(1)

    one, two = weights(1), weights(2)
    assert one[:2] == two[:2] and same(one[2], two[2])


def test_the_estimate_is_what_happens(data, monkeypatch):
    """On a clock that counts episodes: a second for each one learned from, a tenth for each one evaluated."""
    settings = replace(SMALL, ways=5, queries=4, meta_batch=8, validation_episodes=40)
    job = FewShotTraining(settings, data)
    clock = [0.0]

    def costs(name, each):
        found = getattr(job.learner, name)

        def call(episodes, *rest, **named):
            clock[0] += each * len(episodes.train[0])
            return found(episodes, *rest, **named)

        monkeypatch.setattr(job.learner, name, call)

    costs("hypergradient", 1.0)
    costs("accuracies", 0.1)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    before = copied(job.learner.lam)
    estimate = job.estimate()
    assert same(before, job.learner.lam) and not job.optimizer.state
    clock[0] = 0.0
    job.step(1)
    assert estimate.seconds == clock[0] == 8
    clock[0] = 0.0
    job.validate(5)
    assert estimate.validation_seconds == pytest.approx(4) == clock[0]
    weights = sum(leaf.nbytes for leaf in job.learner.lam.values())
    assert estimate.bytes > 6 * weights
    assert Estimate(2.0, 10.0, 5_000_000).total(100, 50) == 230
    said = Estimate(2.0, 10.0, 5_000_000).describe(100, 50)
    assert "2.00 s a hyperiteration" in said and "3.8 minutes for 100 hyperiterations" in said and "5 MB" in said


def test_the_first_loss_is_that_of_guessing_and_learning_lowers_it(data):
    settings = replace(SMALL, meta_batch=4, inner_lr=1e-6, lr=3e-3, decay=0.0)
    assert FewShotTraining(settings, data).step(1)[0]["loss"] == pytest.approx(np.log(3), abs=1e-3)
    job = FewShotTraining(replace(settings, inner_lr=0.1), data)
    losses = [job.step(k)[0]["loss"] for k in range(1, 13)]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


# ------------------------------------------------------------------------------------------------- scores


class Knows:
    """Is right in a share of the answers that depends on the episode and the number of steps."""

    def __init__(self, table):
        self.table, self.asked = table, 0

    has_steps, features_only = True, False

    def accuracies(self, task, steps, *, only_last):
        count = len(task.train[1])
        part = self.table[self.asked : self.asked + count, :steps]
        self.asked += count
        return part


def test_a_score_is_a_mean_with_its_interval(data):
    table = torch.rand(45, 6, dtype=torch.float64)
    done = []
    score = evaluate(Knows(table), episodes(SMALL, data, "val"), 45, 6, report=done.append)
    assert score.episodes == 45 and done == [20, 40, 45]
    assert np.allclose(score.means, table.mean(0)) and np.allclose(
        score.intervals, 1.96 * table.numpy().std(0, ddof=1) / 45**0.5
    )
    assert score.best_steps == 1 + int(table.mean(0).argmax())
    assert EpisodeScore((0.5, 0.7, 0.7), (0, 0, 0), 2).best_steps == 2
    with pytest.raises(BilevelError, match="at least 2"):
        evaluate(Knows(table), episodes(SMALL, data, "val"), 1, 6)
    with pytest.raises(Interrupted):
        evaluate(Knows(table), episodes(SMALL, data, "val"), 45, 6, stop=True)


# ------------------------------------------------------------------------------------------------- settings


def test_the_presets_are_the_papers():
    names = [f"omniglot-{ways}way-{shots}shot" for ways in (5, 20) for shots in (1, 5)]
    names += [f"miniimagenet-{net}-{shots}shot" for net in ("c4l", "rn") for shots in (1, 5)] + ["glyphs-5way-1shot"]
    assert set(names) <= set(PRESETS)
    for name in names:
        settings = preset(name)
        assert f"{settings.shots}shot" in name and settings.dataset in name
        assert TrainingSettings.of(settings.plain()) == settings
    assert preset("omniglot-20way-5shot").ways == 20 and preset("miniimagenet-rn-5shot").network == "rn"
    assert (preset("omniglot-5way-1shot").lr, preset("omniglot-5way-1shot").inner_lr) == (1e-3, 0.1)
    with pytest.raises(BilevelError, match=r"no preset 'omniglot'.*omniglot-5way-1shot"):
        preset("omniglot")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": 0}, "ways=0 must be at least 2"),
        ({"ways": "five"}, "ways='five' is not a whole number"),
        ({"ways": 2.5}, "ways=2.5 is not a whole number"),
        ({"ways": True}, "ways=True is not a whole number"),
        ({"rotations": 1}, "rotations=1 is not true or false"),
        ({"lr": "fast"}, "lr='fast' is not a number"),
        ({"lr": 0}, "lr=0 must be above 0"),
        ({"lr": float("inf")}, "lr=inf is not finite"),
        ({"l2": float("nan")}, "l2=nan is not finite"),
        ({"l2": -1.0}, "l2=-1.0 must be at least 0"),
        ({"dataset": 3}, "dataset=3 is not text"),
        ({"average": 1.0}, "average=1.0 must be at least 0 and below 1"),
        ({"validation_episodes": 1}, "validation_episodes=1 must be at least 2"),
        (
            {"method": "backward"},
            "method='backward' is unknown; pass one of reverse, reverse-sqrt, unrolled, first-order",
        ),
        ({"batch_norm": "none"}, "batch_norm='none' is unknown; pass one of episode, support, running"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": 2**64}, "is too large"),
        ({"way": 5}, "settings of another version: way"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(BilevelError, match=message):
        TrainingSettings.of({**TrainingSettings().plain(), **changes})


def test_networks_and_images_that_do_not_fit(data):
    with pytest.raises(BilevelError, match=r"no network 'c5l'; pass one of c4l"):
        new_learner(replace(SMALL, network="c5l"), data)
    with pytest.raises(BilevelError, match=r"c4l cannot process images of 8×8 pixels.*image_size"):
        new_learner(replace(SMALL, network="c4l"), replace(data, images=data.images[:, :8, :8]))
    with pytest.raises(BilevelError, match=r"image_size=84 is for folders of images and MiniImagenet\. glyphs"):
        open_data(TrainingSettings(dataset="glyphs", image_size=84))


def test_a_folder_of_classes_is_split_by_the_seed(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    for k in range(10):
        (tmp_path / "data" / f"class {k}").mkdir(parents=True)
        Image.new("RGB", (20, 20), (k, 0, 0)).save(tmp_path / "data" / f"class {k}" / "a.png")
    settings = TrainingSettings(dataset=str(tmp_path / "data"), image_size=16)
    found = open_data(settings)
    assert found.shape == (16, 16, 3) and [len(found.splits[s]) for s in ("train", "val", "test")] == [6, 2, 2]
    assert open_data(replace(settings, seed=1)).splits != found.splits


def test_a_world_of_one_shares_everything():
    world = World()
    assert world.share(range(3)) == [0, 1, 2] and world.any(True) and not world.any(False) and world.writes
    assert torch.equal(world.sum(torch.ones(2)), torch.ones(2))
    with pytest.raises(BilevelError, match="mine"), world.agreed():
        raise BilevelError("mine")


def test_a_training_can_begin_with_the_weights_of_another(data, tmp_path):
    first = FewShotTraining(SMALL, data)
    first.step(1)
    first.learner.save(tmp_path / "first", {"settings": SMALL.plain()})
    second = FewShotTraining(replace(SMALL, initial=str(tmp_path / "first"), seed=1), data)
    assert same(second.learner.lam, first.learner.lam)
    second.step(1)
    assert not same(second.learner.lam, first.learner.lam)
    with pytest.raises(BilevelError, match="no trained model"):
        FewShotTraining(replace(SMALL, initial="nowhere"), data)
    with pytest.raises(BilevelError, match=r"network: omniglot-net there, c4l here\n  0.weight: \[64, 1, 3, 3\] there"):
        FewShotTraining(replace(SMALL, initial=str(tmp_path / "first"), network="c4l"), data)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_request_to_stop_is_met_between_groups_and_changes_nothing(data, after):
    job = FewShotTraining(replace(SMALL, meta_batch=3, batch_norm="running"), data)
    job.learner.chunk = 1
    job.step(1)
    before, asked = copied(job.state()), []

    class Stop:
        def __bool__(self):
            asked.append(None)
            return len(asked) > after

    with pytest.raises(Interrupted):
        job.step(2, Stop())
    assert len(asked) == after + 1  # no later group was waited for
    assert same(job.state(), before)
