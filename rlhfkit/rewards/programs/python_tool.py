"""``PythonTool``: run Python that the policy has written, in a sandbox, as a tool of its episodes."""

import asyncio
from functools import cache

from rlhfkit.rewards.programs.evaluation import STARTUP_SECONDS
from rlhfkit.rewards.programs.execution import CodeExecution

_WRAPPED = """
import ast, sys, traceback
_source = {source!r}
_names = {{"__name__": "__main__"}}
try:
    _tree = ast.parse(_source, "<program>")
    _last = _tree.body.pop() if _tree.body and isinstance(_tree.body[-1], ast.Expr) else None
    exec(compile(_tree, "<program>", "exec"), _names)
    if _last is not None:
        _value = eval(compile(ast.Expression(_last.value), "<program>", "eval"), _names)
        if _value is not None:
            print(repr(_value))
except SystemExit:
    pass
except BaseException as _error:
    sys.stdout.flush()
    print("".join(traceback.format_exception_only(_error)).strip())
    for _frame in traceback.extract_tb(_error.__traceback__):
        if _frame.filename == "<program>":
            print(f"  line {{_frame.lineno}}")
sys.stdout.flush()
"""


class PythonTool:
    """A Python interpreter in a sandbox, for ``Episodes(tools=[PythonTool().python])``.

    Each call is a program of its own in a new process: nothing is kept between calls. What is printed comes back, and
    the value of a last line that is an expression; of an exception its message and lines. The sandbox is that of
    :class:`~rlhfkit.rewards.CodeExecution`, which says what it protects from.

    Args:
        timeout: Time limit of a program in seconds.
        workers: Programs that run concurrently, on each rank; ``None``: one per core.
        memory_gib: Address space of each process in GiB, and memory of all processes of a program together.
        output_mib: MiB that a program may print.
        network: Whether programs may use the network.
        allow_partial_isolation: Run programs even if this machine cannot isolate them, instead of raising an error.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        memory_gib: float = 1.0,
        output_mib: float = 0.1,
        network: bool = False,
        allow_partial_isolation: bool = False,
    ) -> None:
        self.timeout = timeout
        self._execution = CodeExecution(
            timeout=timeout,
            workers=workers,
            memory_gib=memory_gib,
            output_mib=output_mib,
            network=network,
            allow_partial_isolation=allow_partial_isolation,
            name="python tool",
        )

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints, or the value of its last line.

        Args:
            code: The program.

        Returns:
            What it printed.
        """
        return await asyncio.to_thread(self.run, code)

    def run(self, code: str) -> str:
        """Run a program and return what the policy reads of it; blocks.

        Raises:
            RuntimeError: If the sandbox cannot run it, or isolation is missing.
        """
        job = {"do": "run", "program": [_WRAPPED.format(source=code)], "input": "", "seconds": self.timeout}
        result = self._execution.sandbox.run(job, timeout=self.timeout + STARTUP_SECONDS)
        if result.status != "ok":
            return f"Error: the program was ended: {result.status}: {result.message}"
        if result.value["timeout"]:
            return f"Error: the program did not end within {self.timeout:g} s"
        text = result.value["text"]
        return "Error: the program crashed, or printed too much" if text is None else text.rstrip() or "(no output)"

    def close(self) -> None:
        """Stop the processes."""
        self._execution.close()


@cache
def _default_tool() -> PythonTool:
    return PythonTool()


# A PythonTool with its defaults, for configurations: tools: [rlhfkit.rewards.python]. The policy reads this docstring.
async def python(code: str) -> str:
    """Run a Python program and return what it prints, or the value of its last line.

    Args:
        code: The program.

    Returns:
        What it printed.
    """
    return await _default_tool().python(code)
