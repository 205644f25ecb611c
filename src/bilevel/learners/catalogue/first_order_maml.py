"""First-order MAML: the derivative of the inner steps is taken for the identity."""

from __future__ import annotations

from typing import ClassVar

from bilevel.engine.method import Method
from bilevel.learners.catalogue.maml import MAML
from bilevel.methods.first_order import FirstOrder


class FirstOrderMAML(MAML):
    """`MAML` with another default method."""

    default_method: ClassVar[Method] = FirstOrder()
