"""What is noticed of the Python state that functions read."""

import functools
import math
import random

import pytest
import torch

from bilevel.methods.watch import Watch

FACTOR = 1.0


class Holder:
    factor = 1.0
    frozen = False

    def penalty(self, w, lam):
        return self.factor * (lam.exp() * w**2).sum()


class TestWatch:
    def test_nested_functions_defaults_and_libraries(self):
        factor = 2.0

        def helper(x):
            return factor * torch.nn.functional.relu(x) + math.pi

        def function(x, power=2, *, shift=None):
            return [helper(y) ** power for y in x]

        watch = Watch(function)
        assert not watch.complete, "keyword-only defaults are in a dict"
        function.__kwdefaults__ = None
        watch = Watch(function)
        assert watch.complete and watch.unchanged()
        function.__defaults__ = (3,)
        assert not watch.unchanged()
        watch = Watch(function)
        factor = 4.0
        assert not watch.unchanged()

    @pytest.mark.parametrize("state", [[1.0], {"a": 1.0}, Holder(), Holder, torch.nn.Linear(1, 1), pytest])
    def test_what_can_change_without_notice_is_not_vouched_for(self, state):
        assert not Watch(lambda x: state and x).complete

    def test_what_is_imported_within(self):
        def function(x):
            from torch import exp

            return exp(x)

        assert not Watch(function).complete

    def test_a_function_with_attributes(self):
        def function(x):
            return function.scale * x

        function.scale = 1.0
        watch = Watch(function)
        assert not watch.complete and watch.unchanged()
        function.scale = 2.0
        assert not watch.unchanged()

    def test_methods_of_objects_that_hold_state(self):
        get, draw, net = {"s": 1.0}.get, random.random, torch.vmap(torch.nn.Linear(1, 1))
        assert not Watch(lambda x: get("s") * x).complete
        assert not Watch(lambda x: draw() * x).complete
        assert not Watch(lambda x: net(x)).complete

    def test_a_wrapper_that_bears_a_library_s_name(self):
        factor = 1.0

        @functools.wraps(torch.nn.functional.mse_loss)
        def function(*args):
            return factor * torch.nn.functional.mse_loss(*args)

        watch = Watch(lambda x: function(x, x))
        assert not watch.complete and watch.unchanged()
        factor = 2.0
        assert not watch.unchanged()

    def test_names_that_are_looked_up_while_it_runs(self):
        for function in (
            lambda x: globals()["FACTOR"] * x,
            lambda x: eval("FACTOR") * x,
            lambda x: getattr(x, "s"),  # noqa: B009
            lambda x: vars(x)["s"],
        ):
            assert not Watch(function).complete

    def test_imports_and_classes_in_a_function_within(self):
        def importing(x):
            def inside():
                from torch import exp

                return exp(x)

            return inside()

        def defining(x):
            class Inside:
                factor = FACTOR

            return Inside.factor * x

        assert not Watch(importing).complete and not Watch(defining).complete

    def test_tensors(self):
        tensor = torch.zeros(4)
        watch = Watch(lambda x: tensor * x)
        tensor.fill_(1.0)
        assert watch.complete and watch.unchanged()
        tensor.data = torch.zeros(4, dtype=torch.float32)
        assert not watch.unchanged()
        assert not Watch(lambda x: tensor.tolist()[0] * x).complete
        tensor.s = 3.0
        assert not Watch(lambda x: tensor.s * x).complete

    def test_numbers_in_an_object(self):
        """Nobody can tell whether they are all that is read, but those that are named are watched."""
        holder = Holder()
        watch = Watch(holder.penalty)
        holder.unrelated = 1
        assert not watch.complete and watch.unchanged()
        holder.factor = 2.0
        assert not watch.unchanged()

    def test_what_is_no_change(self, monkeypatch):
        """A global that bears the name of an attribute, and a number that is rebound to an equal one."""
        number = 2.5
        watch = Watch(lambda x: number * x.mean())
        monkeypatch.setitem(globals(), "mean", 3)
        number = float("2.5")
        assert watch.complete and watch.unchanged()
        number = -number
        assert not watch.unchanged()

    def test_a_builtin_that_is_hidden_later(self, monkeypatch):
        watch = Watch(lambda x: abs(x))
        assert watch.complete and watch.unchanged()
        monkeypatch.setitem(globals(), "abs", math.sqrt)
        assert not watch.unchanged()
