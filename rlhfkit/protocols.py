"""What callbacks, modules, DataModules and strategies ask of one another: they never import each other.

Each protocol lists what one side calls on the other, so any class with these members can take part;
:mod:`rlhfkit.trainer_parts` finds the parts in a Trainer. Protocols of methods only may be tested with ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import lightning as L
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from torch import Tensor, nn

    from rlhfkit.data.batch import PaddedBatch, TokenBatch
    from rlhfkit.data.types import Experience, Prompt
    from rlhfkit.flat_parameters import FlatLayout
    from rlhfkit.training_states import TrainingStates


# ---------------------------------------------------------------------- what a RolloutCallback asks of a module


class ScoresRows(Protocol):
    """Models of a module that score its samples."""

    def parts_of(self, rows: Experience | None) -> Mapping[str, Tensor]:
        """(B,) scores of this rank's rows: ``model``, which is added to the reward, and its parts. A collective.

        ``None``: this rank has no rows, and takes part in the others' forward passes; returns (0,).
        """
        ...


class GenerativeModule(Protocol):
    """A LightningModule whose policy an engine can sample from; :class:`~rlhfkit.modules.PolicyModule` is one."""

    policy: nn.Module

    @property
    def tokenizer(self) -> Any:
        """The policy's Transformers tokenizer."""
        ...

    @property
    def model_name(self) -> str:
        """Folder or hub name of the initial model; an engine loads its configuration from there."""
        ...

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that comes with the model may run."""
        ...

    def token_logprobs(self, token_ids: Tensor, images: Sequence[tuple[Any, ...]] | None = None) -> Tensor:
        """(B, T-1) float32 log-probs at temperature 1 of (B, T) token ids without padding. A collective."""
        ...

    @property
    def scorer(self) -> ScoresRows | None:
        """What scores samples by models of the module; ``None``: nothing does."""
        ...


class ExperienceLearner(GenerativeModule, Protocol):
    """A module that learns from its own samples; :class:`~rlhfkit.modules.OnPolicyModule` is one."""

    @property
    def needs_reward(self) -> bool:
        """Whether samples must be scored by the callback's reward."""
        ...

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss compares the engine's log-probs with the trainer's."""
        ...

    @property
    def packs_sequences(self) -> bool:
        """Whether all models that it trains compute batches without padding, and a shared prompt once."""
        ...

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if the algorithm cannot learn from groups of this size."""
        ...

    def prepare(self, experience: Experience) -> Experience:
        """Add what the loss needs to this rank's rows: old and reference log-probs, values, advantages. A collective.

        ``experience.iteration`` has the numbers of all ranks' rows; ``None``: the rows are the whole iteration.
        """
        ...


class ModelsElsewhere(Protocol):
    """Models on machines of their own, which compute for finished groups while others are sampled."""

    @property
    def present(self) -> bool:
        """Whether there are any."""
        ...

    def begin_asking(self, iteration: int) -> None:
        """Start the models before an iteration's samples. A collective, in the main thread."""
        ...

    def ask_early(self, experience: Experience, iteration: int) -> None:
        """Ask about finished samples; ``experience.action_mask`` has all tokens of the policy. From any thread."""
        ...

    def take_seconds(self) -> Mapping[str, float]:
        """Seconds since the last call that this rank has waited for these models, and that were hidden, by name."""
        ...

    def close(self) -> None:
        """End the models, after a run or an error. Not a collective."""
        ...


@runtime_checkable
class AsksWhileSampling(Protocol):
    """A module with models on machines of their own."""

    @property
    def placed(self) -> ModelsElsewhere:
        """The models."""
        ...


@runtime_checkable
class CorrectsOffPolicy(Protocol):
    """A module that can weight samples by how likely the policy is to have made them."""

    def correct_off_policy(self) -> bool:
        """Use a correction for samples of another policy, unless one was chosen; returns whether it was set."""
        ...


@runtime_checkable
class UsesGreedyRewards(Protocol):
    """A module, or a part of one, that may compare samples with the greedy answer to their prompt."""

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether samples need the reward of that answer among their ``reward_parts``, as ``GREEDY_REWARD``."""
        ...


@runtime_checkable
class ChecksEngine(Protocol):
    """A module that learns from the samples of certain engines or group functions only."""

    def check_engine(self, engine: Any) -> None:
        """Raise ValueError if an engine, or the ``GroupRunner`` around it, does not give the samples it learns from."""
        ...


@runtime_checkable
class ComparesGroups(Protocol):
    """A module whose loss compares samples of one prompt, as that of pairs does."""

    keeps_groups_together: bool
    """Whether the samples of a prompt must be in one micro-batch."""


# ------------------------------------------------------------------ what a RolloutCallback asks of a DataModule


class DrawnPrompts(Protocol):
    """The prompts of one iteration: none is drawn twice, and those that were not used can be requeued."""

    @property
    def remaining(self) -> int:
        """Different prompts that can still be drawn."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts."""
        ...

    def requeue(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts at the front of the next iteration."""
        ...

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Remember the rewards of groups, by the index of their prompt, for a curriculum."""
        ...

    @property
    def after(self) -> dict[str, Any]:
        """Where the next iteration begins, as plain values."""
        ...


class PromptQueue(DrawnPrompts, Protocol):
    """Prompts whose place is known."""

    cursor: Any
    """Where the next prompt is drawn; the queue of another iteration can continue there."""


class PromptSource(Protocol):
    """A DataModule that owns prompts and their cursor; :class:`~rlhfkit.datamodules.PromptDataModule` is one."""

    rollout_batch_size: int
    micro_batch_size: int
    max_tokens_per_micro_batch: int | None
    """Tokens that a rank may compute in a forward pass of training, in place of ``micro_batch_size``; ``None``: no
    limit."""
    updates_per_iteration: int
    """Optimizer updates of an epoch of an iteration, read only with ``max_tokens_per_micro_batch``."""

    @property
    def curriculum_uses_rewards(self) -> bool:
        """Whether there is a curriculum that reads the rewards of samples."""
        ...

    def prompt_queue(self, after: dict[str, Any] | None = None) -> PromptQueue:
        """Return the queue of an iteration, from the cursor or another queue's ``after``; the cursor does not move."""
        ...

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to the end of a queue whose prompts were trained on."""
        ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """A DataModule that can check all prompts before a run; other DataModules' prompts are checked when drawn."""

    @property
    def has_validation_prompts(self) -> bool:
        """Whether there are prompts for validation."""
        ...

    def check_prompts(
        self, *, longest: int, reason: str, vocabulary: int | None = None, validation: bool = False
    ) -> None:
        """Raise ValueError if a prompt has more tokens than ``longest`` or one outside the vocabulary."""
        ...


@runtime_checkable
class ChecksColumns(Protocol):
    """A DataModule that knows before a run which columns its prompts have."""

    def check_columns(self, reader: str, *, answer: bool, columns: Sequence[str], validation: bool = False) -> None:
        """Raise ValueError if ``reader``, a reward, reads an answer or columns that the prompts do not have."""
        ...


# ---------------------------------------------------------------------------------- what DataModules and callbacks ask


@runtime_checkable
class ExperienceSource(Protocol):
    """The callback that turns a DataModule's prompts into experience."""

    @property
    def group_size(self) -> int:
        """Samples per prompt."""
        ...

    def batches_per_iteration(self) -> int:
        """Micro-batches that :meth:`collect` returns on this rank, the same number on every rank.

        With ``max_tokens_per_micro_batch``: the smallest number, of which :meth:`collect` returns a multiple.
        """
        ...

    def collect(self) -> Sequence[Experience]:
        """Return this rank's micro-batches of the current iteration. A collective."""
        ...


@runtime_checkable
class HasTokenizer(Protocol):
    """A module whose tokenizer a DataModule without one can use."""

    @property
    def tokenizer(self) -> Any:
        """The model's Transformers tokenizer."""
        ...


@runtime_checkable
class TakesTokenizer(Protocol):
    """A module that uses a DataModule's tokenizer for the whole run."""

    def take_tokenizer(self, tokenizer: Any, giver: str) -> None:
        """Use it in place of the model's own; ValueError if another was given before, by another ``giver``."""
        ...


@runtime_checkable
class HasChatTemplate(Protocol):
    """A DataModule that gives arguments to the chat template, which later turns of its prompts need too."""

    chat_template_kwargs: Mapping[str, Any]


@runtime_checkable
class HasModelLimits(Protocol):
    """A module with limits, by which a DataModule refuses text that the model cannot take."""

    @property
    def vocabulary_size(self) -> int | None:
        """Number of token embeddings of the model; ``None``: unknown."""
        ...

    @property
    def context_length(self) -> int | None:
        """Context length in tokens; ``None``: unlimited."""
        ...


@runtime_checkable
class SeesImages(Protocol):
    """A module whose model may see images, which a DataModule then reads."""

    @property
    def image_processor(self) -> Any:
        """The model's :class:`~rlhfkit.models.vision.VisionProcessor`; ``None``: it reads text only."""
        ...


@runtime_checkable
class SavesPretrained(Protocol):
    """A module that ``HFExport`` can export."""

    def save_pretrained(self, folder: str | Path, *, adapter: bool = False) -> Path:
        """Write a Hugging Face folder. A collective."""
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """A module that ``Invariants`` can check."""

    def row_problems(self, batch: PaddedBatch) -> list[str]:
        """Describe rows whose log-probs depend on other rows, equally on every rank. A collective."""
        ...


# ------------------------------------------------------------------- what modules ask of a DataModule and a strategy


@runtime_checkable
class DescribesData(Protocol):
    """A DataModule that says what it has read, for the first lines of a run."""

    def describe_data(self) -> str:
        """Return sources, columns and numbers of rows in one line, after ``setup``."""
        ...


@runtime_checkable
class HasPromptColumns(Protocol):
    """A DataModule whose prompts have further columns."""

    def prompt_column(self, name: str) -> Mapping[int, Any]:
        """Return the values of a column of the training prompts, by the index of the prompt."""
        ...


@runtime_checkable
class PretrainingSource(Protocol):
    """A DataModule that may have pretraining text beside its prompts."""

    @property
    def pretraining_data(self) -> L.LightningDataModule | None:
        """Source of the text; ``None``: there is none."""
        ...

    def pretraining_batch(self, number: int) -> TokenBatch:
        """Return the text for this rank's micro-batch ``number``, counted from the start of the run."""
        ...


@runtime_checkable
class LearnsFromText(Protocol):
    """A module, or a part of one, that learns from the pretraining text of its DataModule."""

    learns_from_text: bool


@runtime_checkable
class MixedDataset(Protocol):
    """A data set that combines others; per-example values that are computed before training are computed for each."""

    sources: Sequence[Any]
    """The data sets."""


STATES_OF_RANKS = "states_of_ranks"
"""Key of a loaded checkpoint that another number of ranks has saved: a sequence of what each of them saved, by rank.

A callback with tensors that are shared between ranks puts its part together in ``on_load_checkpoint``. An item is read
when it is indexed, and its tensors when they are copied.
"""


@runtime_checkable
class RLHFStrategy(Protocol):
    """What modules, callbacks and checkpoints ask of ``RLHFDeepSpeedStrategy``; Lightning's strategies lack it."""

    saves_every_rank: bool
    """Whether checkpoints hold the state of every rank, not of rank 0 only."""
    saves_folders: bool
    """Whether checkpoints are folders in which a :class:`KeepsFolder` has one of its own."""
    skipped_updates: int
    """Updates that were skipped because a gradient was not finite."""
    training_states: TrainingStates | None
    """Weights, gradients and optimizer states, which can wait in CPU memory; ``None`` unless a Trainer runs."""

    def config_of(self, child: str, *, trainable: bool) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a child, complete; ``trainable``: if it has an optimizer."""
        ...

    def skip_update(self, child: str) -> None:
        """Leave weights and optimizer state of a child of the module unchanged in the coming update."""
        ...


@runtime_checkable
class TakesFlatLayouts(Protocol):
    """An optimizer of whole parameters that can find them in the flat tensors that a strategy makes of them."""

    def set_flat_layouts(self, layouts: Mapping[Tensor, FlatLayout]) -> None:
        """Take the layout of each flat tensor among its parameters."""
        ...


@runtime_checkable
class KeepsFolder(Protocol):
    """A callback, such as a part of a module, with state in no child: that of a model on machines of its own."""

    def save_folder(self, folder: Path) -> None:
        """Write it to a new folder inside the one of a checkpoint. On all ranks."""
        ...

    def load_folder(self, folder: Path) -> None:
        """Continue with it when training starts; the folder is missing if nothing was written. On all ranks."""
        ...


@runtime_checkable
class RecordsWork(Protocol):
    """A callback, such as a part of a module, with ranks of its own elsewhere that note when they work."""

    def work_elsewhere(self) -> list[tuple[str, str, float, float]]:
        """When these have worked lately: role, phase, start and end in seconds of :func:`time.time`."""
        ...


@runtime_checkable
class StartsRanksOnRay(Protocol):
    """A strategy whose ranks can be Ray actors; ``RLHFDeepSpeedStrategy`` is one."""

    @staticmethod
    def run_on_ray(
        function: Callable[[ClusterEnvironment], Any],
        *,
        num_ranks: int,
        num_nodes: int,
        resources_per_rank: dict[str, float],
        device: str,
        timeout: float,
        on_start: Callable[[Sequence[Any]], None],
    ) -> Any:
        """Call a function on new ranks, with their environment for a Trainer; returns the result of rank 0."""
        ...
