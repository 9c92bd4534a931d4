from __future__ import annotations

from pathlib import Path

import pytest

from pdactors.config.cluster import SecuritySection
from pdactors.config.keys import CurveKeys, client_keys, cluster_keys, make_keys
from pdactors.errors import ConfigError
from pdactors.transport.zmq import make_pair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder, make_pair)
    return folder


def test_every_file_is_for_its_owner_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    names = {"cluster.key", "cluster.pub", "client.key", "client.pub", "token", "join_token"}
    assert {file.name for file in folder.iterdir()} == names
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_a_folder_that_others_may_see_still_gets_private_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_keys(tmp_path, make_pair)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_what_is_there_stays(folder: Path) -> None:
    before = {file: file.read_text() for file in folder.iterdir()}
    assert make_keys(folder, make_pair) == []
    made = make_keys(folder, make_pair, ("client", "alice"))
    assert [file.name for file in made] == ["alice.key", "alice.pub"]
    assert {file: file.read_text() for file in before} == before


def test_each_side_reads_its_own(folder: Path) -> None:
    make_keys(folder, make_pair, ("alice",))
    cluster, alice = cluster_keys(folder), client_keys(folder / "alice.key")
    assert alice.server == cluster.server != alice.secret
    assert set(cluster.clients) == {(folder / f"{name}.pub").read_text().strip() for name in ("client", "alice")}
    assert alice.clients == ()


def test_tokens_can_be_read_as_such(folder: Path) -> None:
    security = SecuritySection(token_file=str(folder / "token"), join_token_file=str(folder / "join_token"))
    assert len(security.client_token()) >= 43
    assert security.client_token() != security.actor_token()


@pytest.mark.parametrize("name", ["cluster", "token", "join_token", "../x", "", ".x", "a/b", "x" * 65])
def test_a_name_that_would_be_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a client"):
        make_keys(tmp_path / "keys", make_pair, (name,))


def test_half_a_pair_is_not_replaced(folder: Path) -> None:
    (folder / "client.pub").unlink()
    with pytest.raises(ConfigError, match="without client"):
        make_keys(folder, make_pair)


def test_a_missing_key_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`pdactors keys --dir"):
        cluster_keys(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_key_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    for file in (folder / "cluster.key", folder / "client.key"):
        file.chmod(mode)
    for read in (lambda: cluster_keys(folder), lambda: client_keys(folder / "client.key")):
        with pytest.raises(ConfigError, match="can be read by others"):
            read()


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "x" * 40 + "\nx", "\\" * 40, "\udcff"])
def test_what_is_no_key_is_refused_without_showing_it(folder: Path, text: str) -> None:
    (folder / "cluster.key").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        cluster_keys(folder)
    assert "x" * 39 not in str(caught.value)


def test_no_secret_is_in_a_repr(folder: Path) -> None:
    keys = cluster_keys(folder)
    assert isinstance(keys, CurveKeys)
    assert keys.secret not in repr(keys)
