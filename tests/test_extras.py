"""The library needs torch, numpy and optree. For the rest, an error names the extra that is not installed."""

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import printed_code
from bilevel import extras

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = [
    *("rich", "typer", "sklearn", "scipy", "pandas", "pyarrow", "safetensors", "PIL", "filelock", "matplotlib"),
    *("jinja2", "plotly", "tensorboard", "threadpoolctl", "starlette", "uvicorn", "yaml"),
]
# What a user calls without the extra, and the extra that the error should name.
CALLS = {
    "from bilevel.estimators import BilevelRidge": "table",
    "from bilevel.tabular.reading import read_table; read_table(Path('a.csv'))": "table",
    "import bilevel.data; bilevel.data.load('glyphs')": "learn",
    "from bilevel.learners.library import find; find('zoo:omniglot-5way-1shot')": "learn",
    "from bilevel.training.folder import RunFolder; RunFolder(Path('runs/a')).locked().__enter__()": "learn",
    "import bilevel.report": "report",
    "import bilevel.app": "app",
    "import bilevel.experiments; bilevel.experiments.load('ridge')": "report",
}
EVERY_CALL = f"""
from pathlib import Path
Path("a.csv").write_text("x,y")
for call in {list(CALLS)}:
    try:
        exec(call)
    except ImportError as error:
        print(type(error).__name__, error)
    else:
        print("It worked.")
"""
# Every block of the README that is about a problem of one's own.
PROBLEM = [(code, shown) for _, code, shown in printed_code.blocks(ROOT / "README.md") if "problem" in code]
BEGIN = "import torch\nimport bilevel as bl\ntorch.set_default_dtype(torch.float64)\n"


def brought_by(extra):
    """The distributions that an extra lists in pyproject.toml, itself or through another extra."""
    found = set()
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]:
        if inner := re.match(r"bilevel\[(.*)\]", line):
            found |= set().union(*map(brought_by, inner[1].split(",")))
        else:
            found.add(re.match(r"[\w-]+", line)[0])
    return found


def run(program, *, without=(), python=sys.executable, folder=None, **environment):
    """Run a program in a process in which some packages cannot be imported."""
    blocked = f"import sys\nfor name in {list(without)}: sys.modules[name] = None\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [python, "-c", blocked + program], capture_output=True, text=True, cwd=folder, env=environment
    )


def assert_prints_what_the_readme_shows(done):
    assert done.returncode == 0, done.stderr
    assert printed_code.agree(done.stdout.split(), " ".join(shown for _, shown in PROBLEM).split()), done.stdout


def test_the_message_names_the_packages_as_pip_calls_them(monkeypatch):
    monkeypatch.setitem(extras.DISTRIBUTIONS, "absent", "scikit-absent")
    with pytest.raises(
        extras.MissingPackage, match=r'X needs scikit-absent and b\. Write: pip install "bilevel\[table'
    ):
        extras.require("json", "absent", "b", extra="table", purpose="X")
    assert issubclass(extras.MissingPackage, ImportError)
    assert extras.load("os.path", extra="table", purpose="X") is os.path


def test_an_error_names_an_extra_that_brings_the_package():
    """What `extras` is asked for anywhere in the package is what the extra of that name installs."""
    named = re.compile(r'extras\.(?:require|load)\(\s*((?:"[\w.]+",\s*)+)extra="(\w+)"')
    calls = [found for path in (ROOT / "src").rglob("*.py") for found in named.findall(path.read_text())]
    assert len(calls) >= 10
    for packages, extra in calls:
        for package in re.findall(r'"([\w]+)', packages):
            assert extras.DISTRIBUTIONS.get(package, package) in brought_by(extra), (package, extra)


def test_a_missing_extra_is_named_with_its_command(tmp_path):
    done = run(EVERY_CALL, without=OPTIONAL, folder=tmp_path)
    assert done.stderr == "" and len(done.stdout.splitlines()) == len(CALLS)
    for line, extra in zip(done.stdout.splitlines(), CALLS.values(), strict=True):
        assert re.fullmatch(rf'MissingPackage .+ needs .+\. Write: pip install "bilevel\[{extra}\]"', line)
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_the_command_without_its_packages_is_one_message():
    done = run("import runpy; runpy.run_module('bilevel', run_name='__main__')", without=["typer"])
    message = 'Error: The command bilevel needs typer. Write: pip install "bilevel[all]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_command_without_its_extra_is_one_message(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    program = "sys.argv = ['bilevel', 'tune', 'a.csv', '--target', 'y']; import bilevel.cli; bilevel.cli.main()"
    done = run(program, without=["sklearn", "pandas", "pyarrow"], folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1
    assert 'Write: pip install "bilevel[table]"' in done.stderr


def test_every_public_name_needs_no_extra_and_solve_has_no_bar_without_rich():
    program = (
        "import torch, bilevel as bl\n"
        "for name in bl.__all__: getattr(bl, name)\n"
        "problem = bl.Problem(lambda w, lam, _: (w - lam).square().sum(), lambda w, *_: w.sum(), torch.zeros_like)\n"
        "settings = dict(dynamics=bl.GradientDescent(0.1), steps=3, iterations=2, progress=True)\n"
        "print(bl.solve(problem, torch.ones(2), bl.Task(None, None), **settings).outcome)\n"
    )
    done = run(program, without=OPTIONAL)
    assert (done.stdout, done.stderr) == ("Ran all 2 hyperiterations.\n", "")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The Python of a new environment that holds this package, installed by pip, and what its base requires."""
    pytest.importorskip("hatchling", reason="hatchling builds the package; the extra `test` brings it")
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    place = Path(run("import sysconfig; print(sysconfig.get_path('purelib'))", python=python).stdout.strip())
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in with_requirements([Requirement(line).name for line in required]):
        for top in {file.parts[0] for file in distribution(name).files} - {"..", "__pycache__"}:
            (place / top).exists() or (place / top).symlink_to(distribution(name).locate_file(top))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(home / "wheels"), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    wheel = next((home / "wheels").glob("bilevel-*.whl"))
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    return python


def with_requirements(names):
    """The distributions, what they require, and so on; extras and other systems left out."""
    found = []
    while names:
        name, *names = names
        if name not in found:
            found.append(name)
            lines = map(Requirement, distribution(name).requires or [])
            names += [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_a_fresh_environment_runs_the_readmes_problem_and_names_what_is_missing(fresh, tmp_path):
    done = run("import rich", python=fresh, PYTHONPATH="")
    assert "No module named 'rich'" in done.stderr, "the environment is not fresh"
    assert_prints_what_the_readme_shows(
        run(BEGIN + "\n".join(code for code, _ in PROBLEM), python=fresh, folder=tmp_path, PYTHONPATH="")
    )
    done = run(EVERY_CALL, python=fresh, folder=tmp_path, PYTHONPATH="")
    for line, extra in zip(done.stdout.splitlines(), CALLS.values(), strict=True):
        assert line == "It worked." or f'Write: pip install "bilevel[{extra}]"' in line
    assert done.stdout.count("It worked.") == 1, "torch brings filelock, so that folders can be locked"
    for command in ([fresh, "-m", "bilevel"], [fresh.with_name("bilevel")]):
        done = subprocess.run([*command, "train"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        assert done.stderr == 'Error: The command bilevel needs typer and rich. Write: pip install "bilevel[all]"\n'
