"""The pool of vLLM engines that all tests share."""

from rlhfkit.rollout.vllm.pool import VLLMPool


class SharedPool(VLLMPool):
    """A pool that outlives the trainer of one test: closing it only forgets the weights."""

    def close(self) -> None:
        """Make whoever comes next publish weights first."""
        self.version = None

    def really_close(self) -> None:
        """End the engines."""
        super().close()
