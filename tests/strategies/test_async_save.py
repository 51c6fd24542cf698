"""A checkpoint written in the background is the one that a blocking save writes, whatever happens meanwhile.

Covers strategies/checkpoint/saving.py and strategies/checkpoint/engine_files.py,
with async_cases.py.
"""

from typing import Any

import pytest
import torch

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint import engine_files as snapshots
from rlhfkit.strategies.checkpoint.engine_files import snapshot
from strategies import ranks


def test_a_snapshot_is_a_copy_in_which_tensors_share_what_they_shared() -> None:
    flat = torch.arange(10.0)
    parameter = torch.nn.Parameter(flat[2:6].view(2, 2))
    value = {"flat": flat, "view": parameter, "set": {1}, "half": torch.ones(3, dtype=torch.bfloat16), "none": None}
    copy, num_bytes = snapshot(value)
    assert num_bytes == 40 + 6
    flat.zero_()
    value["half"].zero_()
    value["set"].add(2)
    assert copy["flat"].tolist() == list(range(10))
    assert copy["view"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(copy["view"], torch.nn.Parameter)
    assert copy["view"].untyped_storage().data_ptr() == copy["flat"].untyped_storage().data_ptr()
    assert copy["half"].tolist() == [1, 1, 1]
    assert copy["half"].dtype == torch.bfloat16
    assert copy["set"] == {1}


@pytest.mark.cuda
def test_a_snapshot_of_a_gpu_takes_as_much_main_memory_as_it_has() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    value = torch.arange(11_000_000, device="cuda")  # three pieces
    copy, num_bytes = snapshot({"value": value})
    value.zero_()
    assert not copy["value"].is_pinned()  # such memory is rounded up to a power of two
    assert num_bytes == copy["value"].untyped_storage().nbytes() == 88_000_000
    assert torch.equal(copy["value"], torch.arange(11_000_000))


@pytest.mark.parametrize("size", [0, 1, 8, 9, 16, 100])
def test_pieces_of_a_copy_are_all_of_it_through_two_of_them(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 8)
    allocated: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: allocated.extend(sizes) or empty(*sizes, **options))
    source, target = torch.arange(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    snapshots.copy_in_pieces(source, target)
    assert torch.equal(target, source)
    assert allocated == [min(size, 8)] * 2


def test_async_save_is_a_boolean() -> None:
    with pytest.raises(TypeError, match="async_save must be True or False, got 'yes'"):
        RLHFDeepSpeedStrategy(async_save="yes")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any, model_folder: str) -> list[dict[str, Any]]:
    """Of both ranks."""
    return ranks.run("strategies.async_cases:everything", 2, tmp_path_factory.mktemp("async"), model=model_folder)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_written_later_is_the_state_of_the_save_and_resumes_bitwise(
    reports: list[dict[str, Any]], stage: int
) -> None:
    for values in (report[f"stage {stage}"] for report in reports):
        assert values["existed early"] == [False], "training went on before the file was written"
        assert values["files"] == ["background.ckpt", "blocking.ckpt"]
        assert values["same names"]
        assert values["different"] == []
        assert (values["loss"], values["weight"]) == (0.0, 0.0)
        assert 0.3 < values["snapshot"] <= 1.0, "the rest of these small files are names and scripts"


@pytest.mark.distributed
def test_a_full_disk_of_one_rank_is_one_error_on_all_and_harms_neither_training_nor_the_checkpoint_before(
    reports: list[dict[str, Any]],
) -> None:
    for values in (report["full"] for report in reports):
        (error,) = values["errors"]
        assert "A checkpoint was not saved in the background" in error
        assert "second.ckpt could not be written: File too large" in error
        assert values["left"] == ["first.ckpt"]
        assert values["files"] == ["first.ckpt", "third.ckpt"]
        assert values["step"] == 1
        assert (values["loss"], values["weight"]) == (0.0, 0.0)
        assert "last.ckpt could not be written" in values["at the end"]
        assert "one.ckpt could not be written" in values["blocking"]  # and not the time limit of the process group
        assert values["blocking step"] == 1
    for moment in ("left by blocking", "left at the end"):
        assert reports[0]["full"][moment] == [], "rank 0 deletes what was written"
    assert "rank 1 failed" in reports[0]["full"]["errors"][0]


@pytest.mark.distributed
def test_a_run_that_fails_completes_the_checkpoint_that_is_being_written(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert (report["failing"]["error"], report["failing"]["step"]) == ("no more", 2)
    assert "failing.ckpt, which is still being written" in reports[0]["failing"]["waited"][0]


@pytest.mark.distributed
def test_deletions_and_links_follow_and_a_second_save_waits_and_says_so(reports: list[dict[str, Any]]) -> None:
    for values in (report["links"] for report in reports):
        assert values["left"] == ["last.ckpt", "step=6.ckpt"]
        assert values["last"] == "step=6.ckpt"
        assert values["batches after the resume"] == 6
    assert "step=1.ckpt, which is still being written" in reports[0]["links"]["waited"][0]
