"""Reading files: CSV dialects, and errors about files that are not tables."""

import gzip
import hashlib
import sys

import numpy as np
import pandas as pd
import pytest
from table_fixtures import diabetes

from asking import refused
from bilevel.tabular.reading import read_table
from bilevel.tabular.values import distinct_labels, kind_of, labels_of, numbers_of


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
        (b"a,b\n1,2\n1,2,3\n", ["line 3 has 3 fields", "header 2", "Quote"]),
        (b'a,b\n1,2\n"x,2\n', ["begins with a quote", "never closed"]),
        (b"PK\x03\x04rest", ["a zip archive", "Excel"]),
        (b"PK\x03\x04 xl/workbook.xml", ["Excel workbook", "cannot be read"]),
        (b"\x1f\x8brest", ["gzip", "cannot be decompressed"]),
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


@pytest.mark.parametrize(("suffix", "package"), [(".csv", "pandas"), (".parquet", "pyarrow")])
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch, suffix, package):
    file = diabetes(tmp_path / f"a{suffix}")
    monkeypatch.setitem(sys.modules, package, None)
    with refused(package, r'pip install "bilevel\[table\]"'):
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
        (["72%", "3.5 %", None], "number"),
        (["72%", "3%", "high"], "mixed"),
        (["72%", "3%", "5"], "mixed"),
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
    assert kind_of(pd.Series(values)) == holds


def test_labels_do_not_depend_on_how_a_column_was_read():
    whole, real, words = (labels_of(pd.Series(values)) for values in ([1, 2, 3], [1.0, 2.0, None], ["1", "2", "a"]))
    assert whole.tolist()[:2] == real.tolist()[:2] == words.tolist()[:2] == ["1", "2"]
    assert np.isnan(real[2])
    assert distinct_labels(pd.Series([True, False, True])) == ["False", "True"]


def test_percentages_are_numbers():
    found = numbers_of(pd.Series(["72%", " 3.5 %", None, "-7,25%", "5"]))
    assert found[[0, 1, 3]].tolist() == [72, 3.5, -7.25] and np.isnan(found[[2, 4]]).all()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_files_compressed_with_gzip(tmp_path, suffix):
    file = diabetes(tmp_path / f"a{suffix}")
    packed = tmp_path / f"a{suffix}.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    table = read_table(packed)
    pd.testing.assert_frame_equal(table.frame, read_table(file).frame)
    assert table.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_excel(tmp_path):
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": ["x", None], "day": pd.to_datetime(["2024-01-31", "2024-02-01"])})
    frame.to_excel(tmp_path / "one.xlsx", index=False)
    found = read_table(tmp_path / "one.xlsx")
    assert found.kind == "Excel" and found.columns == ["a", "b", "day"] and found.frame["a"].tolist() == [1.5, 2.5]
    assert found.frame["day"].dtype.kind == "M"
    with pd.ExcelWriter(tmp_path / "two.xlsx") as book:
        frame.to_excel(book, sheet_name="old", index=False)
        frame.assign(a=[7, 8]).to_excel(book, sheet_name="new", index=False)
    assert read_table(tmp_path / "two.xlsx", sheet="new").frame["a"].tolist() == [7, 8]
    with refused("2 sheets", "--sheet", "'old', 'new'"):
        read_table(tmp_path / "two.xlsx")
    with refused("--sheet 'none' is not in", "'old', 'new'"):
        read_table(tmp_path / "two.xlsx", sheet="none")


def test_decimal_and_thousands_marks(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a;b\n1.234,5;12.000\n-7,25;3\n")
    found = read_table(file, decimal=",", thousands=".").frame
    assert found["a"].tolist() == [1234.5, -7.25] and found["b"].tolist() == [12000, 3]
    file.write_text("a;b\n1.234,5;2.50\n7,25;3.75\n")
    with refused("'2.50' in column 'b'", "--thousands . does not fit"):
        read_table(file, decimal=",", thousands=".")
    with refused("--thousands '..' is not one character"):
        read_table(file, thousands="..")
    with refused("--decimal and --thousands are both"):
        read_table(file, thousands=".")
