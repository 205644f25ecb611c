"""Tensors in files: safetensors, written atomically, checked when read. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bilevel.errors import BilevelError

# The metadata of a safetensors file is text by name, written in no fixed order; ours is one JSON object under one name,
# so that equal content is equal bytes.
FACTS, DIGEST = "bilevel", "checksum"


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file as a whole: whoever reads it, even after a crash, finds the old content or the new one."""
    scratch = ""
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise not_written(path, error) from error


class NotWritten(BilevelError):
    """A file could not be written; what was there before is unchanged."""


def not_written(path: Path, error: OSError) -> NotWritten:
    return NotWritten(f"{path} could not be written: {error.strerror or error}. What was there before is unchanged.")


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BilevelError(f"{path} is not valid JSON ({error}).") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """The tensors and some JSON facts as one safetensors file."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = json.dumps({**(facts or {}), DIGEST: _digest(dense, facts or {})}, sort_keys=True)
    write_bytes(path, save(dense, {FACTS: metadata}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file; a BilevelError says what is wrong with a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        facts = json.loads(metadata.get(FACTS, "{}"))
    except FileNotFoundError as error:
        raise BilevelError(f"{path} does not exist.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise BilevelError(f"{path} is damaged: {error}.") from error
    if facts.pop(DIGEST, None) not in (None, _digest(tensors, facts)):
        raise BilevelError(f"{path} is damaged: its content does not match its checksum.")
    return tensors, facts


def _digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
