"""One vLLM engine of several processes: does each of them get its part of new weights?

    python benchmarks/engine_sizes.py 1 2 1                     # tensor, pipeline and data parallel sizes
    python benchmarks/engine_sizes.py 2 1 2 --device cuda       # a mixture of experts where the last is above 1

A random Llama (or Mixtral) of two layers is served without its weights, is sent new ones twice, and samples each time.
Prints one line of JSON: seconds until the engine was ready, its processes, and for each version the largest difference
between the engine's log-probs of sampled tokens and those of the model here. On CPUs the sizes 2 1 1 and 1 2 1 run, in
about a minute; vLLM's CPU build has no data parallelism for mixtures.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast

from rlhfkit import Prompt, Sample, SamplingSpec, VLLMPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights

VOCABULARY = 128
WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def save_model(folder: Path, experts: bool) -> nn.Module:
    """Save a random model with a tokenizer, and return it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    names = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=names, pad_token="t0", eos_token="t1").save_pretrained(folder)
    config = MixtralConfig(num_local_experts=4, **WIDTHS) if experts else LlamaConfig(**WIDTHS)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


@torch.no_grad()
def difference(model: nn.Module, sample: Sample) -> float:
    """Largest difference between the engine's and the model's log-probs of the sampled tokens."""
    ids = torch.tensor([sample.prompt.token_ids + sample.token_ids])
    logprobs = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(sample.logprobs)).abs().max())


def main() -> None:
    """Run the engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(name, type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    pool = VLLMPool(
        1,
        arguments.tensor,
        pipeline_parallel_size=arguments.pipeline,
        data_parallel_size=arguments.data,
        device=arguments.device,
        kv_cache_gib=1 / 16,
    )
    prompts = [Prompt(index, list(range(2, 6 + 3 * index))) for index in range(8)]
    report: dict[str, object] = {"sizes": [arguments.tensor, arguments.pipeline, arguments.data]}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = save_model(Path(folder), experts=arguments.data > 1)
        started = time.monotonic()
        try:
            pool.start(folder, dtype=torch.float32)
            assert pool.manager is not None
            report["start_seconds"] = round(time.monotonic() - started, 1)
            report["processes"] = pool.processes_per_engine
            for version in (1, 2):
                for parameter in model.parameters():
                    parameter.data += 0.03 * torch.randn_like(parameter)
                pool.load(ModuleWeights(model), version)
                samples = pool.generate(prompts, SamplingSpec(group_size=2, max_new_tokens=16), iteration=version)
                report[f"difference_{version}"] = max(difference(model, sample) for sample in samples)
        finally:
            pool.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
