"""The benchmark's report: made from stored figures, section by section."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SECTION = '''
from harness.tables import Table
from harness.targets import Target

ORDER = 35
TITLE = "A new one"
WHAT = """
It means
something.
"""


def measure(bench):
    bench.tick("half", 0.5)
    return {"answer": bench.pick(quick=6, full=42)}


def targets(figures):
    note = "Nothing reaches it here."
    yield Target("a small answer", "new_one", figures["answer"], 5, "six", low=4.5, limit_note=note)
    yield Target("a large answer", "new_one", figures["answer"], 7, "six", at_least=True, high=6.5)


def tables(figures):
    yield Table("Answers", ["what", "answer"], [["all", str(figures["answer"])]])
'''


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """A copy of the benchmark's code, and its modules."""
    copy = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    forget_modules()
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield copy
    forget_modules()


def forget_modules():
    """Forget the benchmark's modules, which another test may have imported from another folder."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("harness", "sections", "problems", "run"):
            del sys.modules[name]


def test_a_new_section_is_one_new_file(benchmark, tmp_path):
    (benchmark / "sections" / "new_one.py").write_text(SECTION)
    from harness import report, section
    from harness.pool import Pool
    from harness.results import Results

    found = section.find()
    assert list(found).index("memory") < list(found).index("new_one") < list(found).index("scaling")
    ticks = []
    bench = section.Bench(Pool([], True), True, tmp_path, lambda what, amount: ticks.append((what, amount)))
    results = Results(tmp_path)
    results.put("new_one", found["new_one"].measure(bench.share(0.5)), quick=True)
    results.sections["of_an_earlier_version"] = {"machine": {}}
    results.save()
    assert ticks == [("half", 0.25)]

    again = Results(tmp_path)
    report.write(again, found)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## A new one\n\nIt means something.\n\nMeasured " in page
    assert "| all | 6 |" in page
    assert "| a small answer | new_one | six | ≤ 5 | no, within noise |" in page
    assert "| a large answer | new_one | six | ≥ 7 | no |" in page
    assert "\n\na small answer (new_one): Nothing reaches it here." in page


def test_the_page_of_results_is_made_from_the_stored_figures(benchmark, tmp_path):
    from harness import report, section
    from harness.results import Results

    shutil.copy(BENCHMARKS / "results" / "results.json", tmp_path)
    results, found = Results(tmp_path), section.find()
    report.write(results, found)
    assert (tmp_path / "RESULTS.md").read_text() == (BENCHMARKS / "results" / "RESULTS.md").read_text()
    assert set(results.sections) <= set(found)
    for name in results.sections:
        assert len(found[name].what) > 100
    drawn = {picture.name for picture in tmp_path.glob("*.png")}
    kept = {picture.name for picture in (BENCHMARKS / "results").glob("*.png")} - {"estimators.png", "tables.png"}
    assert drawn == kept


def test_partial_runs_keep_the_other_sections(benchmark, tmp_path):
    from harness.results import Results

    (tmp_path / "results.json").write_text(json.dumps({"sections": {"ridge": {"timings": [], "quick": False}}}))
    results = Results(tmp_path)
    results.put("network", {"timings": []}, quick=True)
    results.save()
    stored = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert stored["ridge"] == {"timings": [], "quick": False}
    assert stored["network"]["quick"] and stored["network"]["machine"]["torch"]


def test_a_section_that_fails_is_named_and_the_others_are_measured(benchmark, tmp_path, monkeypatch):
    (benchmark / "sections" / "new_one.py").write_text(SECTION)
    broken = SECTION.replace("ORDER = 35", "ORDER = 34\nfrom harness.contestants import WorkerError")
    broken = broken.replace('bench.tick("half", 0.5)', 'raise WorkerError("It has no figures.")')
    (benchmark / "sections" / "broken.py").write_text(broken)
    from rich.console import Console

    import run
    from harness import section
    from harness.results import Results

    monkeypatch.setattr(run, "Pool", lambda *_: SimpleNamespace(close=lambda: None))
    sections, results = section.find(), Results(tmp_path)
    chosen = [sections["broken"], sections["new_one"]]
    assert run.measure(results, chosen, quick=True, console=Console(quiet=True)) == {"broken": "It has no figures."}
    assert list(json.loads((tmp_path / "results.json").read_text())["sections"]) == ["new_one"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ranks", "glyphs", "1"], ["pretraining", "c4l", "32", "1"]])
def test_the_programs_that_time_trainings_run(words):
    """Their times are not tested. They call the package, and a change of the package may break them."""
    command = [sys.executable, "-m", f"sections.{words[0]}", *words[1:]]
    environment = {**os.environ, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer and all(second > 0 for seconds in answer.values() for second in seconds)
