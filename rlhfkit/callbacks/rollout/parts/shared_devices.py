"""``SharedDevices``: who has the memory of the ranks' devices, training or engines, from phase to phase.

The order of an iteration whose engines share the devices of the training ranks, with the calls of vLLM 0.32 and 0.33:

1. **learn**: weights, gradients and optimizer states are on the device, engines sleep. Preparing, updating, saving.
2. **sync**: gradients and optimizer states go to CPU memory. Every rank collects garbage and gives torch's cache back
   to the driver, of which engines take memory. Engines allocate that of their weights (``wake_up(["weights"])``, which
   first restores what level 1 kept) and are sent the policy's, which are still on the device: each chunk is copied
   before the rank overwrites the buffer, and the end of the update closes it. Only then can every rank free it
   (garbage, ``ipc_collect``). The trainer computes its log-probs for the probe.
3. **generate**: all weights go to CPU memory, except those of a reward model that scores samples. Every rank frees its
   cache again. Engines allocate the rest, their caches of keys and values (``wake_up()``), whose end lets requests run.
   They generate, and samples are scored, in as many rounds as dynamic sampling takes. Several batches of validation are
   one such phase.
4. Engines sleep, and everything comes back to the device: the next phase is learn.

If engines have the weights of this step already (``sleep_level=1``, validation before or after), 2 is left out and they
wake wholly in 3. At ``sleep_level=2`` they forget their version when they sleep, and so are always sent the weights.
Engines start in phase 3, once, and sleep before they are sent weights. Every step is taken by all ranks together, and
caches of torch's allocator are emptied on all of them before engines allocate. Engines that lose their weights while
they generate begin again at 2. After an error engines are closed first, then the states come back
(:meth:`SharedDevices.recover`). Whatever else runs the module or saves it between 2 and 4, for example a reward that
calls the policy, brings the states back by itself (:mod:`rlhfkit.training_states`).
"""

import logging
from collections.abc import Collection, Mapping
from typing import Literal

import lightning as L
import torch

from rlhfkit.callbacks.rollout.part import RolloutPart, Rollouts
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.protocols import RLHFStrategy
from rlhfkit.trainer_parts import policy_of
from rlhfkit.training_states import TrainingStates

log = logging.getLogger(__name__)


class SharedDevices(RolloutPart):
    """Gives the memory of devices that engines and training share to one of them at a time.

    A ``RolloutCallback`` has it by default if an engine shares the GPUs of the training ranks
    (``VLLMPool(colocate=True)``). Without offloading only such engines sleep and wake. Numbers are the same bit for
    bit.

    Args:
        offload_training: Whether weights, gradients and optimizer states are in CPU memory while the engine generates.
            ``None``: if a GPU is shared; ``True`` for any engine, such as a ``LocalEngine`` on the same GPU.

    Raises:
        TypeError: If ``offload_training`` is something else.
        ValueError: When a ``RolloutCallback`` takes it, if another part has the engine generate while the policy
            learns.
    """

    def __init__(self, offload_training: bool | None = None) -> None:
        if offload_training not in (None, True, False):
            raise TypeError(f"offload_training must be None, True or False, got {offload_training!r}")
        self.offload_training = offload_training
        self.colocate = False
        """Whether an engine uses the GPUs of the training ranks."""
        self._states: TrainingStates | None = None
        self._started = False
        self._phase: Literal["learn", "sync", "generate"] = "learn"
        self._before = 0  # bytes of the states when all were on the device
        self._bytes: dict[str, int] = {}

    def attach(self, rollouts: Rollouts) -> None:
        super().attach(rollouts)
        self.colocate = any(engine.colocate for engine in rollouts.engines)
        ahead = [type(part).__name__ for part in rollouts.parts if part.overlaps]
        if ahead and (self.colocate or self.offload_training):
            what = "VLLMPool(colocate=True)" if self.colocate else "SharedDevices(offload_training=True)"
            raise ValueError(
                f"{what} takes the training states off the device while the engine generates, or has it sleep while "
                f"the policy learns, and with {ahead[0]} it generates while the policy learns: use one"
            )

    def offloads(self, trainer: L.Trainer) -> bool:
        """Whether training states leave the device while engines generate: by default if a GPU is shared."""
        if self.offload_training is not None:
            return self.offload_training
        return self.colocate and trainer.strategy.root_device.type == "cuda"

    def why_copied(self, trainer: L.Trainer) -> str | None:
        return "they leave the device while it generates (SharedDevices)" if self.offloads(trainer) else None

    def defers_sync(self, trainer: L.Trainer) -> bool:
        return self.offloads(trainer)

    # ------------------------------------------------------------------ the phases, each a collective

    def before_start(self, trainer: L.Trainer) -> None:
        """Make room for engines that start: they check that the memory they may use is free."""
        if self.offloads(trainer) and not self._started:
            self._offload_all(trainer)

    def after_start(self, trainer: L.Trainer) -> None:
        """Make room for the engines' weights; the training weights are on the device afterwards."""
        self._started = True
        if not self.offloads(trainer):
            return
        if self._phase == "generate":  # engines have lost their weights
            for engine in self.rollouts.engines:
                engine.sleep()
            run_on_all_ranks(lambda: self._of(trainer).reload_states(optimizer=False))
        self._offload(trainer, weights=False)
        self._phase = "sync"

    def before_generate(self, trainer: L.Trainer) -> None:
        """Make room for everything that engines need, and have them take it."""
        if self.offloads(trainer):
            self._offload_all(trainer)
        if self.colocate:
            for engine in self.rollouts.engines:
                run_on_all_ranks(engine.wake)

    def after_generate(self, trainer: L.Trainer, iteration: int) -> None:
        if not self.offloads(trainer):
            return
        self._bytes["generate"] = self._measure(trainer)
        with self.rollouts.timing.record("reload", iteration):
            run_on_all_ranks(self._of(trainer).reload_states)
        self._phase = "learn"

    def recover(self) -> None:
        """Bring the training states back after an error, or at the end; engines are closed."""
        states, self._states, self._phase, self._started = self._states, None, "learn", False
        if states is None:
            return
        try:
            states.reload_states()
        except torch.OutOfMemoryError as error:
            log.error("training states stay in CPU memory, as the device has no room for them: %s", error)

    # ------------------------------------------------------------------ states and their sizes

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Memory of the last learning and generating phase in GiB, of the rank with most.

        On a GPU ``memory/learn_gib`` and ``memory/generate_gib`` are the most that torch had allocated, on a CPU what
        training states occupied; ``memory/train_offloaded_gib`` is what left the device.
        """
        if not self._bytes:
            return {}
        sizes = run_on_all_ranks(lambda: dict(self._bytes))
        names = {"learn": "learn_gib", "generate": "generate_gib", "offloaded": "train_offloaded_gib"}
        return {
            f"memory/{name}": max(one[key] for one in sizes) / 2**30 for key, name in names.items() if key in sizes[0]
        }

    def _of(self, trainer: L.Trainer) -> TrainingStates:
        """The states of the running Trainer: its strategy's, or what its module and optimizers hold."""
        if self._states is None:
            strategy = trainer.strategy
            held = strategy.training_states if isinstance(strategy, RLHFStrategy) else None
            self._states = held or TrainingStates(
                trainer.lightning_module, lambda: strategy.optimizers, strategy.root_device
            )
        return self._states

    def _offload_all(self, trainer: L.Trainer) -> None:
        known = dict(trainer.lightning_module.named_children()) if policy_of(trainer).scorer is not None else {}
        self._offload(trainer, weights=True, keep=[name for name in known if name.startswith("reward_model")])
        self._phase = "generate"

    def _offload(self, trainer: L.Trainer, *, weights: bool, keep: Collection[str] = ()) -> None:
        states = self._of(trainer)
        if self._phase == "learn":
            self._before = sum(states.state_bytes().values())
            self._bytes["learn"] = self._measure(trainer)
        run_on_all_ranks(lambda: states.offload_states(weights=weights, keep=keep))
        self._bytes["offloaded"] = self._before - sum(states.state_bytes().values())
        self._measure(trainer)

    def _measure(self, trainer: L.Trainer) -> int:
        """Most bytes that torch had allocated since the last call; on a CPU bytes of training states now."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return sum(self._of(trainer).state_bytes().values())
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
