"""Composable RLHF building blocks for PyTorch Lightning."""

from rlhfkit._version import __version__

__all__ = ["__version__"]
