"""Model folders: written atomically, and told apart when their weights change."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

DType = Literal["float32", "bfloat16", "float16"]
"""Type of written weights."""


@contextmanager
def atomic_folder(output: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, renamed to ``output`` if the block ends without an error, removed otherwise.

    Raises ``FileExistsError`` if ``output`` exists and ``overwrite`` is false.
    """
    folder = Path(output)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists: choose another output, or replace it with overwrite")
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.is_dir():
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def resolve_dtype(dtype: DType | None, model: str, *, trust_remote_code: bool) -> torch.dtype:
    """Return the type to write weights in; ``None``: that of ``model``, which training started from."""
    from transformers import AutoConfig

    if dtype is None:
        found = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).dtype
        return found if isinstance(found, torch.dtype) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def weights_stamp(model: str) -> list[list[Any]]:
    """Size and modification time of a folder's weight files, to notice changed weights; empty for hub names."""
    files = sorted(path for path in Path(model).expanduser().glob("*") if path.suffix in (".safetensors", ".bin"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
