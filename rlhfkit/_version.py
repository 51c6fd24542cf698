"""The version of rlhfkit, in one place."""

__version__ = "0.2.0"
