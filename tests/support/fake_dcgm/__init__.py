"""Small libdcgm.so.4, built from its documented ABI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compile_library(folder: Path) -> Path:
    """Return libdcgm.so.4, built in `folder`; the layouts are asserted by the compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: the tests of the DCGM backend build a small libdcgm; apt-get install gcc libc6-dev")
    library = folder / "libdcgm.so.4"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(HERE / "fake_dcgm.c"),
        ],
        check=True,
    )
    return library
