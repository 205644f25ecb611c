"""Readable names of a data set's classes, and which classes are related (kin), for pictures and tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bilevel.plotting import class_name

# MiniImagenet has WordNet's numbers for names; the file has the first of ImageNet's words for each.
_named = json.loads((Path(__file__).parent / "miniimagenet_classes.json").read_text(encoding="utf-8"))
DOGS: dict[str, str] = _named["dogs"]
MINIIMAGENET: dict[str, str] = DOGS | _named["others"]
KIN = {"miniimagenet": "both are dogs", "omniglot": "of one alphabet", "glyphs": "of one script"}


def readable(title: str) -> str:
    """A readable name of a class.

    >>> readable("n02110063"), readable("Alphabet_of_the_Magi/character01")
    ('malamute', 'Alphabet of the Magi 1')
    >>> readable("hebrew/U+05D0 HEBREW LETTER ALEF")
    'hebrew alef'
    """
    if title in MINIIMAGENET:
        return MINIIMAGENET[title]
    drawn = re.fullmatch(r"(.+)/character0*(\d+)", title)
    return f"{drawn[1].replace('_', ' ')} {drawn[2]}" if drawn else class_name(title)


def related(one: str, other: str) -> bool:
    """Whether two classes are known to be similar: two dogs, or two characters of one alphabet.

    >>> related("n02110063", "n02113712"), related("n02110063", "n04596742")
    (True, False)
    >>> related("Greek/character01", "Greek/character24")
    True
    """
    if "/" in one and "/" in other:
        return one.partition("/")[0] == other.partition("/")[0]
    return one in DOGS and other in DOGS
