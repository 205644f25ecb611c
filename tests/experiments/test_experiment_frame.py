"""The frame that all experiments share: finding them, typed overrides, and what is left on disk."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

import pytest
import torch

from bilevel import BilevelError, Outcome, Solution, experiments
from bilevel.experiments import base, overrides, records
from bilevel.thread_pool import one_thread


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    lr: float = 0.1
    warm: bool = False
    steps: tuple[int, ...] = (10, 50)
    scales: tuple[float, ...] = (0.5,)
    limit: int | None = None
    kind: Literal["a", "b"] = "a"
    name: str = "x"


def test_every_experiment_keeps_the_contract():
    assert {"ridge", "figure-1", "figure-2"} <= set(experiments.find())
    for name, found in experiments.find().items():
        module = experiments.load(name)
        assert found.summary.endswith(".") and found.paper
        assert found.paper == module.PAPER and module.__doc__.startswith(found.summary)
        kind = base.settings_of(module)
        quick, given = overrides.apply(kind, module.QUICK, {})
        assert given == {} and all(getattr(quick, key) == value for key, value in module.QUICK.items())
        # What `bilevel list NAME` prints as a default must be what `--set` reads back.
        texts = {key: overrides.as_text(value) for key, value in asdict(kind()).items()}
        assert overrides.apply(kind, {}, texts) == (kind(), {})


def test_an_unknown_experiment_names_the_nearest_and_all():
    with pytest.raises(BilevelError, match=r"no experiment 'rigde'. Did you mean 'ridge'\?.*figure-1, figure-2"):
        experiments.load("rigde")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "7", 7),
        ("lr", "1e-3", 1e-3),
        ("lr", "2", 2.0),
        ("warm", "true", True),
        ("warm", "No", False),
        ("steps", "10,50,100", (10, 50, 100)),
        ("steps", "(5,)", (5,)),
        ("steps", "", ()),
        ("scales", "1, 2.5", (1.0, 2.5)),
        ("limit", "none", None),
        ("limit", "3", 3),
        ("kind", "b", "b"),
        ("name", "10", "10"),
    ],
)
def test_text_becomes_a_value_of_the_fields_type(key, text, value):
    found, _ = overrides.apply(Settings, {}, {key: text})
    assert getattr(found, key) == value and type(getattr(found, key)) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("seed", "1.5", "whole number"),
        ("lr", "fast", "float"),
        ("warm", "maybe", "true or false"),
        ("steps", "10,x", "whole numbers separated by commas, such as 10,50,100"),
        ("limit", "some", "whole number .*or none"),
        ("kind", "c", "one of a, b"),
    ],
)
def test_a_badly_typed_value_says_what_is_expected(key, text, expected):
    with pytest.raises(BilevelError, match=rf"--set {key}={text}: {key} is .*{expected}.*default is {key}="):
        overrides.apply(Settings, {}, {key: text})


def test_an_unknown_key_lists_the_known_ones_with_their_defaults():
    with pytest.raises(BilevelError, match=r"no setting 'step'. Did you mean 'steps'\?") as caught:
        overrides.apply(Settings, {}, {"step": "3"})
    for line in ("seed=0", "lr=0.1", "warm=false", "steps=10,50", "limit=none"):
        assert line in str(caught.value)


@pytest.mark.parametrize("option", ["seeds", "=3", " =3"])
def test_an_option_without_key_or_value_is_refused(option):
    with pytest.raises(BilevelError, match="key=value"):
        overrides.pairs([option])


def test_overrides_win_over_quick_and_only_real_changes_are_named():
    found, given = overrides.apply(
        Settings, {"lr": 0.5, "steps": (1,)}, {"lr": "0.2", "steps": "1", "seed": "4", "name": "a b"}
    )
    assert (found.lr, found.steps, found.seed) == (0.2, (1,), 4)
    assert overrides.as_options(given) == ["--set lr=0.2", "--seed 4", "--set 'name=a b'"]


def test_json_has_no_nan_and_no_tensors():
    text = json.dumps(
        records.plain({"a": torch.tensor([1.0, float("nan")]), "b": (1, True, None), "c": float("inf")}),
        allow_nan=False,
    )
    assert json.loads(text) == {"a": [1.0, "nan"], "b": [1, True, None], "c": "inf"}


def test_results_appear_only_when_all_is_written(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "result.json").write_text("old")
    with pytest.raises(RuntimeError), records.staging(tmp_path, "x") as (scratch, _publish):
        (scratch / "result.json").write_text("half")
        raise RuntimeError
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["result.json"]
    assert (tmp_path / "x" / "result.json").read_text() == "old"
    with records.staging(tmp_path, "x") as (scratch, publish):
        (scratch / "result.json").write_text("new")
        assert publish() == tmp_path / "x"
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["result.json"]
    assert (tmp_path / "x" / "result.json").read_text() == "new"


def test_a_failed_first_run_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), records.staging(tmp_path, "x"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    ridge = experiments.load("ridge")
    monkeypatch.setattr(ridge, "run", lambda *arguments: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=r"cannot be written to .*file.ridge.*--out DIR"):
        base.reproduce("ridge", out=tmp_path / "file")


def test_an_interrupted_or_diverged_loop_is_not_a_result():
    def ended(kind):
        return Solution(torch.zeros(()), None, 0.0, {}, Outcome(kind, kind))

    assert base.finished(ended("finished")).value == 0.0
    with pytest.raises(KeyboardInterrupt):
        base.finished(ended("interrupted"))
    with pytest.raises(BilevelError, match="diverged"):
        base.finished(ended("diverged"))


def test_the_number_of_threads_is_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError), one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
