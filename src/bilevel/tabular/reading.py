"""Reading a table from CSV, Parquet or Excel, also compressed with gzip. The file is never changed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bilevel import extras
from bilevel.errors import BilevelError
from bilevel.tabular.formatting import listed

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
GUESSING_LINES = 30  # the separator is guessed from this number of lines
# The first bytes of other kinds of files that users may pass by mistake.
OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"ARROW1": "an Arrow or Feather file",
    b"SQLite": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
}
# pandas' message about a line with more fields than the header.
RAGGED = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")


@dataclass(frozen=True)
class DataTable:
    """A table as it was read.

    Args:
        path: the file.
        frame: its content as a pandas DataFrame with the index 0, 1, ….
        sha256: the checksum of the file.
        kind: "CSV", "Parquet" or "Excel".
        separator: the character between the fields of a CSV file.
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
    thousands: str | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    as_text: bool = False,
) -> DataTable:
    """Read a CSV, Parquet or Excel file. The kind is recognised by the first bytes, not by the name.

    Args:
        path: the file.
        separator: the character between the fields of a CSV file. None guesses it from the first lines.
        decimal: the decimal mark of a CSV file.
        thousands: the mark between the thousands of numbers in a CSV file.
        encoding: the encoding of a CSV file. None means UTF-8, with or without a byte order mark.
        sheet: the sheet of an Excel workbook. It is needed if the workbook has several.
        as_text: whether to keep every field of a CSV file as text.
    """
    path = Path(path)
    content = _bytes(path)
    digest = hashlib.sha256(content).hexdigest()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise BilevelError(f"{path} begins like a gzip file but cannot be decompressed: {error}.") from error
    if content[:4] == b"PAR1":
        return DataTable(path, _parquet(path, content), digest, "Parquet")
    if content[:4] == b"PK\x03\x04" and b"xl/workbook" in content:
        return DataTable(path, _excel(path, content, sheet), digest, "Excel")
    for start, what in OTHER_FORMATS.items():
        if content.startswith(start):
            raise BilevelError(f"{path} is {what}. Save the table as CSV, Parquet or Excel, and pass that file.")
    text = _decoded(path, content, encoding)
    used = _separator(text, separator)
    options = {"decimal": decimal, "thousands": thousands}
    for name, mark in options.items():
        if mark is not None and len(mark) != 1:
            raise BilevelError(f"--{name} {mark!r} is not one character. Write '.', ',' or another.")
    if decimal == thousands:
        raise BilevelError(f"--decimal and --thousands are both {decimal!r}. Write two different characters.")
    if used == decimal and separator is None and decimal != ".":
        used = ";"  # the decimal mark cannot also be the separator
    return DataTable(path, _csv(path, text, used, options, as_text), digest, "CSV", used)


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise BilevelError(f"{path} is a folder. Pass a CSV, Parquet or Excel file.")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise BilevelError(f"There is no file {path}. Pass a CSV, Parquet or Excel file.") from error
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not content.strip():
        raise BilevelError(f"{path} is empty. Pass a CSV file with a header and rows, or a Parquet file.")
    return content


def _parquet(path: Path, content: bytes) -> Any:
    extras.require("pandas", extra="table", purpose="Reading a table")
    parquet = extras.load("pyarrow.parquet", extra="table", purpose="Reading Parquet")
    try:
        read = parquet.read_table(io.BytesIO(content))
        _check_names(path, read.schema.names)
        frame = read.to_pandas()
    except BilevelError:
        raise
    except Exception as error:  # errors of pyarrow, and any error that a damaged file causes in its decoders
        raise BilevelError(f"{path} begins like a Parquet file but cannot be read: {_first_line(error)}") from error
    # A named index is a column of the file. An index without a name is only the row number.
    return _checked(path, frame.reset_index(drop=all(name is None for name in frame.index.names)))


def _excel(path: Path, content: bytes, sheet: str | None) -> Any:
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    extras.require("openpyxl", extra="table", purpose="Reading Excel")
    try:
        with pandas.ExcelFile(io.BytesIO(content), engine="openpyxl") as book:
            names = book.sheet_names
            if sheet is None and len(names) > 1:
                raise BilevelError(f"{path} has {len(names)} sheets. Write --sheet with one of {listed(names)}.")
            if sheet is not None and sheet not in names:
                raise BilevelError(f"--sheet {sheet!r} is not in {path}. It has {listed(names)}.")
            head = pandas.read_excel(book, sheet_name=sheet or 0, header=None, nrows=1)
            _check_names(path, [str(name) for name in (head.iloc[0].dropna() if len(head) else ())])
            frame = pandas.read_excel(book, sheet_name=sheet or 0)
    except BilevelError:
        raise
    except Exception as error:  # openpyxl raises what its XML parsers raise
        raise BilevelError(f"{path} begins like an Excel workbook but cannot be read: {_first_line(error)}") from error
    return _checked(path, frame)


def _decoded(path: Path, content: bytes, encoding: str | None) -> str:
    try:
        text = content.decode(encoding or "utf-8")
    except LookupError as error:
        raise BilevelError(f"--encoding {encoding} is not known. Write utf-8, latin-1, cp1252 or utf-16.") from error
    except UnicodeDecodeError as error:
        likely = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
        raise BilevelError(
            f"{path} is not {encoding or 'UTF-8'} text (byte {error.start}: {error.reason}). If it is a CSV file, name "
            f"its encoding, for example --encoding {likely}. If it is something else, save the table as CSV or Parquet."
        ) from error
    if "\0" in text[:10_000]:
        raise BilevelError(f"{path} is not a text file. Pass CSV, Parquet or Excel.")
    return text.removeprefix("\N{BYTE ORDER MARK}")


def _separator(text: str, given: str | None) -> str:
    """The given separator, or the one that splits the first lines into the most fields, in most lines equally many."""
    if given is not None:
        used = {"tab": "\t", r"\t": "\t", **{word: mark for mark, word in SEPARATORS.items()}}.get(given, given)
        if len(used) != 1:
            raise BilevelError(f"--separator {given!r} is not one character. Write ';', tab or another.")
        return used
    best, most = ",", 1
    for mark in SEPARATORS:
        counts = [len(row) for row in _rows(text, mark, GUESSING_LINES)]
        if counts and counts[0] > most and sum(count == counts[0] for count in counts) > len(counts) / 2:
            best, most = mark, counts[0]
    return best


def _rows(text: str, separator: str, count: int) -> list[list[str]]:
    """The first non-empty records."""
    try:
        return list(islice(filter(None, csv.reader(io.StringIO(text), delimiter=separator)), count))
    except csv.Error:  # the separator does not fit the quotes. If it is chosen all the same, pandas reports the line
        return []


def _csv(path: Path, text: str, separator: str, marks: dict[str, Any], as_text: bool) -> Any:
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    head = _rows(text, separator, 2) or [[]]
    _check_names(path, head[0])
    if len(head) > 1 and len(head[1]) > len(head[0]):
        raise BilevelError(
            f"{path}: the first row has {len(head[1])} fields and the header {len(head[0])} (separator "
            f"{SEPARATORS.get(separator, separator)!r}). Name every column in the header, or pass --separator."
        )
    options: dict[str, Any] = {"sep": separator, **marks, "index_col": False, "low_memory": False}
    if as_text:
        options |= {"dtype": str, "keep_default_na": False}
    # In a file with one column, an empty line is an empty field. In other files it is skipped.
    options["skip_blank_lines"] = len(head[0]) > 1
    try:
        frame = pandas.read_csv(io.StringIO(text), **options)
    except Exception as error:  # pandas raises what its parsers raise
        if ragged := RAGGED.search(str(error)):
            fields, line, saw = ragged.groups()
            raise BilevelError(
                f"{path}: line {line} has {saw} fields and the header {fields} (separator "
                f"{SEPARATORS.get(separator, separator)!r}). Quote fields that hold the separator."
            ) from error
        if "EOF inside string" in str(error):
            raise BilevelError(
                f'{path}: a field begins with a quote (") that is never closed. Close it, or write two quotes for one.'
            ) from error
        raise BilevelError(f"{path} is not a readable CSV file: {_first_line(error)}.") from error
    if marks["thousands"] is not None:
        _check_thousands(path, frame, text, options)
    return _checked(path, frame)


def _check_thousands(path: Path, frame: Any, text: str, options: dict[str, Any]) -> None:
    """Refuse a thousands mark that is not followed by three digits: with thousands=".", 2.50 would become 250."""
    pandas = extras.load("pandas", extra="table", purpose="Reading a table")
    mark, decimal = re.escape(options["thousands"]), re.escape(options["decimal"])
    grouped = rf"\s*[+-]?\d{{1,3}}({mark}\d{{3}})*({decimal}\d*)?\s*%?\s*"
    written = pandas.read_csv(io.StringIO(text), **options, dtype=str)
    for name in frame.columns:
        fields = written[name].dropna()
        fields = fields[fields.str.contains(options["thousands"], regex=False)]
        if pandas.api.types.is_numeric_dtype(frame[name].dtype) and (bad := ~fields.str.fullmatch(grouped)).any():
            raise BilevelError(
                f"{path}: {fields[bad].iloc[0]!r} in column {name!r} has {options['thousands']!r} where no thousands "
                f"end, so --thousands {options['thousands']} does not fit this file."
            )


def _check_names(path: Path, names: Sequence[str]) -> None:
    if duplicates := [name for name, count in Counter(names).items() if count > 1 and name.strip()]:
        raise BilevelError(
            f"{path} has more than one column called {listed(duplicates)}. Rename or remove all but one."
        )


def _checked(path: Path, frame: Any) -> Any:
    if not len(frame):
        raise BilevelError(f"{path} has a header ({listed(frame.columns, 8)}) and no rows.")
    frame.columns = [str(name) for name in frame.columns]
    return frame


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
