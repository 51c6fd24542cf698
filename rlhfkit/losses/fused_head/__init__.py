"""Log-probs, entropy and cross-entropy from hidden states, without an (N, V) matrix of logits.

May import: torch (Triton through ``torch.compile``, where installed) and the files of losses above this folder.
Start at :mod:`rlhfkit.losses.fused_head.logprobs`.
"""
