"""Weights for files and engines: adapters merged, names as saved, Hugging Face folders.

May import: the rest of models, torch, Transformers and peft.
Start at :mod:`rlhfkit.models.weights.merging`.
"""
