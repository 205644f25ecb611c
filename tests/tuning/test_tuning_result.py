"""The result of `tune`: its table, its figure and its files."""

import json
import pickle

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from tuning_examples import classes, loader, network

import bilevel as bl
from bilevel.errors import BilevelError
from bilevel.training.files import read_tensors
from bilevel.tuning import Augmentation, ExampleWeights, LearningRate, LossWeights, Momentum, WeightDecay

VAL = classes(30, seed=1)


def shifted(x, strength, generator):
    return strength[0] * x + strength[1]


@pytest.fixture(scope="module")
def found():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    declared = [
        LearningRate(0.2, per="step"),
        Momentum(0.5),
        WeightDecay(1e-3, per="layer"),
        WeightDecay(0.5, per="weight", name="decay", range=(0.45, 0.55), transform=None),
        ExampleWeights(),
    ]
    return bl.tune(network(), F.cross_entropy, declared, loader(), VAL, steps=6, iterations=12, outer_lr=0.5)


def test_values_have_the_shape_people_expect(found):
    values = found.values
    assert values["lr"].shape == (6,) and isinstance(values["momentum"], float)
    assert set(values["weight_decay"]) == {"0", "2"} and isinstance(values["weight_decay"]["0"], float)
    assert values["decay"]["0.weight"].shape == (4, 3)
    assert values["example_weights"].shape == (24,)
    assert found.before["momentum"] == pytest.approx(0.5) and (found.before["lr"] == pytest.approx(0.2))


def test_the_history_follows_every_hyperiteration(found):
    # The loss was still decreasing, so the λ after the last update is the best.
    assert len(found.history["value"]) == 12 and found.value < found.history["value"].min()
    assert found.history["values"]["lr"].shape == (12, 6) and found.history["values"]["momentum"].shape == (12,)
    momentum = found.history["values"]["momentum"]
    assert momentum[0] == found.before["momentum"] and momentum[-1] != found.values["momentum"]


def test_the_table_says_start_tuned_range_and_bounds(found):
    lines = found.table().splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert cells["hyperparameter"] == ["values", "start", "tuned", "range", "at a bound"]
    assert cells["momentum"] == ["1", "0.5", f"{found.values['momentum']:.3g}", "0 … 0.999", "no"]
    assert cells["· 2"][2] == f"{found.values['weight_decay']['2']:.3g}"
    stuck = sum(int(((x <= 0.45) | (x >= 0.55)).sum()) for x in found.values["decay"].values())
    assert stuck > 0 and cells["decay"][-1] == f"{stuck} of 31"
    assert len({len(line) for line in lines}) == 1
    assert found.table() in str(found) and f"{found.value:.6g} after" in str(found) and "Unrolled" in str(found)


def test_pictures_are_lines_bars_and_histograms(found):
    figure = found.plot()
    panels = {panel.get_title(loc="left"): panel for panel in figure.axes if panel.get_title(loc="left")}
    assert set(panels) == {"validation loss", *found.values}
    np.testing.assert_allclose(panels["validation loss"].lines[0].get_ydata(), found.history["value"])
    np.testing.assert_allclose(panels["lr"].lines[1].get_ydata(), found.values["lr"])
    heights = [bar.get_height() for bar in panels["weight_decay"].patches]
    np.testing.assert_allclose(heights, list(found.values["weight_decay"].values()))
    assert sum(bar.get_height() for bar in panels["example_weights"].patches) == 24
    mine = plt.figure()
    assert found.plot(mine) is mine and mine.axes
    plt.close(mine)


def test_losses_are_bars_with_their_names():
    two = {"log": F.cross_entropy, "square": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).mean()}
    found = bl.tune(network(), two, LossWeights(), loader(), VAL, val_loss=F.cross_entropy, steps=4, iterations=3)
    assert sum(found.values["loss_weights"].values()) == pytest.approx(1)
    assert [label.get_text() for label in found.plot().axes[1].get_xticklabels()] == ["log", "square"]


def test_a_folder_holds_everything(found, tmp_path):
    folder = found.save(tmp_path / "here" / "there")
    assert found.table() in (folder / "table.md").read_text()
    values = json.loads((folder / "values.json").read_text())
    np.testing.assert_allclose(values["lr"], found.values["lr"])
    assert values["weight_decay"] == found.values["weight_decay"]
    tensors, _ = read_tensors(folder / "values.safetensors")
    np.testing.assert_array_equal(tensors["decay/2.bias"].numpy(), found.values["decay"]["2.bias"])
    np.testing.assert_array_equal(tensors["example_weights"].numpy(), found.values["example_weights"])
    assert float(tensors["momentum"]) == pytest.approx(found.values["momentum"])
    model = network()
    model.load_state_dict(read_tensors(folder / "model.safetensors")[0])
    assert torch.equal(model(VAL[0]), found.model(VAL[0]))
    assert (folder / "tuning.png").read_bytes()[:4] == b"\x89PNG"


def test_a_folder_that_cannot_be_made_is_said(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BilevelError, match="could not be written"):
        found.save(tmp_path / "file" / "inside")


def test_a_result_travels_to_another_process(found):
    again = pickle.loads(pickle.dumps(found))
    assert again.table() == found.table() and torch.equal(again.model(VAL[0]), found.model(VAL[0]))
    assert "Ran all 12" in repr(found) and "tensor" not in repr(found)


def test_a_result_without_hyperiterations_can_be_read_and_drawn(tmp_path):
    declared = [Momentum(0.5), LearningRate(0.2, per="step"), Augmentation([0.1, 0.2], function=shifted)]
    found = bl.tune(network(), F.cross_entropy, declared, loader(), VAL, steps=3, iterations=0)
    assert found.value == found.start_value and "0.5" in found.table()
    assert (found.save(tmp_path) / "tuning.png").exists()
    assert [bar.get_height() for bar in found.plot().axes[3].patches] == pytest.approx([0.1, 0.2])


def test_patience_ends_a_tuning_that_no_longer_improves():
    found = bl.tune(
        network(), F.cross_entropy, LearningRate(0.3), loader(), VAL, steps=5, iterations=60, outer_lr=1.0, patience=3
    )
    assert found.outcome.kind == "stopped early" and len(found.history["value"]) < 60
    assert found.value == found.history["value"].min() and found.plot().axes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_tuned_written_and_not_certified(dtype, tmp_path):
    model = network().to(dtype)
    declared = [LearningRate(0.1, per="step"), WeightDecay(per="weight")]
    found = bl.tune(model, F.cross_entropy, declared, loader(), VAL, steps=3, iterations=2)
    assert found.model[0].weight.dtype == dtype and found.values["lr"].shape == (3,)
    assert (found.save(tmp_path) / "values.json").is_file()
    assert not found.gap.applies and str(dtype) in str(found.gap)
