"""Keep secrets out of what `ps` shows of this process: its command line and its environment."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pdactors.config.cluster import SECRETS

_OPTIONS = tuple(f"{start}{name}=" for name in SECRETS for start in ("security.", "--set=security.", "--"))


def conceal(arguments: Sequence[str]) -> None:
    """Overwrite the secrets among this process's `arguments`, as the kernel shows them; `sys.argv` keeps them."""
    found = [argument.partition(start)[2] for argument in arguments for start in _OPTIONS if argument.startswith(start)]
    found += [value for option, value in pairwise(arguments) if option == "--token"]
    _overwrite(found, first=0)


def conceal_environment() -> None:
    """Do the same for variables that hold secrets, and forget them, so that no child inherits them."""
    names = [f"PDACTORS_SECURITY_{name.upper()}" for name in SECRETS]
    _overwrite([value for name in names if (value := os.environ.pop(name, ""))], first=2)


def _overwrite(texts: Sequence[str], *, first: int) -> None:
    """Fill the texts with x where Linux keeps the arguments (`first` = 0) or the environment (2) of this process."""
    if not any(texts):
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[45 + first : 47 + first])  # arg_start, arg_end, env_start, env_end
    if not start < end:
        return  # the kernel does not say
    memory = (ctypes.c_char * (end - start)).from_address(start)
    for text in filter(None, map(os.fsencode, texts)):
        for found in re.finditer(rb"(?<=[\0=])" + re.escape(text) + rb"(?=\0)", memory.raw):
            ctypes.memset(start + found.start(), ord("x"), len(text))
