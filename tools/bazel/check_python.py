"""Says what the interpreter of LOWLAT_PYTHON is and lacks, in one line, and writes all versions to the file that it is given."""

import importlib.metadata
import importlib.util
import sys

REQUIRED = ("torch", "pytest")
# import name -> what does not work without it
WANTED = {
    "cutlass": "kernels",
    "tvm_ffi": "kernels",
    "numpy": "tests",
    "hypothesis": "tests",
    "setuptools": "tests",
    "wheel": "tests",
    "typer": "command line",
    "rich": "command line",
    "matplotlib": "plots",
}


def missing(names):
    return [name for name in names if importlib.util.find_spec(name) is None]


def main() -> int:
    python = "Python " + sys.version.split()[0]
    if sys.version_info < (3, 11):
        print(f"{python} is too old: 3.11 or newer is needed")
        return 1
    lacking = missing(REQUIRED)
    wanted = [f"{name} ({WANTED[name]})" for name in missing(WANTED)]
    if lacking:
        print(f"{python} lacks {', '.join(lacking + wanted)}; {' and '.join(REQUIRED)} must be there")
        return 1
    # Tests depend on this file: an interpreter is no input of an action, so results would outlive a changed one.
    found = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    for path in sys.argv[1:]:
        with open(path, "w") as file:
            file.write("\n".join([f"{python} {sys.executable}", *sorted(found, key=str.lower)]) + "\n")
    print(f"{python}" + (f" lacks {', '.join(wanted)}: what needs them will fail" if wanted else ", nothing is missing"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
