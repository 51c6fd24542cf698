"""A number that is not finite on one rank stops the update of all engines on all ranks, at every ZeRO stage.

Covers strategies/deepspeed/synchronized_steps.py, with guard_cases.py.
"""

from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed
STAGES = [0, 1, 2, 3]
EXACT = [*(f"stage {s}" for s in STAGES), *(f"stage {s}, offload" for s in (2, 3)), "ddp"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any, model_folder: str) -> list[dict[str, Any]]:
    """Everything on two ranks in one launch."""
    return ranks.run("strategies.guard_cases:everything", 2, tmp_path_factory.mktemp("guard"), model=model_folder)


@pytest.mark.parametrize("case", ["plain", *EXACT, *(f"stage {stage}, bf16" for stage in (0, 2, 3))])
def test_a_skipped_update_changes_no_weight_and_no_optimizer_state_of_any_engine(
    reports: list[dict[str, Any]], case: str
) -> None:
    # Between five updates. The second had a loss of NaN in its last micro-batch, the fourth a finite loss and a NaN in
    # the critic's gradient in its first: the policy stands still too. Both on the last rank only.
    expected = [False, True, False, True]
    assert reports[0][case]["weights"] == expected
    for report in reports:
        assert report[case]["states"] == expected
        assert report[case]["logged"] == [0, 1, 1, 2, 2]
        assert report[case]["skipped"] == 2


@pytest.mark.parametrize("case", EXACT)
def test_training_goes_on_as_if_the_skipped_windows_had_not_been_there(
    reports: list[dict[str, Any]], case: str
) -> None:
    # Against plain Lightning on one rank, where the callback drops the gradients of the same windows.
    assert reports[0][case]["difference_to_plain"] <= 1e-6


@pytest.mark.parametrize("strategy", ["rlhf_zero2", "ddp"])
def test_too_many_in_a_row_stop_all_ranks_with_the_batches_on_disk(
    reports: list[dict[str, Any]], strategy: str
) -> None:
    for rank, report in enumerate(reports):
        values = report["stop"][strategy]
        assert "3 updates in a row were skipped" in values["message"]
        assert values["folder"] in values["message"]
        assert values["indices"] == [6, 7], "updates 2, 3 and 4 were bad; the last one's two micro-batches"
        assert values["same"] == [True, True]
        assert values["finite"] == ([False, False] if rank == 1 else [True, True]), "the dump names the bad rank"


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflows_are_errors_only_where_the_loss_scale_cannot_fall(
    reports: list[dict[str, Any]], stage: int
) -> None:
    hopeless = reports[0]["fp16"][str(stage)]
    assert (hopeless["rescaled"], hopeless["skipped"]) == (2, 2), "4, 2, 1, then twice in a row at the minimum"
    assert "2 updates in a row" in hopeless["message"]
    assert hopeless["steps"] == 6
