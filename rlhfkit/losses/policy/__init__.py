"""Policy losses, all with one signature: PPO, GRPO and their variants, losses on whole sequences, REINFORCE.

``loss(logprobs, old_logprobs, advantages, mask, *, log_ratio_clamp, weights, aggregation, denominator, max_length,
...)``, with ``rollout_logprobs`` (engine) where needed, so that each can be the ``policy_loss`` of a module. Where a
loss says no more about them, the arguments are:

- ``logprobs``: (B, T) log-probs of the sampled tokens under the policy, with gradient; ``logprobs[:, t]`` belongs to
  token t + 1.
- ``old_logprobs``: (B, T) log-probs under the policy before this iteration (``logprobs.detach()`` in its first update);
  detached.
- ``advantages``: (B, T), or (B, 1) or (B,) when all tokens of a sequence share one; detached.
- ``mask``: (B, T), true where the policy chose the token and it is trained on. Masked entries of the other tensors may
  hold anything, NaN included.
- ``log_ratio_clamp``: limit of each token's log-ratio in nats, see :func:`~rlhfkit.losses.ppo_loss`.
- ``weights``: (B, T), (B, 1) or (B,) factors of the token losses, e.g. of
  :func:`~rlhfkit.losses.importance_weights`; detached.
- ``aggregation``: how the token losses become one number, see :func:`~rlhfkit.losses.aggregate`.
- ``denominator``: tokens (for ``token-mean``) or sequences of the whole optimizer step, divided by the number of
  micro-batches that are averaged. The count of the call when ``None``.
- ``max_length``: tokens, e.g. the generation limit; only for ``aggregation="constant-length"``.

B are sequences, T tokens on the next-token axis.

May import: torch and the files of losses above this folder.
Start at :mod:`rlhfkit.losses.policy.ppo`; ``base.py`` holds what they share and shows how to write one.
"""
