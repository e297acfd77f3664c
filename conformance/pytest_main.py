"""Runs pytest as a Bazel test: the files in argv, with the report and the filter that Bazel asks for."""

import os
import sys

import pytest


def arguments(argv: list[str], environ: dict[str, str]) -> list[str]:
    options = ["-c", "pyproject.toml", "--rootdir=.", "-p", "conformance.plugin", "-p", "no:cacheprovider"]
    if folder := environ.get("TEST_TMPDIR"):
        options.append(f"--basetemp={folder}/pytest")
    if report := environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    if wanted := environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        options += ["-k", wanted]
    return options + argv


if __name__ == "__main__":
    # The sandbox has no home folder; what wants one gets the test's own.
    os.environ.setdefault("HOME", os.environ.get("TEST_TMPDIR", "/tmp"))
    sys.exit(pytest.main(arguments(sys.argv[1:], dict(os.environ))))
