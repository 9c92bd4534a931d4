"""manifest.json of a stored model: where it came from and the hash of every file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdactors.config.memory import format_size
from pdactors.errors import ModelError

NAME = "manifest.json"

# Called with what is being done, how much of it is done and how much there is, in bytes or pieces (0: not known).
Progress = Callable[[str, int, int], None]


def silent(step: str, done: int, total: int) -> None:
    """Report no progress."""


def in_bytes(progress: Progress) -> Progress:
    """Have steps that are counted in bytes say how many."""

    def tell(step: str, done: int, total: int) -> None:
        progress(f"{step}, {format_size(done)} of {format_size(total)}", done, total)

    return tell


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size_bytes: int
    sha256: str
    mtime_ns: int  # a file whose size and time are as recorded is not hashed again in a quick check


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    source: str
    licence: str
    files: dict[str, FileEntry]
    format: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


def write_manifest(folder: Path, *, name: str, source: str, licence: str, progress: Progress = silent) -> Manifest:
    """Hash every file of `folder` and write its manifest."""
    files = {}
    for path in _files(folder):
        status = path.stat()
        digest = sha256_of(path, progress)
        files[path.relative_to(folder).as_posix()] = FileEntry(status.st_size, digest, status.st_mtime_ns)
    manifest = Manifest(name, source, licence, files)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / NAME).write_bytes(text + b"\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a stored model. Raises ModelError."""
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{folder / NAME} cannot be read: {error}") from error
    if manifest.format != 1:
        raise ModelError(f"{folder / NAME} has format {manifest.format}; this version reads format 1")
    return manifest


def check_folder(folder: Path, *, thorough: bool, progress: Progress = silent) -> Manifest:
    """Hold a stored model against its manifest.

    A quick check hashes only files whose size or time changed; a thorough one hashes all.

    Raises:
        ModelError: the manifest cannot be read, or a file is missing, added or changed (the text names it).
    """
    manifest = read_manifest(folder)
    present = {path.relative_to(folder).as_posix() for path in _files(folder)}
    for name in sorted(present ^ manifest.files.keys()):
        raise ModelError(f"{folder / name} is {'not in the manifest' if name in present else 'missing'}")
    for name, entry in manifest.files.items():
        status = (folder / name).stat()
        if status.st_size != entry.size_bytes:
            raise ModelError(f"{folder / name} has {status.st_size} bytes, its manifest says {entry.size_bytes}")
        if (thorough or status.st_mtime_ns != entry.mtime_ns) and sha256_of(folder / name, progress) != entry.sha256:
            raise ModelError(f"{folder / name} does not have the hash in its manifest")
    return manifest


def sha256_of(path: Path, progress: Progress = silent) -> str:
    digest = hashlib.sha256()
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            in_bytes(progress)("verify", done, total)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
