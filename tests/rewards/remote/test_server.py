"""``rlhfkit serve-reward``: a real server, used by RemoteReward, by plain HTTP, and by a training run.

Covers ``cli/serve_reward.py`` too.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import lightning as L
import pytest
from tiny_models import tiny_model, tiny_tokenizer
from waiting import until

from rlhfkit import GRPOModule, PromptDataModule, RolloutCallback, SamplingSpec
from rlhfkit.cli.serve_reward import load_reward
from rlhfkit.data import Prompt, Sample
from rlhfkit.models import load_scalar_model
from rlhfkit.rewards import ExactMatch, ModelReward, ProcessModelReward, RemoteReward, exact_match
from rlhfkit.rewards.base import RewardError, score_samples
from rlhfkit.rewards.remote.server import reward_app
from rlhfkit.rewards.remote.wire import OpenRLHFFormat
from rlhfkit.serving.server import Server

SECRET = "a-secret-of-24-characters"


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


def samples(texts: Sequence[str] = ("2", "11", "", "abcdefg")) -> list[Sample]:
    tokenizer = tiny_tokenizer()
    prompt = Prompt(0, tokenizer("1+1=")["input_ids"], "1+1=", answer="2")
    found = []
    for index, text in enumerate(texts):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        found.append(Sample(prompt, index, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=text))
    return found


def scored(reward: Any, given: Sequence[Sample]) -> list[float | None]:
    score_samples(reward, given)
    return [sample.reward for sample in given]


def test_a_served_model_gives_the_numbers_of_the_same_model_here(folder: Path, served: str) -> None:
    here = scored(ModelReward(str(folder / "reward"), device="cpu"), samples())
    assert scored(RemoteReward(served, token=SECRET), samples()) == here  # to the last bit
    assert scored(RemoteReward(served, token=SECRET, batch_size=1), samples()) == pytest.approx(here, abs=1e-5)


def test_a_served_model_asks_for_its_token(served: str) -> None:
    with pytest.raises(RewardError, match="answered with status 401"):
        scored(RemoteReward(served), samples())


def test_what_the_model_cannot_read_is_refused_with_the_reason_and_not_tried_again(served: str) -> None:
    given = samples()
    given[1].text = "eleven"
    reward = RemoteReward(served, token=SECRET, name="judge")
    with pytest.raises(RewardError, match=r"status 422: .*another tokenizer than the policy"):
        scored(reward, given)
    assert reward.metrics()["judge/retries"] == 0


def test_a_policy_is_trained_on_a_served_model(folder: Path, served: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(4)))
    rollouts = RolloutCallback(
        RemoteReward(served, token=SECRET), sampling=SamplingSpec(group_size=4, max_new_tokens=4)
    )
    kept: list[Sample] = []

    class Keep(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            kept.extend(rollouts.samples)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[Keep(), rollouts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    data = PromptDataModule(str(tmp_path / "prompts.jsonl"), rollout_batch_size=4, micro_batch_size=16)
    trainer.fit(GRPOModule(str(folder / "policy"), lr=3e-3), data)
    here = ModelReward(str(folder / "reward"), device="cpu")(kept)
    assert len(kept) == 16
    assert [sample.reward for sample in kept] == pytest.approx(here, abs=1e-5)
    assert trainer.global_step == 1


class Recorder:
    """A third of the lengths of the texts, which say what else it does."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, given: Sequence[Sample]) -> list[float]:
        for sample in given:
            if sample.text == "wait":
                assert self.go.wait(120)
            if sample.text == "crash":
                raise RuntimeError("no memory")
            if sample.text == "leave":
                sys.exit("enough")
        return [float(len(sample.text)) / 3 for sample in given]


@pytest.fixture(scope="module")
def function() -> Iterator[str]:
    """Address of a function, served in a thread without a token."""
    with Server(reward_app(Recorder()), max_body_bytes=2000) as server:
        yield server.url


@pytest.fixture
def post(function: str) -> Callable[..., httpx.Response]:
    return lambda path, body, **more: httpx.post(function + path, json=body, timeout=120, **more)


def test_a_served_function_gives_exact_numbers(function: str) -> None:
    assert scored(RemoteReward(function), samples()) == [1 / 3, 2 / 3, 0.0, 7 / 3]


def test_a_sample_needs_its_text_only_and_clients_of_openrlhf_are_served(post: Any, function: str) -> None:
    body = {"samples": [{"prompt": {"text": "1+1="}, "text": "two"}]}
    assert post("/score", body).json() == {"rewards": [1.0]}
    asked = {"query": ["1+1=two", "other"], "prompts": ["1+1=", "1+1="], "labels": ["2", "2"]}
    assert post("/get_reward", asked).json() == {"rewards": [1.0, 5 / 3]}
    there = RemoteReward(f"{function}/get_reward", wire_format=OpenRLHFFormat())
    assert scored(there, samples()) == [1 / 3, 2 / 3, 0.0, 7 / 3]
    assert post("/get_reward", asked | {"labels": ["2"]}).status_code == 422


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "samples: Field required"),
        ({"samples": [{"text": "x"}]}, "samples[0].prompt: Field required"),
        ({"samples": [{"prompt": {}, "token_ids": ["1"]}]}, "samples[0].token_ids[0]: Input should be a valid"),
        ({"samples": [{"prompt": {}, "token_ids": [True]}]}, "samples[0].token_ids[0]: Input should be a valid"),
        ({"samples": [{"prompt": {}, "token_ids": [3, -1]}]}, "samples[0].token_ids[1]: Input should be greater than"),
        ({"samples": [{"prompt": {}, "token_ids": [2**31]}]}, "samples[0].token_ids[0]: Input should be less than"),
        ({"samples": [{"prompt": {"index": -1}}]}, "samples[0].prompt.index: Input should be greater than"),
        ({"samples": [{"prompt": {}, "reward": 1.0}]}, "samples[0].reward: Extra inputs are not permitted"),
        ({"samples": [{"prompt": {}, "token_ids": [1], "action_mask": []}]}, "the per-token lists"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_the_place(post: Any, body: Any, message: str) -> None:
    answer = post("/score", body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(function: str, number: bytes) -> None:
    for path, body in (
        ("/score", b'{"samples": [{"prompt": {"answer": [1.5, %s]}}]}'),
        ("/score", b'{"samples": [{"prompt": {"metadata": {"a": {"b": %s}}}}]}'),
        ("/get_reward", b'{"query": ["x"], "labels": [%s]}'),
    ):
        answer = httpx.post(function + path, content=body % number, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert "numbers in JSON are finite" in answer.json()["detail"]


def test_limits_of_size_and_time_hold_and_crashes_are_told(function: str) -> None:
    def asked(text: str, url: str = function) -> httpx.Response:
        return httpx.post(f"{url}/score", json={"samples": [{"prompt": {}, "text": text}]}, timeout=120)

    assert asked("x" * 3000).status_code == 413
    crashed = asked("crash")
    assert (crashed.status_code, crashed.json()["detail"]) == (500, "reward 'recorder' failed: RuntimeError: no memory")
    assert asked("leave").status_code == 500  # and the server goes on
    plain = httpx.post(f"{function}/score", content=b'{"samples": []}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 422  # what a web page may post anywhere without asking
    slow = Recorder()
    with Server(reward_app(slow, timeout=2.0)) as server, ThreadPoolExecutor() as threads:

        def health() -> int:
            return httpx.get(f"{server.url}/health", timeout=120).status_code

        waiting = threads.submit(asked, "wait", server.url)
        until(lambda: health() == 503)  # scoring for longer than 2 s
        assert waiting.result().status_code == 504
        slow.go.set()
        until(lambda: health() == 200)
        assert asked("abc", server.url).json() == {"rewards": [1.0]}


def test_what_nobody_waits_for_any_more_is_not_scored() -> None:
    begun, go = threading.Event(), threading.Event()
    sizes: list[int] = []

    def held(given: Sequence[Sample]) -> list[float]:
        sizes.append(len(given))
        begun.set()
        assert go.wait(120)
        return [1.0] * len(given)

    body = b'{"samples": [{"prompt": {}}]}'
    head = ["POST /score HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    with Server(reward_app(held)) as server, ThreadPoolExecutor() as threads:

        def asked() -> httpx.Response:
            header = {"Content-Type": "application/json"}
            return httpx.post(f"{server.url}/score", content=body, headers=header, timeout=120)

        first = threads.submit(asked)
        assert begun.wait(120)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as impatient:
            impatient.sendall("\r\n".join([*head, "", ""]).encode() + body)
            until(lambda: server.middleware.active == 2)
        until(lambda: server.middleware.active == 1)
        go.set()
        assert [first.result().json(), asked().json()] == [{"rewards": [1.0]}] * 2
    assert sizes == [1, 1]


def test_names_stand_for_models_functions_classes_and_objects(folder: Path) -> None:
    assert load_reward("rlhfkit.rewards.exact_match") is exact_match
    assert isinstance(load_reward("rlhfkit.rewards.ExactMatch"), ExactMatch)
    model = load_reward(str(folder / "reward"), device="cpu")
    assert type(model) is ModelReward
    steps = load_reward(str(folder / "steps"), separator="\n", device="cpu")
    assert isinstance(steps, ProcessModelReward)
    assert steps(samples()) == ProcessModelReward(str(folder / "steps"), separator="\n", device="cpu")(samples())
    for path, message in [
        ("rlhfkit.rewards.no_such_reward", "neither a folder with a reward model nor the dotted path"),
        ("no_such_module.reward", "neither a folder with a reward model nor the dotted path"),
        ("rlhfkit.rewards.base.TIMEOUT", "is float, which cannot be called on samples"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_reward(path)


def test_a_sample_beyond_the_models_context_is_refused_at_once(served: str) -> None:
    """100,000 tokens kept a server busy for a minute."""
    body = {"samples": [{"prompt": {}, "token_ids": [5] * 100_000, "text": tiny_tokenizer().decode([5]) * 100_000}]}
    answer = httpx.post(f"{served}/score", json=body, headers={"Authorization": f"Bearer {SECRET}"}, timeout=120)
    assert answer.status_code == 422
    assert "has 100000 tokens, and" in answer.json()["detail"]
    assert "reads at most 512" in answer.json()["detail"]
