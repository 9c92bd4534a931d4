from __future__ import annotations

from pathlib import Path

import pytest

from pdactors.config.home import home, logs_dir, models_dir
from pdactors.errors import ConfigError


def test_home_is_what_the_variable_says_and_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDACTORS_HOME", str(tmp_path / "a" / "b"))
    assert home() == tmp_path / "a" / "b"
    assert home().stat().st_mode & 0o777 == 0o700


def test_home_is_in_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PDACTORS_HOME", raising=False)
    assert home() == tmp_path / ".cache" / "pdactors"
    monkeypatch.setenv("PDACTORS_HOME", "")
    assert home() == tmp_path / ".cache" / "pdactors"


def test_models_and_logs_have_folders_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDACTORS_HOME", str(tmp_path))
    assert (models_dir(), logs_dir()) == (tmp_path / "models", tmp_path / "logs")
    assert models_dir().is_dir()
    assert logs_dir().is_dir()


def test_a_relative_home_stays_where_it_was_first_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDACTORS_HOME", "here")
    assert home() == tmp_path / "here"


def test_a_home_that_cannot_be_made_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDACTORS_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match="set PDACTORS_HOME to a folder you can write to"):
        home()
