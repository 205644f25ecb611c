"""Shares of the cases of the battery, each of them with every example and every dynamics; all cases take minutes."""

from collections import Counter

from bilevel import testing


def share(of, shift=0, alone=True):
    """One case in `of`, and those whose dynamics occurs once if `alone`; another `shift` gives other cases."""
    cases = testing.battery_cases()
    labels, names = Counter(case.label for case in cases), Counter(case.example.name for case in cases)
    order = {name: i for group in (labels, names) for i, name in enumerate(group)}

    def is_in(case):
        only_one = alone and labels[case.label] == 1
        return only_one or (order[case.label] + order[case.example.name] + shift) % of == 0

    return [case for case in cases if is_in(case)]
