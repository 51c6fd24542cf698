"""Tests of rlhfkit.rewards.judges."""
