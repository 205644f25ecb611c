"""`bilevel train` with a recipe: stages one after the other, resumed in the middle, refused where they do not fit."""

import json
import shutil

import command_script
import pytest
from processes import here

from bilevel import BilevelError
from bilevel.learners import library
from bilevel.learners.presets import RECIPES
from bilevel.learners.recipes import Recipe
from bilevel.learners.settings import TrainingSettings
from forking import run_ranks

COMMON = """
dataset = "glyphs"
ways = 3
queries = 2
meta_batch = 4
steps = 2
validation_episodes = 2
normalise = true
batch_norm = "running"
step_bound = 0.0
checkpoint_every = 4
"""
STAGES = """
[[stage]]
name = "all"
learner = "multiclass"
classifier = "cosine"
images = 96
iterations = 4

[[stage]]
name = "episodes"
global_loss = 0.5
classifier = "cosine"
train_ways = 5
most_shots = 2
iterations = 3
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(COMMON + STAGES)
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a training by the recipe, and what the command printed; tests write to copies."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "recipe.toml").write_text(COMMON + STAGES)
    done = here("train", "--recipe", folder / "recipe.toml", "--out", folder / "run", "--threads", "1")
    assert done.exit_code == 0, done.output
    return folder / "run", done.output


def weights(folder):
    return (folder / "last.safetensors").read_bytes()


def test_stages_run_one_after_the_other_and_leave_one_card(whole, tmp_path):
    out, printed = shutil.copytree(whole[0], tmp_path / "run"), whole[1]
    assert "1-all: learner multiclass" in printed and "All stages are finished" in printed
    card = json.loads((out / "card.json").read_text())
    first, second = card["stages"]
    # A stage hands on its best weights: those of its start or of its end, where there are so few validations.
    assert first["images"] == 96 * first["hyperiterations"] and first["hyperiterations"] in (0, 4)
    assert second["images"] == 4 * 5 * 3.5 * second["hyperiterations"] and second["hyperiterations"] in (0, 3)
    assert all(stage["minutes"] > 0 for stage in card["stages"])
    assert [stage["command"].split("   ")[1] for stage in card["stages"]] == ["(stage all)", "(stage episodes)"]
    found = library.find(str(out))
    assert found.name.endswith("2-episodes") and found.learner.normalise
    result = here("evaluate", out, "--episodes", "4", "--steps", "1-2")
    assert result.exit_code == 0 and "Meta-test accuracy" in result.output


def test_a_stopped_recipe_goes_on_where_it_was(whole, tmp_path):
    halves = shutil.copytree(whole[0], tmp_path / "halves")
    # As if it had been stopped before the second stage: what is left is its recipe and the first stage.
    shutil.rmtree(halves / "2-episodes")
    result = here("train", "--resume", "--out", halves, "--threads", "1")
    assert result.exit_code == 0 and "Stage 1-all is finished." in result.output
    assert weights(whole[0] / "2-episodes") == weights(halves / "2-episodes")


def test_two_processes_run_the_same_recipe(whole, recipe, tmp_path):
    words = ["train", "--recipe", recipe, "--out", tmp_path / "two", "--threads", "1"]
    run_ranks(command_script.__file__, tmp_path / "said", *words)
    for stage in ("1-all", "2-episodes"):
        assert weights(whole[0] / stage) == weights(tmp_path / "two" / stage)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            COMMON + '[[stage]]\nname = "a"\nlearning_rate = 1',
            "there is no setting learning_rate.*The settings are learner",
        ),
        (COMMON + '[[stage]]\nname = "a"\nsteps = "many"', "stage 'a': steps='many' is not a number"),
        (COMMON + '[[stage]]\nname = "a"\ninitial = "zoo:omniglot-5way-1shot"', "leave `initial` out"),
        (COMMON, r"must have one table \[\[stage\]\] per stage"),
        ("stage = [1, 2]", r"must have one table \[\[stage\]\] per stage"),
        ("steps = ", "is not a TOML file"),
        (COMMON + '[[stage]]\nname = "../a"', "Every stage needs a name of its own"),
        (
            COMMON + '[[stage]]\nname = "a"\nnetwork = "c4l"\n[[stage]]\nname = "b"\nlast_relu = false',
            "network: c4l in 'a', omniglot-net in 'b'\n  last relu: True in 'a', False in 'b'",
        ),
    ],
)
def test_recipes_that_are_wrong(tmp_path, text, message):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(BilevelError, match=message):
        Recipe.load(file)


def test_folders_of_other_recipes_are_left_alone(whole, recipe, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "run")
    again = here("train", "--recipe", recipe, "--out", out)
    assert again.exit_code != 0 and "Continue it with --resume" in str(again.exception) + again.output
    other = here("train", "--recipe", recipe, "--out", out, "--resume", "--steps", "3")
    assert other.exit_code != 0 and "stage all, steps: 2 there, 3 here" in str(other.exception) + other.output


def test_the_recipes_of_the_package_fit_together():
    for name, recipe in RECIPES.items():
        first, *_, last = recipe.stages.values()
        assert first.learner == "multiclass" and first.image_size == 42, name
        assert last.learner == "hyper-representation" and last.image_size == 0, name
    with pytest.raises(BilevelError, match="needs at least one stage"):
        Recipe({})
    with pytest.raises(BilevelError, match="Leave its `initial` out"):
        Recipe({"a": TrainingSettings(), "b": TrainingSettings(initial="zoo:omniglot-5way-1shot")})
