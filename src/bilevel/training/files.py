"""Tensors in files: safetensors, written atomically, checked when read. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel import extras
from bilevel.errors import BilevelError
from bilevel.files import write_bytes

# The metadata of a safetensors file is a dict of texts, written in no fixed order. Ours is one JSON object under one
# key, so that equal content is equal bytes.
FACTS, DIGEST = "bilevel", "checksum"
# More tensors than any network here has. A forged header may name a million empty ones.
MOST_TENSORS = 20_000


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """The tensors and some JSON facts as one safetensors file."""
    write_bytes(path, packed(tensors, facts))


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> bytes:
    """The content of such a file."""
    safetensors = extras.load("safetensors.torch", extra="learn", purpose="Writing a safetensors file")
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = json.dumps({**(facts or {}), DIGEST: digest(dense, facts or {})}, sort_keys=True)
    content: bytes = safetensors.save(dense, {FACTS: metadata})
    return content


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file. A damaged file is a BilevelError that says what is wrong."""
    safetensors = extras.load("safetensors", extra="learn", purpose=f"Reading {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            if len(names) > MOST_TENSORS:
                raise ValueError(f"it holds {len(names):,} tensors, and at most {MOST_TENSORS:,} are read")
            tensors = {name: file.get_tensor(name) for name in names}
        facts = json.loads(metadata.get(FACTS, "{}"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a JSON object")
        # Files of other programs have no such metadata. In a file of ours, damage may have hit their names.
        if metadata.keys() - {FACTS, "format"} or (FACTS in metadata and DIGEST not in facts):
            raise ValueError("its metadata are not those that were written")
    except FileNotFoundError as error:
        raise BilevelError(f"{path} does not exist.") from error
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise BilevelError(f"{path} is damaged: {error}.") from error
    if facts.pop(DIGEST, None) not in (None, digest(tensors, facts)):
        raise BilevelError(f"{path} is damaged: its content does not match its checksum.")
    return tensors, facts


def digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """A checksum of all numbers of the tensors, and of facts in JSON's types."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
