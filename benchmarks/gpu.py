"""What only a GPU's speed and rounding show: steps, AdamW, waits of the host, kernels, sampling; one JSON line.

    python benchmarks/gpu.py                         # on a GPU; models have random weights
    python benchmarks/gpu.py --only steps spread
    python benchmarks/gpu.py --device cpu            # tiny shapes through the same code

- ``steps``: tokens per second and memory of a policy step of Qwen2.5's shapes of 0.5B and 7B parameters, bfloat16
  throughout; ``optimizer``: AdamW's fused and foreach kernels for 0.5B.
- ``waits``: places where the host waits for the GPU in a step.
- ``backends``: which of PyTorch's attention kernels take which inputs; ``math`` alone means memory for all scores.
- ``spread``: how far log-probs of two right kernels are apart, which bounds of the probe of engines have to allow for.
- ``engine``: tokens per second of ``LocalEngine``; ``iteration``: seconds of an iteration of GRPO by phase.

Heads and packed attention by kernel: ``benchmarks/logprobs.py`` and ``benchmarks/attention.py`` with ``--device cuda``.
A part that fails is reported as its error, and the others are measured.
"""

import argparse
import json
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {  # hidden, feed-forward, layers, heads, key heads, vocabulary, tied
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
CUDA = "cuda"


def config_of(size: str, **more: Any) -> Any:
    """Qwen2.5's shapes."""
    from transformers import Qwen2Config

    hidden, feed_forward, layers, heads, key_heads, vocabulary, tied = SHAPES[size]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied, pad_token_id=0,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=1, **more,
    )  # fmt: skip


def build(config: Any, device: str, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Random weights, made on the device; ``attention=None``: packed rows."""
    from transformers import AutoModelForCausalLM

    from rlhfkit.models.attention.families import use_packed_attention

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention or "sdpa")
    if attention is None:
        use_packed_attention(model, None)
    return model


class Rows:
    """Texts padded on the right, as a forward pass of the policy reads them."""

    def __init__(self, texts: list[list[int]], device: str) -> None:
        longest = max(map(len, texts))
        self.input_ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts], device=device)
        lengths = torch.tensor([len(ids) for ids in texts], device=device)
        self.attention_mask = torch.arange(longest, device=device) < lengths[:, None]


def ragged(total: int, vocabulary: int, device: str) -> Rows:
    """Texts of between 16 tokens and a quarter of all, most of them short."""
    generator, texts, left = torch.Generator().manual_seed(0), [], total
    while left:
        length = min(int(16 + (total / 4) * float(torch.rand((), generator=generator)) ** 3), left)
        texts.append(torch.randint(3, vocabulary, (length,), generator=generator).tolist())
        left -= length
    return Rows(texts, device)


def now(device: str) -> float:
    """Seconds, when the device has ended what it was asked."""
    if device == CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """Of the fastest of some calls, after one that is not timed."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = now(device)
        call()
        best = min(best, now(device) - start)
    return best


def policy_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Rows) -> Callable[[], None]:
    """Forward, backward and the optimizer's step of a policy loss."""
    from rlhfkit.losses import ppo_loss
    from rlhfkit.models import policy_output

    advantages = torch.linspace(-1, 1, len(rows.input_ids), device=rows.input_ids.device)
    mask = rows.attention_mask[:, 1:]

    def step() -> None:
        out = policy_output(model, rows, mask)
        ppo_loss(out.logprobs, out.logprobs.detach(), advantages, mask).loss.backward()
        optimizer.step()
        model.zero_grad()

    return step


def steps(device: str) -> dict[str, Any]:
    """0.5B, and 7B with gradient checkpointing where 72 GiB are free."""
    cases = {"0.5B": 16384, "7B": 8192} if device == CUDA else {"tiny": 200}
    found: dict[str, Any] = {}
    for size, tokens in cases.items():
        if size == "7B" and torch.cuda.mem_get_info()[0] < 72 * 2**30:
            found[size] = "needs 72 GiB of free memory"
            continue
        model = build(config_of(size), device, torch.bfloat16)
        if size == "7B":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        if device == CUDA:
            torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        step = policy_step(model, optimizer, ragged(tokens, model.config.vocab_size, device))
        start = now(device)
        step()
        first, seconds = now(device) - start, seconds_of(step, device)
        # 6 operations per parameter and token, 8 when activations are computed again; attention is not counted.
        operations = (8 if size == "7B" else 6) * sum(one.numel() for one in model.parameters()) * tokens
        found[size] = {
            "first_seconds": first,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "teraflops": operations / seconds / 1e12,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == CUDA else None,
        }
        del model, optimizer, step
    return found


def optimizer(device: str) -> dict[str, Any]:
    """Milliseconds of AdamW's step in bfloat16."""
    model = build(config_of("0.5B" if device == CUDA else "tiny"), device, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made = {name: torch.optim.AdamW(model.parameters(), lr=1e-6, **{name: True}) for name in ("fused", "foreach")}
    return {name: seconds_of(one.step, device) * 1e3 for name, one in made.items()}


def waits(device: str) -> dict[str, int] | str:
    """How often each line waits in a step."""
    if device != CUDA:
        return "only CUDA tells; tests/simulated_device counts them on a CPU"
    model = build(config_of("tiny"), device, torch.bfloat16)
    step = policy_step(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), ragged(200, 512, device))
    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [one for one in caught if "synchroniz" in str(one.message)]
    return dict(Counter(f"{re.sub(r'.*/(rlhfkit|site-packages)/', '', one.filename)}:{one.lineno}" for one in lines))


def backends(device: str) -> dict[str, Any]:
    """Backends that take inputs, forward and backward, and milliseconds of PyTorch's own choice."""
    length = 1024 if device == CUDA else 32
    band = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(-15)

    def attend(query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": key.shape[1] < 8}
        out = scaled_dot_product_attention(query, key, key, **options)
        torch.autograd.grad(out.float().sum(), (query, key))

    def takes(name: str, run: Callable[[], None]) -> bool:
        try:
            with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, name)):
                warnings.simplefilter("ignore")
                run()
        except RuntimeError:
            return False
        return True

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for key_heads in (8, 2):
            for mask in (None, band):
                query, key = (
                    torch.randn(2, heads, length, 64, device=device, dtype=dtype, requires_grad=True)
                    for heads in (8, key_heads)
                )
                run = partial(attend, query, key, mask)
                names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
                case = f"{dtype}, {key_heads} key heads, {'causal' if mask is None else 'mask'}"
                taking = [name.lower() for name in names if takes(name, run)]
                found[case] = {"taken_by": taking, "milliseconds": seconds_of(run, device) * 1e3}
    return found


def spread(device: str) -> dict[str, Any]:
    """Absolute differences in nats: mean, and what 50, 90, 99 and 99.9 % are below."""
    from rlhfkit.models import policy_output

    # Sharper than the usual 0.02: the entropy of a trained model is not that of a uniform one.
    config = config_of("0.5B" if device == CUDA else "tiny", initializer_range=0.05)
    exact = build(config, device, torch.float32, "sdpa").eval()
    rows, length = (16, 128) if device == CUDA else (2, 8)
    prompts = torch.randint(3, config.vocab_size, (rows, 8), generator=torch.Generator().manual_seed(0)).to(device)
    texts = Rows(exact.generate(prompts, do_sample=True, max_new_tokens=length, min_new_tokens=length).tolist(), device)

    @torch.no_grad()
    def forward(model: Any) -> Tensor:
        return policy_output(model, texts, texts.attention_mask[:, 1:]).logprobs

    @torch.no_grad()
    def decoded(model: Any) -> Tensor:
        """One token at a time with a cache, as engines do."""
        ids, cache, found = texts.input_ids, None, []
        for place in range(ids.shape[1] - 1):
            out = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[:, -1].float().log_softmax(-1).gather(-1, ids[:, place + 1, None])[:, 0])
        return torch.stack(found, 1)

    def apart(one: Tensor, other: Tensor) -> list[float]:
        gaps = (one.double() - other.double()).abs().flatten().cpu()
        return [float(gaps.mean()), *gaps.quantile(torch.tensor([0.5, 0.9, 0.99, 0.999]).double()).tolist()]

    reference = forward(exact)
    found = {"float32, decoding": apart(decoded(exact), reference)}
    if device == CUDA:
        torch.set_float32_matmul_precision("high")
        found["TF32, forward"], found["TF32, decoding"] = (apart(one(exact), reference) for one in (forward, decoded))
        torch.set_float32_matmul_precision("highest")
    del exact
    for dtype in (torch.bfloat16, torch.float16):
        packed = forward(build(config, device, dtype).eval())
        padded = build(config, device, dtype, "sdpa").eval()
        found[f"{dtype}, packed and decoding"] = apart(packed, decoded(padded))
        found[f"{dtype}, packed and padded"] = apart(packed, forward(padded))
        found[f"{dtype}, packed and float32"] = apart(packed, reference)
    return found


def save_model(size: str, folder: Path, device: str) -> str:
    """Random weights in bfloat16 with a tokenizer of one token per printable character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    build(config_of(size), device, torch.bfloat16, "sdpa").save_pretrained(folder)
    return str(folder)


def engine(device: str) -> dict[str, float]:
    """Seconds to load weights, and tokens per second by number of texts, bfloat16."""
    from rlhfkit import LocalEngine, Prompt, SamplingSpec
    from rlhfkit.rollout import ModuleWeights

    size, new = ("0.5B", 128) if device == CUDA else ("tiny", 8)
    with tempfile.TemporaryDirectory() as name:
        folder, made = save_model(size, Path(name), device), LocalEngine()
        model = build(config_of(size), device, torch.bfloat16)
        made.start(folder, dtype=torch.bfloat16)
        start = now(device)
        made.load(ModuleWeights(model), 1)
        found = {"load_seconds": now(device) - start}
        for count in (8, 128) if device == CUDA else (2,):
            prompts = [Prompt(index=i, token_ids=[3 + i % 90] * 64) for i in range(count // 2)]
            sampling = SamplingSpec(group_size=2, max_new_tokens=new, min_new_tokens=new)
            start = now(device)
            made.generate(prompts, sampling, iteration=0)
            found[f"{count} texts, tokens_per_second"] = count * new / (now(device) - start)
    return found


def digits(samples: Any) -> list[float]:
    """Reward: the share of digits."""
    return [sum(character.isdigit() for character in sample.text) / 8 for sample in samples]


def iteration(device: str) -> dict[str, float]:
    """The third iteration, of two updates of two micro-batches each."""
    import lightning as L

    from rlhfkit import GRPOModule, PromptDataModule, RolloutCallback, SamplingSpec

    size, count, group, new = ("0.5B", 16, 8, 128) if device == CUDA else ("tiny", 4, 2, 8)
    starts: list[float] = []

    class Clock(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            starts.append(now(device))

        on_train_end = on_train_epoch_start

    with tempfile.TemporaryDirectory() as name:
        model = save_model(size, Path(name) / "model", device)
        prompts = [{"prompt": f"{i}+{i}="} for i in range(3 * count)]
        sampling = SamplingSpec(group_size=group, max_new_tokens=new, min_new_tokens=new)
        trainer = L.Trainer(
            accelerator="gpu" if device == CUDA else "cpu", devices=1, precision="bf16-true", max_epochs=3,
            accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir=name, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[RolloutCallback(digits, sampling=sampling), Clock()],
        )  # fmt: skip
        data = PromptDataModule(prompts, rollout_batch_size=count, micro_batch_size=count * group // 4)
        trainer.fit(GRPOModule(model, lr=1e-6), data)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    kept = {key: value for key, value in metrics.items() if key.startswith("time/") or "logprob_abs_diff" in key}
    return {"seconds": starts[3] - starts[2]} | kept


PARTS: dict[str, Callable[[str], Any]] = {
    part.__name__: part for part in (steps, optimizer, waits, backends, spread, engine, iteration)
}


def main() -> None:
    """Measure the parts and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[CUDA, "cpu"], help="default: cuda if there is a GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    chosen = parser.parse_args()
    device = chosen.device or (CUDA if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device == CUDA:
        found["gpu"] = torch.cuda.get_device_name()
    for name in chosen.only:
        try:
            found[name] = PARTS[name](device)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if device == CUDA:
            torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
