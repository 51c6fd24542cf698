"""ChatJudge against a real HTTP server."""

import io
from collections.abc import Iterator
from typing import Any

import PIL.Image
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rewards.samples import sampled, scored
from rlhfkit import Sample
from rlhfkit.data.images import Image
from rlhfkit.rewards import ChatJudge, PairwiseReward
from rlhfkit.rewards.base import RewardError
from rlhfkit.serving.server import Server


class Chat:
    """Prefers the answer with more words, is unavailable at first, and says nothing useful about an empty one."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.unavailable = 2

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.tokens.add(request.headers.get("authorization"))
        self.unavailable -= 1
        content = body["messages"][0]["content"]
        _, first, second = (content if isinstance(content, str) else content[-1]["text"]).split("|")
        difference = len(first.split()) - len(second.split())
        verdict = "C" if not difference else "A" if difference > 0 else "B"
        reply = f"At first [[C]], but finally [[{verdict}]]" if first and second else "I cannot say."
        return JSONResponse({"choices": [{"message": {"content": reply}}]}, 503 if self.unavailable >= 0 else 200)


@pytest.fixture
def server() -> Iterator[Chat]:
    chat = Chat()
    with Server(Starlette(routes=[Route("/v1/chat/completions", chat.answer, methods=["POST"])])) as running:
        chat.url = f"{running.url}/v1/"
        yield chat


def judge(server: Chat, **arguments: Any) -> ChatJudge:
    return ChatJudge(server.url, model="m", template="{prompt}|{first}|{second}", backoff=0.01, **arguments)


def samples(*texts: str) -> list[Sample]:
    return [sampled(text, place=place) for place, text in enumerate(texts)]


def test_verdicts_become_win_rates_and_temporary_failures_are_retried(server: Chat) -> None:
    asked = judge(server, token="a-secret-of-24-letters-x")
    reward = PairwiseReward(asked)
    assert scored(reward, samples("two words", "{first} is three", "one")) == [0.5, 1.0, 0.0]
    assert len(server.requests) == 2 * 3 + 2
    assert server.tokens == {"Bearer a-secret-of-24-letters-x"}
    assert server.requests[0]["model"] == "m"
    assert "1+1=|two words|{first} is three" in {each["messages"][0]["content"] for each in server.requests}
    assert reward.metrics() == {"chat_judge_win_rate/order_agreement": 1.0, "chat_judge/failed_fraction": 0.0}


def test_a_judge_is_shown_the_images_of_the_prompt(server: Chat) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (5, 3), (200, 10, 20)).save(file, "PNG")
    given = samples("one", "two words")
    for one in given:
        one.prompt.attachments = (Image(file.getvalue()),)
    server.unavailable = 0
    assert scored(PairwiseReward(judge(server)), given) == [0.0, 1.0]
    (shown, text) = server.requests[0]["messages"][0]["content"]
    assert Image.of(shown["image_url"]["url"], "what was sent") == Image(file.getvalue())
    assert text["type"] == "text"


def test_replies_without_a_verdict_are_masked_or_stop(server: Chat) -> None:
    reward, found = PairwiseReward(judge(server)), samples("a b", "", "c")
    assert scored(reward, found) == [1.0, None, 0.0]
    assert reward.metrics()["chat_judge/failed_fraction"] == pytest.approx(4 / 6)
    with pytest.raises(RewardError, match="no verdict in the reply"):
        scored(PairwiseReward(judge(server, on_failure="stop")), found)
