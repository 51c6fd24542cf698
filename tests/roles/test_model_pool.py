"""Models in Ray actors against the same models in this process.

Covers replica.py, frozen_model.py, modules/on_policy/placed_models.py and
modules/parts/critic_elsewhere.py.
One Ray session serves all tests.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_forward import experience
from modules.on_policy.ppo_cases import PlainPPO
from rl_runs import digits, fit_run, weights
from tiny_models import tiny_model

from rlhfkit import (
    Experience,
    Prompt,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.losses import LossOutput
from rlhfkit.models import load_causal_lm, load_scalar_model, load_tokenizer, policy_output, reward_output
from rlhfkit.models.distillation import likeliest_tokens
from rlhfkit.modules.parts import Critic, Reference, RewardModel
from rlhfkit.modules.parts.critic import ValueLoss
from rlhfkit.parts import model_elsewhere
from rlhfkit.rewards import ModelReward
from rlhfkit.roles import ModelPool, ModelPoolError
from rlhfkit.roles.replica import ReplicaOptions, TextReading, TokenRows, compute_rows, spread

pytestmark = pytest.mark.ray


def rows() -> Experience:
    """Four sequences."""
    return experience([(4, 5), (2, 2), (6, 6), (3, 3)])


FLOAT32: Any = {"weights": torch.float32, "compute": torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def pool(folder: Path, ray_session: None) -> Iterator[ModelPool]:
    made = ModelPool(str(folder), num_replicas=2)
    made.start("logprobs", **FLOAT32)
    yield made
    made.close()


def expected(folder: Path, batch: Experience) -> torch.Tensor:
    with torch.no_grad():
        return policy_output(load_causal_lm(str(folder)).eval(), batch, batch.action_mask).logprobs


def one_by_one(batch: Experience) -> list[torch.Tensor]:
    return [torch.tensor([row]) for row in range(len(batch))]


def process_of(replica: Any) -> int:
    """The pid of a replica's actor."""
    import ray

    return ray.get(replica.actor.__ray_call__.remote(lambda _: os.getpid()))


def test_numbers_are_those_of_the_model_in_this_process_and_replicas_share_the_requests(
    folder: Path, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a student makes of likeliest tokens: ``preparation/test_placed_models.py``."""
    batch = rows()
    whole = pool.submit(batch, [torch.arange(len(batch))])
    some = pool.submit(batch, [torch.tensor([2]), torch.tensor([0])])
    torch.testing.assert_close(whole.result(), expected(folder, batch), rtol=0, atol=1e-6)
    wanted = torch.zeros(len(batch), 1)
    wanted[[0, 2]] = 1
    torch.testing.assert_close(some.result(), expected(folder, batch) * wanted, rtol=0, atol=1e-5)
    assert [replica.tokens for replica in pool._replicas] == [0, 0]
    monkeypatch.setattr(pool, "top", 4)
    asked = pool.submit(batch, one_by_one(batch))
    assert {replica.name for _, replica in asked._running.values()} == {one.name for one in pool._replicas}
    model = load_causal_lm(str(folder)).eval()
    likeliest = likeliest_tokens(model, batch, batch.action_mask, 4, batch.temperature, chunk_size=5)
    torch.testing.assert_close(asked.result(), likeliest, rtol=0, atol=1e-5)


def test_a_replica_that_dies_is_started_again_and_nothing_is_lost(folder: Path, pool: ModelPool) -> None:
    batch = rows()
    os.kill(process_of(pool._replicas[0]), signal.SIGKILL)
    found = pool.submit(batch, one_by_one(batch)).result()
    torch.testing.assert_close(found, expected(folder, batch), rtol=0, atol=1e-5)
    assert not any(replica.lost for replica in pool._replicas)


def test_what_a_stuck_replica_was_asked_others_compute_and_without_any_it_is_an_error(
    folder: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, pool = rows(), ModelPool(str(folder), num_replicas=2, max_restarts=0)
    pool.start("logprobs", **FLOAT32)
    try:
        first, second = (process_of(replica) for replica in pool._replicas)
        os.kill(first, signal.SIGSTOP)
        asked = pool.submit(batch, one_by_one(batch))
        give_up = asked._give_up

        def once(replica: Any, reason: str) -> None:
            give_up(replica, reason)
            pool.request_timeout = 600.0  # the other may be slow

        monkeypatch.setattr(asked, "_give_up", once)
        while any(replica is pool._replicas[1] for _, replica in asked._running.values()):
            asked._take(1.0)
        pool.request_timeout = 3.0  # from when nobody but the stuck one has anything to do
        torch.testing.assert_close(asked.result(), expected(folder, batch), rtol=0, atol=1e-5)
        assert [bool(replica.lost) for replica in pool._replicas] == [True, False]
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        pool.request_timeout = 3600.0  # longer than a test may take: those that have died are not waited for
        with pytest.raises(ModelPoolError, match=r"no replica of .* is left .*finished nothing for 3 s"):
            pool.submit(batch, one_by_one(batch)).result()
    finally:
        pool.close()


def test_a_replica_that_computes_for_other_ranks_is_not_stuck(
    folder: Path, pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this rank asks for waits behind what others have asked for, for longer than a request may take."""
    import ray

    begun, go_on = tmp_path / "begun", tmp_path / "go on"

    def hold(replica: Any) -> None:
        replica.load()

        def wait(*_: Any) -> None:
            begun.touch()
            while not go_on.exists():
                time.sleep(0.05)

        replica.held = replica._model.register_forward_pre_hook(wait)

    batch, replica = rows(), pool._replicas[0]
    monkeypatch.setattr(pool, "request_timeout", 300.0)
    ray.get(replica.actor.compute.remote(TokenRows.of(batch, [0])))
    ray.get(replica.actor.__ray_call__.remote(hold))
    try:
        other = replica.actor.compute.remote(TokenRows.of(batch, [0]))
        asked = pool.submit(batch, [torch.arange(len(batch))])
        while not begun.exists():
            time.sleep(0.05)
        replica.last_finished = time.monotonic() - 1000.0  # as far as this rank has seen
        asked._check_progress()
        assert not replica.lost
        time.sleep(0.5)
        assert not replica.works(0.5)  # it says when it has finished something, not only that it is there
        go_on.touch()
        found = asked.result()
        del other
    finally:
        go_on.touch()
        ray.get(replica.actor.__ray_call__.remote(lambda replica: replica.held.remove()))
    torch.testing.assert_close(found, expected(folder, batch), rtol=0, atol=1e-5)


def test_a_pool_that_has_another_role_already_is_refused(pool: ModelPool) -> None:
    """Its replicas would answer with the numbers of that role."""
    pool.start("logprobs", **FLOAT32)
    with pytest.raises(ValueError, match=r"were started for log-probs .*, and are asked for values .*of its own"):
        pool.start("values", **FLOAT32)
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        pool.start("logprobs", weights=torch.float32, compute=torch.bfloat16)


def test_a_model_that_cannot_be_loaded_or_placed_is_an_error_at_once(tmp_path: Path, ray_session: None) -> None:
    with pytest.raises(ModelPoolError, match=r"could not load .*missing"):
        ModelPool(str(tmp_path / "missing")).start("logprobs", **FLOAT32)
    import ray

    free = int(ray.available_resources()["CPU"])  # engines of other tests may have some
    with pytest.raises(ModelPoolError, match=r"could not load .*missing"):  # while there is no room for the second
        ModelPool(str(tmp_path / "missing"), num_replicas=2, resources={"CPU": free}).start("logprobs", **FLOAT32)
    with pytest.raises(ModelPoolError, match=r"1 of 1 replica\(s\) .* within 1 s: .*'GPU': 64"):
        ModelPool("model", resources={"GPU": 64}, start_timeout=1.0).start("logprobs", **FLOAT32)


def test_scores_are_those_of_the_reward_model_in_this_process(tmp_path: Path, folder: Path, ray_session: None) -> None:
    """Of the policy's tokens; and of text, by a model with another tokenizer and a dialogue format of its own."""
    model = load_scalar_model(str(folder), head_std=0.1)
    model.save_pretrained(tmp_path / "reward")
    tokenizer, own = load_tokenizer(str(folder)), load_tokenizer(str(folder))
    own.chat_template = "{% for turn in messages %}<{{ turn.role[0] }}>{{ turn.content }}{% endfor %}"
    own.save_pretrained(tmp_path / "reward")
    batch = rows()
    pools = [ModelPool(str(tmp_path / "reward"), reads=reads) for reads in ("tokens", "chat")]
    for pool in pools:
        pool.start("reward", policy=str(folder), **FLOAT32)
    tokens, chat = (pool.submit(batch, one_by_one(batch)).result(columns=1)[:, 0] for pool in pools)
    with torch.no_grad():
        torch.testing.assert_close(tokens, reward_output(model.eval(), batch), rtol=0, atol=1e-5)
    samples = []
    for row, (ids, length) in enumerate(zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True)):
        begin = int(batch.prompt_lengths[row])
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:begin], ids[begin:length])]
        prompt = Prompt(row, ids[:begin], text=f"<u>{texts[0]}<a>{texts[1]}")
        samples.append(Sample(prompt, 0, ids[begin:length], [0.0] * (length - begin), [0] * (length - begin), "stop"))
    direct = ModelReward(str(tmp_path / "reward"), text=lambda sample: sample.prompt.text, device="cpu")(samples)
    torch.testing.assert_close(chat, torch.tensor(direct), rtol=0, atol=1e-5)
    for pool in pools:
        pool.close()
    with pytest.raises(ValueError, match="is for reward models"):
        ModelPool("model", reads="chat").start("logprobs", **FLOAT32)


def kill(pool: ModelPool) -> None:
    """End the processes of all replicas."""
    for pid in [process_of(replica) for replica in pool._replicas]:
        os.kill(pid, signal.SIGKILL)


class NoGradient(ValueLoss):
    """A loss that changes no critic."""

    def loss(self, batch: Experience, values: torch.Tensor) -> LossOutput:
        return LossOutput(0 * values.sum(), super().loss(batch, values).metrics)


def test_a_run_with_all_models_elsewhere_is_the_run_with_children(tmp_path: Path, ray_session: None) -> None:
    """Replicas die in the first iteration, when they were asked about its groups, before the policy needs a number.

    Of the child that stands for the frozen critic in a pool nothing learns.
    """
    model, scorer = str(tiny_model(tmp_path / "model")), str(tmp_path / "scorer")
    load_scalar_model(model, head_std=0.1).save_pretrained(scorer)
    load_tokenizer(model).save_pretrained(scorer)
    trained, metrics = [], []
    asked: list[int] = []
    for elsewhere in (False, True):
        pools = [ModelPool(scorer), ModelPool(model), ModelPool(scorer, num_replicas=2)] if elsewhere else []
        reward, reference, values = pools or (scorer, None, scorer)

        def score(samples: Any) -> list[float]:
            if not asked:
                asked.extend(len(pool.early.keys()) for pool in pools)  # noqa: B023
                for pool in pools:  # noqa: B023
                    kill(pool)
            return digits(samples)

        critic = [Critic(values, bootstrap_truncated=True), *([] if elsewhere else [NoGradient()])]
        parts = [RewardModel(reward), Reference(reference), *critic]
        rollouts = RolloutCallback(score, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
        arguments = {"lr": 0.05, "kl_coef": 0.1, "parts": parts}
        trainer, module, _ = fit_run(tmp_path, module=PlainPPO, module_arguments=arguments, rollouts=rollouts)
        assert bool(rollouts.experience.truncated.any())  # so that values of final states were asked for
        assert {hasattr(module, name) for name in ("reference", "reward_model", "critic")} == {not elsewhere}
        trained.append(weights(module))
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert asked == [32] * 3
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=1e-6)
    kept = {name for name in metrics[1] if name.startswith("value/")}
    assert kept == {"value/mean", "value/error", "value/explained_variance"}
    for name in kept:
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-4), name
    for name in ("reference_waited", "reference_hidden", "reward_model_waited", "reward_model_hidden"):
        assert metrics[1][f"time/{name}"] >= 0
    restored = PlainPPO(**dict(module.hparams))
    assert model_elsewhere(restored.parts, "reference").plain() == reference.plain()
    assert restored.critic_part.plain() == module.critic_part.plain()
    with pytest.raises(ValueError, match="the critic is frozen: it is still that of"):
        module.save_pretrained(tmp_path / "saved", child="critic")


def test_what_a_reward_model_reads_has_a_token_and_fits_its_context(tmp_path: Path, folder: Path) -> None:
    short = str(tiny_model(tmp_path / "short", context=8))
    reading = TextReading("text", str(folder), short, False)
    ids, lengths = reading.read(torch.tensor([[1, 1, 0], [5, 6, 7]]), torch.tensor([2, 3]), torch.ones(2, 2))
    assert lengths.tolist() == [1, 3]  # of control tokens alone, which are no text
    assert ids[1].tolist() == [5, 6, 7]
    batch, options = rows(), ReplicaOptions(short, "reward", torch.float32, torch.float32, None, False, "text")
    model = load_scalar_model(short)
    given = TokenRows.of(batch, [1, 3])
    assert compute_rows(model, given, options, reading, torch.device("cpu")).shape == (2, 1)
    with pytest.raises(ValueError, match=r"has 12 tokens, and .*short reads at most 8"):
        compute_rows(model, TokenRows.of(batch, [2]), options, reading, torch.device("cpu"))


def test_each_device_of_a_replica_has_an_equal_part_of_the_layers_and_all_else_is_on_the_first(folder: Path) -> None:
    batch, cpu, other = rows(), torch.device("cpu"), torch.device("meta")
    model: Any = spread(load_causal_lm(str(folder)), [cpu, other])
    first, second = ({one.device for one in layer.parameters()} for layer in model.model.layers)
    around = {one.device for name, one in model.named_parameters() if ".layers." not in name}
    assert (first, second, around) == ({cpu}, {other}, {cpu})
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to copy back from this device
        policy_output(model, batch, batch.action_mask)
    with torch.no_grad():
        whole = policy_output(spread(load_causal_lm(str(folder)).eval(), [cpu, cpu]), batch, batch.action_mask)
    torch.testing.assert_close(whole.logprobs, expected(folder, batch), rtol=0, atol=0)
    with pytest.raises(ValueError, match="2 layers cannot be divided over 3 devices"):
        spread(load_causal_lm(str(folder)), [cpu] * 3)
