"""The Python that Bazel runs everything with: a hash-locked environment, or an interpreter that the user names.

(On a remote-execution cluster: the one in the container.) Two repositories, and one for each further environment.
`selected_python` is small and holds the toolchain; it refers to `locked_python`, which makes
the environment, only where LOWLAT_PYTHON is not set, so that a machine without a network never tries to.
The environment itself lies in a cache folder (make_env.py says where) that clones share.
"""

_RUNTIME = """
py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    # Stock Debian has no `python`, which Bazel's own stub asks for.
    stub_shebang = "#!{python}",
    visibility = ["//visibility:public"],
)

filegroup(
    name = "versions",
    srcs = ["versions.txt"],
    visibility = ["//visibility:public"],
)
"""

_TOOLCHAIN = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime_pair(
    name = "pair",
    py3_runtime = "{home}:runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

_ALIAS = """
alias(
    name = "versions",
    actual = "@locked_python//:versions",
    visibility = ["//visibility:public"],
)
"""

_ENVIRONMENT = """
# python.txt names the interpreter; versions.txt is what a result depends on.
filegroup(
    name = "environment",
    srcs = ["python.txt", "versions.txt"],
    visibility = ["//visibility:public"],
)
"""

_VERSION = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"

def _python311(repository_ctx):
    seen = []
    for name in ["python3.11", "python3"]:
        path = repository_ctx.which(name)
        if path:
            result = repository_ctx.execute([path, "-c", _VERSION])
            lines = result.stdout.splitlines()
            if result.return_code == 0 and lines[0] == "3.11":
                return lines[1]
            seen.append("{} ({})".format(path, lines[0] if result.return_code == 0 else "does not run"))
    fail(("lowlat_gemm: needs Python 3.11 on PATH (requirements/*.lock are for it), found {}. Install python3.11 " +
          "with its venv module, or name an interpreter of your own with --repo_env=LOWLAT_PYTHON=/path/to/python3").format(
        ", ".join(seen) or "no python3",
    ))

def _make(repository_ctx, *options):
    """Has make_env.py make an environment; python.txt and versions.txt are then in the repository."""

    # Paths of labels, so that an edited lock or script makes this run again.
    script = repository_ctx.path(Label("//tools/bazel:make_env.py"))
    for lock in repository_ctx.attr.locks:
        repository_ctx.path(lock)
    command = [_python311(repository_ctx), "-I", script, "--into", "."] + list(options)
    result = repository_ctx.execute(command, timeout = 3600, quiet = False)
    if result.return_code:
        lines = [line for line in result.stderr.splitlines() if line.startswith("lowlat_gemm: ")]
        fail(lines[-1] if lines else "lowlat_gemm: making the Python environment ended with {}".format(result.return_code))

def _locked_python_impl(repository_ctx):
    _make(repository_ctx)
    python = repository_ctx.read("python.txt").strip()
    repository_ctx.file("BUILD", _RUNTIME.format(python = python), executable = False)

locked_python = repository_rule(
    implementation = _locked_python_impl,
    attrs = {"locks": attr.label_list(mandatory = True)},
    environ = ["HOME", "LOWLAT_BAZEL_CACHE", "LOWLAT_WITH_FLASHINFER", "XDG_CACHE_HOME"],
    # Looked at again whenever a Bazel server starts, in case someone emptied the cache; a no-op otherwise.
    local = True,
)

def _select_remote(repository_ctx):
    """The interpreter of a container on a remote-execution cluster: nothing of it can be looked at from here."""
    environ = repository_ctx.os.environ
    python = environ.get("LOWLAT_REMOTE_PYTHON", "")
    if not python.startswith("/"):
        fail("lowlat_gemm: --config=rbe-* needs LOWLAT_REMOTE_PYTHON=/path/to/python3, as it is in the container")
    repository_ctx.file("versions.txt", "{} in {}\n".format(python, environ.get("LOWLAT_REMOTE_IMAGE", "")), executable = False)
    repository_ctx.file("BUILD", _TOOLCHAIN.format(home = "") + _RUNTIME.format(python = python), executable = False)

def _locked_environment_impl(repository_ctx):
    _make(repository_ctx, "--environment", repository_ctx.attr.environment)
    repository_ctx.file("BUILD", _ENVIRONMENT, executable = False)

# An environment beside that of everything else, for tests that in_environment.py runs. Made when first built.
locked_environment = repository_rule(
    implementation = _locked_environment_impl,
    attrs = {
        "environment": attr.string(mandatory = True),
        "locks": attr.label_list(mandatory = True),
    },
    environ = ["HOME", "LOWLAT_BAZEL_CACHE", "XDG_CACHE_HOME"],
    local = True,
)


def _selected_python_impl(repository_ctx):
    script = repository_ctx.path(Label("//tools/bazel:check_python.py"))
    if repository_ctx.os.environ.get("LOWLAT_REMOTE"):
        _select_remote(repository_ctx)
        return
    python = repository_ctx.os.environ.get("LOWLAT_PYTHON", "")
    if not python:
        if repository_ctx.os.environ.get("LOWLAT_PYTHON_REQUIRED"):
            fail("lowlat_gemm: --config=local-python needs LOWLAT_PYTHON=/path/to/python3 in the environment")
        repository_ctx.file("BUILD", _TOOLCHAIN.format(home = "@locked_python//") + _ALIAS, executable = False)
        return
    if not python.startswith("/") or not repository_ctx.path(python).exists:
        fail("lowlat_gemm: LOWLAT_PYTHON={} is not the absolute path of an interpreter".format(python))
    result = repository_ctx.execute([python, script, "versions.txt"])
    message = (result.stdout or result.stderr or "exit {}".format(result.return_code)).strip().splitlines()[-1]
    if result.return_code:
        fail("lowlat_gemm: LOWLAT_PYTHON={}: {}".format(python, message))
    print("lowlat_gemm: using LOWLAT_PYTHON={}: {}".format(python, message))
    repository_ctx.file(
        "BUILD",
        _TOOLCHAIN.format(home = "") + _RUNTIME.format(python = python),
        executable = False,
    )

selected_python = repository_rule(
    implementation = _selected_python_impl,
    environ = [
        "LOWLAT_PYTHON",
        "LOWLAT_PYTHON_REQUIRED",
        "LOWLAT_REMOTE",
        "LOWLAT_REMOTE_IMAGE",
        "LOWLAT_REMOTE_PYTHON",
        "PYTHONPATH",
    ],
    local = True,
)
