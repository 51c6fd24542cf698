"""``Reference``: log-probs of the initial model for the tokens of an iteration, wherever that model is."""

from collections.abc import Mapping
from typing import Any

from rlhfkit.data.types import Experience
from rlhfkit.modules.on_policy.placed_models import AskedRows, ask, pool_result
from rlhfkit.parts import Part, Stage
from rlhfkit.roles import FrozenModel, ModelPool, ServedModel
from rlhfkit.roles.replica import Role


class Reference(Part):
    """Gives the log-probs of a reference model, which is the policy as it was loaded.

    Parts that read ``ref_logprobs``, such as a KL penalty, bring one; give it to say where the model is::

        GRPOModule("sft", kl_coef=0.01, parts=[Reference(ModelPool("sft", resources={"GPU": 1}))])

    Args:
        pool: ``None``: a frozen child of the module, or the policy without its adapters. A
            :class:`~rlhfkit.roles.ModelPool`: on machines of its own, where it works while the policy computes its old
            log-probs; a :class:`~rlhfkit.roles.ServedModel`: behind a running ``vllm serve``. Both also as plain
            values.

    Raises:
        ValueError: If a model elsewhere was given and no part asks it.
    """

    stage, writes = Stage.MODELS, ("ref_logprobs",)

    def __init__(self, pool: ModelPool | ServedModel | Mapping[str, Any] | None = None) -> None:
        self.pool: FrozenModel | None = FrozenModel.of(pool)
        self.loads_reference = self.pool is None
        self._asked: AskedRows | None = None

    def attach(self, module: Any) -> None:
        """Check that a model elsewhere is asked."""
        super().attach(module)
        if self.pool is not None and not any("ref_logprobs" in part.reads for part in module.parts):
            raise ValueError(
                f"Reference({type(self.pool).__name__}(...)) is a model that nothing asks: give a kl_coef (0.01 is "
                "OpenRLHF's) or KLPenalty, or leave Reference out"
            )

    def placed(self) -> Mapping[str, tuple[FrozenModel, Role]]:
        """The pool."""
        return {} if self.pool is None else {"reference": (self.pool, "logprobs")}

    def begin(self, rows: Experience) -> None:
        """Ask a model elsewhere, which works while the policy computes."""
        if self.pool is not None:
            self._asked = ask(self.pool, "logprobs", self.module, rows)

    def prepare(self, rows: Experience) -> Experience:
        """Add the log-probs."""
        if self.pool is not None:
            asked, self._asked = self._asked, None
            assert asked is not None
            return rows.with_columns(ref_logprobs=pool_result(asked))
        with self.module.reference_model() as reference:
            return rows.with_columns(ref_logprobs=self.module.passes.logprobs(reference, rows))
