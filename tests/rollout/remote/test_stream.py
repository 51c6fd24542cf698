"""Groups of real vLLM engines as they are finished: taken one by one, more asked for, the rest dropped."""

from pathlib import Path

import pytest
import torch
from shared_pool import SharedPool
from tiny_models import tiny_tokenizer

from rlhfkit.data import Prompt
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout import ModuleWeights, SamplingSpec

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def test_groups_come_one_by_one_and_the_rest_is_dropped(vllm_pool: SharedPool, vllm_model: Path) -> None:
    assert vllm_pool.can_stream
    vllm_pool.load(ModuleWeights(load_causal_lm(str(vllm_model)).eval().requires_grad_(False)), 3)
    prompts = [Prompt(index, tiny_tokenizer()(f"{index}+{index}=").input_ids) for index in range(6)]
    spec = SamplingSpec(group_size=2, max_new_tokens=200)
    expected = vllm_pool.generate(prompts, spec, iteration=5)

    stream = vllm_pool.stream(spec, iteration=5)
    stream.submit(prompts[:4])
    groups = stream.collect(1)
    stream.submit(prompts[4:])
    while given := stream.collect(2):
        assert len(given) <= 2
        groups += given
    stream.close()
    groups.sort(key=lambda group: group[0].prompt.index)
    assert [(s.prompt.index, s.sample_index, s.token_ids.tolist()) for group in groups for s in group] == [
        (s.prompt.index, s.sample_index, s.token_ids.tolist()) for s in expected
    ]
    assert {version for group in groups for sample in group for version in sample.versions.tolist()} == {3}

    # A stream that is closed with requests in flight leaves none behind, neither counted here nor in the engines.
    endless = vllm_pool.stream(SamplingSpec(group_size=2, max_new_tokens=400, min_new_tokens=400), iteration=0)
    endless.submit(prompts)
    engines = vllm_pool.engines
    assert engines is not None
    assert sum(handle.num_requests for handle in engines.handles) == 12
    endless.close()
    endless.close()
    assert endless.collect(1) == []
    assert [handle.num_requests for handle in engines.handles] == [0, 0]
    assert vllm_pool.generate(prompts[:1], spec, iteration=5)[0].token_ids == expected[0].token_ids.tolist()
    torch.testing.assert_close(
        torch.tensor(vllm_pool.generate(prompts[:1], spec, iteration=5)[0].logprobs),
        torch.tensor(expected[0].logprobs), rtol=0, atol=1e-5,
    )  # fmt: skip
