"""The neural statistician (Edwards and Storkey, 2017): a variational context for the set of images of a class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bilevel.learners.base import LearnerOptions, NetworkOptions
from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means
from bilevel.learners.settings import setting

NOISE = "pixel_noise.log_scale"


@dataclass(frozen=True, kw_only=True)
class NeuralStatisticianOptions(NetworkOptions):
    """The settings of `NeuralStatistician`.

    Args:
        context: the size of the context c of a set.
        latent: the size of the latent variable z of an image.
        hidden: the width of the dense networks.
        set_size: the largest number of images in a set in training.
    """

    context: int = setting(64, least=1)
    latent: int = setting(16, least=1)
    hidden: int = setting(256, least=1)
    set_size: int = setting(5, least=1)


class NeuralStatistician(ScoringLearner):
    """score(x, k) = −KL(q(c | D_k) ‖ q(c | x)) with the support images D_k of class k, and q(c | D) the context of D.

    The statistic network q(c | D) is a normal distribution whose mean and scale are functions of the mean of h_λ over
    D. The training objective is minus the evidence lower bound of sets D of images of one class, divided by the number
    of pixels of the images,

        E_q(c|D) Σ_x { E_q(z|x,c) log p(x | z, c) − KL(q(z | x, c) ‖ p(z | c)) } − KL(q(c | D) ‖ N(0, 1))

    The labels are only used to form the sets.

    In the bilevel framework the inner problem would be the search for the best approximate posterior of a set.
    Amortised inference q(c | D) replaces it, so there is no inner loop. λ holds both q and the generative model.

    Choices: the images of a class in an episode, support and queries, are divided into sets of at most `set_size`.
    There is one layer of latent variables z. p(x | z, c) is normal with one learned scale, because images need not be
    binary, and its mean is a dense network. The seed of the samples is a function of the pixels of the episode, so the
    objective is a function of λ and the episode. Scores need no samples.
    """

    strategy: ClassVar[str] = "memorisation"
    Options: ClassVar[type[LearnerOptions]] = NeuralStatisticianOptions

    def build(self) -> None:
        options, features = self.options, self.features - 1
        self.lam[NOISE] = next(iter(self.lam.values())).new_full((), math.log(0.3))
        self.add_part("statistic", _dense(features, options.hidden, 2 * options.context))
        self.add_part("latent_posterior", _dense(features + options.context, options.hidden, 2 * options.latent))
        self.add_part("latent_prior", _dense(options.context, options.hidden, 2 * options.latent))
        self.add_part("decoder", _dense(options.context + options.latent, options.hidden, math.prod(self.shape)))

    def contexts(self, lam: Mapping[str, Tensor], pooled: Tensor) -> Normal:
        """q(c | D) of every set, from the mean features of the set."""
        return _normal(self.part("statistic", lam, pooled))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        of_classes = self.contexts(lam, class_means(support, episode.labels, episode.ways))
        of_queries = self.contexts(lam, queries[:, None])
        return -kl_divergence(of_classes, of_queries).sum(-1)

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        features = torch.cat(self.represent(lam, episode))
        images = torch.cat([episode.support, episode.queries]).flatten(1).to(features)
        sets = sets_of(torch.cat([episode.labels, answers]), self.options.set_size)
        generator = torch.Generator().manual_seed(seed_of(images))
        posterior = self.contexts(lam, class_means(features, sets, int(sets.max()) + 1))
        context = _sample(posterior, generator)[sets]
        latent_posterior = _normal(self.part("latent_posterior", lam, torch.cat([features, context], 1)))
        latent_prior = _normal(self.part("latent_prior", lam, context))
        latent = _sample(latent_posterior, generator)
        means = self.part("decoder", lam, torch.cat([context, latent], 1))
        likelihood = Normal(means, lam[NOISE].exp()).log_prob(images)  # type: ignore[no-untyped-call]
        prior = Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
        divergences = kl_divergence(latent_posterior, latent_prior).sum() + kl_divergence(posterior, prior).sum()
        loss: Tensor = (divergences - likelihood.sum()) / images.numel()
        return loss


def sets_of(labels: Tensor, size: int) -> Tensor:
    """The number of the set of every image. A set has at most `size` images of one class; sets have similar sizes.

    >>> sets_of(torch.tensor([0, 1, 0, 0, 1]), 2)
    tensor([0, 2, 1, 0, 2])
    """
    sets, first = torch.empty_like(labels), 0
    for label in sorted(set(labels.tolist())):
        members = torch.nonzero(labels == label)[:, 0]
        count = math.ceil(len(members) / size)
        sets[members] = first + torch.arange(len(members), device=labels.device) % count
        first += count
    return sets


def seed_of(images: Tensor) -> int:
    """A seed that depends on every pixel, and not on the order of the images."""
    return int(images.detach().float().contiguous().view(torch.int32).sum(dtype=torch.int64)) % 2**62


def _dense(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, outputs)
    )


def _normal(parameters: Tensor) -> Normal:
    """Independent normal distributions: the first half are means, and the softplus of the second half are scales."""
    mean, scale = parameters.chunk(2, dim=-1)
    return Normal(mean, F.softplus(scale) + 1e-3)


def _sample(normal: Normal, generator: torch.Generator) -> Tensor:
    """A reparametrised sample, with noise from a generator on the CPU."""
    noise = torch.randn(normal.loc.shape, generator=generator, dtype=torch.float64)
    return normal.loc + normal.scale * noise.to(normal.loc)
