"""Hugging Face's hub: whether it answers, so that a run without a network ends within seconds and says what is missing.

Transformers and datasets ask five or six times with growing pauses, and for each file again: 25 to 75 seconds.
"""

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""What may be the name of a data set or a model on the hub; nothing else is asked for there."""

TIMEOUT = 5.0
"""Seconds that the hub has for an answer; it is asked twice."""

_OF_MODELS = ("config.json", "adapter_config.json", "tokenizer_config.json")


def why_hub_is_unreachable(address: str, *, offline: bool) -> str | None:
    """Ask the hub at an address for an answer, whatever it is; ``None``: it has answered."""
    from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]  # it is loaded when it is asked for

    if offline:
        return "HF_HUB_OFFLINE forbids to ask there"
    try:
        http_backoff("HEAD", address, timeout=TIMEOUT, max_retries=1, retry_on_status_codes=())
    except Exception as error:  # of the HTTP client, which differs between versions of huggingface_hub
        return f"{address} cannot be reached ({error})"
    return None


def check_hub_model(name: str) -> None:
    """Raise ConnectionError if a model is neither a folder nor in the hub's cache, and the hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).is_dir() or not HUB_NAME.fullmatch(name):
        return
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _OF_MODELS):
        return
    reason = why_hub_is_unreachable(constants.ENDPOINT, offline=constants.HF_HUB_OFFLINE)
    if reason is not None:
        raise ConnectionError(
            f"{name} is no folder in {Path.cwd()}, and as a model of the hub it is not in the cache "
            f"({constants.HF_HUB_CACHE}), and {reason}. Without a network give a folder written by save_pretrained, or "
            "load it once on a machine with a network and copy its cache"
        )
