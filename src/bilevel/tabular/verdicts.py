"""The conclusion of a comparison: which model to use, and whether its lead is significant."""

from __future__ import annotations

from dataclasses import dataclass

from bilevel.tabular.candidates import CONSTANT
from bilevel.tabular.comparing import ComparedModel, ModelComparison
from bilevel.tabular.formatting import counted
from bilevel.tabular.scores import PairedTest, corrected_test, measures

SIGNIFICANT = 0.05
FEW = 10  # folds: as many as there are if the time allows no more, or if rows are in order of time


@dataclass(frozen=True)
class TableVerdict:
    """Which of our models is saved, which model is recommended, and why.

    Attributes:
        ours: the best of our models, which is saved.
        best: the model with the least error of all, which is recommended.
        tests: the test of every other model against the best, by name.
        sentence: the conclusion as a sentence.
    """

    ours: ComparedModel
    best: ComparedModel
    tests: dict[str, PairedTest]
    sentence: str


def table_verdict(comparison: ModelComparison, classes: list[str]) -> TableVerdict:
    """Compare the best of ours with the best of scikit-learn's by the corrected test.

    p has a Bonferroni correction: it is multiplied by the number of other models, because the best of several models is
    compared.
    """
    names = measures(classes)
    key, measure = list(names.items())[-1]
    constant = next(model for model in comparison.models if model.name == CONSTANT[bool(classes)])
    models = [model for model in comparison.models if model is not constant]
    ours, best = next(model for model in models if model.own), models[0]
    rivals = [model for model in models if not model.own]

    def tested(first: ComparedModel, second: ComparedModel) -> PairedTest:
        test = corrected_test(first.losses, second.losses, comparison.ratio)
        return PairedTest(test.difference, test.error, min(1.0, test.p * max(1, len(models) - 1)))

    tests = {model.name: tested(model, best) for model in comparison.models if model is not best}
    folds = counted(len(ours.losses), "fold")
    against_constant = tested(constant, best)
    if best.scores[key] >= constant.scores[key] or against_constant.p > SIGNIFICANT:
        sentence = (
            f"No model predicts significantly better than the {constant.name} ({measure} {constant.scores[key]:.4g}; "
            f"{best.name} has {best.scores[key]:.4g}, p = {against_constant.p:.2g}, {folds})."
        )
        if best.scores[key] < constant.scores[key] and len(ours.losses) <= FEW:
            sentence += (
                f" With {folds}, only very even differences are significant. --cv 10 or more --minutes add folds."
            )
        return TableVerdict(ours, best, tests, sentence)
    saved = "" if best is ours else f" Saved is the best of ours, {ours.name}."
    if not rivals:
        return TableVerdict(ours, best, tests, f"Best: {best.name}, {measure} {best.scores[key]:.4g}.{saved}")
    winner, loser = best, rivals[0] if best.own else next(model for model in models if model.own)
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
