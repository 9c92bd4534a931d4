"""Arenas on a device, opened by another process, and copies between them. What needs a GPU is skipped without one."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import numpy as np
import pytest

from pdactors.errors import ConfigError, PDError
from pdactors.transport import cuda_ipc
from pdactors.transport.cuda_ipc import DeviceArena, DeviceCopier, DeviceHandle

SIZE = 1 << 20


def missing() -> str:
    """Return why there is no GPU here, or ""."""
    try:
        return "" if cuda_ipc.num_devices() else "this machine has no CUDA device"
    except ConfigError as error:
        return error.message


on_gpu = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a GPU")

OPENER = """
import asyncio, sys
import msgspec
from pdactors.transport.cuda_ipc import DeviceArena, DeviceCopier, DeviceHandle, pinned

async def main():
    arena = DeviceArena.open(msgspec.json.decode(sys.argv[1], type=DeviceHandle))
    host = pinned(1000)
    host[:] = 7
    done = asyncio.get_running_loop().create_future()
    copier = DeviceCopier(arena.device)
    copier.copy([host], [arena.view(500, 1000)], done.set_result)
    assert await done is None
    copier.close()
    arena.close()

asyncio.run(main())
"""


async def copied(copier: DeviceCopier, sources: list[object], targets: list[object]) -> PDError | None:
    done: asyncio.Future[PDError | None] = asyncio.get_running_loop().create_future()
    copier.copy(sources, targets, done.set_result)
    assert not done.done()
    return await asyncio.wait_for(done, 20)


def test_without_cupy_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (
        cuda_ipc.num_devices,
        lambda: cuda_ipc.pinned(1),
        lambda: DeviceArena.create(0, 1),
        lambda: DeviceArena.open(DeviceHandle("0000:00:00.0", 1, b"")),
        lambda: DeviceCopier(0),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'pdactors\[cuda\]'"):
            call()


@on_gpu
async def test_bytes_go_to_a_device_across_it_and_back():
    first, second = DeviceArena.create(0, SIZE), DeviceArena.create(cuda_ipc.num_devices() - 1, SIZE)
    copier, host, back = DeviceCopier(0), cuda_ipc.pinned(2000), cuda_ipc.pinned(2000)
    host[:] = np.random.default_rng(1).integers(0, 256, 2000)
    assert await copied(copier, [host[:1500], host[1500:]], [first.view(0, 1500), first.view(4096, 500)]) is None
    pieces = [second.view(100, 1500), second.view(9000, 500)]
    assert await copied(copier, [first.view(0, 1500), first.view(4096, 500)], pieces) is None
    assert await copied(copier, pieces, [back[:1500], back[1500:]]) is None
    assert (back == host).all()
    copier.close()
    first.close()
    second.close()


@on_gpu
async def test_another_process_opens_an_arena_by_its_handle():
    arena, copier, host = DeviceArena.create(0, SIZE), DeviceCopier(0), cuda_ipc.pinned(SIZE)
    host[:] = 1
    assert await copied(copier, [host], [arena.view(0, SIZE)]) is None
    handle = msgspec.json.encode(arena.handle).decode()
    opener = await asyncio.create_subprocess_exec(sys.executable, "-c", OPENER, handle)
    assert await asyncio.wait_for(opener.wait(), 60) == 0
    assert await copied(copier, [arena.view(0, SIZE)], [host]) is None
    assert (host[500:1500] == 7).all()
    assert int(host.sum()) == SIZE + 6 * 1000
    copier.close()
    arena.close()


@on_gpu
async def test_what_is_not_in_the_arena_or_of_another_size_is_refused():
    arena, copier = DeviceArena.create(0, SIZE), DeviceCopier(0)
    for offset, size in ((-1, 10), (SIZE, 1), (0, SIZE + 1)):
        with pytest.raises(ValueError, match="not in an arena"):
            arena.view(offset, size)
    with pytest.raises(ValueError, match="cannot be copied"):
        copier.copy([arena.view(0, 10)], [arena.view(20, 11)], print)
    arena.close()
    with pytest.raises(ValueError, match="not in an arena"):
        arena.view(0, 1)
