"""One virtual environment per peer. The requirements of the peers conflict, and the package depends on no peer."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".bench"


class NotInstalled(Exception):
    """The environment could not be made. The message is the reason."""


def python_of(environment: str | None, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment, which is made on first use. If `environment` is None, the running interpreter.

    `constraints.txt` pins the CPU build of torch. Without it pip would download several gigabytes of CUDA packages for
    each torch peer.
    """
    if environment is None:
        return Path(sys.executable)
    folder = FOLDER / environment
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker, wanted = folder / "installed.txt", "\n".join(requirements)
    if marker.exists() and marker.read_text() == wanted:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
        *requirements,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(_reason(done.stderr))
    marker.write_text(wanted)
    return python


def single_threaded() -> dict[str, str]:
    """The environment variables of a worker: one thread in every library, and no accelerator."""
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
    )
    jax = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    return {**os.environ, **threads, **jax, "PYTHONDONTWRITEBYTECODE": "1"}


def _reason(output: str) -> str:
    """pip's last error, without the addresses it tried."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR") and "://" not in line]
    return errors[-1].removeprefix("ERROR: ") if errors else "pip failed"
