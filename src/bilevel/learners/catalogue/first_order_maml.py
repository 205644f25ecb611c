"""First-order MAML (Finn, Abbeel and Levine, 2017): the derivative of w_T in λ is replaced by the identity."""

from __future__ import annotations

from typing import ClassVar

from bilevel.engine.method import Method
from bilevel.learners.catalogue.maml import MAML
from bilevel.methods.first_order import FirstOrder


class FirstOrderMAML(MAML):
    """`MAML` with the method `FirstOrder` by default."""

    default_method: ClassVar[Method] = FirstOrder()
