"""Device memory that the processes of a node share, and copies between devices. The only module that imports cupy.

The owner of an arena exports a handle of it, which travels over the authenticated control plane; whoever got it opens
it and sees the same bytes. One migrator serves a node and has all its arenas open, so a copy between two devices is its
own affair: it needs both arenas, not a port at the other end. `ended` is called as the data ports call it.

    DeviceArena.create(device, size) --handle--> DeviceArena.open(handle)    in another process
    DeviceCopier.copy(sources, targets, ended)                               on a stream of its own, polled

Views have `__cuda_array_interface__`, so a UCX whose fabric reads device memory sends them as they are. For one that
does not, `DeviceCopier` copies to and from the pinned host memory of `pinned()` just as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct

from pdactors.errors import ConfigError, PDError
from pdactors.transport.data_port import Buffer, Ended

POLL_S = 0.0002  # between looks at copies under way


class DeviceHandle(Struct, frozen=True):
    """What another process of the same machine needs to open an arena."""

    bus: str  # PCI address of its device, which is the same in every process
    size_bytes: int
    memory: bytes  # CUDA's own handle


class DeviceArena:
    """A run of memory on one device; `handle` opens it in other processes while its owner lives."""

    def __init__(self, handle: DeviceHandle, device: int, memory: Any, opened: int) -> None:
        self.handle = handle
        self.device = device
        self._memory = memory
        self._opened = opened  # address that was mapped here; 0 for the owner

    @classmethod
    def create(cls, device: int, size_bytes: int) -> DeviceArena:
        """Allocate an arena apart from cupy's pools, for a handle names a whole allocation.

        Raises:
            ConfigError: cupy or the device is missing, or the device has too little memory.
        """
        cupy = _load()
        try:
            with cupy.cuda.Device(device):
                memory = cupy.cuda.memory.Memory(size_bytes)
                exported = cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)
            bus = cupy.cuda.runtime.deviceGetPCIBusId(device)
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise ConfigError(f"an arena of {size_bytes} bytes on CUDA device {device}: {error}") from error
        return cls(DeviceHandle(bus, size_bytes, bytes(exported)), device, memory, 0)

    @classmethod
    def open(cls, handle: DeviceHandle) -> DeviceArena:
        """Map the arena of another process; its own creator cannot.

        Raises:
            ConfigError: cupy or the device is missing, or the owner is gone.
        """
        cupy = _load()
        runtime = cupy.cuda.runtime
        try:
            device = runtime.deviceGetByPCIBusId(handle.bus)
            with cupy.cuda.Device(device):
                address = runtime.ipcOpenMemHandle(handle.memory)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"the arena on the CUDA device at {handle.bus} cannot be opened: {error}") from error
        memory = cupy.cuda.UnownedMemory(address, handle.size_bytes, None, device)
        return cls(handle, device, memory, address)

    def view(self, offset: int, size_bytes: int) -> Any:
        """Return a piece of the arena as an array of bytes on the device.

        Raises:
            ValueError: it is not inside the arena, or the arena is closed.
        """
        if self._memory is None or not 0 <= offset <= offset + size_bytes <= self.handle.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes}: not in an arena of {self.handle.size_bytes}")
        cupy = _load()
        return cupy.ndarray((size_bytes,), np.uint8, cupy.cuda.MemoryPointer(self._memory, offset))

    def close(self) -> None:
        """Unmap or free the memory; no view may be in use. Idempotent."""
        self._memory, opened, self._opened = None, self._opened, 0
        if opened:
            cupy = _load()
            with cupy.cuda.Device(self.device):
                cupy.cuda.runtime.ipcCloseMemHandle(opened)


@dataclass(frozen=True)
class _Copy:
    event: Any
    buffers: Sequence[Buffer]  # keep them alive
    ended: Ended
    error: PDError | None


class DeviceCopier:
    """Copies on a stream of its own, beside the engines' work; asks for their end instead of waiting for it.

    Raises:
        ConfigError: cupy or the device is missing.
    """

    def __init__(self, device: int) -> None:
        self._cupy = _load()
        try:
            with self._cupy.cuda.Device(device):
                self._stream = self._cupy.cuda.Stream(non_blocking=True)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise ConfigError(f"CUDA device {device}: {error}") from error
        self._device = device
        self._under_way: deque[_Copy] = deque()
        self._loop = asyncio.get_running_loop()
        self._polling = False

    def copy(self, sources: Sequence[Buffer], targets: Sequence[Buffer], ended: Ended) -> None:
        """Copy each source into its target; either may be a view of a device arena or pinned host memory.

        The buffers live until `ended` is called, exactly once and later. A copy cannot be taken back.

        Raises:
            ValueError: the sizes differ.
        """
        pairs = [(_place(source), _place(target)) for source, target in zip(sources, targets, strict=True)]
        for (_, size), (_, wanted) in pairs:
            if size != wanted:
                raise ValueError(f"a buffer of {size} bytes cannot be copied into one of {wanted}")
        runtime, error = self._cupy.cuda.runtime, None
        with self._cupy.cuda.Device(self._device):
            event = self._cupy.cuda.Event(disable_timing=True)
            try:
                for (source, size), (target, _) in pairs:
                    runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, self._stream.ptr)
            except runtime.CUDARuntimeError as refused:  # what was launched before runs all the same
                error = self._failure(refused)
            event.record(self._stream)
        self._under_way.append(_Copy(event, (*sources, *targets), ended, error))
        self._poll()

    def _poll(self) -> None:
        if not self._polling and self._under_way:
            self._polling = True
            self._loop.call_later(POLL_S, self._look)

    def _look(self) -> None:
        """Tell of copies that are done; they end in the order of the stream."""
        self._polling = False
        try:
            while self._under_way and self._under_way[0].event.done:
                copy = self._under_way.popleft()
                self._loop.call_soon(copy.ended, copy.error)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:  # the device is lost, and every copy with it
            while self._under_way:
                self._loop.call_soon(self._under_way.popleft().ended, self._failure(error))
        self._poll()

    def _failure(self, error: Exception) -> PDError:
        return PDError(f"CUDA device {self._device}: {error}")

    def close(self) -> None:
        """Wait for what is under way, and tell of it; idempotent."""
        self._stream.synchronize()
        self._look()


def pinned(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return page-locked host memory, which devices copy to and from without a detour.

    Raises:
        ConfigError: cupy is missing, or there is no such memory.
    """
    cupy = _load()
    try:
        memory = cupy.cuda.alloc_pinned_memory(size_bytes)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"{size_bytes} bytes of pinned memory: {error}") from error
    return np.frombuffer(memory, np.uint8, size_bytes)


def num_devices() -> int:
    """Count this process's CUDA devices.

    Raises:
        ConfigError: cupy or a driver is missing.
    """
    cupy = _load()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"no CUDA device: {error}") from error


def _place(buffer: Buffer) -> tuple[int, int]:
    """Return the address and the size in bytes of contiguous memory, on a device or on the host."""
    if hasattr(buffer, "__cuda_array_interface__"):
        return int(buffer.data.ptr), int(buffer.nbytes)
    view = np.frombuffer(buffer, np.uint8)
    return int(view.ctypes.data), view.nbytes


def _load() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"CUDA devices need cupy: pip install 'pdactors[cuda]' ({error})") from error
    return cupy
