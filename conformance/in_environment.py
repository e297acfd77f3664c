"""Runs the pytest launcher with the Python of another locked environment than the one that Bazel runs everything with.

    in_environment.py REPOSITORY [arguments of pytest_main.py]

REPOSITORY is a ``locked_environment`` of WORKSPACE, whose python.txt names the interpreter. Standard library only.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    repository, *arguments = sys.argv[1:]
    python = (Path(os.environ["TEST_SRCDIR"]) / repository / "python.txt").read_text().strip()
    # PYTHONPATH comes from Bazel's launcher: the targets that the test declares.
    os.execv(python, [python, "-m", "conformance.pytest_main", *arguments])


if __name__ == "__main__":
    main()
