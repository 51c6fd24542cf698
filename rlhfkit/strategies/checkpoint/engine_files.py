"""Files that DeepSpeed writes: an error of one rank must not leave the others waiting for it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@contextmanager
def errors_at_the_end(engines: Iterable["DeepSpeedEngine"]) -> Iterator[None]:
    """Inside, ``save_checkpoint`` of the engines runs to its end though a file cannot be written; then that is raised.

    DeepSpeed 0.19.8 has barriers between its files, in which the other ranks would wait for one whose disk is full.
    """
    errors: list[Exception] = []
    engines = list(engines)
    for engine in engines:
        writer = _Writer(engine.checkpoint_engine, errors)
        engine.checkpoint_engine = writer
        engine._copy_recovery_script = partial(writer.attempt, engine._copy_recovery_script)
    try:
        yield
    finally:
        for engine in engines:
            engine.checkpoint_engine = engine.checkpoint_engine.inner
            engine.__dict__.pop("_copy_recovery_script")
    if errors:
        raise errors[0]


class _Writer:
    """DeepSpeed's ``CheckpointEngine`` that keeps errors of files, and writes no further file after one."""

    def __init__(self, inner: Any, errors: list[Exception]) -> None:
        self.inner = inner
        self._errors = errors

    def attempt(self, write: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self._errors:
            try:
                return write(*arguments, **options)
            except Exception as error:
                self._errors.append(error)
        return True  # what commit() returns

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(self.inner.save, state_dict, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(self.inner.makedirs, path, exist_ok=exist_ok)

    def create(self, info: Any) -> None:
        self.attempt(self.inner.create, info)

    def commit(self, info: Any) -> bool:
        return bool(self.attempt(self.inner.commit, info))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
