"""What a comparison lets one say: which model to use, and how certain that is."""

from __future__ import annotations

from dataclasses import dataclass

from bilevel.tabular.comparing import ComparedModel, ModelComparison
from bilevel.tabular.rivals import CONSTANT
from bilevel.tabular.scores import PairedTest, corrected_test, measures
from bilevel.tabular.words import counted

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class TableVerdict:
    """Which of our models is saved, which model is recommended, and why.

    Attributes:
        ours: the best of our models, which is saved.
        best: the model with the least error of all, which is recommended.
        tests: of every model against the best, by name.
        sentence: all of that in words.
    """

    ours: ComparedModel
    best: ComparedModel
    tests: dict[str, PairedTest]
    sentence: str


def table_verdict(found: ModelComparison, classes: list[str]) -> TableVerdict:
    """Compare the best of ours with the best of scikit-learn's by the corrected test; p is multiplied by the number of
    models, because the best of several is looked at."""
    names = measures(classes)
    key, measure = list(names.items())[-1]
    constant = next(one for one in found.models if one.name == CONSTANT[bool(classes)])
    models = [one for one in found.models if one is not constant]
    ours, best = next(one for one in models if one.own), models[0]
    rivals = [one for one in models if not one.own]

    def tested(first: ComparedModel, second: ComparedModel) -> PairedTest:
        test = corrected_test(first.losses, second.losses, found.ratio)
        return PairedTest(test.difference, test.error, min(1.0, test.p * max(1, len(models) - 1)))

    tests = {one.name: tested(one, best) for one in found.models if one is not best}
    folds = counted(len(ours.losses), "fold")
    hopeless = tested(constant, best)
    if best.scores[key] >= constant.scores[key] or hopeless.p > SIGNIFICANT:
        sentence = (
            f"No model predicts significantly better than the {constant.name} ({measure} {constant.scores[key]:.4g}; "
            f"{best.name} has {best.scores[key]:.4g}, p = {hopeless.p:.2g}, {folds})."
        )
        return TableVerdict(ours, best, tests, sentence)
    saved = "" if best is ours else f" Saved is the best of ours, {ours.name}."
    if not rivals:
        return TableVerdict(ours, best, tests, f"Best: {best.name}, {measure} {best.scores[key]:.4g}.{saved}")
    winner, loser = best, rivals[0] if best.own else next(one for one in models if one.own)
    test = tested(winner, loser)
    less = 1 - winner.scores[key] / loser.scores[key] if loser.scores[key] else 0.0
    numbers = f"{measure} {winner.scores[key]:.4g} against {loser.scores[key]:.4g} of {loser.name}, {less:.1%} less"
    if test.p > SIGNIFICANT:
        sentence = (
            f"Best: {winner.name}. No significant difference from {loser.name}: {numbers} (p = {test.p:.2g}, {folds})."
            f"{saved}"
        )
    elif best.own:
        sentence = f"Best: {winner.name}, significantly: {numbers} (p = {test.p:.2g}, {folds}).{saved}"
    else:
        sentence = (
            f"Recommended: scikit-learn's {winner.name}, significantly better: {numbers} (p = {test.p:.2g}, {folds})."
            f"{saved}"
        )
    return TableVerdict(ours, best, tests, sentence)
