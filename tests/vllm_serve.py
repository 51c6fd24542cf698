"""``vllm serve`` on the CPU, as tests of ``VLLMServer`` need it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhfkit.ray_session import unassigned_port

ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def vllm_serve(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Start a server that takes weights, give its address, and end it.

    It is started by its module, as the command asks for metadata of a package that vLLM's CPU build does not have.
    """
    port = unassigned_port("127.0.0.1")
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles one function of its log-probs even with enforce_eager
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(2**26), "--block-size", "32", "--generation-config", "vllm"),
        # vLLM 0.32 rewinds the random generator when a part of a prompt fits into a step, which CPUs' cannot.
        "--no-enable-chunked-prefill",
        *("--weight-transfer-config", '{"backend": "rlhfkit"}'),
        *("--worker-extension-cls", "rlhfkit.rollout.vllm.plugin.WorkerExtension"),
        *arguments,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
