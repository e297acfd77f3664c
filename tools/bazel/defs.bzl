"""pytest_test: a group of pytest files as one Bazel test."""

def pytest_test(name, srcs, deps = [], data = [], args = [], size = "medium", environment = None, **kwargs):
    """Runs test files of this package under pytest, with the conformance plugin and Bazel's shards.

    Args:
      name: name of the test target.
      srcs: test files, as paths in this package; importing torch and cutlass costs 3 s a process, so take many.
      deps: Python libraries that the tests import.
      data: files that they read.
      args: further arguments of pytest.
      size: as for any Bazel test.
      environment: name of a locked_environment whose Python runs the tests, instead of the usual one.
      **kwargs: what py_test takes besides: shard_count, tags, target_compatible_with, ...
    """
    package = native.package_name()
    launchers = ["//conformance:in_environment.py"] if environment else []
    launchers.append("//conformance:pytest_main.py")
    data = data + (["@{}//:environment".format(environment)] if environment else [])
    native.py_test(
        name = name,
        size = size,
        srcs = srcs + launchers,
        main = launchers[0],
        args = ([environment] if environment else []) + args + [package + "/" + src if package else src for src in srcs],
        data = data + [
            "//:package_files",
            "@lowlat_python//:versions",
        ],
        deps = deps + ["//conformance:lib"],
        legacy_create_init = False,
        **kwargs
    )
