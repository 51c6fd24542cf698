"""Who worked when: Ray's record is read, spans are merged, and a run without actors has the trainer's lane."""

from pathlib import Path
from typing import Any

import pytest
from rl_runs import setup_run

from rlhfkit import RoleTimeline
from rlhfkit.callbacks.role_timeline import Interval, merged, recorded_intervals


def call(worker: str, name: str, start: float, seconds: float, category: str | None = None) -> dict[str, Any]:
    """A line of ``ray.timeline``, of Ray 2.60."""
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"cat": category or f"task::Actor.{name}", "name": name, "tid": f"worker:{worker}", **times}


def created(worker: str, actor: str) -> dict[str, Any]:
    return call(worker, "__init__", 0, 1, f"task::{actor}:Actor.__init__")


def test_calls_are_assigned_to_roles_by_the_names_of_their_actors() -> None:
    events = [
        created("a", "engine-1f-0"),
        created("b", "logprobs-2e-0"),
        created("c", "logprobs-2e-1"),
        created("d", "reward-3d-0"),
        created("e", "mailbox"),
        call("a", "generate", 10, 2),
        call("a", "health", 11, 1),
        call("a", "update", 12, 1),
        call("b", "compute", 10, 1),
        call("c", "compute", 11, 1),
        call("d", "compute", 12, 1),
        call("d", "execute", 12, 1, "task:execute"),
        call("e", "compute", 12, 1),
        call("nobody", "compute", 12, 1),
    ]
    assert recorded_intervals(events) == [
        Interval("engine", "sample", 10, 12),
        Interval("engine", "weight_sync", 12, 13),
        Interval("reference 0", "compute", 10, 11),
        Interval("reference 1", "compute", 11, 12),
        Interval("reward model", "compute", 12, 13),
    ]


def test_spans_that_overlap_are_one() -> None:
    assert merged([(5, 6), (1, 3), (2, 4), (7, 7), (4, 4.5)]) == [(1, 4.5), (5, 6)]


def test_a_run_in_one_process_has_the_lane_of_the_trainer(tmp_path: Path) -> None:
    timeline = RoleTimeline("drawn.png", iterations=2)
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[timeline], max_epochs=3)
    timeline.path = str(tmp_path / "drawn.png")
    trainer.fit(module, datamodule=data)
    assert timeline.saved == tmp_path / "drawn.png"
    assert timeline.saved.stat().st_size > 10_000
    assert {"update", "prepare"} <= {one.phase for one in timeline.intervals if one.lane == "trainer"}
    assert 0.05 < timeline.busy_shares()["trainer"] <= 1
    start, end = timeline._starts[0], timeline._starts[2]
    assert all(start <= one.start < one.end <= end for one in timeline.intervals)


def test_iterations_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="iterations must be an integer of at least 1"):
        RoleTimeline(iterations=0)


def test_a_long_run_keeps_what_is_drawn_and_no_more(tmp_path: Path) -> None:
    timeline, kept = RoleTimeline(iterations=2), []

    class Watch(RoleTimeline):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append((len(timeline._starts), len(timeline._updates)))

    trainer, module, data, _ = setup_run(
        tmp_path, max_epochs=6, callbacks=[timeline, Watch(str(tmp_path / "other.png"))]
    )
    trainer.fit(module, data)
    # Four micro-batches an iteration; the iteration that runs is the third.
    assert kept == [(1, 4), (2, 8), (3, 12), (3, 12), (3, 12), (3, 12)]
    assert {one.phase for one in timeline.intervals} >= {"update"}
    start, end = timeline._window()
    assert sum(one.phase == "update" for one in timeline.intervals) == 8
    assert all(start <= one.start <= one.end <= end for one in timeline.intervals)
