from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pdactors.config import ClusterConfig, SecuritySection
from pdactors.config.logging import ERASE_LINE, configure, get_logger
from pdactors.errors import ConfigError

SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PDACTORS_LOG_LEVEL", raising=False)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_the_bound_context(stream: io.StringIO) -> None:
    configure(stream=stream)
    get_logger(actor="prefill-0").info("request done", tokens=3, text="Grüße\nx")
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "actor": "prefill-0",
        "event": "request done",
        "tokens": 3,
        "text": "Grüße\nx",
        "level": "info",
    }
    assert "Grüße" in stream.getvalue()


def test_context_variables_are_merged(stream: io.StringIO) -> None:
    configure(stream=stream)
    with structlog.contextvars.bound_contextvars(request="r1"):
        get_logger().warning("late")
    assert lines(stream)[0]["request"] == "r1"


def test_a_terminal_gets_a_console_line_that_takes_the_place_of_a_progress_bar() -> None:
    stream = Terminal()
    configure(stream=stream)
    get_logger().info("request done", tokens=3)
    assert stream.getvalue().startswith(ERASE_LINE)
    assert "request done" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_lines_below_the_level_are_dropped(stream: io.StringIO) -> None:
    configure(level="warning", stream=stream)
    get_logger().info("no")
    get_logger().warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_the_environment_sets_the_level(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDACTORS_LOG_LEVEL", "DEBUG")
    configure(stream=stream)
    get_logger().debug("detail")
    assert [line["event"] for line in lines(stream)] == ["detail"]


def test_an_unknown_level_is_an_error_that_says_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='log level: "loud" is not one of debug, info'):
        configure(level="loud")
    monkeypatch.setenv("PDACTORS_LOG_LEVEL", "quiet")
    with pytest.raises(ConfigError, match='PDACTORS_LOG_LEVEL: "quiet"'):
        configure()


def test_a_logger_made_before_configure_follows_it(stream: io.StringIO) -> None:
    log = get_logger(actor="a")
    configure(stream=stream)
    log.info("hello")
    configure(level="error", stream=stream)
    log.info("dropped")
    assert [line["event"] for line in lines(stream)] == ["hello"]


@pytest.mark.parametrize("key", ["token", "join_token", "secret", "password", "Authorization", "TOKEN"])
def test_values_of_secret_keys_are_masked(stream: io.StringIO, key: str) -> None:
    configure(stream=stream)
    get_logger(**{key: SECRET}).info("joined", token_id=7, nested={"a": [{key: SECRET}]})
    (line,) = lines(stream)
    assert line[key] == "***"
    assert line["nested"] == {"a": [{key: "***"}]}
    assert line["token_id"] == 7
    assert SECRET not in stream.getvalue()


def test_secrets_are_masked_on_a_terminal_and_inside_a_configuration() -> None:
    stream = Terminal()
    configure(stream=stream)
    get_logger().info("start", token=SECRET, config=ClusterConfig(security=SecuritySection(token=SECRET)))
    assert "***" in stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_traceback_is_logged_without_the_values_of_local_variables(kind: type[io.StringIO]) -> None:
    stream = kind()
    configure(stream=stream)
    fail_with_a_secret_at_hand()
    assert "ZeroDivisionError" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def fail_with_a_secret_at_hand() -> None:
    held = "-".join(["open", "sesame"])
    try:
        _ = len(held) / 0
    except ZeroDivisionError:
        get_logger().exception("failed")


def test_the_standard_librarys_loggers_write_the_same_lines(stream: io.StringIO) -> None:
    configure(stream=stream)
    log = logging.getLogger("some.library")
    log.info("chatter")
    log.warning("watch %s", "out")
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("broke")
    warning, error = lines(stream)
    assert (warning["event"], warning["level"], warning["logger"]) == ("watch out", "warning", "some.library")
    assert "KeyError" in error["exception"]


def test_python_warnings_become_log_lines(stream: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure(stream=stream)
        warnings.warn("old thing", stacklevel=1)
    (line,) = lines(stream)
    assert "old thing" in line["event"]
    assert line["logger"] == "py.warnings"


def test_configuring_again_replaces_the_handler(stream: io.StringIO) -> None:
    configure(stream=io.StringIO())
    configure(stream=stream)
    logging.getLogger("x").warning("once")
    assert len(lines(stream)) == 1


LIBRARY = """
import sys
if sys.argv[1] == "before":
    import transformers.utils.logging as library
    library.get_logger("transformers.early")
from pdactors.config.logging import configure
configure()
import transformers.utils.logging as library
library.get_logger("transformers.models.x").warning("the weights are odd")
"""


@pytest.mark.parametrize("imported", ["before", "after"])
def test_warnings_of_transformers_become_log_lines_whenever_it_is_imported(imported: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIBRARY, imported], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout == ""
    (line,) = [json.loads(line) for line in result.stderr.splitlines()]
    assert (line["event"], line["logger"]) == ("the weights are odd", "transformers.models.x")


def test_without_configure_warnings_go_to_stderr_and_nothing_to_stdout() -> None:
    script = "from pdactors.config.logging import get_logger as g; g().info('quiet'); g().warning('loud')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == ""
    assert [json.loads(line)["event"] for line in result.stderr.splitlines()] == ["loud"]
