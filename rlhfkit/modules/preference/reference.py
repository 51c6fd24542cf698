"""``ReferenceModule``: a policy with a reference model, which is held in memory or computed before training."""

from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.formats.preferences import PreferenceBatch, PreferenceExample, collate_preferences
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.distributed import all_reduce
from rlhfkit.mesh import Mesh, forward_group_of
from rlhfkit.models import load_causal_lm, unwrap
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.base import PolicyModule, freeze
from rlhfkit.modules.precompute import (
    cache_folder,
    load_or_compute,
    model_fingerprint,
    token_batches,
    tokens_fingerprint,
)
from rlhfkit.protocols import MixedDataset
from rlhfkit.validation import check_integer


class Pairs(Protocol):
    """A data set of two answers each; :class:`~rlhfkit.data.formats.preferences.PreferenceExamples` is one."""

    lengths: list[int]

    def __len__(self) -> int:
        """Number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> PreferenceExample:
        """One pair."""
        ...


AnswerLogprobs = Callable[[nn.Module, PreferenceBatch], Tensor]
"""(2B,) log-probs of the answers of a batch under a model."""


class ReferenceModule(PolicyModule):
    """A :class:`PolicyModule` that is compared with a reference model on data that is known before training.

    The reference is the initial policy, in one of three forms: a frozen copy (the default), the policy with its
    adapters switched off (with ``lora=...``), or log-probs computed once before training and cached on disk
    (``precompute_ref_log_probs``).

    Args:
        model: Folder or hub name of the policy.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs of all data once, before training. Needs a
            DataModule of rlhfkit that holds the data in memory.
        ref_cache: Folder for these log-probs, only with them; ``None``: ``rlhfkit/reference_logprobs`` in the
            cache folder of ``datasets``.
        max_tokens_per_forward: Tokens per forward pass of ``precompute_ref_log_probs``; only with it.
        **kwargs: Optimizer and loading of the model: see :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        ref_cache: str | None = None,
        max_tokens_per_forward: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        if not precompute_ref_log_probs:
            given = {"ref_cache": ref_cache is not None, "max_tokens_per_forward": max_tokens_per_forward != 16384}
            refuse_without_effect(given, "precompute_ref_log_probs=False")
        self.ref_model_name = ref_model
        self.precompute_ref_log_probs = precompute_ref_log_probs
        self.ref_cache = ref_cache
        self.max_tokens_per_forward = max_tokens_per_forward
        self._policy_is_initial = True
        self.attach_parts()

    # ------------------------------------------------------------------ the model

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is evaluated during training."""
        return not self.precompute_ref_log_probs

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is asked during training."""
        return self.uses_reference

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is used during training and is the initial policy."""
        return self.uses_reference and self.ref_model_name is None

    def configure_model(self) -> None:
        """Build the policy, and the reference model if it is used during training."""
        super().configure_model()
        if self.uses_reference and self.ref_model_name is not None and not hasattr(self, "reference"):
            self.reference = self.build_reference()

    def build_reference(self) -> nn.Module:
        """Load the reference model, frozen and without dropout."""
        if self.ref_model_name is None:
            return freeze(self.build_policy())
        reference = load_causal_lm(self.ref_model_name, dtype=self.model_dtype, loading=self.loading.frozen())
        disable_dropout(reference)
        return freeze(reference)

    # ------------------------------------------------------------------ computed before training

    def precompute(self, examples: Any) -> None:
        """Give a data set its reference log-probs by :meth:`computed_reference`; subclasses override it.

        ``examples`` is the data set of a loader, or one source of a mixture; other types are left unchanged.
        """

    def computed_reference(self, pairs: Pairs, logprobs: AnswerLogprobs, *details: Any) -> Tensor:
        """(N, 2) float32 reference log-probs of all answers on the CPU, computed or from the cache. A collective.

        Args:
            pairs: N pairs of answers, the same on every rank.
            logprobs: Computes those of a batch under a model.
            *details: What else the numbers depend on, identified by ``repr``.
        """

        def key() -> list[Any]:
            answers = (answer for i in range(len(pairs)) for answer in (pairs[i].chosen, pairs[i].rejected))
            model = model_fingerprint(self.ref_model_name or self.model_name)
            return [tokens_fingerprint(answers), model, str(self.trainer.precision), *details]

        def compute() -> Tensor:
            # Before training the policy is the reference; a resumed run loads the reference again.
            same = self._policy_is_initial and self.ref_model_name is None
            model = self.policy if same else self.build_reference().to(self.device)
            return compute_reference(pairs, model, logprobs, self.trainer, max_tokens=self.max_tokens_per_forward)

        folder = cache_folder(self.ref_cache, "reference_logprobs")
        what = f"reference log-probs of {len(pairs)} pairs"
        found: Tensor = load_or_compute(key, folder, self.trainer, compute, what)
        return found

    def _precompute_all(self, loaders: Any) -> None:
        if self.precompute_ref_log_probs:
            for examples in data_sets(loaders):
                self.precompute(examples)

    def on_train_start(self) -> None:
        """Compute the reference's log-probs before the policy changes."""
        super().on_train_start()
        self._precompute_all(self.trainer.train_dataloader)
        self._precompute_all(self.trainer.val_dataloaders)
        self._policy_is_initial = False

    def on_validation_start(self) -> None:
        """Compute the reference's log-probs of validation data that has none."""
        self._precompute_all(self.trainer.val_dataloaders)

    def on_predict_start(self) -> None:
        """Compute the reference's log-probs of data that has none."""
        self._precompute_all(self.trainer.predict_dataloaders)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if needed; the policy is not the initial one any more."""
        super().on_load_checkpoint(checkpoint)
        self._policy_is_initial = False


def data_sets(loaders: Any) -> list[Any]:
    """The data sets of the Trainer's StepLoader(s); for a mixture, its sources."""
    found: list[Any] = []
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if isinstance(loader, StepLoader):
            found += loader.examples.sources if isinstance(loader.examples, MixedDataset) else [loader.examples]
    return found


@torch.no_grad()
def compute_reference(
    examples: Pairs, model: nn.Module, logprobs: AnswerLogprobs, trainer: L.Trainer, *, max_tokens: int
) -> Tensor:
    """Log-probs of all answers of N pairs under a model, each rank computing its share. A collective.

    ``max_tokens`` is the number of tokens per rank and forward pass. Returns (N, 2) float32 on the CPU, chosen and
    rejected, the same on every rank.
    """
    from tqdm.auto import tqdm

    device, group = trainer.strategy.root_device, forward_group_of(unwrap(model))
    mesh = Mesh(trainer.global_rank, trainer.world_size) if group is None else group.mesh
    total = torch.zeros(len(examples), 2, device=device)
    batches = token_batches(examples.lengths, max_tokens * mesh.sequence)
    training = model.training
    model.eval()
    turns = range(0, len(batches), mesh.data)
    for first in tqdm(turns, desc="Reference log-probs", disable=mesh.rank > 0, leave=False):
        # Every rank runs equally many forward passes: a sharded model gathers its weights in each. Of ranks that
        # compute them together one brings the rows, the others two tokens.
        number = min(first + mesh.data_rank, len(batches) - 1)
        rows = batches[number] if mesh.member == 0 else batches[-1][-1:]
        batch: PreferenceBatch = collate_preferences([examples[row] for row in rows])
        batch = (batch if mesh.member == 0 else batch.first_tokens(2)).to(device)
        with trainer.precision_plugin.forward_context():
            values = logprobs(model, batch)
        if mesh.member == 0 and number == first + mesh.data_rank:
            total[rows] = values.float().view(-1, 2)
    model.train(training)
    return all_reduce(total).cpu()
