"""ChatJudge against a real HTTP server."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import PIL.Image
import pytest

from rlhfkit import Prompt, Sample
from rlhfkit.data.images import Image
from rlhfkit.rewards import ChatJudge, PairwiseReward
from rlhfkit.rewards.base import RewardError, score_samples


class Server(ThreadingHTTPServer):
    """Prefers the answer with more words, is unavailable at first, and says nothing useful about an empty one."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.unavailable = 2
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.tokens.append(self.headers["Authorization"])
            self.server.unavailable -= 1
            refused = self.server.unavailable >= 0
        content = body["messages"][0]["content"]
        _, first, second = (content if isinstance(content, str) else content[-1]["text"]).split("|")
        difference = len(first.split()) - len(second.split())
        verdict = "C" if not difference else "A" if difference > 0 else "B"
        reply = f"At first [[C]], but finally [[{verdict}]]" if first and second else "I cannot say."
        content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield found
        found.shutdown()


def judge(server: Server, **arguments: Any) -> ChatJudge:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1/"
    return ChatJudge(url, model="m", template="{prompt}|{first}|{second}", backoff=0.01, **arguments)


def samples(*texts: str) -> list[Sample]:
    prompt = Prompt(0, [1], text="Which?")
    return [Sample(prompt, place, [1], [0.0], [0], "stop", text=text) for place, text in enumerate(texts)]


def test_verdicts_become_win_rates_and_temporary_failures_are_retried(server: Server) -> None:
    asked = judge(server, token="a-secret-of-24-letters-x")
    reward, found = PairwiseReward(asked), samples("two words", "{first} is three", "one")
    score_samples(reward, found)
    assert [sample.reward for sample in found] == [0.5, 1.0, 0.0]
    assert len(server.requests) == 2 * 3 + 2
    assert set(server.tokens) == {"Bearer a-secret-of-24-letters-x"}
    assert server.requests[0]["model"] == "m"
    assert "Which?|two words|{first} is three" in {each["messages"][0]["content"] for each in server.requests}
    assert reward.metrics() == {"chat_judge_win_rate/order_agreement": 1.0, "chat_judge/failed_fraction": 0.0}


def test_a_judge_is_shown_the_images_of_the_prompt(server: Server) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (5, 3), (200, 10, 20)).save(file, "PNG")
    given = samples("one", "two words")
    given[0].prompt.attachments = (Image(file.getvalue()),)
    server.unavailable = 0
    assert score_samples(PairwiseReward(judge(server)), given) is None
    assert [sample.reward for sample in given] == [0.0, 1.0]
    (shown, text) = server.requests[0]["messages"][0]["content"]
    assert Image.of(shown["image_url"]["url"], "what was sent") == Image(file.getvalue())
    assert text["type"] == "text"


def test_replies_without_a_verdict_are_masked_or_stop(server: Server) -> None:
    reward, found = PairwiseReward(judge(server)), samples("a b", "", "c")
    score_samples(reward, found)
    assert [sample.reward for sample in found] == [1.0, None, 0.0]
    assert reward.metrics()["chat_judge/failed_fraction"] == pytest.approx(4 / 6)
    with pytest.raises(RewardError, match="no verdict in the reply"):
        score_samples(PairwiseReward(judge(server, on_failure="stop")), found)


def test_wrong_arguments_are_refused() -> None:
    for arguments, message in (
        ({"url": "judge:80"}, "must be like"),
        ({"template": "{first} {second}"}, "prompt"),
        ({"verdict": "[AB]"}, "one group"),
        ({"on_failure": 0.0}, "on_failure must be"),
    ):
        with pytest.raises(ValueError, match=message):
            ChatJudge(**{"url": "http://localhost/v1", "model": "m"} | arguments)
