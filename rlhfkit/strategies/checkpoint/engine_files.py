"""Files that DeepSpeed writes: copied into CPU memory in seconds, to be written beside training, or written at once."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_Id = tuple[int, torch.dtype | None]


class Write(NamedTuple):
    """A file to be written later."""

    folder: Path
    write: Callable[[], Any]
    num_bytes: int
    """Of the copied tensors."""


def snapshot(value: Any) -> tuple[Any, int]:
    """Return a deep copy of anything that ``torch.save`` can write, with all tensors on the CPU, and their bytes.

    Tensors that share memory share it in the copy. Tensors of GPUs pass through pinned memory of 64 MiB in all.
    """
    stream = io.BytesIO()
    copier = _Copier(stream)
    copier.dump(value)
    stream.seek(0)
    return _Restorer(stream, copier.copies).load(), sum(copy.nbytes() for copy in copier.copies)


def write_file(value: Any, path: Path, *, zip_format: bool = True) -> None:
    """Write a file of ``torch.save``, through Python, whose errors say why: torch's own name no reason."""
    with open(path, "wb") as stream:
        torch.save(value, stream, _use_new_zipfile_serialization=zip_format)


PIECE_BYTES = 32 * 2**20
"""Two such pieces are in pinned memory, where a GPU copies faster."""


def copy_in_pieces(source: Tensor, target: Tensor) -> None:
    """Copy (N,) bytes of a GPU into main memory; one piece arrives in pinned memory while another one leaves it.

    A pinned target would be larger: torch 2.13 rounds pinned blocks up to powers of two, and keeps them.
    """
    on_gpu = source.device.type == "cuda"
    staging = [torch.empty(min(PIECE_BYTES, len(source)), dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    arriving: tuple[Any, Tensor, Tensor] | None = None
    pieces = zip(torch.split(source, PIECE_BYTES), torch.split(target, PIECE_BYTES), strict=True)
    for number, (part, into) in enumerate(pieces):
        piece = staging[number % 2][: len(part)]
        piece.copy_(part, non_blocking=on_gpu)
        event = torch.cuda.current_stream(source.device).record_event() if on_gpu else None
        _finish(arriving)
        arriving = event, piece, into
    _finish(arriving)


def _finish(arriving: tuple[Any, Tensor, Tensor] | None) -> None:
    if arriving is not None:
        event, piece, into = arriving
        if event is not None:
            event.synchronize()
        into.copy_(piece)


class _Copier(pickle.Pickler):
    """Pickles everything but the memory of tensors, which it copies; as ``torch.save``, but into memory."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # of the copies, by address of the storage

    def persistent_id(self, obj: Any) -> _Id | None:
        if isinstance(obj, TypedStorage):
            return self._copy(obj._untyped_storage), obj.dtype
        return (self._copy(obj), None) if isinstance(obj, UntypedStorage) else None

    def _copy(self, storage: UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.copies)
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if storage.device.type == "cuda":
                copy_in_pieces(source, copy)
            else:
                copy.copy_(source)
            self.copies.append(copy.untyped_storage())
        return self._numbers[storage._cdata]


class _Restorer(pickle.Unpickler):
    """Builds what :class:`_Copier` has pickled in this process, on the copied memory."""

    def __init__(self, stream: io.BytesIO, copies: list[UntypedStorage]) -> None:
        super().__init__(stream)
        self._copies = copies

    def persistent_load(self, pid: _Id) -> TypedStorage | UntypedStorage:
        number, dtype = pid
        if dtype is None:
            return self._copies[number]
        typed_storage: Any = TypedStorage  # torch 2.13 does not type its constructor
        return typed_storage(wrap_storage=self._copies[number], dtype=dtype, _internal=True)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what DeepSpeed would write


class _FilesOf:
    """DeepSpeed 0.19.8's ``CheckpointEngine``: what it would do to files is handed to ``handle`` instead."""

    def __init__(self, inner: Any, handle: Callable[..., None]) -> None:
        self.inner = inner
        self._handle = handle

    def save(self, state_dict: Any, path: str) -> None:
        self._handle(self.inner.save, state_dict, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._handle(self.inner.makedirs, path, exist_ok)

    def create(self, info: Any) -> None:
        self._handle(self.inner.create, info)

    def commit(self, info: Any) -> bool:
        self._handle(self.inner.commit, info)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def _files_handled(engines: Iterable["DeepSpeedEngine"], handle: Callable[..., None]) -> Iterator[None]:
    """Inside, ``save_checkpoint`` of the engines touches no file and hands each function that would to ``handle``."""
    engines = list(engines)
    for engine in engines:
        engine.checkpoint_engine = _FilesOf(engine.checkpoint_engine, handle)
        engine._copy_recovery_script = partial(handle, engine._copy_recovery_script)
    try:
        yield
    finally:
        for engine in engines:
            engine.checkpoint_engine = engine.checkpoint_engine.inner
            engine.__dict__.pop("_copy_recovery_script")


@contextmanager
def snapshots_of(engine: "DeepSpeedEngine") -> Iterator[list[Write]]:
    """Make ``engine.save_checkpoint`` copy what it would write; inside the context it touches no file.

    The list has the files when the context ends.
    """
    writes: list[Write] = []
    writer, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script

    def record(write: Callable[..., Any], *arguments: Any) -> None:
        if write == writer.save:
            copy, num_bytes = snapshot(arguments[0])
            path = Path(arguments[1])
            later = partial(write_file, copy, path, zip_format=writer.zipfile_serialization)
            writes.append(Write(path.parent, later, num_bytes))
        elif write == copy_scripts:
            writes.append(Write(Path(arguments[0]), partial(write, *arguments), 0))

    with _files_handled([engine], record):
        yield writes


@contextmanager
def errors_at_the_end(engines: Iterable["DeepSpeedEngine"]) -> Iterator[None]:
    """Inside, ``save_checkpoint`` of the engines runs to its end though a file cannot be written; then that is raised.

    No further file is written after an error. DeepSpeed 0.19.8 has barriers between its files, in which the other ranks
    would wait for one whose disk is full.
    """
    errors: list[Exception] = []

    def attempt(write: Callable[..., Any], *arguments: Any) -> None:
        try:
            if not errors:
                write(*arguments)
        except Exception as error:
            errors.append(error)

    with _files_handled(engines, attempt):
        yield
    if errors:
        raise errors[0]


def require_plain_writers(engines: Mapping[str, "DeepSpeedEngine"]) -> None:
    """Raise MisconfigurationException for engines that do not write through ``torch.save`` alone."""
    for name, engine in engines.items():
        writer = type(engine.checkpoint_engine).__name__
        if writer != "TorchCheckpointEngine" or engine.zero_nvme_offload_optimizer():
            other = "an optimizer on NVMe" if writer == "TorchCheckpointEngine" else f"DeepSpeed's {writer}"
            raise MisconfigurationException(
                f"async_save=True copies what DeepSpeed would write into memory, but '{name}' uses {other}. Remove it"
                " from the DeepSpeed configuration, or save with async_save=False."
            )
