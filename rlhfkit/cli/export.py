"""``rlhfkit export`` and ``rlhfkit merge-adapter``: model folders that Transformers, peft and vLLM load."""

import logging
import os
import pkgutil
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rlhfkit.models.attention.families import sees_images
from rlhfkit.models.load import ModelLoading, base_model_name, existing_name, load_causal_lm, load_tokenizer
from rlhfkit.models.lora import adapter_base
from rlhfkit.models.weights.files import save_weights
from rlhfkit.modules.checkpointing import CLASSES, CheckpointMixin
from rlhfkit.rollout.weight_sync.source import ModuleWeights

log = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16"]
"""Type of written weights."""


def export(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    child: str = "policy",
    adapter: bool = False,
    dtype: DType | None = None,
    model: str | None = None,
    module: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write one model of a checkpoint and its tokenizer as a Hugging Face folder, in one process without a GPU.

    The checkpoint is a file of plain Lightning, or a directory of a DeepSpeed strategy of rlhfkit, of any ZeRO stage
    and number of ranks.

    Example::

        rlhfkit export runs/last.ckpt models/policy --dtype bfloat16

    Args:
        checkpoint: File or directory.
        output: Folder to write.
        child: Which of the module's models: ``policy``, ``critic``.
        adapter: Write the LoRA adapter alone, for peft, instead of merging it into the weights.
        dtype: Type of the written weights; ``None``: that of the model which training started from, or float32 for an
            adapter alone.
        model: Folder or hub name of that model, if it has moved; ``None``: as in the checkpoint.
        module: Dotted name of the module's class; ``None``: as in the checkpoint. Needed for a class defined in a
            script that builds its model in its own way.
        overwrite: Replace the output if it exists.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the output exists.
        ValueError: If the checkpoint is not of a module of rlhfkit, has no such child, or does not fit its model.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    with atomic_folder(output, overwrite=overwrite) as folder:
        about, weights = _read_directory(path, child) if path.is_dir() else _read_file(path, child)
        hyperparameters = dict(about.get("hyper_parameters") or {})
        if "model" not in hyperparameters or not (module or about.get(CLASSES)):
            raise ValueError(
                f"{path} was not saved from a module of rlhfkit: it does not name the model that was trained"
            )
        if model is not None:
            hyperparameters["model"] = model
        made = _module([module] if module else about[CLASSES], hyperparameters)
        made.restore_tokenizer(about)
        _build(made, child)
        _load(made, child, weights, path)
        start, trusted = base_model_name(hyperparameters["model"]), bool(made.trust_remote_code)
        own = adapter and dtype is None  # small, and in float32 beside weights of 16 bits
        written = None if own else resolve_dtype(dtype, start, trust_remote_code=trusted)
        made.save_pretrained(folder, child=child, adapter=adapter, dtype=written)
    return Path(output)


def _read_file(path: Path, child: str) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    about = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    prefix = f"{child}."
    state = about.get("state_dict", {})
    return about, {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _read_directory(path: Path, child: str) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    from rlhfkit.strategies.checkpoint.io import rank_file, saved_weights
    from rlhfkit.strategies.checkpoint.verification import verify

    engines = verify(path)["engines"]
    about = torch.load(path / rank_file(0), map_location="cpu", weights_only=True, mmap=True)
    if child not in engines:
        raise ValueError(f"{path} holds {', '.join(sorted(engines))}, not {child!r}")
    return about, saved_weights(path, child)


def _module(classes: Sequence[str], hyperparameters: Mapping[str, Any]) -> CheckpointMixin:
    """Create the module, or its nearest base class that can be imported and takes its hyperparameters."""
    failures: list[str] = []
    for name in classes:
        try:
            found = pkgutil.resolve_name(name)
            known = {one for base in found.__mro__ for one in signature(base.__init__).parameters}
            made: CheckpointMixin = found(**{key: value for key, value in hyperparameters.items() if key in known})
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            failures.append(f"{name}: {error}")
            continue
        if failures:
            log.warning("exported as a %s, because of %s", name, "; ".join(failures))
        return made
    raise ValueError(f"no class of the module could be created: {'; '.join(failures)}")


def _build(module: CheckpointMixin, child: str) -> None:
    """Build a child alone if the module has a method for it, since memory may not hold all of them."""
    if hasattr(module, f"build_{child}"):
        setattr(module, child, getattr(module, f"build_{child}")())
    else:
        module.configure_model()


def _load(module: CheckpointMixin, child: str, weights: dict[str, Tensor], path: Path) -> None:
    """Load a child's weights; those that are loaded by name may be missing."""
    if not weights:
        raise ValueError(f"{path} holds no weights of {child!r}")
    result = module.get_submodule(child).load_state_dict(weights, strict=False)
    by_name = module.loaded_by_name()
    wrong = [name for name in result.missing_keys if not by_name(f"{child}.{name}")] + list(result.unexpected_keys)
    if wrong:
        raise ValueError(
            f"the weights of {child!r} in {path} do not fit {module.model_name!r}: {wrong[:8]} are missing or "
            "unknown; give module='my_package.MyModule' if its class builds the model differently"
        )


def merge_adapter(
    adapter: str,
    output: str | os.PathLike[str],
    *,
    dtype: DType | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Path:
    """Merge an adapter of a causal language model into the weights of its base model.

    Example::

        rlhfkit merge-adapter models/adapter models/merged --dtype bfloat16

    Args:
        adapter: Folder with ``adapter_config.json``, as peft and ``rlhfkit export --adapter true`` write it.
        output: Folder to write.
        dtype: Type of the written weights; ``None``: that of the base model. The sum is computed in float32.
        trust_remote_code: Run Python code that comes with the model.
        overwrite: Replace the output if it exists.

    Returns:
        The output folder.

    Raises:
        ValueError: If the folder holds no adapter.
        FileExistsError: If the output exists.
    """
    if adapter_base(existing_name(adapter)) is None:
        raise ValueError(f"{adapter} holds no adapter (no adapter_config.json)")
    written = resolve_dtype(dtype, base_model_name(adapter), trust_remote_code=trust_remote_code)
    with atomic_folder(output, overwrite=overwrite) as folder:
        model = load_causal_lm(adapter, loading=ModelLoading(trust_remote_code=trust_remote_code))
        save_weights(model, folder, {name: tensor.clone() for name, tensor in ModuleWeights(model, dtype=written)})
        if sees_images(cast(Any, model).config):
            from rlhfkit.models.vision import load_processor

            start = base_model_name(adapter)
            load_processor(start, trust_remote_code=trust_remote_code).save_pretrained(folder)
        load_tokenizer(adapter, trust_remote_code=trust_remote_code).save_pretrained(folder)
    return Path(output)


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
