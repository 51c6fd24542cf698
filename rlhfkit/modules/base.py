"""``PolicyModule``, the base of all modules: loads the model, makes the optimizer, saves, and logs."""

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from rlhfkit.argument_names import AnswersNames, constructor_arguments
from rlhfkit.data.batch import PaddedBatch, moved, on_both
from rlhfkit.data.types import Experience
from rlhfkit.first_lines import print_run, print_sizes, replace_model_summary, silence_tips
from rlhfkit.losses import LossOutput, aggregate, sum_losses
from rlhfkit.losses.aggregation import check_loss_output
from rlhfkit.models import LoRA, PolicyOutput, adapter_disabled, load_causal_lm, load_tokenizer, policy_output
from rlhfkit.models.attention.families import sees_images
from rlhfkit.models.forward import UnpaddedBatch, packs_batches, unwrap
from rlhfkit.models.heads import ROW_TOLERANCES, row_difference
from rlhfkit.models.load import (
    ModelLoading,
    base_model_name,
    context_length,
    disable_dropout,
    existing_name,
    load_config,
    precision_dtype,
    tokenizer_differences,
    with_padding_token,
)
from rlhfkit.models.lora import has_adapter, save_initial_adapter
from rlhfkit.modules.checkpointing import CheckpointMixin
from rlhfkit.modules.gpu_memory import require_gpu_memory
from rlhfkit.modules.metrics import EpochMetric, StepMetrics, as_metrics
from rlhfkit.modules.optim import Optimization, OptimizationMixin
from rlhfkit.parts import Child, GivenPart, Part, attach_all, hooks_of, make_part, part_name
from rlhfkit.trainer_parts import callbacks_of
from rlhfkit.validation import check_number

silence_tips()  # of a module that is imported from its own room

_BAR = "bar:"
"""Begins the names of metrics of a step that are on the progress bar only."""


class PolicyModule(OptimizationMixin, CheckpointMixin, metaclass=AnswersNames):
    """A LightningModule around one causal language model, ``self.policy``.

    Subclasses write ``training_step`` and usually a short ``loss``; optimization is automatic. ``configure_model``
    builds the network, so that sharded strategies can build it sharded. Arguments are attributes of the same name
    (names of models: ``model_name``, ...); ``hparams`` hold plain copies for checkpoints and loggers.

    Args:
        model: Folder or hub name of the policy. If the folder holds an adapter, training continues with it.
        lr: Peak learning rate.
        optimization: Optimizer, warm-up, schedule of the learning rate, weight decay: an
            :class:`~rlhfkit.Optimization`, or its fields by name.
        lora: Train adapters, not the model's own weights; checkpoints then hold the adapters only. ``None``: all
            weights, or the adapter that ``model`` holds.
        loading: Attention, gradient checkpointing, kernels, quantization, code of the model's own and other technical
            options of policy and critic: a :class:`~rlhfkit.ModelLoading`, or its fields by name.
        parts: More features, each a :class:`~rlhfkit.Part`, its dotted name, or, as in a configuration file,
            ``{"class_path": ..., "init_args": {...}}``.

    Raises:
        ValueError: If an argument is out of range.
    """

    policy: nn.Module
    reference: nn.Module
    batch_types: ClassVar[tuple[type, ...]] = ()
    """Types of batches that the module trains on; others, subclasses included, are refused. Empty: any type."""
    without_dropout: ClassVar[bool] = False
    """Whether the policy is loaded without dropout: where log-probs are compared it would be noise."""
    bar_metrics: ClassVar[Mapping[str, str]] = {
        "rewards/accuracies": "accuracy",
        "rewards/margins": "margin",
        "prm/accuracy": "accuracy",
    }
    """Metrics of a step that the progress bar shows beside the loss, and their names there."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__()
        check_number("lr", lr, above=0)
        self.save_hyperparameters()
        taken = constructor_arguments(type(self))
        for name in {*self.hparams} - {*taken}:  # what a constructor gives to that of its base
            self.hparams.pop(name)
        self.lr = lr
        self.optimization = Optimization.of(optimization)
        self.loading = ModelLoading.of(loading)
        self.model_name = model
        self.lora = LoRA.of(lora)
        self.keep_plain(
            optimization=self.optimization.plain(),
            lora=None if self.lora is None else self.lora.plain(),
            loading=self.loading.plain(),
        )
        self._tokenizer: Any = None
        self._tokenizer_giver: str | None = None
        self._rows_checked = False
        self._model_config: Any = None
        self._epoch_metrics: dict[str, tuple[Any, EpochMetric]] = {}
        self._step_metrics = StepMetrics()
        self.own_parts: list[Part] = [*vars(self).get("own_parts", ())]
        """What arguments of the module stand for, in part set before this; the parts that are given come after them."""
        self.given_parts = [make_part(one) for one in parts]
        self.keep_plain(parts=[part.plain() for part in self.given_parts])  # arguments make the others again
        self.parts: list[Part] = []
        """All parts, once the module is made."""
        self.router_loss: Tensor | None = None
        """Of a mixture of experts in the last forward pass, where that gives no :class:`PolicyOutput`."""
        self.hooks = hooks_of(())
        """Methods of parts that the module calls, see :func:`~rlhfkit.parts.hooks_of`."""
        self.observers: list[Any] = []
        """:meth:`Part.observe` of the parts that override it; callbacks may append functions of an iteration."""
        self._attached = False
        self._children: dict[str, Child] = {}
        self.outputs: frozenset[str] = frozenset()
        """What the parts need of the policy's output beside log-probs."""

    def keep_plain(self, **arguments: Any) -> None:
        """Keep plain values as hyperparameters, safe to load, in place of objects; of arguments of the class only."""
        self.hparams.update({name: value for name, value in arguments.items() if name in self.hparams})

    def attach_parts(self) -> None:
        """Attach the parts; a module whose attributes they need calls it at the end of its constructor.

        A part that was given takes the place of a part of the module of its class, in the order too, or of one that
        writes the same fields.
        """
        own = self.in_place(self.own_parts)
        others = [part for part in self.given_parts if part not in own]
        replaced = {name for part in others for name in part.creates}
        own = [part for part in own if part in self.given_parts or part.creates.isdisjoint(replaced)]
        for part in (needed for one in (*own, *others) for needed in one.brings()):
            if not part.writes or not any({*part.writes} <= {*other.writes} for other in (*own, *others)):
                own.append(part)
        self.parts = [*own, *others]
        self._attached = True
        self._assemble()

    def add_part(self, part: Part) -> None:
        """Add a part after the module was made and before it is fitted; it is no hyperparameter.

        Raises:
            ValueError: If it does not fit the module.
        """
        self.parts.append(part)
        self._assemble()

    def in_place(self, own: Sequence[Part]) -> list[Part]:
        """Parts of the module, each or the first of its class that was given in its place."""
        return [next((one for one in self.given_parts if isinstance(one, type(part))), part) for part in own]

    def _assemble(self) -> None:
        """Attach the parts, and keep what is called when."""
        attach_all(self.parts, self)
        self.hooks = hooks_of(self.parts)
        self.observers = self.hooks["observe"]
        self.outputs = frozenset(name for part in self.parts for name in part.outputs)
        self._children = {name: child for part in self.parts for name, child in part.children().items()}
        frozen = (name for name, child in self._children.items() if not child.trained)
        self.frozen_children = (*dict.fromkeys((*type(self).frozen_children, *frozen)),)

    def with_terms(self, result: LossOutput, batch: Any, out: Any, old: Tensor | None = None) -> LossOutput:
        """Add the terms of parts to the loss of a micro-batch; ``old``: log-probs that ratios are taken to."""
        terms = [term(batch, out, old) for term in self.hooks["term"]]
        check_loss_output(f"{type(self).__name__}.loss", result)
        for term, given in zip(self.hooks["term"], terms, strict=True):
            check_loss_output(getattr(term, "__qualname__", "the term of a part"), given)
        return sum_losses(result, *terms) if terms else result

    def observed(self, batch: Any, out: Any) -> dict[str, Tensor]:
        """The metrics of parts of a micro-batch of data."""
        return {name: value for observe in self.observers for name, value in observe(batch, out, None).items()}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Each trained child, with its learning rate, and what parts make of these."""
        rates = {name: {"lr": child.lr} for name, child in self._children.items() if child.lr is not None}
        groups = [group | rates.get(group["name"], {}) for group in super().parameter_groups()]
        for changed in self.hooks["parameter_groups"]:
            groups = changed(groups)
        return groups

    # ------------------------------------------------------------------ building

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run: that of its DataModule or one that was set, else the model's, loaded when needed.

        Data, episodes, engines and exports use the same, so setting another than was given is a ValueError.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_name, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.take_tokenizer(tokenizer, f"{type(self).__name__}.tokenizer")

    @property
    def given_tokenizer(self) -> Any:
        """The run's tokenizer if it was given; ``None``: it is the model's own."""
        return None if self._tokenizer_giver is None else self._tokenizer

    def take_tokenizer(self, tokenizer: Any, giver: str) -> None:
        """Use a tokenizer in place of the model's own; ``giver`` says for messages where it was given.

        Raises:
            ValueError: If another one was given before.
        """
        if self._tokenizer_giver is None:
            self._tokenizer, self._tokenizer_giver = with_padding_token(tokenizer), giver
            return
        differences = tokenizer_differences(self._tokenizer, tokenizer)
        if differences:
            raise ValueError(
                f"a run has one tokenizer, and those of {self._tokenizer_giver} and {giver} differ in "
                f"{', '.join(differences)}: give both the same, or leave one of them out"
            )

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with the model may run."""
        return self.loading.trust_remote_code

    @property
    def model_config(self) -> Any:
        """The model's configuration, read when first needed without loading weights."""
        if self._model_config is None:
            self._model_config = load_config(self.model_name, trust_remote_code=self.trust_remote_code)
        return self._model_config

    @property
    def image_processor(self) -> Any:
        """The processor of a model that sees images; ``None``: it reads text only."""
        if not sees_images(self.model_config):
            return None
        from rlhfkit.models.vision import vision_processor

        name = base_model_name(existing_name(self.model_name))
        return vision_processor(name, self.model_config, trust_remote_code=self.trust_remote_code)

    @property
    def vocabulary_size(self) -> int | None:
        """Number of tokens with embeddings; ``None``: not in the model's configuration."""
        return getattr(self.model_config.get_text_config(), "vocab_size", None)

    @property
    def context_length(self) -> int | None:
        """Number of tokens that the model can attend to; ``None``: no limit."""
        return context_length(self.model_config)

    @property
    def model_dtype(self) -> torch.dtype:
        """Type of the weights under the Trainer's precision; float32 without a Trainer."""
        return torch.float32 if self._trainer is None else precision_dtype(self._trainer.precision)

    def build_policy(self) -> nn.Module:
        """Load the policy; override to wrap or change it."""
        model: nn.Module = load_causal_lm(self.model_name, dtype=self.model_dtype, lora=self.lora, loading=self.loading)
        if self.without_dropout:
            disable_dropout(model)
        return model

    def setup(self, stage: str) -> None:
        """Before the network is built, compare its weights with the memory of the GPU.

        Raises:
            RuntimeError: If they alone are larger.
        """
        super().setup(stage)
        if not self._attached:
            self.attach_parts()
        self._epoch_metrics = {}
        if self._trainer is not None:
            replace_model_summary(self._trainer)
            if not hasattr(self, "policy"):
                require_gpu_memory(self)

    def on_fit_start(self) -> None:
        """Print model, data and folders of the run."""
        print_run(self)

    def on_train_start(self) -> None:
        """Print the sizes of an epoch or iteration, and the number of updates."""
        print_sizes(self)

    def configure_model(self) -> None:
        """Build the models, those of parts too, and let the parts have them; Lightning may call this again."""
        if not hasattr(self, "policy"):
            self.policy = self.build_policy()
            if self.needs_reference and has_adapter(self.policy):
                save_initial_adapter(self.policy)
            elif self.needs_reference:
                self.reference = freeze(self.build_policy())
        for name, child in self._children.items():
            if not hasattr(self, name):
                setattr(self, name, child.build() if child.trained else freeze(child.build()))
        for part in self.parts:
            part.loaded()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or a part uses the initial model as :meth:`reference_model`; override it to get one."""
        return any(part.loads_reference for part in self.parts)

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is asked during training, here or elsewhere."""
        return self.needs_reference or any("reference" in part.children() for part in self.parts)

    def configure_callbacks(self) -> list[Callback]:
        """The parts, whose hooks Lightning calls and whose states it saves.

        Raises:
            ValueError: If a part was given to the Trainer.
        """
        if not self._attached:
            self.attach_parts()
        callbacks = callbacks_of(self.trainer)
        foreign = [one for one in callbacks if isinstance(one, Part) and one not in self.parts]
        loose = [part_name(one) for one in foreign if one.module is None]
        if loose:
            raise ValueError(
                f"{', '.join(loose)} is a part of a module, and Trainer(callbacks=...) was given it: give it to "
                f"{type(self).__name__}(parts=[...])"
            )
        callbacks[:] = [one for one in callbacks if one not in foreign]  # those of a module fitted before
        return [*super().configure_callbacks(), *self.parts]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Also save weights that parts change."""
        super().on_save_checkpoint(checkpoint)
        for part in self.parts:
            part.save_weights(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if needed, and restore weights of parts; without a Trainer their states, too."""
        super().on_load_checkpoint(checkpoint)
        if self._trainer is None:  # else the Trainer does it, after this
            states = checkpoint.get("callbacks", {})
            for part in self.parts:
                if part.state_key in states:
                    part.load_state_dict(states[part.state_key])
        for part in self.parts:
            part.load_weights(checkpoint)

    @property
    def scorer(self) -> Any:
        """The part that scores samples by models of the module; ``None``: there is none."""
        return next((part for part in self.parts if hasattr(part, "parts_of")), None)

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """Give access to the initial model: a frozen copy, or the policy without its adapters.

        Example::

            with torch.no_grad(), self.reference_model() as reference:
                logprobs = policy_output(reference, batch, mask).logprobs
        """
        if hasattr(self, "reference"):
            yield self.reference
        else:
            with adapter_disabled(self.policy):
                yield self.policy

    # ------------------------------------------------------------------ checks of the data

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check the type of the batch and, for the first batch, :meth:`row_problems`.

        Raises:
            TypeError: If the type is not in ``batch_types``: an ``SFTModule`` would learn rejected answers of pairs.
            RuntimeError: If the log-probs of a row depend on the other rows.
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
                raise RuntimeError(f"{'; '.join(problems)}. Give loading=ModelLoading(attention='eager') to train it")

    def row_problems(self, batch: PaddedBatch) -> list[str]:
        """Compare the output for a random row alone with that in its batch. A collective of two forward passes.

        Returns a description for each rank on which they differ, the same on every rank.
        """
        # Not the first row: in a packed batch it cannot attend to later rows.
        row = random.Random(f"{self.trainer.global_step} {self.global_rank}").randrange(1, max(len(batch), 2))
        row = min(row, len(batch) - 1)
        training = self.policy.training
        self.policy.eval()
        with self.trainer.precision_plugin.forward_context():
            difference = row_difference(self.policy, batch, row)
        self.policy.train(training)
        mine = torch.tensor([row, difference], dtype=torch.float64, device=self.device)
        found = cast(Tensor, self.all_gather(mine)).reshape(-1, 2).tolist()
        tolerance = ROW_TOLERANCES[precision_dtype(self.trainer.precision, compute=True)]
        return [
            f"row {int(row)} of a batch of rank {rank} differs by {difference:.2g} a token from what it is alone "
            f"(allowed: {tolerance:g}): sequences of a batch see one another"
            for rank, (row, difference) in enumerate(found)
            if math.isfinite(difference) and difference > tolerance  # NaN of a diverged policy is reported elsewhere
        ]

    # ------------------------------------------------------------------ type of the weights

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the module, but keep float32 buffers and float32 adapters in float32, as DeepSpeed does.

        Lightning's ``bf16-true`` also casts the frequencies of rotary embeddings: in 16 bits the angle of token 1,000
        is wrong by whole radians, and engines, which cast no buffers, would disagree.
        """
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        adapters = [(one, one.data) for name, one in self.named_parameters() if ".lora_" in name]
        result = cast(Any, super())._apply(fn, recurse)  # torch does not annotate it
        for matrix, values in adapters:
            if values.dtype == torch.float32 and matrix.dtype in (torch.float16, torch.bfloat16):
                matrix.data = values.to(matrix.device)
        for name, buffer in before.items():
            home, _, leaf = name.rpartition(".")
            owner = self.get_submodule(home)
            moved = owner._buffers[leaf]
            if moved is not None and moved.dtype in (torch.float16, torch.bfloat16):
                owner._buffers[leaf] = buffer.to(moved.device)
        return result

    # ------------------------------------------------------------------ forward

    @property
    def packs_sequences(self) -> bool:
        """Whether all models that are trained compute batches without padding, and a prompt once for its samples."""
        trained = [child for child in self.children() if any(weight.requires_grad for weight in child.parameters())]
        return all(packs_batches(child) for child in trained if hasattr(unwrap(child), "config"))

    @property
    def balances_routers(self) -> bool:
        """Whether forward passes must return the router's loss of a mixture of experts: in training, for a part."""
        return "router_loss" in self.outputs and torch.is_grad_enabled()

    def token_mean(self, values: Tensor, batch: Experience) -> Tensor:
        """This micro-batch's share of the mean of ``values``, (B, T-1), over the trained tokens of the optimizer step.

        Lightning's average of these scalars over micro-batches and ranks is the exact mean.
        """
        return aggregate(values, batch.action_mask, "token-mean", batch.token_denominator)

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor, images: Sequence[tuple[Any, ...]] | None = None) -> Tensor:
        """(B, T-1) float32 log-probs on the CPU, at temperature 1, of sequences (B, T) int64 without padding.

        ``images``: those of each sequence, for a model that sees them. A collective under sharded strategies.
        """
        batch = UnpaddedBatch(moved(token_ids, self.device), images)
        mask = on_both(lambda real: real[:, 1:], batch.attention_mask)
        training = self.policy.training
        self.policy.eval()  # engines have no dropout
        with self.trainer.precision_plugin.forward_context():
            out: PolicyOutput = policy_output(self.policy, batch, mask)
        self.policy.train(training)
        return out.logprobs.cpu()

    def log_means(self, metrics: Mapping[str, Tensor]) -> None:
        """Log detached scalars as plain means over micro-batches and ranks of the epoch (in RL: iteration).

        Exact for values that are divided by the ``denominator`` of their optimizer step where each step has equally
        many micro-batches, as in RL; :func:`~rlhfkit.losses.metrics.share_metric` is exact for any number.
        """
        self.log_dict(dict(metrics), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def log_metrics(
        self,
        metrics: Mapping[str, Tensor],
        weight: Tensor | float,
        *,
        prefix: str = "",
        suffix: str = "",
        prog_bar: bool = False,
    ) -> None:
        """Log metrics of a micro-batch, reduced over the epoch (of training or validation) and all ranks.

        A :class:`~rlhfkit.losses.metrics.Metric` defines its reduction; plain scalars are averaged.

        Args:
            metrics: Detached scalars by name.
            weight: Weight of this micro-batch in the average of plain scalars: its trained tokens, or pairs.
            prefix: Put before each name.
            suffix: Put after each name.
            prog_bar: Show them on the progress bar.
        """
        if self._trainer is None:
            return
        stage = (self.trainer.state.stage, self.trainer.current_epoch)
        for name, metric in as_metrics(metrics, weight, self.device).items():
            key = f"{prefix}{name}{suffix}"
            begun, epoch_metric = self._epoch_metrics.get(key, (None, None))
            if epoch_metric is None or begun != stage:  # an interrupted epoch left its values
                epoch_metric = EpochMetric(metric).to(self.device)
                self._epoch_metrics[key] = (stage, epoch_metric)
            begins = not epoch_metric.update_called  # Lightning has reset it after the validation before this one
            epoch_metric.update(metric)
            if begins:  # it is read when the epoch ends, and Lightning 2.6 takes 0.3 ms for every call
                self.log(
                    key,
                    epoch_metric,
                    prog_bar=prog_bar,
                    on_step=False,
                    on_epoch=True,
                    batch_size=1,
                    metric_attribute="_epoch_metrics",
                )

    def log_step(self, metrics: Mapping[str, Tensor], weight: Tensor | float) -> None:
        """Log metrics before the optimizer's step, reduced over the step's micro-batches and all ranks.

        Args:
            metrics: Detached scalars by name, the same names in every micro-batch; ``loss`` is on the progress bar.
            weight: Weight of this micro-batch in the average of plain scalars: its trained tokens, or pairs. A loss
                that is divided by the step's denominator is a :func:`~rlhfkit.losses.metrics.share_metric`.
        """
        if self._trainer is not None:
            step = (id(self.trainer), self.trainer.global_step)
            self._step_metrics.add(step, as_metrics(metrics, weight, self.device))

    def on_bar(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of :attr:`bar_metrics`, for :meth:`log_step`, under names that say so; none without a bar."""
        if self._trainer is None or self.trainer.progress_bar_callback is None:
            return {}
        wanted = {name: shown for name, shown in self.bar_metrics.items() if name in metrics and shown not in metrics}
        return {_BAR + shown: metrics[name] for name, shown in wanted.items()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the metrics that :meth:`log_step` collected."""
        # Lightning reads what is on the progress bar after every micro-batch, for which the host waits.
        bar = self.trainer.progress_bar_callback is not None
        for key, value in self._step_metrics.take().items():
            name = key.removeprefix(_BAR)
            logged = None if name == key else False  # those of the bar are logged under their whole names
            on_bar = bar and (name == "loss" or name != key)
            self.log(name, value, prog_bar=on_bar, logger=logged, on_step=True, on_epoch=False, batch_size=1)


def freeze(model: nn.Module) -> nn.Module:
    """Prepare a model that is never trained: no gradients, eval mode."""
    # Lightning 2.6 warns of every module in eval mode when fitting starts; here that is intended.
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
    return model.requires_grad_(False).eval()


def load_frozen(name: str, module: PolicyModule) -> nn.Module:
    """Load another causal language model in the way of a module's own, without dropout, to be never trained."""
    model: nn.Module = load_causal_lm(name, dtype=module.model_dtype, loading=module.loading.frozen())
    disable_dropout(model)
    return freeze(model)
