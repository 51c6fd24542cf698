"""When functions without side effects run compiled: on CUDA, the kernels between two matrix products of the head.

Not where that is switched off (``TORCH_COMPILE_DISABLE=1``, PyTorch's own switch), without Triton, and after a
compilation that failed, as it does without a C compiler; the functions then run as they are.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

_BACKEND = "inductor"  # of torch.compile
_SLOWER = "log-probs of the output layer run without compiled kernels, which is slower"
_failed = False


def can_compile(device: str) -> bool:
    """Whether tiles on this type of device are compiled: CUDA with Triton, and not inside a caller's ``torch.compile``.

    Logs once why not, if it could be otherwise.
    """
    if _failed or torch.compiler.is_compiling() or not _has_kernels(device):
        return False
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # the second is the older name
    return all(os.environ.get(switch, "0") in ("", "0") for switch in switches)


@functools.cache
def _has_kernels(device: str) -> bool:
    if device != "cuda":
        return False
    old = torch.cuda.get_device_capability() < (7, 0)
    if old or importlib.util.find_spec("triton") is None:
        log.warning("%s: %s", _SLOWER, "Triton does not support this GPU" if old else "Triton is not installed")
        return False
    return True


def run_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function without side effects, compiled; as it is, and from then on all, once a compilation has failed."""
    global _failed
    if _failed:
        return function(*arguments)
    try:
        return _compiled(function, _BACKEND)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and their drivers raise errors of any type
        result = function(*arguments)  # raises what is no compiler's error
        _failed = True
        reason = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
        log.warning("%s: %s: %s", _SLOWER, type(error).__name__, reason)
        return result


@functools.cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=True)
