"""Reading a table: CSV in its dialects, or Parquet. The file is opened for reading once and never touched."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.tabular._packages import package
from bilevel.tabular.words import listed

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
HEAD = 30  # lines that the separator is guessed from
# The first bytes of files that are often taken for tables.
FOREIGN = {
    b"PK\x03\x04": "a zip archive, perhaps an Excel workbook",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"\x1f\x8b": "compressed with gzip",
    b"ARROW1": "an Arrow or Feather file",
    b"SQLite": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
}


@dataclass(frozen=True)
class Table:
    """A table as it was read.

    Args:
        path: the file.
        frame: its content as a pandas DataFrame with the index 0, 1, ….
        sha256: of the file's bytes, so that a result knows its data again.
        kind: "CSV" or "Parquet".
        separator: between the fields of a CSV file.
    """

    path: Path
    frame: Any
    sha256: str
    kind: str
    separator: str | None = None

    @property
    def columns(self) -> list[str]:
        return list(self.frame.columns)


def read_table(
    path: Path | str,
    *,
    separator: str | None = None,
    decimal: str = ".",
    encoding: str | None = None,
    as_text: bool = False,
) -> Table:
    """Read a CSV or Parquet file, told apart by its first bytes and not by its name.

    Args:
        path: the file.
        separator: between the fields of a CSV file; guessed from its first lines if not given.
        decimal: the decimal mark of a CSV file.
        encoding: of a CSV file; UTF-8, with or without a byte order mark, if not given.
        as_text: leave every field of a CSV file as it is written.
    """
    place = Path(path)
    content = _bytes(place)
    digest = hashlib.sha256(content).hexdigest()
    if content[:4] == b"PAR1":
        return Table(place, _parquet(place, content), digest, "Parquet")
    for start, what in FOREIGN.items():
        if content.startswith(start):
            raise BilevelError(f"{place} is {what}. Save the table as CSV or Parquet, and pass that file.")
    text = _decoded(place, content, encoding)
    used = _separator(place, text, separator)
    return Table(place, _csv(place, text, used, decimal, as_text), digest, "CSV", used)


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise BilevelError(f"{path} is a folder; pass a CSV or Parquet file.")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise BilevelError(f"There is no file {path}; pass a CSV or Parquet file.") from error
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not content.strip():
        raise BilevelError(f"{path} is empty; pass a CSV file with a header and rows, or a Parquet file.")
    return content


def _parquet(path: Path, content: bytes) -> Any:
    package("pandas", "Reading a table")
    parquet = package("pyarrow.parquet", "Reading Parquet")
    try:
        read = parquet.read_table(io.BytesIO(content))
        _check_names(path, read.schema.names)
        frame = read.to_pandas()
    except BilevelError:
        raise
    except Exception as error:  # pyarrow's own family, and whatever a damaged file makes of its decoders
        raise BilevelError(f"{path} begins like a Parquet file but cannot be read: {_first_line(error)}") from error
    # An index with a name is a column of the file; one without counts the rows.
    return _checked(path, frame.reset_index(drop=all(name is None for name in frame.index.names)))


def _decoded(path: Path, content: bytes, encoding: str | None) -> str:
    try:
        text = content.decode(encoding or "utf-8")
    except LookupError as error:
        raise BilevelError(f"--encoding {encoding} is not known; write utf-8, latin-1, cp1252 or utf-16.") from error
    except UnicodeDecodeError as error:
        likely = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
        raise BilevelError(
            f"{path} is not {encoding or 'UTF-8'} text (byte {error.start}: {error.reason}). If it is a CSV file, name "
            f"its encoding, for example --encoding {likely}; if it is something else, save the table as CSV or Parquet."
        ) from error
    if "\0" in text[:10_000]:
        raise BilevelError(f"{path} is not a text file; pass CSV or Parquet.")
    return text.removeprefix("\N{BYTE ORDER MARK}")


def _separator(path: Path, text: str, given: str | None) -> str:
    """The separator that cuts the first lines into equally many fields, as many as possible."""
    if given is not None:
        used = {"tab": "\t", r"\t": "\t", **{word: mark for mark, word in SEPARATORS.items()}}.get(given, given)
        if len(used) != 1:
            raise BilevelError(f"--separator {given!r} is not one character; write ';', tab or another.")
        return used
    best, most = ",", 1
    for mark in SEPARATORS:
        counts = [len(row) for row in _rows(text, mark, HEAD)]
        if counts and counts[0] > most and sum(count == counts[0] for count in counts) > len(counts) / 2:
            best, most = mark, counts[0]
    return best


def _rows(text: str, separator: str, count: int) -> list[list[str]]:
    """The first records, as many as the start of the file surely holds whole."""
    found: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text), delimiter=separator):
            if row:
                found.append(row)
            if len(found) == count:
                break
    except csv.Error:
        return found
    return found


def _csv(path: Path, text: str, separator: str, decimal: str, as_text: bool) -> Any:
    pandas = package("pandas", "Reading a table")
    head = _rows(text, separator, 2)
    _check_names(path, head[0] if head else [])
    if len(head) > 1 and len(head[1]) > len(head[0]):
        raise BilevelError(
            f"{path}: the first row has {len(head[1])} fields and the header {len(head[0])} (separator "
            f"{SEPARATORS.get(separator, separator)!r}). Name every column in the header, or pass --separator."
        )
    options: dict[str, Any] = {"sep": separator, "decimal": decimal, "index_col": False, "low_memory": False}
    if as_text:
        options |= {"dtype": str, "keep_default_na": False}
    # In a file of one column an empty line is an empty field; in others it is nothing.
    options["skip_blank_lines"] = len(head[0]) > 1
    try:
        frame = pandas.read_csv(io.StringIO(text), **options)
    except Exception as error:  # pandas raises what its parsers raise
        raise BilevelError(f"{path} is not a readable CSV file: {_first_line(error)}.") from error
    return _checked(path, frame)


def _check_names(path: Path, names: Sequence[str]) -> None:
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        if name in seen and name not in twice:
            twice.append(name)
        seen.add(name)
    if twice := [name for name in twice if name.strip()]:
        raise BilevelError(f"{path} has more than one column called {listed(twice)}; rename or remove all but one.")


def _checked(path: Path, frame: Any) -> Any:
    if not len(frame):
        raise BilevelError(f"{path} has a header ({listed(frame.columns, 8)}) and no rows.")
    frame.columns = [str(name) for name in frame.columns]
    return frame


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
