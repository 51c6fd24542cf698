"""What classes refuse when they are made: what cannot be, contradicts something else or would have no effect.

Numbers and choices out of their range are in ``test_numeric_arguments.py``.
"""

from typing import Any

import pytest
import torch
from episodes.episode_cases import Counting
from torch import Tensor

from rlhfkit import (
    Ahead,
    DistillationModule,
    DPOModule,
    DynamicSampling,
    Episodes,
    Experience,
    GRPOModule,
    LocalEngine,
    LossOutput,
    ModelPool,
    OnlineDPOModule,
    OnPolicyDistillationModule,
    Optimization,
    Oversampling,
    Placement,
    PPOModule,
    PromptDataModule,
    RLHFDeepSpeedStrategy,
    RolloutCallback,
    SamplingSpec,
    ServedModel,
    VLLMPool,
    VLLMServer,
)
from rlhfkit.callbacks import SharedDevices
from rlhfkit.episodes import AgentEpisodes, GymEnvironment, MCPTools, ToolEnvironment
from rlhfkit.losses import kl_loss, ppo_loss
from rlhfkit.modules.parts import (
    GAE,
    AdvantagesBy,
    ClipRewards,
    Correction,
    Critic,
    CriticWarmup,
    DivergenceLoss,
    GroupAdvantages,
    KLInReward,
    KLPenalty,
    KLTarget,
    LogLinear,
    MaskTruncated,
    MissingEndPenalty,
    MovingReference,
    NormalizeRewards,
    Pairs,
    Reference,
    Returns,
    RewardModel,
    RouterReplay,
    StopEarly,
    StopProperly,
    Teacher,
    TokenCredit,
    ValueLoss,
)
from rlhfkit.ray_placement import ReservedResources
from rlhfkit.rewards import (
    ChatJudge,
    ExactMatch,
    FormatReward,
    ModelReward,
    ProcessModelReward,
    ReasoningFormat,
    SandboxedReward,
    SubprocessReward,
    TagCount,
    WeightedSum,
)
from rlhfkit.roles import CriticPool
from rlhfkit.rollout.engine import MAX_STOP_TOKEN_IDS
from rlhfkit.serving.access import ServerOptions

DPO = "rlhfkit.losses.preference.dpo"
ADDRESS = "http://127.0.0.1:1"


def of_rewards(rewards: Tensor, group: Tensor) -> Tensor:
    return 2.0 * rewards


def of_rows(batch: Experience) -> Tensor:
    return -batch.action_mask.sum(-1).float()


def plain(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> LossOutput:
    """A user's loss without weights, denominator or clip."""
    return LossOutput(-(logprobs * advantages * mask).sum(), {})


def of_other_names(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> LossOutput:
    """As in verl, whose old log-probs come first."""
    return ppo_loss(log_prob, old_log_prob, advantages, response_mask)


def passed_on(*inputs: Tensor, **knobs: Any) -> LossOutput:
    return ppo_loss(*inputs, **knobs)


def penalizing(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ref_logprobs: Any, kl_coef: float
) -> LossOutput:
    """A user's loss with a KL penalty of its own."""
    return kl_loss(logprobs, ref_logprobs, mask, coef=kl_coef)


def without_rate(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=1.0)


def part(name: str, **arguments: Any) -> dict[str, Any]:
    """A part as in YAML, made when the module is."""
    return {"class_path": f"rlhfkit.modules.parts.{name}", "init_args": arguments}


class OwnLoss(ValueLoss):
    def loss(self, batch: Any, values: Tensor) -> Any:
        return super().loss(batch, values)


class OwnCritic(Critic):
    def build(self) -> Any:
        return super().build()


class Plain(LocalEngine):
    """An engine that takes turns only."""

    can_stream = False
    updates_in_flight = False


async def agent(connection: Any, prompt: Any) -> float:
    return 1.0


CONTINUED = {"parts": [Oversampling(0.5, continued=True)]}
POOL = ModelPool("elsewhere")
ONE, TWO = {"model": "anywhere"}, {"model": "anywhere", "teacher": "elsewhere"}
LEAST: dict[type, dict[str, Any]] = {
    **dict.fromkeys((GRPOModule, PPOModule, OnlineDPOModule, DPOModule), ONE),
    **dict.fromkeys((DistillationModule, OnPolicyDistillationModule), TWO),
    VLLMServer: {"urls": "http://127.0.0.1:8000"},
    RolloutCallback: {"reward": len},
    AgentEpisodes: {"agent": agent},
    GymEnvironment: {"parse_action": int},
    ChatJudge: {"url": ADDRESS, "model": "judge"},
    PromptDataModule: {"data": []},
}
REFUSED: dict[type, list[tuple[dict[str, Any], str]]] = {
    GRPOModule: [
        # functions of advantages
        ({"advantages": "pass_at_k_advantages"}, r"takes \(rewards, group, k\).*functools.partial\(function, k="),
        ({"advantages": lambda rewards, baseline: rewards}, r"takes \(rewards, baseline\), and a function is given"),
        ({"advantages": "rloo"}, "did you mean 'rloo_advantages'"),
        ({"advantages": of_rewards, "advantage_scale": "none"}, "advantage_scale would have no effect beside"),
        ({"parts": [AdvantagesBy(of_rows), TokenCredit(0.5)]}, "those before it differ between tokens"),
        ({"parts": [TokenCredit(0.5, earned=True)]}, "units of the reward"),
        ({"preset": "remax", "parts": [ClipRewards(1.0)]}, "whose rewards ClipRewards does not change: leave it out"),
        ({"parts": [Returns()]}, "GRPOModule has no Critic among its parts"),
        # policy losses
        ({"policy_loss": "gspo"}, r"policy_loss='gspo' cannot be imported.*did you mean 'gspo_loss'"),
        ({"policy_loss": "rlhfkit.losses.__name__"}, "is a str, not a function"),
        ({"policy_loss": passed_on}, "is no policy loss"),
        ({"policy_loss": of_other_names}, r"takes \(old_log_prob, .* so that logprobs, old_logprobs, mask is missing"),
        ({"policy_loss": penalizing}, "does not take what it is given.*ref_logprobs"),
        ({"policy_loss_arguments": {"mask": 1.0}}, "must not have mask: it is a tensor of the micro-batch"),
        ({"policy_loss_arguments": {"ratio_max": 5.0}}, r"dapo_loss does not take ratio_max; it takes clip_low"),
        ({"policy_loss_arguments": {"denominator": 5.0}}, "must not have denominator: it is the count"),
        ({"policy_loss_arguments": {"clip_low": 0.1}, "clip_low": 0.2}, "clip_low is given twice"),
        ({"policy_loss": "cispo_loss", "clip_low": 0.2}, r"cispo_loss does not take clip_low; it takes ratio_min"),
        ({"policy_loss": "dr_grpo_loss"}, "max_length"),
        # factors of tokens
        ({"parts": [part("Correction", kind="tiss")]}, "correction must be one of tis"),
        ({"parts": [part("TopEntropy", fraction=1.5)]}, "TopEntropy.fraction"),
        ({"policy_loss": "dppo_loss", "parts": [Correction("tis")]}, "would count them twice"),
        ({"policy_loss": plain, "parts": [Correction("tis")]}, "takes no weights"),
        (
            {"policy_loss": "vespo_loss", "parts": [Correction("seq-tis"), part("TopEntropy", fraction=0.2)]},
            "vespo_loss multiplies the weights",
        ),
        # the reference and old log-probs
        ({"parts": [part("KLPenalty", coef=0.1, estimator="k1")]}, "gradient of mean 0.*'k3', or importance_weight"),
        ({"parts": [KLPenalty(0.1), KLInReward(0.1)]}, "a module has one KL penalty"),
        ({"parts": [Reference(POOL)]}, r"Reference\(ModelPool\(...\)\) is a model that nothing asks"),
        ({"parts": [MovingReference(5)]}, "moves a reference model that nothing asks"),
        ({"kl_coef": 0.1, "parts": [Reference(POOL), MovingReference()]}, "moves a reference .* here a ModelPool has"),
        ({"parts": [LogLinear(), KLInReward(0.1)]}, "LogLinear makes no forward pass"),
        ({"parts": [LogLinear(), StopEarly(0.1)]}, "LogLinear makes no forward pass"),
        ({"parts": [LogLinear(), LogLinear()]}, "LogLinear and LogLinear each have the log-probs that ratios"),
        ({"optimization": {"sise": 2}}, "Optimization has no sise; it has"),
    ],
    PPOModule: [
        (
            {"parts": [part("Critic", model="elsewhere", shared=True)]},
            "of its own: leave the model out",
        ),
        ({"parts": [Critic(shared=True), CriticWarmup(1)]}, "leave CriticWarmup out"),
        ({"parts": [Critic(shared=True), LogLinear()], "kl_coef": 0.0}, r"LogLinear .* effect beside Critic\(shared"),
        ({"parts": [Critic(shared=True), RouterReplay()]}, "RouterReplay would have no effect"),
        (
            {"advantages": "rloo_advantages", "parts": [GAE(lam="length_adaptive_lambda")]},
            r"advantages .* beside GAE\(",
        ),
        ({"lam": 0.9, "parts": [GAE(lam="length_adaptive_lambda")]}, r"lam would have no effect beside GAE\("),
        ({"critic": "rm", "parts": [Critic(normalize=True)]}, r"critic would have no effect beside Critic\("),
        ({"parts": [MaskTruncated(), Critic(bootstrap_truncated=True)]}, "bootstrap_truncated would have no effect"),
        # a critic that ranks of its own train, or nobody
        ({"critic": CriticPool(), "parts": [OwnLoss()]}, "OwnLoss overrides loss, and a critic elsewhere does not"),
        ({"parts": [OwnCritic(CriticPool())]}, "OwnCritic overrides build, and a critic elsewhere does not call it"),
        ({"critic": POOL, "critic_lr": 1e-3}, "is not trained, so the learning rate would have no effect"),
        ({"critic": POOL, "parts": [ValueLoss(clip=None)]}, "is not trained, so ValueLoss would have no effect"),
        ({"parts": [Critic(POOL, normalize=True)]}, "is not trained, so normalize would have no effect"),
        ({"critic": POOL, "parts": [CriticWarmup(1)]}, "is not trained, so CriticWarmup would have no effect"),
    ],
    OnlineDPOModule: [
        ({"parts": [Correction("tis")]}, "Correction takes part in a policy loss"),
        ({"parts": [MaskTruncated()]}, r"give Pairs\(truncated=False\)"),
        (
            {"parts": [Pairs(truncated=False), MissingEndPenalty(1.0)]},
            "MissingEndPenalty .* compares no answer",
        ),
        ({"parts": [NormalizeRewards()]}, "NormalizeRewards changes no comparison"),
        ({"loss_type": "aot"}, "sort the batch"),
        ({"loss_type": {"sigmoid": 1.0, "sft": 0.1}}, "nll_coef"),
        ({"loss_arguments": {"divergense": "js"}}, "loss_arguments are more arguments of dpo_loss.*divergense"),
        ({"loss_arguments": {"beta": 0.2}}, "loss_arguments are more arguments of dpo_loss.*beta"),
        (
            {"loss_type": {"class_path": f"{DPO}.DiscoPOP", "init_args": {"temperature": -1.0}}},
            "temperature must be pos",
        ),
        ({"parts": [KLTarget(0.1)]}, "moves the weight of a KL penalty, and .* has none here"),
    ],
    OnPolicyDistillationModule: [
        ({"divergence": "rlhfkit.losses.nothing"}, "cannot be imported"),
        (
            {"divergence": {"class_path": "JensenShannon", "init_args": {"teacher_weight": 1.0}}},
            "teacher_weight must lie",
        ),
        ({"parts": [DivergenceLoss("jsd")], "divergence": "jsd"}, "divergence would have no effect beside Diverg"),
        ({"parts": [part("DivergenceLoss", divergence="jsd", chunk_size=0)]}, "chunk_size"),
        ({"parts": [Teacher("third")]}, r"teacher would have no effect beside Teacher\(.* among parts"),
        ({"teacher": None}, "there is no teacher"),
        ({"teacher": None, "parts": [part("Teacher", model="one", column="task")]}, "Teacher.column would have no eff"),
        ({"divergence": "jsd", "parts": [RouterReplay()]}, "RouterReplay would have no effect beside divergence"),
        ({"parts": [LogLinear()]}, "a teacher's log-probs.* leave it out"),
        ({"parts": [ClipRewards(1.0)]}, "ClipRewards would have no effect: .* does: .*a reward_coef"),
        ({"advantages": "rloo_advantages"}, "advantages would have no effect beside reward_coef=0"),
        ({"parts": [GroupAdvantages()]}, "GroupAdvantages writes advantages, which TeacherAdvantages has"),
        ({"reward_coef": 0.5, "parts": [TokenCredit()]}, "give it before the part that tells tokens apart"),
        (
            {"divergence": "jsd", "parts": [Correction("tis")]},
            "Correction would have no effect beside divergence='jsd' without a",
        ),
        ({"divergence": "jsd", "policy_loss": "sapo_loss"}, "policy_loss would have no effect beside div"),
        ({"teacher": {"a": "b", "c": "d"}, "divergence": "jsd"}, "leave divergence out"),
        ({"teacher": POOL, "divergence": "jsd"}, "give top_k, as in top_k=20"),
        (
            {"teacher": POOL, "parts": [Reference(POOL), DivergenceLoss("jsd", top_k=4)], "kl_coef": 0.1},
            "a ModelPool or ServedModel of its own",
        ),
        (
            {"teacher": ServedModel("teacher", ADDRESS), "divergence": "jsd"},
            "a divergence compares the teacher's probabilities of all tokens",
        ),
    ],
    DistillationModule: [
        ({"divergence": "total"}, "divergence must be"),
        ({"precompute_teacher": True}, "top_k=64"),
        ({"precompute_teacher": True, "top_k": 4, "temperature": 2.0}, "renormalize"),
        ({"remainder": "renormalize"}, "remainder would have no effect beside top_k=None"),
        (
            {"teacher": ServedModel("teacher", ADDRESS), "top_k": 5},
            "precompute_teacher=True with top_k, which vLLM limits to 20",
        ),
    ],
    DPOModule: [
        ({"loss_type": "sigmiod"}, "loss_type must be a function or one of sigmoid"),
        ({"loss_type": "exo_pair"}, "needs label_smoothing > 0"),
        ({"loss_type": "aot", "use_weighting": True}, "sort the batch"),
        ({"loss_type": "aot", "divergence": "js"}, "defined for divergence 'reverse_kl' only"),
        ({"parts": [part("MovingReference", steps=5)], "precompute_ref_log_probs": True}, "that nothing asks"),
        ({"parts": [part("MovingReference", steps=5)], "reference_free": True}, "that nothing asks"),
        ({"parts": [part("PrecomputedReference")], "ref_model": "other"}, "it out, or ref_model$"),
        ({"parts": [part("PrecomputedReference")], "reference_free": True}, "it out, or reference_free$"),
        ({"reference_free": True, "ref_model": "other"}, "reference_free uses no reference"),
    ],
    Optimization: [
        ({"optimizer": "adam_w"}, "optimizer='adam_w' cannot be imported.*did you mean 'adamw'"),
        ({"optimizer_arguments": {"epsilon": 1}}, "epsilon, which optimizer='adamw' does not take: it takes eps"),
        ({"optimizer_arguments": {"eps": -1.0}}, "refuses optimizer_arguments.*[Ii]nvalid epsilon"),
        (
            {"optimizer": "torch.optim.RAdam", "optimizer_arguments": {"lr": 1}},
            "lr: lr is an argument of the module",
        ),
        ({"optimizer": without_rate}, "without_rate' takes no lr.* give the function an argument lr"),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "give warmup_steps=2 or warmup_ratio=0.1, not both"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio would have no effect beside lr_schedule='constant'"),
        ({"decay_ratio": 0.1, "lr_schedule": "linear"}, "decay_ratio would have no effect beside lr_schedule="),
    ],
    # parts
    TokenCredit: [({"gamma": 1.5}, r"TokenCredit\.gamma")],
    GAE: [
        ({"gamma": 1.5}, r"GAE\.gamma"),
        ({"lam": {"class_path": "length_adaptive_lambda", "init_args": {"alpha": 0.0}}}, "alpha must be positive"),
    ],
    StopProperly: [({"coef": 1.5}, r"StopProperly\.coef")],
    RewardModel: [
        ({"models": {"a b": "first"}}, "takes names of letters"),
        ({"models": {"one": "first", "two": "second"}, "weights": {"third": 1.0}}, "weights by name are those of"),
        ({"models": "first", "weights": {"": 1.0}}, "for one model give a number"),
    ],
    # roles
    ModelPool: [({"model": "model", "reads": "words"}, "reads must be one of tokens, text, chat or")],
    CriticPool: [
        ({"num_nodes": 2}, "num_nodes must be .* each machine has a rank"),
        ({"strategy": "ddp"}, "strategy must be one of rlhf_zero0, .*, got 'ddp'"),
        (
            {"num_ranks": 2, "num_nodes": 2, "resources": ReservedResources({"CPU": 1}, "ab", [0, 1])},
            "num_nodes=2: a Placement has chosen the machines",
        ),
        ({"optimizer_arguments": {"momentum": 0.9}}, "need an optimizer"),
        ({"resources": {"GPU": 0}}, "resources"),
    ],
    Placement: [
        ({"trainer": "with engines"}, "takes a number of ranks"),
        ({"engines": "with reference", "reference": 1}, "engines can be with trainer"),
        ({"reference": "elsewhere"}, "a number of processes or 'with trainer', got 'elsewhere'"),
        ({"reference": {"count": 2}}, "takes processes, resources and machines"),
        ({"reference": {"processes": 2, "resources": {"GPU": 0}}}, "above 0"),
    ],
    # sampling and engines
    SamplingSpec: [
        ({"stop": ("",)}, r"stop must be a text or several, none of them empty, got \(''\,\)"),
        ({"stop": ("\ud800",)}, "stop must be a text"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids must be a list .* integers from 0 on, got \(-1,\)"),
        ({"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids must be a list of up to 96"),
        ({"temperature": 1e-9}, r"temperature must be 0 \(greedy\) or at least 0.0001, got 1e-09"),
        ({"temperature": 0}, "greedy, and 8 completions of a prompt would all be the same: give group_size=1"),
        ({"top_k": 2**31}, "top_k must be an integer of at least 0"),
        ({"json_schema": "{"}, "must be a JSON schema"),
        ({"regex": ""}, "must be a pattern"),
        ({"regex": "a", "json_schema": {}}, "not both"),
    ],
    VLLMPool: [
        ({"device": "tpu"}, "device must be None, 'cpu' or 'cuda', got 'tpu'"),
        ({"quantization": "awq"}, "must be None or one of 'fp8', .*'mxfp8'.* got 'awq'"),
        ({"engine_arguments": {"tensor_parallel_size": 1, "nnodes": 2}}, r"must leave nnodes out: .*\(tensor_paral"),
        (
            {"tensor_parallel_size": 2, "engine_arguments": {"enable_expert_parallel": True}},
            "enable_expert_parallel out",
        ),
        ({"engine_arguments": {"enable_lora": True}}, r"must leave enable_lora out: .* see VLLMPool\(lora=\.\.\.\)"),
        ({"expert_parallel": True, "pipeline_parallel_size": 2}, "which is 1: raise one of them"),
        ({"lora": "adapter", "colocate": True}, "cannot be combined with colocate=True"),
        ({"transfer": "mpi"}, "transfer must be one of 'auto', 'gloo', 'nccl', 'ipc', got 'mpi'"),
        ({"transfer": "nccl", "device": "cpu"}, "sends from GPU to GPU, and the engines are on CPUs"),
        ({"transfer": "ipc", "colocate": True, "device": "cpu"}, "use 'auto' or 'gloo'"),
        ({"transfer": "ipc"}, "it needs colocate=True"),
        ({"transfer": "nccl", "colocate": True}, "cannot connect two processes on one GPU"),
    ],
    VLLMServer: [
        ({"urls": []}, "at least one address of a running server"),
        ({"urls": "10.0.0.5:8000"}, "must be like 'http://127.0.0.1:8000'"),
        ({"transfer": "ipc"}, "'auto', 'gloo' or 'nccl'"),
    ],
    # strategies
    RLHFDeepSpeedStrategy: [
        ({"launcher": "subprocess", "num_nodes": 2}, r"use Trainer\(num_nodes=...\)"),
        ({"launcher": "ray", "resources_per_rank": {"CPU": 0}}, "resources_per_rank must name positive amounts"),
        ({"launcher": "ray", "resources_per_rank": {"GPU": 0.5}}, "whole GPUs"),
    ],
    # rollouts
    RolloutCallback: [
        ({"reward": [len]}, r"got list: WeightedSum\(right=..., style=...\) adds several"),
        ({"reward": lambda prompts, completions: []}, r"one argument, a list of samples .*\(prompts, completions\)"),
        ({"sampling": {"num_generations": 8}}, "SamplingSpec has no num_generations; .* is group_size here"),
        ({"engine": Plain(), "parts": [Ahead(in_flight=True)]}, "Plain does not say that it can"),
        ({"engine": Plain(), "parts": [Oversampling(0.5)]}, r"Oversampling\(0\.5\) .* Plain cannot"),
        ({"parts": [Ahead(1), SharedDevices(True)]}, "with Ahead it generates while the policy learns"),
        ({"engine": VLLMPool(colocate=True), "parts": [Ahead(1)]}, r"^VLLMPool\(colocate=True\) takes the training"),
        ({"engine": VLLMPool(), "sampling": SamplingSpec(stop="x"), **CONTINUED}, r"SamplingSpec\(stop=...\)"),
        (
            {"engine": VLLMPool(), "sampling": SamplingSpec(regex="a+", presence_penalty=1.0), **CONTINUED},
            r"SamplingSpec\(presence_penalty=..., regex=...\) to what it adds alone",
        ),
    ],
    DynamicSampling: [({"by": "right", "keep": len}, "not both")],
    PromptDataModule: [
        ({"micro_batch_size": 4, "max_tokens_per_micro_batch": 100}, "or max_tokens_per_micro_batch, not both"),
        ({"updates_per_iteration": 2}, "updates_per_iteration=2 needs max_tokens_per_micro_batch"),
    ],
    # rewards
    WeightedSum: [
        ({}, "at least one part"),
        ({"a": 3}, "part 'a' must be a callable"),
        ({"a": len, "normalize": "group"}, "normalize must be a function of values and group ids, got 'group'"),
        ({"a": len, "normalize": lambda group, values: values}, r"needed is a function \(values, group\)"),
    ],
    FormatReward: [({"pattern": "("}, r"'\(' is not a regular expression")],
    ExactMatch: [({"pattern": "("}, r"'\(' is not a regular expression")],
    ReasoningFormat: [({"begin": ""}, "tags must be texts that are not empty")],
    TagCount: [({"tags": "<a>"}, "tags must be a list of texts")],
    ModelReward: [({"model": "none", "dtype": "of words"}, "dtype must be the name of a torch type .* got 'of words'")],
    ProcessModelReward: [({"model": "none", "separator": ""}, "separator must have at least one character")],
    ChatJudge: [
        ({"template": "{first} {second}"}, "prompt"),
        ({"verdict": "[AB]"}, "one group"),
        ({"on_failure": 0.0}, "on_failure must be"),
    ],
    SandboxedReward: [
        ({"reward": "correct"}, "must be a dotted name such as 'my_rewards.correct', got 'correct'"),
        ({"reward": "no_such_package.correct"}, "there is no module 'no_such_package'"),
        ({"reward": lambda batch: [0.0]}, "cannot be sent to another process"),
    ],
    SubprocessReward: [({"reward": "rlhfkit.rewards.missing"}, r"'rlhfkit\.rewards\.missing' cannot be imported")],
    # episodes
    Episodes: [
        ({"environment": Counting()}, "a class or a function that makes a new Environment"),
        ({"environment": Counting, "tools": [print]}, "either an environment or tools"),
        ({"environment": Counting, "tool_call_parser": "hermes"}, "tool_call_parser finds calls of tools"),
        ({"tools": [print], "tool_call_parser": "grok"}, "must be a function or one of hermes, llama3_json"),
    ],
    AgentEpisodes: [
        ({"agent": "agent"}, "agent must be a function"),
        ({"server": ServerOptions(host="0.0.0.0")}, "without a token"),
    ],
    GymEnvironment: [
        ({"environment": object()}, r"needs reset\(\) and step\(\), as gymnasium.Env has"),
        ({"environment": Counting(), "parse_action": None}, "parse_action must be a function"),
    ],
    ToolEnvironment: [({"tools": []}, "must be"), ({"tools": [part, part]}, "must be")],
    MCPTools: [({"server": "uvx mcp-server-time"}, "server must be a command")],
}
CASES = [(kind, given, message) for kind, rows in REFUSED.items() for given, message in rows]


@pytest.mark.parametrize(
    ("kind", "given", "message"), CASES, ids=[f"{kind.__name__}-{number}" for number, (kind, _, _) in enumerate(CASES)]
)
def test_it_is_refused_with_what_was_given_and_what_is_allowed(kind: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**LEAST.get(kind, {}) | given)
