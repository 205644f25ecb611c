"""Metric and memorisation learners: what each computes, against its mathematics. The battery has the differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from bilevel import learners
from bilevel.errors import BilevelError
from bilevel.learners.catalogue.matching import Matching
from bilevel.learners.catalogue.memory_module import KeyMemory, MemoryModule
from bilevel.learners.catalogue.meta_networks import MetaNetworks, embedding_gradient, example_gradients
from bilevel.learners.catalogue.neural_statistician import NeuralStatistician, seed_of, sets_of
from bilevel.learners.catalogue.relation import Relation
from bilevel.learners.catalogue.siamese import BIAS, WEIGHT, Siamese
from bilevel.learners.catalogue.snail import SNAIL, CausalNetwork
from bilevel.learners.presets import for_learner, preset
from bilevel.learners.scoring_learner import Episode
from bilevel.testing import check_learner
from bilevel.testing.learners import episodes, small


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)


def one_episode(ways=3, shots=2, queries=4, seed=1):
    batch = episodes(1, ways, shots, queries, seed)
    (support, labels), (asked, answers) = batch.train, batch.val
    return Episode(support[0], labels[0], asked[0], ways), answers[0]


@pytest.mark.parametrize(
    "learner",
    [
        lambda: small(Matching, context=True, reads=2),
        lambda: small(MemoryModule, slots=4),
        lambda: small(SNAIL, ways=3, shots=2),
        lambda: small(NeuralStatistician, batch_norm="running"),
    ],
)
def test_other_options_pass_the_battery(learner):
    check_learner(learner())


# ------------------------------------------------------------------------------------------------ metric


def test_sharp_matching_with_one_image_per_class_is_the_nearest_neighbour():
    learner = small(Matching, sharpness=1e4)
    episode, _ = one_episode(ways=5, shots=1)
    known, asked = learner.represent(learner.lam, episode)
    nearest = F.cosine_similarity(asked[:, None], known[None], dim=2).argmax(1)
    chances = learner.scores(learner.lam, episode).softmax(1)
    assert torch.equal(chances.argmax(1), episode.labels[nearest])
    assert chances.amax(1).min() > 0.99


def test_matching_sums_the_attention_of_a_class():
    learner = small(Matching, sharpness=2.0)
    episode, _ = one_episode()
    known, asked = learner.represent(learner.lam, episode)
    attention = (2.0 * F.cosine_similarity(asked[:, None], known[None], dim=2)).softmax(1)
    expected = torch.stack([attention[:, episode.labels == c].sum(1) for c in range(3)], 1)
    assert torch.allclose(learner.scores(learner.lam, episode).softmax(1), expected)


def test_context_makes_support_features_depend_on_each_other():
    episode, _ = one_episode()
    other = Episode(torch.cat([episode.support[:-1], episode.support[:1]]), episode.labels, episode.queries, 3)
    for context in (False, True):
        learner = small(Matching, context=context, batch_norm="running")
        found = []
        for one in (episode, other):
            known, asked = learner.represent(learner.lam, one)
            if context:
                known, asked = learner._in_context(learner.lam, known, asked)
            found.append((known[0], asked[0]))
        for first, second in zip(*found, strict=True):
            assert torch.equal(first, second) != context


def test_siamese_with_equal_weights_is_the_l1_nearest_neighbour():
    learner = small(Siamese)
    learner.lam[WEIGHT] = torch.full_like(learner.lam[WEIGHT], -0.3)
    episode, _ = one_episode(ways=5, shots=1)
    known, asked = learner.represent(learner.lam, episode)
    distances = torch.cdist(asked, known, p=1)
    scores = learner.scores(learner.lam, episode)
    assert torch.equal(scores.argmax(1), episode.labels[distances.argmin(1)])
    assert torch.allclose(scores, learner.lam[BIAS] - 0.3 * distances)


def test_siamese_loss_gives_same_and_different_pairs_half_each():
    learner = small(Siamese)
    episode, answers = one_episode()
    logits = learner.pair_logits(learner.lam, episode)
    same = answers[:, None] == episode.labels[None]
    expected = (-F.logsigmoid(logits[same]).mean() - F.logsigmoid(-logits[~same]).mean()) / 2
    assert torch.allclose(learner.episode_loss(learner.lam, episode, answers), expected)


def test_relation_on_a_network_set_by_hand():
    """The first layer adds up the class's sum and, apart, the query; the others subtract one from the other."""
    learner = small(Relation, hidden=2)
    size = learner.features - 1
    ones, zeros = torch.ones(size), torch.zeros(size)
    learner.lam["comparison.0.weight"] = torch.stack([torch.cat([ones, zeros]), torch.cat([zeros, ones])])
    learner.lam["comparison.0.bias"] = torch.full((2,), 100.0)  # so that the ReLUs do nothing
    learner.lam["comparison.2.weight"], learner.lam["comparison.2.bias"] = torch.eye(2), torch.zeros(2)
    learner.lam["comparison.4.weight"], learner.lam["comparison.4.bias"] = torch.tensor([[1.0, -1.0]]), torch.zeros(1)
    episode, answers = one_episode()
    known, asked = learner.represent(learner.lam, episode)
    sums = torch.stack([known[episode.labels == c].sum() for c in range(3)])
    expected = sums[None] - asked.sum(1)[:, None]
    assert torch.allclose(learner.scores(learner.lam, episode), expected)
    errors = (expected.sigmoid() - F.one_hot(answers, 3)).square().mean()
    assert torch.allclose(learner.episode_loss(learner.lam, episode, answers), errors)


# ------------------------------------------------------------------------------------------------ memory module


def test_the_update_rule_of_the_memory_step_by_step():
    def unit(*numbers):
        return F.normalize(torch.tensor(numbers), dim=0)

    def state(memory):
        return memory.values.tolist(), memory.ages.tolist()

    a, b = torch.tensor(0), torch.tensor(1)
    memory = KeyMemory.empty(torch.zeros(1, 2))
    memory = memory.write(unit(1.0, 0.0), a, slots=2)  # empty: a new slot
    assert state(memory) == ([0], [0])
    memory = memory.write(unit(1.0, 1.0), b, slots=2)  # the nearest key says a: a new slot
    assert state(memory) == ([0, 1], [1, 0])
    memory = memory.write(unit(0.0, 1.0), b, slots=2)  # right: the key moves between both
    assert state(memory) == ([0, 1], [2, 0])
    assert torch.allclose(memory.keys, torch.stack([unit(1.0, 0.0), unit(2**-0.5, 2**-0.5 + 1)]))
    memory = memory.write(unit(0.1, 1.0), a, slots=2)  # wrong, and the memory is full: the oldest slot goes
    assert state(memory) == ([0, 1], [0, 1])
    assert torch.allclose(memory.keys[0], unit(0.1, 1.0))
    best = memory.best(unit(0.1, 1.0)[None], 3)[0]
    assert torch.allclose(best, torch.tensor([1.0, memory.keys[1] @ unit(0.1, 1.0), -1.0]))


def test_the_margin_loss_compares_the_nearest_right_and_wrong_keys():
    learner = small(MemoryModule, margin=0.7)
    episode, answers = one_episode(shots=1)
    known, asked = learner.represent(learner.lam, episode)
    cosines = F.cosine_similarity(asked[:, None], known[None], dim=2)
    losses = []
    for row, answer in zip(cosines.tolist(), answers.tolist(), strict=True):
        wrong = max(value for c, value in enumerate(row) if c != answer)
        losses.append(max(0.0, 0.7 + wrong - row[answer]))
    assert any(losses)
    found = learner.episode_loss(learner.lam, episode, answers)
    assert math.isclose(float(found), sum(losses) / len(losses), rel_tol=1e-12)


def test_a_memory_refuses_more_classes_than_it_has_slots():
    with pytest.raises(BilevelError, match="slots=4 cannot hold 5 classes; set slots=5"):
        small(MemoryModule, slots=4).check_episode(5, 1)


# ------------------------------------------------------------------------------------------------ snail


def test_the_causal_network_does_not_look_ahead_and_a_query_sees_all():
    torch.manual_seed(0)
    network = CausalNetwork(features=4, ways=3, shots=2, filters=5)
    pairs, queries = torch.randn(6, 7), torch.randn(2, 7)
    outputs, answers = network((pairs, queries))
    for t in range(6):
        moved = pairs.clone()
        moved[t] += 1
        later, others = network((moved, queries))
        changed = (later - outputs).abs().amax(1) > 1e-12
        assert changed.tolist() == [place >= t for place in range(6)]
        assert bool(((others - answers).abs().amax(1) > 1e-12).all())


def test_a_query_is_the_last_element_of_the_sequence():
    torch.manual_seed(0)
    network = CausalNetwork(features=4, ways=3, shots=2, filters=5)
    pairs, queries = torch.randn(6, 7), torch.randn(2, 7)
    _, answers = network((pairs, queries))
    for query, answer in zip(queries, answers, strict=True):
        whole, _ = network((torch.cat([pairs, query[None]]), queries))
        assert torch.allclose(whole[-1], answer)


def test_snail_takes_its_classes_from_the_training_and_refuses_more():
    for changes, ways in (({}, 5), ({"train_ways": 8}, 8)):
        settings = for_learner(preset("glyphs-5way-1shot"), "snail")
        settings = type(settings)(**{**settings.plain(), **changes})
        options = SNAIL.options_of(settings)
        assert options["ways"] == ways
        learner = small(SNAIL, ways=options["ways"])
        learner.check_episode(ways, 10)
        with pytest.raises(BilevelError, match=f"built for {ways} classes and cannot classify {ways + 1}"):
            learner.check_episode(ways + 1, 1)


# ------------------------------------------------------------------------------------------------ meta networks


def test_fast_weights_come_from_the_gradients_of_the_support_losses():
    episode, _ = one_episode()
    known = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(3, 7, requires_grad=True)
    for i, found in enumerate(example_gradients(known, episode)):
        loss = F.cross_entropy(known[i : i + 1] @ weights.mT, episode.labels[i : i + 1])
        assert torch.allclose(found, torch.autograd.grad(loss, weights)[0])
    slow = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        without_graph = embedding_gradient(slow, known, episode)
    found = embedding_gradient(slow.requires_grad_(), known, episode)
    assert torch.equal(found.detach(), without_graph)
    assert found.requires_grad and not without_graph.requires_grad


def test_linear_fast_weights_are_attention_over_inner_products():
    """With m(g) = −g the logits are Σ a_i ([y_i = c] − 1/ways) h(x_i)ᵀh(x), up to a scale."""
    learner = small(MetaNetworks, hidden=1)
    tiny = 1e-6  # where tanh is linear
    learner.lam["example_weights.0.weight"] = torch.full((1, 1), tiny)
    learner.lam["example_weights.0.bias"] = torch.zeros(1)
    learner.lam["example_weights.2.weight"] = torch.full((1, 1), -1 / tiny)
    episode, _ = one_episode(shots=1)
    # An attention of equal weights.
    learner.options = type(learner.options)(sharpness=1e-12)
    known, asked = learner.represent(learner.lam, episode)
    products = asked @ known.mT
    expected = products - products.mean(1, keepdim=True)
    found = learner.scores(learner.lam, episode)
    assert torch.allclose(F.normalize(found, dim=1), F.normalize(expected, dim=1), atol=1e-6)


# ------------------------------------------------------------------------------------------------ neural statistician


def test_the_scores_of_the_statistician_are_divergences_of_contexts():
    learner = small(NeuralStatistician, context=4)
    episode, _ = one_episode()
    known, asked = learner.represent(learner.lam, episode)
    scores = learner.scores(learner.lam, episode)

    def full(features):
        base = learner.contexts(learner.lam, features[None])
        return MultivariateNormal(base.loc[0], scale_tril=torch.diag(base.scale[0]))

    for c in range(3):
        mean = known[episode.labels == c].mean(0)
        for x in range(len(asked)):
            assert torch.allclose(scores[x, c], -kl_divergence(full(mean), full(asked[x])))


def test_the_bound_of_the_statistician_is_below_the_evidence():
    """With decoder and latent posterior that ignore their inputs, the evidence is known: one normal per pixel."""
    learner = small(NeuralStatistician)
    for name in learner.lam:
        if name.startswith(("decoder.4", "latent_posterior.4", "latent_prior.4", "statistic.4")):
            learner.lam[name] = torch.zeros_like(learner.lam[name])
    episode, answers = one_episode()
    images = torch.cat([episode.support, episode.queries])
    evidence = torch.distributions.Normal(0.0, 0.3).log_prob(images).mean()
    loss = learner.episode_loss(learner.lam, episode, answers)
    # q(z | x, c) = p(z | c) here. What is missing is KL(q(c | D) ‖ p(c)) of each set, with one scale for all.
    scale = math.log(2) + 1e-3
    sets = int(sets_of(torch.cat([episode.labels, answers]), 5).max()) + 1
    gap = sets * learner.options.context * (-math.log(scale) + (scale**2 - 1) / 2)
    assert gap > 0
    assert math.isclose(float(loss), float(-evidence) + gap / images.numel(), rel_tol=1e-9)


def test_the_noise_is_a_function_of_the_pixels():
    images = torch.rand(4, 9)
    assert seed_of(images) == seed_of(images.flip(0)) != seed_of(images + 0.1)


def test_sets_hold_images_of_one_class_and_no_more_than_asked():
    labels = torch.tensor([0] * 16 + [1] * 3)
    sets = sets_of(labels, 5)
    assert torch.bincount(sets).tolist() == [4, 4, 4, 4, 3]
    assert all(len(labels[sets == number].unique()) == 1 for number in range(5))


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("matching", {"sharpness": 0.0}, "sharpness=0.0 must be above 0"),
        ("matching", {"context": 1}, "context=1 is not true or false"),
        ("relation", {"hidden": 0}, "hidden=0 must be at least 1"),
        ("memory-module", {"slots": 1}, "slots=1 must be at least 2"),
        ("memory-module", {"margin": 0.0}, "margin=0.0 must be above 0"),
        ("snail", {"ways": 1}, "ways=1 must be at least 2"),
        ("meta-networks", {"hidden": 0}, "hidden=0 must be at least 1"),
        ("neural-statistician", {"set_size": 0}, "set_size=0 must be at least 1"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    kind = learners.get(name)
    with pytest.raises(BilevelError, match=message):
        kind(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (1, 2, 2), **options)
