"""``rlhfkit serve-reward``: serve a reward model or function over HTTP."""

import inspect
import os
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from rlhfkit.rewards.base import TIMEOUT, Reward, reward_name
from rlhfkit.serving.access import AccessToken
from rlhfkit.validation import check_integer, check_number


def serve_reward(
    reward: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_variable: str | None = None,
    ssl_certfile: str | os.PathLike[str] | None = None,
    ssl_keyfile: str | os.PathLike[str] | None = None,
    separator: str | None = None,
    normalized: bool = True,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    timeout: float = TIMEOUT,
    max_concurrent: int = 256,
    max_body_mib: int = 64,
    max_total_mib: int = 128,
    max_samples: int = 1024,
    max_tokens: int = 2**20,
) -> None:
    """Serve a reward for ``RemoteReward`` until the process is interrupted; running requests are finished.

    By default only this machine can reach the server; any other ``host`` needs a token.

    Example::

        rlhfkit serve-reward reward-model
        rlhfkit serve-reward reward-model --host 0.0.0.0 --token_variable REWARD_TOKEN
        rlhfkit serve-reward rlhfkit.rewards.math_match --port 8001

    Args:
        reward: Folder or hub name of a reward model, or dotted path of a reward: a function, a class without required
            arguments, or an object.
        host: Address to listen on.
        port: 0: any that is free. The address is printed.
        token_variable: Environment variable with the secret that clients must send. The secret itself is no option,
            since every user of the machine can read command lines.
        ssl_certfile: TLS certificate (PEM); needed where the network is not trusted.
        ssl_keyfile: Its private key.
        separator: Use the model as a process reward model; this text ends a step.
        normalized: See ``ModelReward``.
        dtype: Type of a model's weights.
        device: Where a model runs; ``None``: the accelerator, else the CPU.
        trust_remote_code: Run Python code that comes with the model.
        timeout: Time limit of a request in seconds.
        max_concurrent: Maximum of concurrent requests; others are refused with 503 and ``Retry-After``.
        max_body_mib: Maximum size of one request in MiB.
        max_total_mib: Maximum size of all concurrent requests in MiB; others are refused with 503 and ``Retry-After``.
            The server takes up to 32 times as much memory for them.
        max_samples: Samples per request.
        max_tokens: Tokens per request, all prompts and completions together.

    Raises:
        ValueError: If a number is out of range, the host can be reached from outside and there is no good token, or the
            reward is not found.
    """
    from rlhfkit.rewards.remote.server import reward_app
    from rlhfkit.serving.server import Server

    check_number("timeout", timeout, above=0, why="it is in seconds")  # before the model is loaded, which takes long
    check_integer("max_body_mib", max_body_mib, minimum=1)
    check_integer("max_total_mib", max_total_mib, minimum=max_body_mib)
    loaded = load_reward(
        reward,
        separator=separator,
        normalized=normalized,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    server = Server(
        reward_app(
            loaded,
            timeout=timeout,
            max_samples=max_samples,
            max_tokens=max_tokens,
        ),
        host=host,
        port=port,
        token=AccessToken.optional(variable=token_variable),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        max_concurrent=max_concurrent,
        max_body_bytes=max_body_mib * 2**20,
        max_total_bytes=max_total_mib * 2**20,
    )
    server.run(ready=lambda url: print(f"reward {reward_name(loaded)!r} is served at {url}", flush=True))


def load_reward(
    reward: str,
    *,
    separator: str | None = None,
    normalized: bool = True,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Reward:
    """Return the reward that a command line names: a folder, an importable dotted path, or a hub name.

    The other arguments, those of :func:`serve_reward`, are for models, which are loaded. Raises ``ValueError`` if a
    dotted path leads to nothing that can be called.
    """
    if not Path(reward).exists() and "/" not in reward and "." in reward:
        return _imported(reward)
    from rlhfkit.rewards.models import ModelReward, ProcessModelReward

    if separator is None:
        model = ModelReward(
            reward, normalized=normalized, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    else:
        model = ProcessModelReward(
            reward, separator=separator, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    model.load()
    return model


def _imported(path: str) -> Reward:
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path!r} is neither a folder with a reward model nor the dotted path of a reward: {error}. Modules are "
            "found as Python finds them; PYTHONPATH=. adds the current folder"
        ) from error
    loaded: Any = found() if inspect.isclass(found) else found
    if not callable(loaded):
        raise ValueError(f"{path!r} is {type(loaded).__name__}, which cannot be called on samples")
    return cast(Reward, loaded)
