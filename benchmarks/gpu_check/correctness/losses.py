"""Every public function of ``rlhfkit.losses`` in float32 on the device, compared with float64 on the CPU."""

import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance, tensors_of

HEADS = (
    *("linear_cross_entropy", "linear_logprobs", "linear_policy_gradient", "linear_single_pass"),
    *("gradient_scope", "logits_logprobs"),
)
"""Functions with checks of their own, in ``heads.py``."""
COMPOSED = ("policy_loss_output", "policy_tokens", "sum_losses", "sums_metric", "turn_advantages", "weighted_metric")
"""Parts of other functions, and functions of an experience, which take no plain tensors."""
LEAVES = ("logprobs", "chosen", "student", "logits", "values", "entropy", "token_loss")
"""Arguments with a gradient: the first of these that a function has."""
BOUND = 1e-4
"""Relative in norm. float32 gives 1e-5 at most: exponentials of log-ratios that are summed over a sequence."""
SETTINGS: dict[str, dict[str, Any]] = {
    "aggregate": {"mode": "sequence-mean-token-mean"},
    "bradley_terry_loss": {"centering": 0.01, "label_smoothing": 0.1},
    "clip_cov_loss": {"fraction": 0.2, "covariance_low": 0.0},
    "clipped_surrogate": {"clip_low": 0.2, "clip_high": 0.2},
    "cross_entropy_loss": {},
    "distillation_loss": {"divergence": "jsd"},
    "divergence_score": {"divergence": "js"},
    "dpo_loss": {"loss_type": "sigmoid", "label_smoothing": 0.1},
    "dr_grpo_loss": {"max_length": 64},
    "entropy_bonus": {"coef": 0.01},
    "kl_cov_loss": {"fraction": 0.2},
    "length_desensitized_logprobs": {"alpha": 0.5},
    "log_linear_proximal_logprobs": {"version": 3},
    "normalize_rewards": {"mean": 0.1, "std": 2.0},
    "off_policy_sequence_mask": {"threshold": 0.05},
    "overlong_penalty": {"max_length": 32, "buffer": 16},
    "pass_at_k_advantages": {"k": 2},
    "preference_advantages": {"link": "bradley-terry"},
    "rejection_mask": {"level": "token", "high": 0.1},
    "reinforce_baseline_advantages": {"kl_coef": 0.1},
    "stop_properly_penalty": {"coef": 0.5},
    "token_rewards": {"kl_coef": 0.1},
}
"""Arguments that are no tensors, where a function needs some or its defaults leave a branch out."""
OF_SEQUENCES = {
    "alphapo_loss", "bco_loss", "bradley_terry_loss", "clip_rewards", "cpo_loss", "dpo_loss", "kto_kl_estimate",
    "kto_kl_sums", "kto_loss", "missing_eos_penalty", "normalize_rewards", "orpo_loss",
    "pairwise_accuracy", "rejected_values", "simpo_loss", "slic_loss", "stop_properly_penalty", "token_rewards",
    "divergence_score", "exploration_loss", "nash_md_loss",
}  # fmt: skip
"""Functions of one value per sequence, (B,)."""


def public_functions() -> dict[str, Callable[..., Any]]:
    """All functions of tensors that ``rlhfkit.losses`` exports."""
    import rlhfkit.losses

    found = {name: getattr(rlhfkit.losses, name) for name in rlhfkit.losses.__all__}
    left_out = (*HEADS, *COMPOSED)
    return {name: one for name, one in found.items() if inspect.isfunction(one) and name not in left_out}


class Values:
    """Random arguments by name, float64 numbers that float32 can represent, on the CPU.

    Args:
        rows: B sequences, in groups of two.
        tokens: T.
        seed: Of the random numbers.
    """

    def __init__(self, rows: int, tokens: int, seed: int = 0) -> None:
        self.rows, self.tokens = rows, tokens
        self._generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, tokens + 1, (rows, 1), generator=self._generator)
        self.mask = torch.arange(tokens) < lengths
        self.old = -3 * self.uniform(rows, tokens)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(shape, generator=self._generator).double()

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal with mean 0."""
        return (scale * torch.randn(shape, generator=self._generator)).double()

    def near(self, scale: float) -> Tensor:
        """(B, T) log-probs of another policy."""
        return (self.old + self.normal(*self.old.shape, scale=scale)).clamp(max=0).float().double()

    def argument(self, function: str, name: str) -> Tensor | None:
        """The tensor that a function is given for one of its parameters; ``None``: the parameter keeps its default."""
        shape = (self.rows,) if function in OF_SEQUENCES else (self.rows, self.tokens)
        rows = (self.rows,)
        if name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "logprobs", "teacher_logprobs"):
            if function in OF_SEQUENCES:
                return -10 * self.uniform(*rows)
            return self.old if name == "old_logprobs" else self.near(0.3 if name == "logprobs" else 0.1)
        if name in ("chosen", "rejected", "ref_chosen", "ref_rejected", "mismatched", "ref_mismatched"):
            return -10 * self.uniform(*rows)
        if name == "mask":
            return None if function in OF_SEQUENCES and function != "token_rewards" else self.mask
        if name in ("advantages", "token_loss", "logratio"):
            return self.normal(*shape)
        if name in ("values", "old_values", "returns"):
            return self.normal(*shape)
        if name in ("entropy", "kl", "ratio", "priority", "log_sum_squares"):
            sign = -1 if name == "log_sum_squares" else 1
            shape = () if function in ("kto_loss",) else (*rows, self.tokens) if name == "kl" else shape
            return sign * self.uniform(*shape)
        if name == "rewards":
            per_token = function in ("gae", "discounted_returns", "reinforce_advantages")
            several = (self.rows, 3) if function == "gdpo_advantages" else rows
            return self.normal(*((self.rows, self.tokens) if per_token else several))
        if name == "greedy_rewards":
            return self.normal(*rows)
        if name == "spans":
            return (torch.arange(self.tokens) // 2).expand(shape)
        if name == "embeddings":
            return self.normal(self.rows, 4)
        if name == "signs":
            return torch.where(torch.arange(self.rows) % 2 == 0, 1.0, -1.0).double()
        if name == "partners":
            return torch.eye(self.rows).roll(1, -1).bool()
        if name in ("student", "teacher"):
            return self.normal(self.rows, self.tokens, 32)
        if name == "common":
            return torch.stack([torch.arange(20), torch.arange(20).roll(3)], -1)
        if name in ("tokens", "teacher_tokens"):
            return torch.randint(0, 32, shape, generator=self._generator)
        if name in ("later", "teacher_later"):
            return -self.uniform(*shape).where(self.uniform(*shape) < 0.5, 0.0)
        if name == "logits":
            return self.normal(self.rows, self.tokens, 2)
        if name == "by_policy":
            return torch.arange(self.rows) % 2 == 0
        if name == "labels":
            return self.uniform(self.rows, self.tokens)
        if name == "sums":
            return torch.tensor([3.5, 2.0], dtype=torch.float64)
        if name == "group":
            return torch.arange(self.rows) // 2
        if name in ("lengths", "chosen_lengths", "rejected_lengths", "public_lengths"):
            return torch.randint(1, self.tokens + 1, rows, generator=self._generator)
        if name in ("desirable", "truncated"):
            return torch.arange(self.rows) % 2 == 0
        if name == "versions":
            return torch.randint(0, 3, shape, generator=self._generator)
        return None

    def of(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        """All tensor arguments and settings of a function, the same whichever other functions there are."""
        self._generator.manual_seed(zlib.crc32(name.encode()))
        found: dict[str, Any] = dict(SETTINGS.get(name, {}))
        for parameter in inspect.signature(function).parameters.values():
            value = None if parameter.name in found else self.argument(name, parameter.name)
            if value is not None:
                found[parameter.name] = value
        if "kl_estimator" in inspect.signature(function).parameters:
            found["kl_coef"] = 0.1
        return found


def evaluate(function: Callable[..., Any], given: dict[str, Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Everything that a function returns and, if it can be differentiated, the gradient of its first leaf."""
    placed = {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype) if torch.is_tensor(value) else value
        for name, value in given.items()
    }
    leaf = next((placed[name] for name in LEAVES if name in placed), None)
    if leaf is not None:
        leaf.requires_grad_()
    output = function(**placed)
    first = next(iter(tensors_of(output)), None)
    found: list[Any] = [output]
    if leaf is not None and first is not None and first.requires_grad:
        # Not the plain sum, which is constant for whitened values.
        weights = torch.linspace(1, 2, first.numel(), dtype=torch.float64).to(device, first.dtype).view_as(first)
        found.append(torch.autograd.grad((first * weights).sum(), leaf)[0])
    return found


@check("losses/functions", seconds=60)
def every_function(setting: Setting) -> Iterator[Figure]:
    """Values and gradients of all functions."""
    values = Values(*setting.size((64, 512), (6, 40)))
    for name, function in public_functions().items():
        try:
            given = values.of(name, function)
            exact = evaluate(function, given, "cpu", torch.float64)
            yield Figure(name, distance(evaluate(function, given, setting.device, torch.float32), exact), BOUND)
        except Exception as error:  # of one function: the others are still checked
            yield Figure(name, f"{type(error).__name__}: {error}"[:300], BOUND)


@check("losses/compiled", seconds=90, simulated=False)
def compiled(setting: Setting) -> Iterator[Figure]:
    """Losses inside ``torch.compile`` without graph breaks."""
    values = Values(*setting.size((64, 512), (6, 40)))
    functions = public_functions()
    for name in ("ppo_loss", "grpo_loss", "dpo_loss"):  # inductor takes seconds for each
        given = values.of(name, functions[name])
        backend = "inductor" if setting.on_gpu else "eager"
        fast = torch.compile(functions[name], fullgraph=True, backend=backend)
        exact = evaluate(functions[name], given, "cpu", torch.float64)
        yield Figure(name, distance(evaluate(fast, given, setting.device, torch.float32), exact), BOUND)
