"""The nearest class mean of raw pixels: a baseline that every trained learner should exceed."""

from __future__ import annotations

from typing import ClassVar

from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.nearest_centroid import NearestCentroid


class Pixels(NearestCentroid):
    """score(x, c) = −‖x − μ_c‖² on the images themselves; λ is empty."""

    Options: ClassVar[type[LearnerOptions]] = LearnerOptions
