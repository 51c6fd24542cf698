"""``AnswerReference`` and ``PrecomputedReference``: log-probs of answers in the data under a reference model."""

from collections.abc import Mapping
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import (
    PreferenceBatch,
    PreferenceExample,
    ReferencedBatch,
    UnpairedExample,
    collate_preferences,
)
from rlhfkit.data.loaders.steps import ExampleTable
from rlhfkit.distributed import all_reduce
from rlhfkit.mesh import Mesh, forward_group_of
from rlhfkit.models import policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.base import freeze, load_frozen
from rlhfkit.modules.precompute import (
    cache_folder,
    load_or_compute,
    model_fingerprint,
    tables_of,
    token_batches,
    tokens_fingerprint,
)
from rlhfkit.parts import Child, Part
from rlhfkit.validation import function_name


class AnswerReference(Part):
    """The log-probs of answers in the data under a reference model, which is computed beside the policy.

    Modules that learn from preferences make one from their ``ref_model``. :class:`PrecomputedReference` among ``parts``
    takes its place.

    Args:
        model: Folder or hub name of the reference; ``None``: the initial policy, as a frozen copy or as the policy with
            its adapters switched off.
    """

    writes = ("ref_logprobs",)

    def __init__(self, model: str | None = None) -> None:
        self.model = model
        self.loads_reference = model is None

    def attach(self, module: Any) -> None:
        """Become the reference of a module.

        Raises:
            ValueError: If arguments of the module say something else, or the module has no use for it.
        """
        super().attach(module)
        if self not in module.given_parts:
            return
        names = ("reference_free", "ref_model_name", "precompute_ref_log_probs")
        chosen = [name.removesuffix("_name") for name in names if getattr(module, name, None)]
        if chosen or not hasattr(module, "answer_logprobs"):
            raise ValueError(
                f"{type(self).__name__} says which model the reference is and when it is asked: leave it out, or "
                f"{', '.join(chosen) or 'take a module that learns from preferences with a reference'}"
            )

    def children(self) -> Mapping[str, Child]:
        """``module.reference``, if it is another model than the policy."""
        return {} if self.model is None else {"reference": Child(self.build)}

    def build(self) -> nn.Module:
        """Load the reference, frozen and without dropout."""
        return freeze(self.module.build_policy()) if self.model is None else load_frozen(self.model, self.module)

    def answers(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """(B,) log-probs of the answers of a batch under a model, as the module measures them."""
        logprobs: Tensor = self.module.answer_logprobs(batch, policy_output(model, batch, batch.loss_mask).logprobs)
        return logprobs

    @torch.no_grad()
    def logprobs(self, batch: PreferenceBatch | ReferencedBatch) -> Tensor:
        """(B,) log-probs of the answers of a batch under the reference, from the data if it has them."""
        if batch.ref_logprobs is not None:
            return batch.ref_logprobs
        with self.module.reference_model() as reference:
            return self.answers(reference, batch)


class PrecomputedReference(AnswerReference):
    """The reference's log-probs of all data, computed once before training and cached on disk; then no model is kept.

    ``precompute_ref_log_probs=True`` makes one. Needs a DataModule of rlhfkit that holds the data in memory::

        DPOModule("sft", parts=[PrecomputedReference(cache="logprobs")])

    Args:
        model: As for :class:`AnswerReference`.
        cache: Folder of these log-probs; ``None``: ``rlhfkit/reference_logprobs`` in the cache folder of ``datasets``.
    """

    def __init__(self, model: str | None = None, *, cache: str | None = None) -> None:
        super().__init__(model)
        self.loads_reference = False
        self.cache = cache
        self._policy_is_initial = True

    def children(self) -> Mapping[str, Child]:
        """None: the reference is not kept."""
        return {}

    def logprobs(self, batch: PreferenceBatch | ReferencedBatch) -> Tensor:
        """(B,) log-probs of the answers of a batch under the reference, from the data.

        Raises:
            RuntimeError: If the data has none.
        """
        if batch.ref_logprobs is None:
            raise RuntimeError(
                "precompute_ref_log_probs found no table of PreferenceExample or UnpairedExample behind this batch's "
                "loader: use PreferenceDataModule or UnpairedPreferenceDataModule, or a StepLoader over such an "
                "ExampleTable"
            )
        return batch.ref_logprobs

    # ------------------------------------------------------------------ when

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the log-probs before the policy changes."""
        self._compute_all(trainer.train_dataloader)
        self._compute_all(trainer.val_dataloaders)
        self._policy_is_initial = False

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the log-probs of validation data that has none."""
        self._compute_all(trainer.val_dataloaders)

    def on_predict_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the log-probs of data that has none."""
        self._compute_all(trainer.predict_dataloaders)

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """The policy is not the initial one any more."""
        self._policy_is_initial = False

    # ------------------------------------------------------------------ how

    def _compute_all(self, loaders: Any) -> None:
        for examples in tables_of(loaders, PreferenceExample, UnpairedExample):
            if "ref_logprobs" not in examples.values:
                pairs = examples if examples.example is PreferenceExample else _WithMismatched(examples)
                examples.values["ref_logprobs"] = self._load_or_compute(pairs)

    def _load_or_compute(self, pairs: "Pairs") -> Tensor:
        """(N, 2) float32 log-probs of both answers of N pairs, on the CPU. A collective."""
        module = self.module

        def key() -> list[Any]:
            answers = (answer for i in range(len(pairs)) for answer in (pairs[i].chosen, pairs[i].rejected))
            # What else the numbers depend on, if the module says so.
            measure = *getattr(module, "measure", ()), function_name(type(module).answer_logprobs)
            model = model_fingerprint(self.model or module.model_name)
            return [tokens_fingerprint(answers), model, str(module.trainer.precision), *measure]

        def compute() -> Tensor:
            # Before training the policy is the reference; a resumed run loads the reference again.
            same = self._policy_is_initial and self.model is None
            return self.compute(pairs, module.policy if same else self.build().to(module.device))

        what = f"reference log-probs of {len(pairs)} pairs"
        found: Tensor = load_or_compute(
            key, cache_folder(self.cache, "reference_logprobs"), module.trainer, compute, what
        )
        return found

    @torch.no_grad()
    def compute(self, pairs: "Pairs", model: nn.Module) -> Tensor:
        """Log-probs of both answers of N pairs under a model, each rank computing its share. A collective.

        Returns (N, 2) float32 on the CPU, chosen and rejected, the same on every rank.
        """
        from tqdm.auto import tqdm

        trainer = self.module.trainer
        device, group = trainer.strategy.root_device, forward_group_of(unwrap(model))
        mesh = Mesh(trainer.global_rank, trainer.world_size) if group is None else group.mesh
        total = torch.zeros(len(pairs), 2, device=device)
        batches = token_batches(pairs.lengths, self.module.loading.max_tokens_per_forward * mesh.sequence)
        training = model.training
        model.eval()
        turns = range(0, len(batches), mesh.data)
        for first in tqdm(turns, desc="Reference log-probs", disable=mesh.rank > 0, leave=False):
            # Every rank runs equally many forward passes: a sharded model gathers its weights in each. Of ranks that
            # compute them together one brings the rows, the others two tokens.
            number = min(first + mesh.data_rank, len(batches) - 1)
            rows = batches[number] if mesh.member == 0 else batches[-1][-1:]
            batch: PreferenceBatch = collate_preferences([pairs[row] for row in rows])
            batch = (batch if mesh.member == 0 else batch.first_tokens(2)).to(device)
            with trainer.precision_plugin.forward_context():
                values = self.answers(model, batch)
            if mesh.member == 0 and number == first + mesh.data_rank:
                total[rows] = values.float().view(-1, 2)
        model.train(training)
        return all_reduce(total).cpu()


class Pairs(Protocol):
    """A data set of two answers each; :class:`~rlhfkit.data.loaders.steps.ExampleTable` of pairs is one."""

    lengths: list[int]

    def __len__(self) -> int:
        """Number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> PreferenceExample:
        """One pair."""
        ...


class _WithMismatched:
    """Each answer and its mismatched one as a pair, so that their shared prompt is computed once."""

    def __init__(self, examples: ExampleTable[UnpairedExample]) -> None:
        self.examples = examples
        self.lengths = [2 * length for length in examples.lengths]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> PreferenceExample:
        example = self.examples[index]
        return PreferenceExample(example.answer, example.mismatched or example.answer)
