"""Reading files: dialects, and what is said about files that are no tables."""

import hashlib
import importlib

import numpy as np
import pandas as pd
import pytest
from table_fixtures import diabetes

from asking import refused
from bilevel.tabular.reading import read_table
from bilevel.tabular.values import look


def test_csv_and_parquet_are_the_same_table_and_the_file_is_left_alone(tmp_path):
    text, binary = diabetes(tmp_path / "a.csv"), diabetes(tmp_path / "a.parquet")
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in (text, binary)]
    first, second = read_table(text), read_table(binary)
    pd.testing.assert_frame_equal(first.frame, second.frame)
    assert (first.kind, second.kind) == ("CSV", "Parquet")
    assert first.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert before == [(file.read_bytes(), file.stat().st_mtime_ns) for file in (text, binary)]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_the_separator_is_found_and_a_byte_order_mark_ignored(tmp_path, separator, encoding):
    file = tmp_path / "table.csv"
    lines = [["größe", "name"], ["1.5", '"a, b; c"'], ["2", '"d|e"'], ["3", "f"]]
    file.write_text("\n".join(separator.join(line) for line in lines) + "\n", encoding=encoding)
    table = read_table(file)
    assert table.columns == ["größe", "name"] and table.separator == separator
    assert table.frame["größe"].tolist() == [1.5, 2.0, 3.0] and table.frame["name"][0] == "a, b; c"


def test_a_separator_a_decimal_mark_and_an_encoding_that_are_given(tmp_path):
    file = tmp_path / "table.csv"
    file.write_bytes("größe:b\n1,5:x\n2,5:y\n".encode("latin-1"))
    with refused("not UTF-8", "--encoding latin-1"):
        read_table(file)
    table = read_table(file, separator=":", decimal=",", encoding="latin-1")
    assert table.frame["größe"].tolist() == [1.5, 2.5]
    file.write_text("a\tb\n1\t2\n")
    assert read_table(file, separator="tab").columns == ["a", "b"]
    with refused("--separator 'xx' is not one character"):
        read_table(file, separator="xx")
    with refused("--encoding klingon is not known"):
        read_table(file, encoding="klingon")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"  \n\n", ["is empty"]),
        (b"a,b\n", ["has a header", "'a', 'b'", "no rows"]),
        (b"a,b,a\n1,2,3\n", ["more than one column called 'a'"]),
        (b"a,b\n1,2,3\n4,5,6\n", ["first row has 3 fields", "header 2"]),
        (b"a,b\n1,2\n1,2,3\n", ["not a readable CSV", "line 3"]),
        (b"PK\x03\x04rest", ["Excel"]),
        (b"\x1f\x8brest", ["gzip"]),
        (b"PAR1 but nothing else", ["Parquet", "cannot be read"]),
        (b"\xff\xfea\x00,\x00", ["not UTF-8", "--encoding utf-16"]),
        (b"a,b\x00\x00\n1,2\n", ["not a text file"]),
    ],
)
def test_files_that_are_no_tables(tmp_path, content, words):
    file = tmp_path / "odd.csv"
    file.write_bytes(content)
    with refused("odd.csv", *words):
        read_table(file)


def test_paths_that_are_no_files(tmp_path):
    with refused("is a folder"):
        read_table(tmp_path)
    with refused("There is no file", "none.csv"):
        read_table(tmp_path / "none.csv")


def test_an_index_with_a_name_is_a_column_of_a_parquet_file(tmp_path):
    frame = pd.DataFrame({"a": [1, 2]}, index=pd.Index([7, 8], name="id"))
    frame.to_parquet(tmp_path / "named.parquet")
    frame.rename_axis(None).to_parquet(tmp_path / "plain.parquet")
    assert read_table(tmp_path / "named.parquet").columns == ["id", "a"]
    assert read_table(tmp_path / "plain.parquet").columns == ["a"]


@pytest.mark.parametrize(("suffix", "module"), [(".csv", "pandas"), (".parquet", "pyarrow.parquet")])
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch, suffix, module):
    file = diabetes(tmp_path / f"a{suffix}")
    found = importlib.import_module

    def without(name, *rest):
        if name == module:
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr("bilevel.tabular._packages.import_module", without)
    with refused(module, r"pip install 'bilevel\[table\]'"):
        read_table(file)


def test_fields_as_they_are_written(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("a,b\n1.50,NA\n007,\n")
    assert read_table(file, as_text=True).frame.to_numpy().tolist() == [["1.50", "NA"], ["007", ""]]
    assert read_table(file).frame["b"].isna().all()


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([1, 2, 3], "number"),
        ([1.5, None], "number"),
        ([float("inf"), 1.0], "number"),
        ([True, False], "boolean"),
        ([True, None], "boolean"),
        (["a", "b", None], "text"),
        (["1", "2", "3", "x"], "mixed"),
        (["2020-01-01", "2021-12-31"], "date"),
        (["31.12.2020", "1.1.2021"], "date"),
        (["2020-01-01T12:30:00", "2021-01-01 00:00"], "date"),
        (pd.to_datetime(["2020-01-01"]), "date"),
        (pd.Categorical(["x", "y"]), "text"),
        (pd.Categorical([1, 2]), "number"),
        (pd.array([1, None], dtype="Int64"), "number"),
        ([None, None], "empty"),
        (pd.Series([[1], [2, 3]]), "other"),
        ([1 + 2j, 3j], "other"),
        ([10**30, 1], "number"),
    ],
)
def test_what_a_column_holds(values, holds):
    assert look(values).holds == holds


def test_labels_do_not_depend_on_how_a_column_was_read():
    whole, real, words = look([1, 2, 3]), look([1.0, 2.0, None]), look(["1", "2", "a"])
    assert whole.labels().tolist()[:2] == real.labels().tolist()[:2] == words.labels().tolist()[:2] == ["1", "2"]
    assert real.labels()[2] is None
    assert look([10, 9, 10]).distinct() == ["9", "10"]  # by size, not by letters
    assert look([True, False, True]).distinct() == ["False", "True"]
    assert np.isnan(look([1.0, None]).numbers[1])
