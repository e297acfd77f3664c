"""Small local repositories in place of three that Bazel itself names and would download.

Python targets use nothing of them, but Bazel loads them while it sets up its own toolchains.
"""

_CC = """
cc_binary = native.cc_binary
cc_library = native.cc_library
cc_test = native.cc_test
cc_import = native.cc_import
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
"""

_JAVA = """
java_binary = native.java_binary
java_library = native.java_library
java_test = native.java_test
java_import = native.java_import
java_toolchain = native.java_toolchain
java_runtime = native.java_runtime
"""

# Only `bazel coverage` would use it.
_COVERAGE = """
filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])
filegroup(name = "lcov_merger", visibility = ["//visibility:public"])
"""

def _stand_in_impl(repository_ctx):
    for path, content in repository_ctx.attr.files.items():
        repository_ctx.file(path, content, executable = False)

_stand_in = repository_rule(
    implementation = _stand_in_impl,
    attrs = {"files": attr.string_dict(doc = "path -> content")},
)

def stand_ins():
    _stand_in(name = "rules_cc", files = {"BUILD": "", "cc/BUILD": "", "cc/defs.bzl": _CC})
    _stand_in(name = "rules_java", files = {"BUILD": "", "java/BUILD": "", "java/defs.bzl": _JAVA})
    _stand_in(
        name = "remote_coverage_tools",
        files = {"BUILD": _COVERAGE, "tools/BUILD": "", "tools/coverage/BUILD": ""},
    )
