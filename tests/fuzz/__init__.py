"""Fuzz targets for input from outside, one file each: a `target` takes any bytes and may not raise.

`make fuzz SECONDS=30` runs each under atheris (https://github.com/google/atheris), a coverage-guided fuzzer, from the
seeds in `corpus/`; what it finds beyond them is kept in .cache/fuzz. tests/unit/test_fuzz.py runs the seeds alone.
"""

TARGETS = ("kmsg", "sysfs", "podresources", "otlp", "webconfig", "inspector")
