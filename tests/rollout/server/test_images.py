"""``VLLMServer`` with images on a real ``vllm serve --enable-scale-out``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models.vision_families import prompts, save_vision_model
from vllm_serve import vllm_serve

from rlhfkit import VLLMServer
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout.errors import RequestError
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_images import SPEC, check_three_syncs, sent_as_they_are

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model("idefics3", tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VLLMServer]:
    with vllm_serve(folder, folder.parent / "log", "--enable-scale-out") as url:
        engine = VLLMServer(url, sync_timeout=60, start_timeout=600)
        engine.start(str(folder), dtype=torch.float32)
        yield engine
        engine.close()


def test_logprobs_are_the_trainers_after_each_of_three_syncs(server: VLLMServer, folder: Path) -> None:
    check_three_syncs(server, folder)


def test_tokens_that_the_servers_processor_writes_again_are_refused(server: VLLMServer, folder: Path) -> None:
    server.load(ModuleWeights(load_causal_lm(str(folder))), 4)
    with sent_as_they_are(), pytest.raises(RequestError, match=r"vLLM has read \d+ tokens of a prompt with images"):
        server.generate(prompts(folder, several=False)[:1], SPEC, iteration=0)
