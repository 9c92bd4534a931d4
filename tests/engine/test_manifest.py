import os

import pytest

from pdactors.engine.manifest import check_folder, read_manifest, write_manifest
from pdactors.errors import ModelError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights").write_bytes(b"abcd" * 1000)
    write_manifest(tmp_path, name="tiny", source="a test", licence="none")
    return tmp_path


def change(path, content):
    """Another content of the same size and time."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_manifest_names_every_file_and_the_source(folder):
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.source, manifest.licence) == ("tiny", "a test", "none")
    assert list(manifest.files) == ["config.json", "deep/weights"]
    assert manifest.size_bytes == 4002
    assert check_folder(folder, thorough=True) == manifest


@pytest.mark.parametrize("thorough", [False, True])
def test_a_missing_added_or_changed_file_is_named(folder, thorough):
    (folder / "config.json").write_bytes(b"[]")
    os.utime(folder / "config.json", ns=(1, 1))
    with pytest.raises(ModelError, match=r"config\.json does not have the hash"):
        check_folder(folder, thorough=thorough)
    (folder / "config.json").write_bytes(b"{")
    with pytest.raises(ModelError, match=r"config\.json has 1 bytes"):
        check_folder(folder, thorough=thorough)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        check_folder(folder, thorough=thorough)
    (folder / "another").touch()
    with pytest.raises(ModelError, match="another is not in the manifest"):
        check_folder(folder, thorough=thorough)


def test_a_change_that_keeps_size_and_time_is_seen_by_a_thorough_check(folder):
    change(folder / "config.json", b"[]")
    check_folder(folder, thorough=False)
    with pytest.raises(ModelError, match="hash"):
        check_folder(folder, thorough=True)


def test_a_file_with_another_time_and_the_same_content_is_right(folder):
    os.utime(folder / "config.json", ns=(1, 1))
    check_folder(folder, thorough=False)


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"name":"","source":"","licence":"","files":{},"format":2}'])
def test_a_missing_or_foreign_manifest_is_refused(folder, content):
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"manifest\.json"):
        read_manifest(folder)
