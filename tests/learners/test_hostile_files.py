"""Files that somebody damaged or forged, and calls that cannot work: each is refused with a sentence."""

import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from test_meta_training import SMALL

from bilevel import BilevelError, DivergenceError, HyperRepresentation, distributed
from bilevel.data.files import read_file
from bilevel.files import read_json
from bilevel.learners import library
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.training import FewShotTraining
from bilevel.training.files import read_tensors, write_tensors
from small_learner import episodes, learner


@pytest.fixture
def saved(tmp_path):
    """The stem of a saved learner."""
    torch.set_default_dtype(torch.float32)
    HyperRepresentation("omniglot-net", (1, 28, 28), steps=2).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x * torch.nan, "not finite"),
        (lambda x: x + torch.inf, "not finite"),
        (lambda x: x.to(torch.int8), "are torch.int8"),
        (lambda x: x > 0, "are torch.bool"),
    ],
)
def test_weights_that_are_no_finite_numbers(saved, damage, message):
    file = saved.with_suffix(".safetensors")
    weights = read_tensors(file)[0]
    name = sorted(weights)[-1]
    save_file({**weights, name: damage(weights[name])}, file)
    for load in (lambda: HyperRepresentation.load(saved), lambda: library.find(str(saved))):
        with pytest.raises(BilevelError, match=f"{name} are") as refused:
            load()
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1, -28, 28]}, "must be (channels, height, width)"),
        ({"shape": [1, 28.5, 28]}, "must be (channels, height, width)"),
        ({"shape": [1, 10**6, 10**6]}, "must be (channels, height, width)"),
        ({"shape": 5}, "does not describe a learner"),
        ({"shape": None}, "does not describe a learner"),
        ({"name": ["x"]}, "There is no learner ['x']"),
        ({"steps": 10**9}, "would take too long"),
        ({"inner_lr": 1e300}, "infinite in single precision"),
        ({"inner_lr": "x"}, "is not a number"),
    ],
)
def test_cards_with_impossible_values(saved, change, message):
    file = saved.with_suffix(".json")
    card = read_json(file)
    file.write_text(json.dumps({**card, "learner": {**card["learner"], **change}}))
    with pytest.raises(BilevelError) as refused:
        library.find(str(saved))
    assert message in str(refused.value)


def test_json_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(BilevelError, match="nested too deeply"):
        read_json(tmp_path / "deep.json")


def written(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def test_headers_of_tensors_that_nobody_wrote(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = written(tmp_path / "many.safetensors", {f"x{k}": entry for k in range(100_000)})
    with pytest.raises(BilevelError, match=r"holds 100,000 tensors"):
        read_tensors(many)
    for facts in ("5", "[" * 100_000, "{"):
        odd = written(tmp_path / "odd.safetensors", {"__metadata__": {"bilevel": facts}, "x": entry})
        with pytest.raises(BilevelError, match="is damaged"):
            read_tensors(odd)


def test_errors_name_some_of_many_tensors():
    with pytest.raises(BilevelError, match="and 92 more") as refused:
        model = learner()
        model.set_weights({**model.lam, **{f"x{k}": torch.zeros(1) for k in range(100)}})
    assert len(str(refused.value)) < 200


def test_no_episodes_at_all():
    batch = episodes(2)
    empty = type(batch)(tuple(x[:0] for x in batch.train), tuple(x[:0] for x in batch.val))
    for nothing in ([], empty):
        with pytest.raises(BilevelError, match="pass at least one"):
            learner().hypergradient(nothing)


def test_a_count_of_restarts_that_is_no_number(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "x")
    with pytest.raises(BilevelError, match="TORCHELASTIC_RESTART_COUNT=x is not a whole number"):
        distributed.restarted()


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(BilevelError, match="not a regular file"):
        read_file(tmp_path / "x.png")


def test_a_step_size_without_bounds_is_called_divergence(data):
    torch.set_default_dtype(torch.float32)
    job = FewShotTraining(replace(SMALL, lr=1e10), data)
    with pytest.raises(DivergenceError, match=r"λ has grown to .*smaller lr than 1e\+10"):
        for k in range(1, 4):
            job.step(k)


def kept(path):
    """A classifier in a file, as its tensors and facts."""
    torch.set_default_dtype(torch.float32)
    made = HyperRepresentation("omniglot-net", (1, 28, 28), steps=2).adapt(torch.rand(4, 1, 28, 28), "abab")
    made.save(path)
    return read_tensors(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", -1.0, "temperature=-1 must be between"),
        ("temperature", 0.0, "temperature=0 must be between"),
        ("steps", 10**9, "steps=1,000,000,000 would take too long"),
        ("steps", 2**63, "would take too long"),
        (
            "learner",
            {"name": "hyper-representation", "shape": [1, 8, 8], "network": 0.5},
            "is not the name of a network",
        ),
    ],
)
def test_a_forged_classifier(tmp_path, key, value, message):
    tensors, facts = kept(tmp_path / "x.safetensors")
    facts["classifier"][key] = value
    write_tensors(tmp_path / "x.safetensors", tensors, facts)
    with pytest.raises(BilevelError, match=message):
        FewShotClassifier.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("label", [torch.inf, -torch.inf, torch.nan])
def test_a_classifier_with_labels_that_are_no_numbers(tmp_path, label):
    tensors, facts = kept(tmp_path / "x.safetensors")
    tensors["labels"] = tensors["labels"].float() + label
    write_tensors(tmp_path / "x.safetensors", tensors, facts)
    with pytest.raises(BilevelError, match="cannot be used"):
        FewShotClassifier.load(tmp_path / "x.safetensors")


def test_a_checkpoint_in_half_precision_would_count_wrongly(data):
    torch.set_default_dtype(torch.float32)
    job = FewShotTraining(SMALL, data)
    job.step(1)
    state = job.state()
    for name in state:
        with pytest.raises(BilevelError, match=r"torch\.bfloat16"):
            job.restore({**state, name: state[name].to(torch.bfloat16)})
    job.restore(state)
