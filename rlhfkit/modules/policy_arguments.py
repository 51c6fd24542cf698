"""``PolicyArguments``: what all modules take beside their own arguments, for editors, type checkers and command lines.

A module writes ``**kwargs: Unpack[PolicyArguments]`` and hands them to :class:`~rlhfkit.modules.PolicyModule`, which
has the defaults and the checks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from rlhfkit.models import LoRA
from rlhfkit.models.load import Quantization
from rlhfkit.modules.optimizers.factories import OptimizerFactory
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import GivenPart


class PolicyArguments(TypedDict, total=False):
    """Optimizer, loading of the model, and parts; all may be left out.

    Args:
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        betas: AdamW's two averaging factors (0.9 and 0.95: OpenRLHF's default).
        optimizer: ``adamw``, ``adamw_8bit``, ``muon``, ``sgd``, ``adafactor`` (:mod:`rlhfkit.modules.optimizers`), or a
            function of parameter groups and ``lr`` or a class of optimizers, itself or by its dotted name
            (``torch.optim.RAdam``).
        optimizer_arguments: More arguments of ``optimizer``, for example ``{"eps": 1e-6}``.
        parameter_options: ``lr`` and ``weight_decay`` of parts: ``embeddings``, ``heads``, ``matrices``, ``vectors``,
            ``stacks`` (of experts), a child (``critic``) or both (``critic.heads``), which wins.
        warmup_steps: Optimizer steps of linear warm-up.
        warmup_ratio: Warm-up as a part of the run's optimizer steps, instead of ``warmup_steps``.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). The formulas are those of
            :func:`~rlhfkit.modules.optimizers.schedules.learning_rate_factor`.
        min_lr_ratio: The rate at the end, as a part of the peak; not with ``constant``.
        decay_ratio: The part of the run in which ``wsd`` decays, only with it (0.2: Hägele et al., 2024,
            arXiv:2405.18392).
        attention: How attention is computed. ``None`` or ``auto``: packed where the model can be packed, with the first
            kernel that can run, else padded. ``varlen`` (torch's ``varlen_attn``), ``flash_attention_2``,
            ``flash_attention_3`` (packages ``flash_attn`` and ``flash_attn_interface``) and ``buckets`` (torch's
            ``scaled_dot_product_attention`` over sequences of similar length): packed with this kernel. Else
            Transformers' ``attn_implementation``, padded: ``eager``, ``sdpa`` (refused where it would leave out a soft
            cap), ``flex_attention``, ``flash_attention_4``, a kernel on the hub (``organization/name``), or one
            registered with ``transformers.AttentionInterface``.
        gradient_checkpointing: Recompute activations in the backward pass.
        offload_activations: Keep in CPU memory what ``gradient_checkpointing`` holds until the backward pass; for long
            rows on GPUs (ALST: Bekman et al., 2025, arXiv:2506.13996).
        tiled_mlp: Compute dense MLPs in tiles of this many tokens, which the backward pass recomputes: their inner
            activations exist for one tile only. ``True``: tiles of the hidden size (ALST's).
        liger_kernels: Compute norms, rotary embeddings and MLPs of policy and critic with Liger's Triton kernels (Hsu
            et al., 2024, arXiv:2410.10989); needs a GPU and the extra ``liger``.
        lora: Train adapters, not the model's own weights; checkpoints then hold the adapters only. ``None``: all
            weights, or the adapter that ``model`` holds.
        quantization: ``nf4`` holds the frozen weights in 4 bits (QLoRA); needs ``lora``.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts, policy or critic, logged as
            ``aux_loss`` (0.001 in Transformers' configurations of Mixtral and Qwen); 0: not computed.
        trust_remote_code: Run Python code that comes with the model.
        parts: More features, each a :class:`~rlhfkit.Part`, its dotted name, or, as in a configuration file,
            ``{"class_path": ..., "init_args": {...}}``.
    """

    weight_decay: float
    betas: tuple[float, float]
    optimizer: str | OptimizerFactory
    optimizer_arguments: Mapping[str, Any] | None
    parameter_options: Mapping[str, Mapping[str, float]] | None
    warmup_steps: int
    warmup_ratio: float | None
    lr_schedule: Schedule
    min_lr_ratio: float
    decay_ratio: float
    attention: str | None
    gradient_checkpointing: bool
    offload_activations: bool
    tiled_mlp: bool | int
    liger_kernels: bool
    lora: LoRA | None
    quantization: Quantization | None
    router_aux_loss_coef: float
    trust_remote_code: bool
    parts: Sequence[GivenPart]


class ReferenceArguments(PolicyArguments, total=False):
    """Those of a module with a reference model, see :class:`~rlhfkit.modules.ReferenceModule`.

    Args:
        ref_cache: Folder for log-probs that are computed before training, only with ``precompute_ref_log_probs``;
            ``None``: ``rlhfkit/reference_logprobs`` in the cache folder of ``datasets``.
        max_tokens_per_forward: Tokens per forward pass of ``precompute_ref_log_probs``; only with it.
    """

    ref_cache: str | None
    max_tokens_per_forward: int
