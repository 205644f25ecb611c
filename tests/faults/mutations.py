"""Damage to bytes, and forged values in JSON."""

import math
from random import Random

# What a stranger may write where a value belongs.
HOSTILE = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -28, 10**9, 2**63, -(2**63), 10**400, 1e300, -1e300, 1e-320),
    *(math.nan, math.inf, -math.inf, "", "x", "\0", "../../../etc/passwd", "=1+1", "nan", "1", "é" * 3, "x" * 5_000),
    *([], {}, [[]], [None], [1, 2, 3], [-1, 28, 28], {"a": None}, {"": {}}, [0] * 1_000, "a\nb", "\ud800"),
)
NUMBERS = (b"-1", b"0", b"1e999", b"NaN", b"1e300", b"99999999999999999999", b"0.5", b"null", b'"x"', b"", b"1" * 400)
TOKENS = (
    b"\0",
    b"\n",
    b"\r\n",
    b",",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"\xff",
    b"\xef\xbb\xbf",
    b"#",
    b"=",
    b"'",
    b"[" * 3000,
)


def damage(content: bytes, draw: Random) -> bytes:
    """One to three random changes, or nothing left at all; never the same bytes."""
    if draw.random() < 0.02:
        return b""
    made = content
    while made == content:
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            made = draw.choice(CHANGES)(made, draw)
    return made


def _span(content: bytes, draw: Random) -> tuple[int, int]:
    """A range of random length, short ones as likely as long ones."""
    begin = _place(content, draw)
    return begin, min(len(content), begin + int(2 ** draw.uniform(0, math.log2(len(content) + 2))))


def _place(content: bytes, draw: Random) -> int:
    """A random place; headers, where formats are fragile, are hit more often."""
    most = len(content) if draw.random() < 0.5 else min(len(content), 256)
    return draw.randrange(most + 1)


def _flip(content: bytes, draw: Random) -> bytes:
    if not content:
        return b"x"
    place = min(_place(content, draw), len(content) - 1)
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def _replace(content: bytes, draw: Random) -> bytes:
    place = _place(content, draw)
    return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


def _cut(content: bytes, draw: Random) -> bytes:
    return content[: _place(content, draw)]


def _drop(content: bytes, draw: Random) -> bytes:
    begin, end = _span(content, draw)
    return content[:begin] + content[end:]


def _repeat(content: bytes, draw: Random) -> bytes:
    begin, end = _span(content, draw)
    return content[:end] + content[begin:end] * draw.choice((1, 1, 2, 5)) + content[end:]


def _zero(content: bytes, draw: Random) -> bytes:
    begin, end = _span(content, draw)
    return content[:begin] + bytes(end - begin) + content[end:]


def _noise(content: bytes, draw: Random) -> bytes:
    begin, end = _span(content, draw)
    return content[:begin] + draw.randbytes(end - begin) + content[end:]


def _move(content: bytes, draw: Random) -> bytes:
    begin, end = _span(content, draw)
    part, rest = content[begin:end], content[:begin] + content[end:]
    to = _place(rest, draw)
    return rest[:to] + part + rest[to:]


def _token(content: bytes, draw: Random) -> bytes:
    place = _place(content, draw)
    return content[:place] + draw.choice(TOKENS) + content[place:]


def _number(content: bytes, draw: Random) -> bytes:
    """Another number in place of one that is written in digits."""
    digits = [i for i, byte in enumerate(content[:20_000]) if 48 <= byte <= 57]
    if not digits:
        return _token(content, draw)
    begin = end = draw.choice(digits)
    while begin > 0 and content[begin - 1] in b"0123456789.eE+-":
        begin -= 1
    while end < len(content) and content[end] in b"0123456789.eE+-":
        end += 1
    return content[:begin] + draw.choice(NUMBERS) + content[end:]


def _append(content: bytes, draw: Random) -> bytes:
    return content + draw.choice((content[:1_000], draw.randbytes(50), b"\n", b"\0" * 10))


CHANGES = (_flip, _flip, _replace, _cut, _drop, _repeat, _zero, _noise, _move, _token, _number, _append)


def forge(value, draw: Random):
    """The value with one to three hostile changes anywhere inside it."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = _forged(value, draw)
    return value


def _forged(value, draw: Random):
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        way = draw.random()
        if way < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if way < 0.15:
            return {**value, draw.choice(("x", "", "steps", "name", "__class__")): draw.choice(HOSTILE)}
        return {**value, key: _forged(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value[:place] + value[place + 1 :] if draw.random() < 0.5 else [*value, *value]
        return [*value[:place], _forged(value[place], draw), *value[place + 1 :]]
    if type(value) in (int, float) and abs(value) < 1e15 and draw.random() < 0.3:
        return draw.choice((-value, value * 1000, value + 0.5, str(value), [value]))
    return draw.choice(HOSTILE)
