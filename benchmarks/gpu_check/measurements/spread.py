"""How far two right ways to compute a log-prob are apart: what the bounds of the probe of engines have to allow for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.models import Rows, build, large_config

QUANTILES = (0.5, 0.9, 0.99, 0.999)


def quantiles(name: str, found: Tensor, expected: Tensor) -> Iterator[Figure]:
    """Of the absolute difference, in nats."""
    apart = (found.double() - expected.double()).abs().cpu()
    yield Figure(f"{name}: mean", float(apart.mean()), unit="nats")
    for share, value in zip(QUANTILES, apart.quantile(torch.tensor(QUANTILES).double()), strict=True):
        yield Figure(f"{name}: {share:.1%} are below", float(value), unit="nats")
    yield Figure(f"{name}: largest", float(apart.max()), unit="nats")


def sampled(model: Any, rows: int, length: int, device: str) -> list[list[int]]:
    """Texts that the model has sampled itself, whose log-probs are those that training sees."""
    prompts = torch.randint(3, model.config.vocab_size, (rows, 8), generator=torch.Generator().manual_seed(0))
    ids = prompts.to(device)
    found: list[list[int]] = model.generate(ids, do_sample=True, max_new_tokens=length, min_new_tokens=length).tolist()
    return found


@torch.no_grad()
def log_probs(model: Any, texts: list[list[int]], device: str) -> Tensor:
    """By our forward pass, packed where the model is."""
    from rlhfkit.models import policy_output

    rows = Rows(texts, device)
    return policy_output(model, rows, rows.mask).logprobs


@torch.no_grad()
def decoded(model: Any, texts: list[list[int]], device: str) -> Tensor:
    """One token at a time with a cache, as engines do."""
    ids, cache, found = torch.tensor(texts, device=device), None, []
    for place in range(ids.shape[1] - 1):
        out = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[:, -1].float().log_softmax(-1).gather(-1, ids[:, place + 1, None])[:, 0])
    return torch.stack(found, 1)


@check("measure/spread", seconds=75)
def spread(setting: Setting) -> Iterator[Figure]:
    """0.5B random weights: packed rows and decoding with a cache, against padded sdpa in float32."""
    config, device = large_config(setting.size("0.5B", "tiny")), setting.device
    config.initializer_range = 0.05  # sharper than 0.02: the entropy of a trained model is not that of a uniform one
    exact = build(config, device, torch.float32, "sdpa").eval()
    texts = sampled(exact, *setting.size((16, 128), (2, 8)), device)
    reference = log_probs(exact, texts, device)
    yield Figure("mean log-prob", float(reference.mean()), unit="nats")
    yield from quantiles("float32, decoding", decoded(exact, texts, device), reference)
    if setting.on_gpu:
        torch.set_float32_matmul_precision("high")
        try:
            yield from quantiles("TF32, forward", log_probs(exact, texts, device), reference)
            yield from quantiles("TF32, decoding", decoded(exact, texts, device), reference)
        finally:
            torch.set_float32_matmul_precision("highest")
    del exact
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        packed = log_probs(build(config, device, dtype).eval(), texts, device)
        padded = build(config, device, dtype, "sdpa").eval()
        one_by_one = decoded(padded, texts, device)
        yield from quantiles(f"{name}, packed against decoding", packed, one_by_one)
        yield from quantiles(f"{name}, packed against padded", packed, log_probs(padded, texts, device))
        yield from quantiles(f"{name}, packed against float32", packed, reference)
