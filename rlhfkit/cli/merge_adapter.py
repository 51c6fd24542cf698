"""``rlhfkit merge-adapter``: merge a LoRA adapter into its base model, as a folder that needs no peft."""

import os
from pathlib import Path

from rlhfkit.cli.folders import DType, atomic_folder, resolve_dtype
from rlhfkit.models.load import base_model_name, existing_name, load_causal_lm, load_tokenizer
from rlhfkit.models.lora import adapter_base
from rlhfkit.models.weights.files import save_weights
from rlhfkit.rollout.weight_sync.source import ModuleWeights


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
        model = load_causal_lm(adapter, trust_remote_code=trust_remote_code)
        save_weights(model, folder, {name: tensor.clone() for name, tensor in ModuleWeights(model, dtype=written)})
        load_tokenizer(adapter, trust_remote_code=trust_remote_code).save_pretrained(folder)
    return Path(output)
