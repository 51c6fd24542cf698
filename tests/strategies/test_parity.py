"""Every ZeRO stage trains like plain single-process Lightning, to fp32 rounding, on two ranks.

Covers strategies/strategy.py and deepspeed/engines.py; one rank trains as two do in test_universal.py.
"""

from pathlib import Path
from typing import Any

import pytest

import rlhfkit.strategies  # noqa: F401  (registers the names)
from strategies import ranks, toys
from strategies.parity_cases import check_equal, fit

# Losses are about 4; neighbouring fp32 numbers there are 4.8e-7 apart, so 1e-6 is two units in the last place.
TOLERANCE = 1e-6
TWO_ENGINES = "two engines, reference"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd, accumulate 3 of 4, clip": ({"optimizer": "sgd"}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    TWO_ENGINES: ({"critic": True, "reference": True}, {"accumulate_grad_batches": 3}),
    "tied": ({"optimizer": "sgd"}, {}),
    "gradient checkpointing": ({"optimizer": "sgd", "checkpointing": True}, {}),
}
"""Options of the module, and of the Trainer."""


def parity(folder: Path, model: str, case: str) -> None:
    """Each rank runs the plain fit for itself."""
    options, trainer = CASES[case]
    plain = fit(toys.Toy(model, **options), "auto", **trainer)
    assert abs(plain.losses[0] - plain.losses[-1]) > 0.05, "it must have learnt, else equality shows nothing"
    for stage in range(4):
        found, what = (
            fit(toys.Toy(model, **options), f"rlhf_zero{stage}", log_every_n_steps=1, **trainer),
            f"stage {stage}",
        )
        check_equal(found, plain, what, TOLERANCE)
        assert found.module.learning_rates == plain.module.learning_rates, what
        assert found.module.trainer.global_step == plain.module.trainer.global_step, what
        assert isinstance(found.module.policy, toys.LlamaForCausalLM), "the raw children come back after fit"
        if case == TWO_ENGINES:  # the gradient norm of each engine is known and logged
            norms = found.norms[-1]
            assert norms == pytest.approx(plain.norms[-1], rel=1e-5), what
            assert found.logged[-1] == pytest.approx(norms["policy"], rel=1e-6), what


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.smoke] if case == TWO_ENGINES else []) for case in CASES]
)
def test_all_stages_equal_plain_lightning(tmp_path: Path, model_folder: str, tied_model_folder: str, case: str) -> None:
    ranks.run(parity, 2, tmp_path, model=tied_model_folder if case == "tied" else model_folder, case=case)
