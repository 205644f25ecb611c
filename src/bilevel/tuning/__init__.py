"""Tune the hyperparameters of any torch model: the roles to declare, and the result."""

from __future__ import annotations

from bilevel.tuning.gap import Gap
from bilevel.tuning.result import Tuned
from bilevel.tuning.roles.augmentation import Augmentation, gaussian_noise
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.roles.example_weight import ExampleWeight
from bilevel.tuning.roles.example_weights import ExampleWeights
from bilevel.tuning.roles.initialisation import Initialisation
from bilevel.tuning.roles.label_smoothing import LabelSmoothing
from bilevel.tuning.roles.learning_rate import LearningRate
from bilevel.tuning.roles.loss_weights import LossWeights
from bilevel.tuning.roles.momentum import Momentum
from bilevel.tuning.roles.weight_decay import WeightDecay
from bilevel.tuning.training_problem import TrainingProblem, prepare
from bilevel.tuning.transforms import Transform
from bilevel.tuning.tuner import tune

__all__ = [
    "Augmentation",
    "ExampleWeight",
    "ExampleWeights",
    "Gap",
    "Hyperparameter",
    "Initialisation",
    "LabelSmoothing",
    "LearningRate",
    "LossWeights",
    "Momentum",
    "TrainingProblem",
    "Transform",
    "Tuned",
    "WeightDecay",
    "gaussian_noise",
    "prepare",
    "tune",
]
