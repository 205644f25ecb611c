"""`bilevel train --config`: files in three formats, options that win, runs that are given back, and what is refused."""

import json

import pytest
import yaml
from safetensors.torch import load_file

from bilevel.learners.configuration import read_configuration
from bilevel.learners.settings import TrainingSettings
from training.processes import TINY, here

SMALL = {
    "preset": "glyphs-5way-1shot",
    "ways": 3,
    "queries": 2,
    "meta_batch": 2,
    "steps": 2,
    "iterations": 3,
    "validation_episodes": 2,
    "checkpoint_every": 4,
    "seed": 5,
}


def config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def train(*words):
    done = here("train", *words)
    assert done.exit_code == 0, done.output
    return done


def same(one, other):
    a, b = (load_file(folder / "last.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def as_toml(values):
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


@pytest.fixture(scope="module")
def by_options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options") / "run"
    words = [*TINY, "--iterations", 3, "--seed", 5, "--out", folder]
    train("glyphs-5way-1shot", *words)
    return folder


def test_a_file_is_the_training_of_the_same_options(by_options, tmp_path):
    (tmp_path / "mine.toml").write_text(as_toml(SMALL))
    train("--config", tmp_path / "mine.toml", "--out", tmp_path / "run", "--threads", 1)
    assert config(tmp_path / "run")["settings"] == config(by_options)["settings"]
    assert config(tmp_path / "run")["preset"] == "glyphs-5way-1shot"
    assert same(by_options, tmp_path / "run")


def test_the_configuration_of_a_run_gives_the_same_run(by_options, tmp_path):
    train("--config", by_options / "config.json", "--out", tmp_path / "again")
    before, after = config(by_options), config(tmp_path / "again")
    assert after["settings"] == before["settings"] and after["threads"] == before["threads"]
    assert same(by_options, tmp_path / "again")
    # Its settings alone, written by hand as YAML, too.
    (tmp_path / "by_hand.yaml").write_text(yaml.safe_dump(before["settings"]))
    train("--config", tmp_path / "by_hand.yaml", "--out", tmp_path / "yaml", "--threads", 1)
    assert same(by_options, tmp_path / "yaml")


def test_options_win_over_the_file_and_the_rest_stays(by_options, tmp_path):
    words = ["--iterations", 1, "--lr", 0.5, "--out", tmp_path / "run"]
    train("--config", by_options / "config.json", *words)
    expected = {**config(by_options)["settings"], "iterations": 1, "lr": 0.5}
    assert config(tmp_path / "run")["settings"] == expected


def test_a_learner_has_settings_of_its_own(tmp_path):
    shared = {key: value for key, value in SMALL.items() if key != "steps"}
    text = as_toml({**shared, "learner": "ridge-head", "iterations": 1}) + "\n[options]\npenalty = 0.25\nscale = 4.0\n"
    (tmp_path / "ridge.toml").write_text(text)
    train("--config", tmp_path / "ridge.toml", "--set", "scale=2", "--out", tmp_path / "run", "--threads", 1)
    found = config(tmp_path / "run")["settings"]
    assert found["learner"] == "ridge-head" and found["options"] == {"penalty": 0.25, "scale": 2.0}


def test_a_file_with_stages_is_a_recipe_and_can_be_given_back(tmp_path):
    common = {key: value for key, value in SMALL.items() if key != "preset"} | {"dataset": "glyphs", "iterations": 1}
    stages = [{"name": "first"}, {"name": "second", "lr": 0.01}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**common, "stage": stages}))
    train("--config", tmp_path / "two.yaml", "--out", tmp_path / "staged", "--threads", 1)
    train("--config", tmp_path / "staged" / "recipe.json", "--out", tmp_path / "again", "--threads", 1)
    assert same(tmp_path / "staged" / "2-second", tmp_path / "again" / "2-second")


def test_values_have_the_types_of_the_settings_and_paths_are_the_file_s(tmp_path):
    (tmp_path / "pictures").mkdir()
    text = (
        "lr: 1e-3\nsplit: [0.6, 0.2, 0.2]\naugment: [flip, crop]\ndataset: pictures\ninitial: zoo:omniglot-5way-1shot\n"
    )
    (tmp_path / "a.yml").write_text(text)
    found = read_configuration(tmp_path / "a.yml").settings
    assert found["lr"] == 0.001 and found["split"] == "0.6,0.2,0.2" and found["augment"] == "flip,crop"
    assert found["dataset"] == str((tmp_path / "pictures").resolve()) and found["initial"].startswith("zoo:")
    assert TrainingSettings(**found).fractions() == (0.6, 0.2, 0.2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.toml",
            "wyas = 5",
            "there is no setting wyas. Did you mean ways? The settings are preset, learner, dataset",
        ),
        ("a.toml", "ways = ", "is not a TOML file"),
        ("a.yaml", "ways: [", "is not a YAML file"),
        ("a.yaml", "- 1", "must hold settings by name"),
        ("a.yaml", "!!python/object/apply:os.system [exit]", "is not a YAML file"),
        ("a.json", "[" * 100_000, "a.json"),
        ("a.json", '{"ways": "five"}', "is not a number"),
        ("a.toml", 'ways = 5.5\ndataset = "glyphs"', "ways=5.5 is not a whole number"),
        ("a.toml", 'preset = "nothing"', "There is no preset 'nothing'"),
        ("a.toml", "preset = 3", "is not the name of a preset"),
        ("a.toml", 'learner = "nothing"', "There is no learner 'nothing'"),
        ("a.toml", 'dataset = "glyphs"\n[options]\nnothing = 1', "has no setting nothing"),
        ("a.txt", "ways = 5", "must have a name that ends in"),
        ("a.toml", b"\xff\xfe", "is not a TOML file"),
        ("a.toml", b"#" * 1_000_001, "bytes"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = here("train", "--config", file, "--out", tmp_path / "run")
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and message in done.stderr, done.output
    assert not (tmp_path / "run").exists()


def test_a_file_and_a_preset_or_no_file_at_all(tmp_path):
    (tmp_path / "a.toml").write_text("ways = 5")
    done = here("train", "glyphs-5way-1shot", "--config", tmp_path / "a.toml")
    assert done.exit_code == 2 and "leave glyphs-5way-1shot out" in done.stderr
    done = here("train", "--config", tmp_path / "missing.toml")
    assert done.exit_code == 2 and "No such file" in done.stderr
    done = here("train", "--config", tmp_path / ".toml")
    assert done.exit_code == 2
