"""``rlhfkit serve-reward``: a real server, used by RemoteReward, by plain HTTP, and by a training run.

Covers ``cli/serve_reward.py`` too.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from rl_runs import fit_run
from tiny_models import tiny_model, tiny_tokenizer
from waiting import until

from rewards.samples import sampled, scored, tokenized
from rlhfkit import RolloutCallback, SamplingSpec
from rlhfkit.cli.serve_reward import load_reward, serve_reward
from rlhfkit.data import Sample
from rlhfkit.models import load_scalar_model
from rlhfkit.rewards import ExactMatch, ModelReward, ProcessModelReward, RemoteReward, exact_match
from rlhfkit.rewards.base import RewardError
from rlhfkit.rewards.remote.server import reward_app
from rlhfkit.rewards.remote.wire import OpenRLHFFormat
from rlhfkit.serving.server import Server

SECRET = "a-secret-of-24-characters"
TEXTS = ("2", "11", "", "abcdefg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model and a process reward model."""
    folder = tmp_path_factory.mktemp("served")
    policy = str(tiny_model(folder / "policy"))
    load_scalar_model(policy, head_std=1.0).save_pretrained(folder / "reward")
    load_scalar_model(policy, head_std=1.0, stepwise=True).save_pretrained(folder / "steps")
    for name in ("reward", "steps"):
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    """Address of the reward model, served by the command in a process of its own."""
    command = [sys.executable, "-m", "rlhfkit.cli.main", "serve-reward", str(folder / "reward"), "--port", "0"]
    environment = os.environ | {"REWARD_TOKEN": SECRET}
    process = subprocess.Popen(
        [*command, "--token_variable", "REWARD_TOKEN", "--device", "cpu"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while not (found := re.search(r"reward 'reward_model' is served at (http://127\.0\.0\.1:\d+)\n", said)):
            line = process.stdout.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield found[1]
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=120)[0]
        assert process.returncode in (0, -signal.SIGTERM)
        assert SECRET not in said + rest
    finally:
        process.kill()


def test_a_served_model_gives_the_numbers_of_the_same_model_here_and_asks_for_its_token(
    folder: Path, served: str
) -> None:
    here = scored(ModelReward(str(folder / "reward"), device="cpu"), tokenized(*TEXTS))
    assert scored(RemoteReward(served, token=SECRET), tokenized(*TEXTS)) == here  # to the last bit
    assert scored(RemoteReward(served, token=SECRET, batch_size=1), tokenized(*TEXTS)) == pytest.approx(here, abs=1e-5)
    with pytest.raises(RewardError, match="answered with status 401"):
        scored(RemoteReward(served), tokenized(*TEXTS))


def test_what_the_model_cannot_read_is_refused_at_once_with_the_reason_and_not_tried_again(served: str) -> None:
    """100,000 tokens, beyond the model's context, kept a server busy for a minute."""
    reward = RemoteReward(served, token=SECRET, name="judge")
    other = tokenized(*TEXTS)
    other[1].text = "eleven"
    long = sampled(tiny_tokenizer().decode([5]) * 100_000, tokens=[5] * 100_000)
    for given, reason in ((other, "another tokenizer than the policy"), ([long], "100002 tokens, and .* at most 512")):
        with pytest.raises(RewardError, match=rf"status 422: .*{reason}"):
            scored(reward, given)
        assert reward.metrics()["judge/retries"] == 0


def test_a_policy_is_trained_on_a_served_model(folder: Path, served: str, tmp_path: Path) -> None:
    rollouts = RolloutCallback(
        RemoteReward(served, token=SECRET), sampling=SamplingSpec(group_size=4, max_new_tokens=4)
    )
    trainer, _, _ = fit_run(tmp_path, model=folder / "policy", rollouts=rollouts, max_epochs=1)
    here = ModelReward(str(folder / "reward"), device="cpu")(rollouts.samples)
    assert [one.reward for one in rollouts.samples] == pytest.approx(here, abs=1e-5)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["remote_reward/failed_fraction"] == 0.0


class Recorder:
    """A third of the lengths of the texts, which say what else it does."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, given: Sequence[Sample]) -> list[float]:
        self.calls += 1
        for one in given:
            if one.text == "wait":
                self.begun.set()
                assert self.go.wait(120)
            if one.text == "crash":
                raise RuntimeError("no memory")
            if one.text == "leave":
                sys.exit("enough")
        return [float(len(one.text)) / 3 for one in given]


@pytest.fixture(scope="module")
def function() -> Iterator[str]:
    """Address of a function, served in a thread without a token."""
    with Server(reward_app(Recorder())) as server:
        yield server.url


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=120)


def ask(url: str, text: str = "abc", **prompt: Any) -> httpx.Response:
    """For the score of one text."""
    return post(f"{url}/score", {"samples": [{"prompt": prompt, "text": text}]})


def test_a_served_function_gives_exact_numbers_to_clients_of_openrlhf_too(function: str) -> None:
    assert scored(RemoteReward(function), tokenized(*TEXTS)) == [1 / 3, 2 / 3, 0.0, 7 / 3]
    there = RemoteReward(f"{function}/get_reward", wire_format=OpenRLHFFormat())
    assert scored(there, tokenized(*TEXTS)) == [1 / 3, 2 / 3, 0.0, 7 / 3]
    asked = {"query": ["1+1=two", "other"], "prompts": ["1+1=", "1+1="], "labels": ["2", "2"]}
    assert post(f"{function}/get_reward", asked).json() == {"rewards": [1.0, 5 / 3]}
    assert post(f"{function}/get_reward", asked | {"labels": ["2"]}).status_code == 422
    assert ask(function, "two").json() == {"rewards": [1.0]}  # a sample needs its text only


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "samples: Field required"),
        ({"samples": [{"text": "x"}]}, "samples[0].prompt: Field required"),
        ({"samples": [{"prompt": {}, "token_ids": ["1"]}]}, "samples[0].token_ids[0]: Input should be a valid"),
        ({"samples": [{"prompt": {}, "token_ids": [3, -1]}]}, "samples[0].token_ids[1]: Input should be greater than"),
        ({"samples": [{"prompt": {}, "token_ids": [2**31]}]}, "samples[0].token_ids[0]: Input should be less than"),
        ({"samples": [{"prompt": {"index": -1}}]}, "samples[0].prompt.index: Input should be greater than"),
        ({"samples": [{"prompt": {}, "reward": 1.0}]}, "samples[0].reward: Extra inputs are not permitted"),
        ({"samples": [{"prompt": {}, "token_ids": [1], "action_mask": []}]}, "the per-token lists"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_the_place(function: str, body: Any, message: str) -> None:
    answer = post(f"{function}/score", body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


@pytest.mark.parametrize("number", [b"NaN", b"1e999"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(function: str, number: bytes) -> None:
    for path, body in (
        ("/score", b'{"samples": [{"prompt": {"answer": [1.5, %s]}}]}'),
        ("/score", b'{"samples": [{"prompt": {"metadata": {"a": {"b": %s}}}}]}'),
        ("/get_reward", b'{"query": ["x"], "labels": [%s]}'),
    ):
        answer = httpx.post(function + path, content=body % number, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert "numbers in JSON are finite" in answer.json()["detail"]


def test_the_limit_of_time_holds_and_crashes_are_told(function: str) -> None:
    crashed = ask(function, "crash")
    assert (crashed.status_code, crashed.json()["detail"]) == (500, "reward 'recorder' failed: RuntimeError: no memory")
    assert ask(function, "leave").status_code == 500  # and the server goes on
    plain = httpx.post(f"{function}/score", content=b'{"samples": []}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 422  # what a web page may post anywhere without asking
    slow = Recorder()
    with Server(reward_app(slow, timeout=2.0)) as server, ThreadPoolExecutor() as threads:

        def health() -> int:
            return httpx.get(f"{server.url}/health", timeout=120).status_code

        waiting = threads.submit(ask, server.url, "wait")
        until(lambda: health() == 503)  # scoring for longer than 2 s
        assert waiting.result().status_code == 504
        slow.go.set()
        until(lambda: health() == 200)
        assert ask(server.url).json() == {"rewards": [1.0]}


def test_while_one_request_is_scored_others_have_little_room_and_are_forgotten_when_they_leave() -> None:
    held, large = Recorder(), {"answer": "a" * 600_000}
    limits = {"max_body_bytes": 700_000, "max_total_bytes": 1_000_000}
    with Server(reward_app(held), **limits) as server, ThreadPoolExecutor() as threads:
        first = threads.submit(ask, server.url, "wait", **large)
        assert held.begun.wait(120)
        refused = ask(server.url, **large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "more than 1000000 bytes" in refused.text
        body = b'{"samples": [{"prompt": {}}]}'
        head = (
            f"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as impatient:
            impatient.sendall(f"{head}\r\n\r\n".encode() + body)
            until(lambda: server.middleware.active == 2)
        until(lambda: server.middleware.active == 1)
        held.go.set()
        assert first.result().json() == {"rewards": [4 / 3]}
        # A client has its answer before the server has finished with the request.
        until(lambda: server.middleware.total_bytes == 0)
        assert ask(server.url, **large).json() == {"rewards": [1.0]}
    assert held.calls == 2


def test_names_stand_for_models_functions_classes_and_objects(folder: Path) -> None:
    assert load_reward("rlhfkit.rewards.exact_match") is exact_match
    assert isinstance(load_reward("rlhfkit.rewards.ExactMatch"), ExactMatch)
    model = load_reward(str(folder / "reward"), device="cpu")
    assert type(model) is ModelReward
    steps = load_reward(str(folder / "steps"), separator="\n", device="cpu")
    assert isinstance(steps, ProcessModelReward)
    there = ProcessModelReward(str(folder / "steps"), separator="\n", device="cpu")
    assert steps(tokenized(*TEXTS)) == there(tokenized(*TEXTS))
    for path, message in [
        ("rlhfkit.rewards.no_such_reward", "neither a folder with a reward model nor the dotted path"),
        ("no_such_module.reward", "neither a folder with a reward model nor the dotted path"),
        ("rlhfkit.rewards.base.TIMEOUT", "is float, which cannot be called on samples"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_reward(path)


def test_limits_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="timeout must be a finite number above 0, got 0"):
        serve_reward("no-such-model", timeout=0)
