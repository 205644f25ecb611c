"""The paper's few-shot experiments as settings (Section 5.2 and Appendix D). Nothing here imports torch."""

from __future__ import annotations

from dataclasses import replace

from bilevel.errors import BilevelError
from bilevel.meta.settings import Settings

MINIIMAGENET = Settings(dataset="miniimagenet")


def _all() -> dict[str, Settings]:
    found = {}
    for ways, meta_batch in ((5, 32), (20, 16)):
        for shots in (1, 5):
            name = f"omniglot-{ways}way-{shots}shot"
            found[name] = Settings(rotations=True, ways=ways, shots=shots, meta_batch=meta_batch)
            # The paper's step size comes near 2/ν or above it, so the default bounds it. This one does not.
            found[f"{name}-paper"] = replace(found[name], step_bound=0)
    for shots, meta_batch in ((1, 4), (5, 2)):
        found[f"miniimagenet-c4l-{shots}shot"] = replace(
            MINIIMAGENET, network="c4l", shots=shots, meta_batch=meta_batch, inner_lr=0.01
        )
        found[f"miniimagenet-rn-{shots}shot"] = replace(
            MINIIMAGENET, network="rn", shots=shots, meta_batch=2, inner_lr=0.04
        )
    found["glyphs-5way-1shot"] = Settings(
        dataset="glyphs", meta_batch=8, iterations=2000, validate_every=200, validation_episodes=200
    )
    return found


PRESETS = _all()


def preset(name: str) -> Settings:
    """The settings of that name.

    >>> preset("omniglot-20way-5shot").meta_batch
    16
    """
    if name not in PRESETS:
        raise BilevelError(f"There is no preset {name!r}. The presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
