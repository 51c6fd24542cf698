"""What the updates of an iteration know of the policy before it: old log-probs, experts that it chose, its entropy.

``OldLogprobs`` computes what others need, ``LogLinear`` approximates it, ``RouterReplay`` (routers.py) has
it chosen again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import log_linear_proximal_logprobs
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Part, Stage, part_name
from rlhfkit.trainer_parts import epochs_of


class OldLogprobs(Part):
    """Computes what the policy before an iteration makes of its tokens, where something needs it.

    The first update uses its own log-probs as old ones. Later updates, and parts that read ``old_logprobs``, need them
    computed before; parts may also read the columns ``entropy`` and ``routing``, and ``values`` of a head of the
    policy. One forward pass gives all of it. Modules that learn from their own samples make one.

    With several epochs over an iteration (``PromptDataModule(epochs_per_iteration=...)``), each of which is one
    optimizer update, the log-probs that the first epoch trains with are those of the old policy, and every later epoch
    has the same micro-batches in the same order: they are kept, and no forward pass is made for them.
    """

    stage, temporary = Stage.POLICY, {"entropy": "a filter of tokens"}
    writes: tuple[str, ...] = ("old_logprobs", "entropy", "routing")  # and values, if the policy has a head of them

    def __init__(self) -> None:
        self._read: frozenset[str] = frozenset()
        """What other parts read of it; ``values`` only if they are of a head of the policy."""
        self._kept: dict[int, Tensor] = {}
        self._place, self._epoch = 0, 0

    def attach(self, module: Any) -> None:
        """Learn what the other parts read."""
        super().attach(module)
        found = {name for part in module.parts for name in part.reads if name != "values"}
        self._read = frozenset(found | {name for part in module.parts for name in part.outputs if name == "values"})
        self.writes = (*type(self).writes, *(["values"] if "values" in self._read else []))

    @property
    def of_all_rows(self) -> bool:
        """Whether a forward pass over all rows is made before each iteration, whatever its updates are."""
        return not self._read.isdisjoint(("old_logprobs", "entropy", "values"))

    def prepare(self, rows: Experience) -> Experience:
        """Add old log-probs and the columns. A collective."""
        module, updates = self.module, rows.update if rows.iteration is None else rows.iteration.update  # of all ranks
        repeated = module._trainer is not None and epochs_of(module.trainer) > 1
        later = not module.hooks["old_logprobs"] and bool((updates > 0).any())
        wanted = later or "old_logprobs" in self._read or ("routing" in self._read and repeated)
        wanted = wanted and rows.old_logprobs is None
        entropy, values = "entropy" in self._read, "values" in self._read
        if not (wanted or entropy or values):
            return rows
        chosen = rows.update >= 0 if self.of_all_rows or repeated else rows.update > 0
        found = module.passes.statistics(
            module.policy,
            rows,
            None if values else chosen,
            entropy=entropy,
            values=values,
            routing="routing" in self._read and wanted,
        )
        rows = rows.with_columns(entropy=found.entropy, values=found.values)
        if not (wanted or values):
            return rows
        return dataclasses.replace(rows, old_logprobs=found.logprobs).with_columns(routing=found.routing)

    # ------------------------------------------------------------------ several epochs over an iteration

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Experience, batch_idx: int) -> None:
        """Add old log-probs to a micro-batch of a later epoch that has none."""
        epochs = epochs_of(trainer)
        if epochs == 1 or self.module.hooks["old_logprobs"]:
            return
        if batch_idx == 0:  # an iteration before it may have been interrupted
            self._kept = {}
        per_epoch = int(trainer.num_training_batches) // epochs
        self._epoch, self._place = divmod(batch_idx, per_epoch)
        if self._epoch and batch.old_logprobs is None:
            batch.old_logprobs = self._kept[self._place].to(batch.action_mask.device)

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """Keep the log-probs with which the first epoch trains on a micro-batch, if later ones need them."""
        trainer = self.module._trainer
        if batch.old_logprobs is not None or self._epoch or trainer is None or self.module.hooks["old_logprobs"]:
            return {}
        if int(trainer.num_training_batches) // trainer.accumulate_grad_batches == epochs_of(trainer) > 1:
            self._kept[self._place] = out.logprobs.detach()
        return {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Forget the iteration that was trained on."""
        self._kept = {}

    def state_dict(self) -> dict[str, Any]:
        """What is kept, by the number of the micro-batch; none outside of an iteration."""
        return {"kept": {place: logprobs.cpu() for place, logprobs in self._kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with it."""
        self._kept = dict(state["kept"])


class LogLinear(Part):
    """Takes ratios to log-probs between the engine's and the policy's own, by policy versions.

    No forward pass is made for old log-probs (AReaL: Fu et al., 2025, arXiv:2505.24298), see
    :func:`~rlhfkit.losses.log_linear_proximal_logprobs`. Decoupled PPO (arXiv:2110.00641) takes it too. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[LogLinear()])

    Raises:
        ValueError: If something in the module needs the forward pass that it leaves out.
    """

    reads = ("rollout_logprobs",)

    def __init__(self) -> None:
        self.version = 0
        """Version of the policy before the iteration."""

    def attach(self, module: object) -> None:
        """Check that nothing needs old log-probs of the trainer."""
        super().attach(module)
        recording = [part_name(part) for part in self.module.parts if "routing" in part.reads]
        if recording:
            raise ValueError(
                f"{recording[0]} records which experts are chosen in the forward pass of the old log-probs, which "
                "LogLinear leaves out: give one of them"
            )
        if any("old_logprobs" in part.reads for part in self.module.parts):
            raise ValueError(
                "LogLinear makes no forward pass for old log-probs, which a KL penalty in the reward, KLTarget, and a "
                "teacher's log-probs compare with: leave it out"
            )

    def prepare(self, rows: Experience) -> Experience:
        """Note the version."""
        self.version = self._now()
        return rows

    def _now(self) -> int:
        return 0 if self.module._trainer is None else int(self.module.trainer.global_step)

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1), the policy's own in the first update of an iteration."""
        now = self._now()
        if now == self.version:
            return out.logprobs.detach()
        return log_linear_proximal_logprobs(
            out.logprobs, batch.rollout_logprobs, batch.versions, version=now, proximal_version=self.version
        )

    def state_dict(self) -> dict[str, int]:
        """The version, for a checkpoint within an iteration."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with it."""
        self.version = state["version"]
