"""Tests of rlhfkit.checkpoints."""
