"""Meta networks (Munkhdalai and Yu, 2017): fast weights, computed from loss gradients of the support images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.learners.base import LearnerOptions, NetworkOptions
from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means, squared_distances
from bilevel.learners.settings import setting

SLOW = "embedding.slow"


@dataclass(frozen=True, kw_only=True)
class MetaNetworksOptions(NetworkOptions):
    """The settings of `MetaNetworks`.

    Args:
        embedding: the size of the embedding u in which the attention compares images.
        hidden: the width of the networks that turn gradients into fast weights.
        sharpness: the factor on cosines before the softmax of the attention.
    """

    embedding: int = setting(32, least=1)
    hidden: int = setting(16, least=1)
    sharpness: float = setting(10.0, above=0)


class MetaNetworks(ScoringLearner):
    """logits(x) = W*(x) h(x),   W*(x) = Σ_i a_i(x) m_λ(∇_W ℓ_i),   a(x) = softmax_i of β cos(u(x), u(x_i)).

    ℓ_i is the cross-entropy of support image i under the slow weights W. The network m_λ maps each entry of its
    gradient to a fast weight. The fast weights of all support images are the memory, which a query reads by attention.
    The embedding u has slow weights Q, and fast weights Q* for the episode, in two parallel layers (layer
    augmentation):

        u(x) = relu(Q h(x)) + relu(Q* h(x)),   Q* = d_λ(∇_Q of the embedding's loss on the support set)

    In the bilevel framework Q* and W* are one step w_1 = Φ_1(w_0, λ) of a learned optimiser, where Φ_1 is d_λ or m_λ of
    the gradient of an inner objective. The hypergradient includes the derivative of that gradient.

    Simplifications: only the last layers have fast weights, and the convolutions have none. The slow W is zero, because
    classes are renumbered in every episode. So there is no layer of slow weights parallel to W*, any number of classes
    works, and ∇_W ℓ_i has a closed form. The embedding's loss is the cross-entropy of the negative squared distances to
    class means, instead of the paper's loss on pairs. Every gradient is divided by its root mean square before d_λ and
    m_λ.
    """

    strategy: ClassVar[str] = "memorisation"
    Options: ClassVar[type[LearnerOptions]] = MetaNetworksOptions

    def build(self) -> None:
        options = self.options
        slow = nn.Linear(self.features - 1, options.embedding, bias=False).weight
        self.lam[SLOW] = slow.detach().to(next(iter(self.lam.values())))
        for name in ("task_weights", "example_weights"):
            layers = [nn.Linear(1, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 1, bias=False)]
            self.add_part(name, nn.Sequential(*layers))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        fast = self._fast(lam, "task_weights", embedding_gradient(lam[SLOW], support, episode))
        keys, embedded = (augmented(lam[SLOW], fast, features) for features in (support, queries))
        cosines = F.normalize(embedded, dim=1) @ F.normalize(keys, dim=1).mT
        attention = (self.options.sharpness * cosines).softmax(1)
        memory = self._fast(lam, "example_weights", example_gradients(support, episode))
        logits = torch.einsum("qi,icf,qf->qc", attention, memory, queries)
        return logits / support.shape[1] ** 0.5

    def _fast(self, lam: Mapping[str, Tensor], name: str, gradient: Tensor) -> Tensor:
        """Fast weights with the shape of the gradient, computed by one network for all entries."""
        scaled = gradient / gradient.square().mean().add(1e-12).sqrt()
        fast: Tensor = self.part(name, lam, scaled[..., None])
        return fast[..., 0]


def augmented(slow: Tensor, fast: Tensor, features: Tensor) -> Tensor:
    """The sum of a layer with slow weights and a layer with fast weights, on the same features."""
    return (features @ slow.mT).relu() + (features @ fast.mT).relu()


def embedding_gradient(slow: Tensor, support: Tensor, episode: Episode) -> Tensor:
    """∇_Q of the mean cross-entropy of −‖relu(Q h_i) − μ_c‖², μ_c the mean of relu(Q h) over class c."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        weights = slow if slow.requires_grad else slow.detach().requires_grad_()
        embedded = (support @ weights.mT).relu()
        distances = squared_distances(embedded, class_means(embedded, episode.labels, episode.ways))
        loss = F.cross_entropy(-distances, episode.labels)
        return torch.autograd.grad(loss, weights, create_graph=recorded)[0]


def example_gradients(support: Tensor, episode: Episode) -> Tensor:
    """∇_W of the cross-entropy of each support image at W = 0, images × ways × F: (1/ways − [y_i = c]) h(x_i)."""
    errors = 1 / episode.ways - F.one_hot(episode.labels, episode.ways).to(support)
    return errors[:, :, None] * support[:, None]
