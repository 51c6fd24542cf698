"""Groups with a signal are kept and trained on again, weighted by the policies that made them.

That weights of sequences are the ratio of the two policies: ``modules/on_policy/test_functions.py``.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl_runs import Iterations, PlainGRPO, SaveAt, fit_run, only_odd, setup_run, weights

from rlhfkit import (
    LocalEngine,
    Part,
    Prompt,
    ReplayBuffer,
    ReplayEngine,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.callbacks import RolloutDump
from rlhfkit.callbacks.rollout.parts import replay_buffer
from rlhfkit.callbacks.rollout.parts.dynamic_sampling import check_part
from rlhfkit.data import Experience
from rlhfkit.modules.parts import NoCorrection
from rlhfkit.modules.parts.correction import Correction
from rlhfkit.protocols import STATES_OF_RANKS
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.replay import sample_from_state, sample_state


def group(index: int, rewards: Sequence[float | None]) -> list[Sample]:
    prompt = Prompt(index, [5], text="a", answer=3, metadata={"source": "x"})
    return [
        Sample(prompt, place, [7, place], [-0.5, -1.25], [0, 1], "stop", reward=reward)
        for place, reward in enumerate(rewards)
    ]


def collected(*groups: list[Sample]) -> CollectedGroups:
    return CollectedGroups(list(groups), [one[0].prompt.index for one in groups], len(groups), len(groups), 0, 0.0, {})


def iterations(replay: ReplayBuffer, *each: Sequence[list[Sample]], seed: int = 0) -> list[list[tuple[int, bool]]]:
    """Prompts of the groups that are trained on, and whether they are replayed, of iterations of one update each."""
    found = []
    for number, groups in enumerate(each):
        made = replay.replay(collected(*groups), iteration=number, version=number, seed=seed)
        assert [one[0].prompt.index for one in made.groups] == made.prompts
        found.append([(one[0].prompt.index, one[0].replayed) for one in made.groups])
    return found


GOOD, EQUAL = [1.0, 0.0], [0.0, 0.0]


def test_groups_without_a_signal_are_replaced_by_kept_ones_in_their_places() -> None:
    replay = ReplayBuffer(fraction=0.5)
    first, second, third = iterations(
        replay,
        [group(0, GOOD), group(1, EQUAL), group(2, [1.0, 0.5]), group(3, EQUAL)],
        [group(4, EQUAL), group(5, GOOD), group(6, EQUAL), group(7, EQUAL)],
        [group(0, EQUAL), group(5, [0.0, None]), group(9, EQUAL), group(10, GOOD)],
    )
    assert first == [(0, False), (1, False), (2, False), (3, False)]  # nothing was kept before
    assert {second[0], second[2]} == {(0, True), (2, True)}
    assert (second[1], second[3]) == ((5, False), (7, False))  # half of the iteration at most
    assert third[0] == (2, True)  # not those of prompts that were just sampled
    assert third[1:] == [(5, False), (9, False), (10, False)]


def test_a_group_is_replayed_until_a_token_is_too_old_and_ages_are_logged() -> None:
    replay = ReplayBuffer(max_age=3, fraction=1.0)
    silent = [[group(10 + number, EQUAL), group(20 + number, EQUAL)] for number in range(4)]
    runs = iterations(replay, [group(0, GOOD), group(1, EQUAL)], *silent)
    assert [run[0] for run in runs] == [(0, False), (0, True), (0, True), (0, True), (13, False)]
    replay = ReplayBuffer(max_age=3, fraction=1.0)
    iterations(replay, [group(0, GOOD), group(1, EQUAL)], *silent[:3])
    assert replay.measured == {
        "rollout/replayed_fraction": 0.5,
        "rollout/replayed_age": 2.5,  # tokens of versions 0 and 1 at version 3
        "rollout/replayed_age_max": 3.0,
        "rollout/reward_before_replay": 0.0,
        "rollout/replay_buffer_groups": 1.0,
    }


def first(state: dict[str, Any]) -> Sample:
    """The first sample of a group in a checkpoint."""
    return sample_from_state(state["samples"][0])


def test_the_groups_that_differ_most_stay_and_the_newest_of_a_prompt() -> None:
    replay = ReplayBuffer(capacity=2, min_reward=0.5)
    iterations(
        replay,
        [group(0, [0.6, 0.0]), group(1, [1.0, 0.0]), group(2, [0.9, 0.0]), group(3, [0.4, -9.0])],
        [group(1, [0.8, 0.2]), group(4, [0.5, 0.4])],
    )
    kept = {one.prompt.index: one.reward for one in map(first, replay.state_dict(0))}
    assert kept == {2: 0.9, 1: 0.8}


def test_the_choice_is_drawn_in_proportion_to_the_deviations() -> None:
    counts = {0: 0, 1: 0}
    for seed in range(400):
        replay = ReplayBuffer(fraction=0.5)
        (_, second) = iterations(
            replay, [group(0, [3.0, 0.0]), group(1, [1.0, 0.0])], [group(2, EQUAL), group(3, EQUAL)], seed=seed
        )
        counts[second[0][0]] += 1
    assert abs(counts[0] / 400 - 0.75) < 3.5 * math.sqrt(0.75 * 0.25 / 400)


def test_what_differs_may_be_a_part_of_the_reward() -> None:
    samples = group(0, [1.0, 0.9])
    for sample in samples:
        sample.reward_parts = {"right": 1.0}
    replay = ReplayBuffer(by="right")
    iterations(replay, [samples])
    assert replay.state_dict(0) == []
    with pytest.raises(ValueError, match=r"ReplayBuffer\(by='right'\): no reward part is called that"):
        iterations(replay, [group(1, GOOD)])
    with pytest.raises(ValueError, match=r"ReplayBuffer\(by='wrong'\): no reward part is called that; .* are right"):
        check_part("ReplayBuffer", "wrong", ["right"])


def test_states_are_plain_and_hold_every_field_exactly() -> None:
    sample = group(3, GOOD)[0]
    sample.action_mask, sample.token_rewards, sample.logprobs = [True, False], [0.1, 0.2], [math.nan, -1e-9]
    sample.reward_parts, sample.info, sample.text = {"right": 1.0}, {"turns": 2}, "x y"
    file = io.BytesIO()
    torch.save(sample_state(sample), file)
    file.seek(0)
    restored = sample_from_state(torch.load(file, weights_only=True))
    assert repr(restored) == repr(sample)  # NaN is not equal to itself


# ---------------------------------------------------------------------- whole runs


class Watch(Iterations):
    """And all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Experience] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    @property
    def replayed(self) -> list[list[int]]:
        """Prompts of the replayed groups of each iteration."""
        return [[one.prompt.index for one in samples[::4] if one.replayed] for samples in self.samples]


def fit(folder: Path, *callbacks: Any, engine: Any = None, resume: Any = None) -> Any:
    """The module after four iterations."""
    sampling, parts = SamplingSpec(group_size=4, max_new_tokens=8), [ReplayBuffer(fraction=0.25, max_age=4)]
    run = {"module": PlainGRPO, "module_arguments": {"lr": 0.05}, "callbacks": callbacks, "max_epochs": 4}
    rollouts = RolloutCallback(only_odd, engine=engine or LocalEngine(), sampling=sampling, parts=parts)
    return fit_run(folder, rollouts=rollouts, resume=resume, **run)[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, Any]:
    folder = tmp_path_factory.mktemp("replay")
    watch = Watch()
    module = fit(folder, watch, SaveAt(folder / "saved.ckpt", batch=10), RolloutDump(folder / "dump"))
    return folder, watch, module


def test_a_run_replaces_silent_groups_and_weights_their_tokens_by_the_policies_that_made_them(straight: Any) -> None:
    _, watch, module = straight
    assert [len(prompts) for prompts in watch.replayed] == [0, 2, 2, 2]
    assert all(len(prompts) == 8 for prompts in watch.prompts)
    assert all(prompt % 2 for prompts in watch.replayed for prompt in prompts)
    metrics = module.trainer.callback_metrics
    assert metrics["rollout/replayed_fraction"] == 0.25
    assert metrics["rollout/replayed_age_max"] <= 4
    assert [part.kind for part in module.parts if isinstance(part, Correction)] == ["tis"]
    for number, batch in enumerate(watch.batches):
        made = batch.versions.amax(-1)
        begun = number // 4 * 2  # updates before the iteration
        assert torch.equal(batch.replayed, made < begun)
        if batch.old_logprobs is None:
            continue
        change = (batch.old_logprobs - batch.rollout_logprobs).abs().where(batch.action_mask, 0.0).amax(-1)
        assert (change[~batch.replayed] < 2e-5).all()
        assert (change[batch.replayed] > 1e-3).all()


def test_a_resumed_run_has_the_groups_and_is_bitwise_the_straight_one(straight: Any) -> None:
    folder, watch, module = straight
    rest = Watch()
    resumed = fit(folder, rest, resume=str(folder / "saved.ckpt"))
    assert rest.replayed == [[], *watch.replayed[3:]]  # inside an iteration there are no samples
    assert all(torch.equal(tensor, weights(module)[name]) for name, tensor in weights(resumed).items())


def test_a_recorded_run_with_a_buffer_is_repeated_bitwise(straight: Any) -> None:
    folder, watch, module = straight
    again = Watch()
    repeated = fit(folder, again, engine=ReplayEngine(folder / "dump"))
    assert again.tokens == watch.tokens
    assert all(torch.equal(tensor, weights(module)[name]) for name, tensor in weights(repeated).items())


def saved(part: ReplayBuffer | None, index: int, iteration: int = 0, reward: float = 1.0) -> ReplayBuffer:
    """The part after an iteration with one group."""
    assert part is not None
    part.replay(collected(group(index, [reward, 0.0])), iteration=iteration, version=0, seed=0)
    return part


def test_groups_of_all_ranks_states_are_divided_and_the_newest_of_a_prompt_counts() -> None:
    def callback() -> RolloutCallback:
        return RolloutCallback(only_odd, sampling=SamplingSpec(group_size=2), parts=[ReplayBuffer()])

    states = []
    for prompt in range(4):  # each of four ranks has one
        one = callback()
        saved(one.part(ReplayBuffer), prompt)
        states.append({"callbacks": {one.state_key: one.state_dict()}})
    found = []
    for rank in range(2):
        one = callback()
        trainer: Any = SimpleNamespace(global_rank=rank, world_size=2)
        one.on_load_checkpoint(trainer, trainer, {STATES_OF_RANKS: states})
        one.load_state_dict(states[0]["callbacks"][one.state_key])
        found.append([first(each).prompt.index for each in one.state_dict()["parts"]["ReplayBuffer[0]"]])
    assert found == [[0, 2], [1, 3]]

    kept = [saved(ReplayBuffer(), 0, number, 1.0 - number / 2).state_dict(0)[0] for number in (0, 1)]
    replay = ReplayBuffer()
    replay.take(kept, group_size=2)
    assert [state["iteration"] for state in replay.state_dict(0)] == [1]
    replay.take(kept, group_size=3)  # the run goes on with larger groups
    assert replay.state_dict(0) == []


@pytest.mark.parametrize(("own", "other"), [(0, 1), (1, 0), (1, 1)])
def test_of_groups_of_a_prompt_that_two_ranks_have_the_newest_or_the_lower_ranks_stays(
    own: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a resume by other ranks; this is rank 0, and knows the other by what that one sends."""
    sent: list[Any] = []
    monkeypatch.setattr(replay_buffer, "gather_objects", lambda numbers: [sent.append(numbers) or numbers])
    there, here = (saved(ReplayBuffer(), 0, iteration) for iteration in (other, own))
    sent.clear()
    there.replay(collected(group(9, EQUAL)), iteration=2, version=0, seed=0)
    monkeypatch.setattr(replay_buffer, "gather_objects", lambda numbers: [numbers, ([], sent[0][1])])
    here.replay(collected(group(8, EQUAL)), iteration=2, version=0, seed=0)
    assert [state["iteration"] for state in here.state_dict(0)] == ([own] if own >= other else [])


@pytest.mark.parametrize(
    ("correction", "group_size", "says"),
    [
        (NoCorrection(), 2, r"for which it has no importance weights: give it Correction\('tis'"),
        (Correction("tis"), 1, r"with SamplingSpec\(group_size=1\) none does"),
    ],
)
def test_a_module_without_weights_and_groups_of_one_are_refused(
    tmp_path: Path, correction: Part, group_size: int, says: str
) -> None:
    sampling = SamplingSpec(group_size=group_size, max_new_tokens=4)
    rollouts = RolloutCallback(only_odd, sampling=sampling, parts=[ReplayBuffer()])
    trainer, module, data, _ = setup_run(tmp_path, module_arguments={"parts": [correction]}, rollouts=rollouts)
    with pytest.raises(ValueError, match=says):
        trainer.fit(module, data)
