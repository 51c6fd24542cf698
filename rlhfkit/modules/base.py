"""``PolicyModule``: what every module with a language model shares: loading, optimizer, saving, forward, logging."""

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import PaddedBatch
from rlhfkit.data.types import Experience
from rlhfkit.losses import aggregate
from rlhfkit.models import (
    LoRA,
    PolicyOutput,
    adapter_disabled,
    has_adapter,
    load_causal_lm,
    load_tokenizer,
    policy_output,
)
from rlhfkit.models.load import Quantization, context_length, load_config, precision_dtype
from rlhfkit.models.lora import save_initial_adapter
from rlhfkit.models.row_check import ROW_TOLERANCES, UnpaddedBatch, row_difference
from rlhfkit.modules.checkpointing import CheckpointMixin
from rlhfkit.modules.clipping import clip_each_child
from rlhfkit.modules.metrics import EpochMetric, StepMetrics, as_metrics
from rlhfkit.modules.optim import SCHEDULES, learning_rate_factor
from rlhfkit.validation import check_integer, check_number


class PolicyModule(CheckpointMixin):
    """A LightningModule around one causal language model, ``self.policy``.

    Subclasses write ``training_step`` (and usually a short ``loss``). Automatic optimization; the network is built in
    ``configure_model``, so that sharded strategies can build it sharded.

    Args:
        model: Folder or hub name of the policy; a folder that holds an adapter is trained on.
        lr: Peak learning rate of AdamW.
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's two averaging factors (0.9 and 0.95: OpenRLHF's default).
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: ``constant``, ``linear`` or ``cosine`` (both decay to 0 at the end of training) after warm-up.
        attention: Transformers' ``attn_implementation``; ``None``: packed attention where the model allows it.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters and freeze the policy's own weights; checkpoints hold the adapters only.
        quantization: ``nf4`` holds the frozen weights in 4 bits (QLoRA); needs ``lora``.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts, logged as ``aux_loss``,
            and of a critic that is one (0.001 in Transformers' configurations of Mixtral and Qwen); 0: none.
        trust_remote_code: Run Python code that comes with the model. Off unless asked.

    Raises:
        ValueError: If an argument is out of range.
    """

    policy: nn.Module
    reference: nn.Module
    batch_types: ClassVar[tuple[type, ...]] = ()
    """Kinds of batches that it learns from; others, subclasses too, are refused. Empty: whatever comes."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        lr_schedule: str = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        router_aux_loss_coef: float = 0.0,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_number("lr", lr, above=0)
        check_number("weight_decay", weight_decay, minimum=0)
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        for factor in betas:
            check_number("each of betas", factor, minimum=0, below=1)
        check_integer("warmup_steps", warmup_steps, minimum=0)
        if lr_schedule not in SCHEDULES:
            raise ValueError(f"lr_schedule must be one of {', '.join(SCHEDULES)}, got {lr_schedule!r}")
        check_number("router_aux_loss_coef", router_aux_loss_coef, minimum=0, why="0 is no such loss")
        # For checkpoints and loggers only: code reads the attributes below.
        self.save_hyperparameters()
        self.model_name = model
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_steps = warmup_steps
        self.lr_schedule = lr_schedule
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        self.lora = LoRA.of(lora)
        self.hparams.update(lora=None if self.lora is None else self.lora.plain())  # safe to load, unlike an object
        self.quantization = quantization
        self.router_aux_loss_coef = router_aux_loss_coef
        self.trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._rows_checked = False
        self._model_config: Any = None
        self._epoch_metrics: dict[str, tuple[Any, EpochMetric]] = {}
        self._step_metrics = StepMetrics()

    # ------------------------------------------------------------------ building

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_name, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    @property
    def model_config(self) -> Any:
        """The model's configuration, read when first needed; no weights are loaded for it."""
        if self._model_config is None:
            self._model_config = load_config(self.model_name, trust_remote_code=self.trust_remote_code)
        return self._model_config

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens that the model knows."""
        return getattr(self.model_config.get_text_config(), "vocab_size", None)

    @property
    def context_length(self) -> int | None:
        """Tokens that the model can see; ``None``: any number."""
        return context_length(self.model_config)

    @property
    def model_dtype(self) -> torch.dtype:
        """Type of the weights under the Trainer's precision; float32 without a Trainer."""
        return torch.float32 if self._trainer is None else precision_dtype(self._trainer.precision)

    def build_policy(self) -> nn.Module:
        """Load the policy; override to wrap or change it."""
        return load_causal_lm(
            self.model_name,
            dtype=self.model_dtype,
            attention=self.attention,
            gradient_checkpointing=self.gradient_checkpointing,
            lora=self.lora,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
        )

    def configure_model(self) -> None:
        """Build the network once; Lightning calls this again before validation."""
        if hasattr(self, "policy"):
            return
        self.policy = self.build_policy()
        if not self.needs_reference:
            return
        if has_adapter(self.policy):
            save_initial_adapter(self.policy)
            return
        self.reference = self.build_policy().requires_grad_(False).eval()
        # Lightning 2.6 warns of every module in eval mode when fitting starts; this one is meant to be.
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for :meth:`reference_model`; override it."""
        return False

    @property
    def scores_samples(self) -> bool:
        """Whether the module has a reward model whose scores are added to the rewards of samples."""
        return False

    def reward_model_scores(self, experience: Experience) -> Tensor:
        """(B,) scores of the module's reward model; only called where :attr:`scores_samples` is true."""
        raise NotImplementedError(f"{type(self).__name__} has no reward model")

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """The model that training started from, for a while: a frozen copy, or the policy without its adapters.

        Example::

            with torch.no_grad(), self.reference_model() as reference:
                logprobs = policy_output(reference, batch, mask).logprobs
        """
        if hasattr(self, "reference"):
            yield self.reference
        else:
            with adapter_disabled(self.policy):
                yield self.policy

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse what a DataModule of another kind gives: fine-tuned on pairs, a model would learn rejected answers.

        The first batch of a fit is also checked for rows that see one another, see :meth:`row_problems`.

        Raises:
            TypeError: If the batch is none of ``batch_types``.
            RuntimeError: If what the policy says of a row depends on the other rows.
        """
        if self.batch_types and type(batch) not in self.batch_types:
            known = " or ".join(kind.__name__ for kind in self.batch_types)
            raise TypeError(
                f"{type(self).__name__} learns from {known}, got {type(batch).__name__}: take the DataModule that "
                "belongs to it, or name what your own gives in the module's batch_types"
            )
        if not self._rows_checked and isinstance(batch, PaddedBatch):
            self._rows_checked = True
            problems = self.row_problems(batch)
            if problems:
                raise RuntimeError(f"{'; '.join(problems)}. Load the model with attention='sdpa' to train it")

    def row_problems(self, batch: PaddedBatch) -> list[str]:
        """Compare a random row of a batch alone with the same row among the others. A collective: two forward passes.

        Args:
            batch: This rank's, of at least one row.

        Returns:
            For each rank on which what the policy says of the row depends on the other rows, which row it is and how
            far the two are apart; the same on every rank.
        """
        # The first row of a packed batch comes before all others and cannot have seen them.
        row = random.Random(f"{self.trainer.global_step} {self.global_rank}").randrange(1, max(len(batch), 2))
        row = min(row, len(batch) - 1)
        training = self.policy.training
        self.policy.eval()
        with self.trainer.precision_plugin.forward_context():
            far = row_difference(self.policy, batch, row)
        self.policy.train(training)
        mine = torch.tensor([row, far], dtype=torch.float64, device=self.device)
        found = cast(Tensor, self.all_gather(mine)).reshape(-1, 2).tolist()
        tolerance = ROW_TOLERANCES[precision_dtype(self.trainer.precision, compute=True)]
        return [
            f"row {int(row)} of a batch of rank {rank} differs by {far:.2g} a token from what it is alone "
            f"(allowed: {tolerance:g}): sequences of a batch see one another"
            for rank, (row, far) in enumerate(found)
            if math.isfinite(far) and far > tolerance  # a policy that has diverged is somebody else's to report
        ]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer trains: one group for each child with parameters that require a gradient.

        Add ``"lr"`` to a group for a learning rate of its own.
        """
        groups = {
            name: [parameter for parameter in child.parameters() if parameter.requires_grad]
            for name, child in self.named_children()
        }
        return [{"params": parameters, "name": name} for name, parameters in groups.items() if parameters]

    def configure_optimizers(self) -> Any:
        """AdamW over everything that requires a gradient, with warm-up and decay per optimizer step."""
        if self._trainer is not None:  # NaN would make every gradient NaN, and Lightning takes it
            clip = self.trainer.gradient_clip_val
            check_number("Trainer(gradient_clip_val=...)", clip, minimum=0, optional=True, infinite=True)
        optimizer = torch.optim.AdamW(
            self.parameter_groups(),
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
        )
        kind, warmup = self.lr_schedule, self.warmup_steps
        if kind == "constant" and not warmup:
            return optimizer
        total: int | None = None
        if kind != "constant":
            steps = self.trainer.estimated_stepping_batches
            if steps == math.inf:
                raise ValueError(f"lr_schedule={kind!r} decays to the end of training: give Trainer(max_epochs=...)")
            total = int(steps)
        factor = partial(learning_rate_factor, schedule=kind, warmup_steps=warmup, total_steps=total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip policy, critic and other children each by its own norm, as the engines of ``rlhf_zero*`` do."""
        clip_each_child(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the module, but keep float32 buffers in float32, as DeepSpeed does, and float32 adapters.

        Lightning's ``bf16-true`` casts buffers too, among them the frequencies of rotary embeddings: in 16 bits the
        angle of token 1,000 is wrong by whole radians, and the engine, which casts no buffer, disagrees.
        """
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        adapters = [(one, one.data) for name, one in self.named_parameters() if ".lora_" in name]
        result = super()._apply(fn, recurse)
        for matrix, values in adapters:
            if values.dtype == torch.float32 and matrix.dtype in (torch.float16, torch.bfloat16):
                matrix.data = values.to(matrix.device)
        for name, buffer in before.items():
            home, _, leaf = name.rpartition(".")
            owner = self.get_submodule(home)
            cast = owner._buffers[leaf]
            if cast is not None and cast.dtype in (torch.float16, torch.bfloat16):
                owner._buffers[leaf] = buffer.to(cast.device)
        return result

    # ------------------------------------------------------------------ forward

    @property
    def balances_routers(self) -> bool:
        """Whether the forward pass that comes has to give the router's loss: in training, where it has a weight."""
        return bool(self.router_aux_loss_coef) and torch.is_grad_enabled()

    def token_mean(self, values: Tensor, batch: Experience) -> Tensor:
        """Mean over the trained tokens of the whole optimizer step, all micro-batches and ranks, as this batch's share.

        Args:
            values: (B, T-1).
            batch: Gives the mask and the count.

        Returns:
            Scalar; Lightning's average over micro-batches and ranks is the exact mean.
        """
        return aggregate(values, batch.action_mask, "token-mean", batch.token_denominator)

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor) -> Tensor:
        """Log-probs at temperature 1 of given sequences. A collective under sharded strategies.

        Args:
            token_ids: (B, T) int64, no padding.

        Returns:
            (B, T-1) float32 on the CPU.
        """
        batch = UnpaddedBatch(token_ids.to(self.device))
        training = self.policy.training
        self.policy.eval()  # an engine has no dropout
        with self.trainer.precision_plugin.forward_context():
            out: PolicyOutput = policy_output(self.policy, batch, torch.ones_like(batch.input_ids[:, 1:]).bool())
        self.policy.train(training)
        return out.logprobs.cpu()

    def log_means(self, metrics: Mapping[str, Tensor]) -> None:
        """Log scalars as plain means over the micro-batches of the epoch (in reinforcement learning: the iteration).

        Right for losses and whatever else has the ``denominator`` of its optimizer step, over all ranks.

        Args:
            metrics: Detached scalars by name.
        """
        self.log_dict(dict(metrics), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def log_metrics(
        self, metrics: Mapping[str, Tensor], weight: Tensor | float, *, prefix: str = "", suffix: str = ""
    ) -> None:
        """Log what a loss says of one micro-batch, over the epoch (in training or validation) and all ranks.

        Each :class:`~rlhfkit.losses.Metric` reduces as it says; a plain scalar as a mean.

        Args:
            metrics: Detached scalars by name.
            weight: Scalar, what plain ones are the means of: trained tokens, or pairs, of the micro-batch.
            prefix: Put before each name.
            suffix: Put behind it.
        """
        if self._trainer is None:
            return
        stage = (id(self.trainer), self.trainer.state.stage, self.trainer.current_epoch)
        for name, metric in as_metrics(metrics, weight, self.device).items():
            key = f"{prefix}{name}{suffix}"
            begun, epoch_metric = self._epoch_metrics.get(key, (None, None))
            if epoch_metric is None or begun != stage:  # an epoch that broke off leaves something behind
                epoch_metric = EpochMetric(metric).to(self.device)
                self._epoch_metrics[key] = (stage, epoch_metric)
            epoch_metric.update(metric)
            self.log(key, epoch_metric, on_step=False, on_epoch=True, batch_size=1, metric_attribute="_epoch_metrics")

    def log_step(self, metrics: Mapping[str, Tensor], weight: Tensor | float = 1.0) -> None:
        """Log what a loss says of one micro-batch, over those of its optimizer step and all ranks.

        They are put together and logged when the step is made.

        Args:
            metrics: Detached scalars by name, the same names in every micro-batch; ``loss`` is on the progress bar.
            weight: Scalar, what plain ones are the means of. 1: shares of a mean over the step, as the loss is.
        """
        if self._trainer is not None:
            step = (id(self.trainer), self.trainer.global_step)
            self._step_metrics.add(step, as_metrics(metrics, weight, self.device))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log what the micro-batches of the step have said."""
        for name, value in self._step_metrics.take().items():
            self.log(name, value, prog_bar=name == "loss", on_step=True, on_epoch=False, batch_size=1)
