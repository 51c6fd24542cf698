"""``EngineWrapper``: base class of engines around another one, which is used for everything but sampling."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource


class EngineWrapper(RolloutEngine):
    """A :class:`~rlhfkit.rollout.engine.RolloutEngine` with the weights, versions and ranks of the inner ``engine``.

    Subclasses override :meth:`generate`, which is called from any thread where the inner engine is shared; a sample of
    the inner engine has its ``text``. All other members are the inner engine's, except ``can_stream`` and with it
    ``continuous_batching``, since its ``stream`` would bypass the subclass. Raises ``TypeError`` if ``engine`` is not a
    ``RolloutEngine``.
    """

    changes_training_only: ClassVar[bool] = True
    """Whether validation, and the greedy answers of ReMax, are sampled by the inner engine alone, so that their scores
    are the policy's; false for a wrapper that is a part of the task, as episodes are."""

    def __init__(self, engine: RolloutEngine) -> None:
        if not isinstance(engine, RolloutEngine):
            raise TypeError(f"engine must implement rlhfkit.rollout.RolloutEngine, got {type(engine).__name__}")
        self.engine = engine

    @property
    def shared(self) -> bool:
        """Whether one engine serves all ranks."""
        return self.engine.shared

    @property
    def colocate(self) -> bool:
        """Whether the engine uses the GPUs of the training ranks."""
        return self.engine.colocate

    @property
    def updates_in_flight(self) -> bool:
        """Whether weights may be updated while the engine generates."""
        return self.engine.updates_in_flight

    @property
    def continuous_batching(self) -> bool:
        """Whether the engine runs later requests beside earlier ones; false for a subclass without ``stream``."""
        return self.can_stream and self.engine.continuous_batching

    @property
    def can_score(self) -> bool:
        """Whether the engine can return log-probs of given tokens."""
        return self.engine.can_score

    @property
    def recorded(self) -> bool:
        """Whether samples come from an earlier run."""
        return self.engine.recorded

    @property
    def quantized(self) -> bool:
        """Whether the engine computes with fewer bits than it is sent."""
        return self.engine.quantized

    @property
    def shortens_answers(self) -> bool:
        """Whether completions are limited to the room left in the context."""
        return self.engine.shortens_answers

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of prompt and completion; ``None``: the model's context."""
        return self.engine.max_model_len

    @property
    def version(self) -> int | None:
        """Policy version of the weights being served."""
        return self.engine.version

    @version.setter
    def version(self, version: int | None) -> None:
        self.engine.version = version

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Get ready to serve a model; see :meth:`RolloutEngine.start`."""
        self.engine.start(model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=load_weights)

    def check_model(self, model: str, *, trust_remote_code: bool = False) -> None:
        """Check that the engine can serve a model; see :meth:`RolloutEngine.check_model`."""
        self.engine.check_model(model, trust_remote_code=trust_remote_code)

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """Prepare log-probs; see :meth:`RolloutEngine.configure_logprobs`."""
        return self.engine.configure_logprobs(sampling)

    def configure_weights(self, weights: WeightSource) -> None:
        """Prepare for the weights; see :meth:`RolloutEngine.configure_weights`."""
        self.engine.configure_weights(weights)

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer; see :meth:`RolloutEngine.configure_tokenizer`."""
        self.engine.configure_tokenizer(tokenizer, chat_template_kwargs)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample; see :meth:`RolloutEngine.generate`."""
        return self.engine.generate(prompts, sampling, iteration=iteration)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of given tokens; see :meth:`RolloutEngine.score`."""
        return self.engine.score(sequences)

    def load(self, weights: WeightSource, version: int) -> None:
        """Load weights; see :meth:`RolloutEngine.load`."""
        self.engine.load(weights, version)

    def sync_metrics(self) -> Mapping[str, float]:
        """Return metrics; see :meth:`RolloutEngine.sync_metrics`."""
        return self.engine.sync_metrics()

    def sleep(self) -> None:
        """Free GPU memory; see :meth:`RolloutEngine.sleep`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.engine.wake()

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self.engine.close()


def policy_engine(engine: RolloutEngine) -> RolloutEngine:
    """The engine that samples as the policy does: without wrappers that change how training samples."""
    while isinstance(engine, EngineWrapper) and engine.changes_training_only:
        engine = engine.engine
    return engine
