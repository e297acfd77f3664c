"""Platforms of a remote-execution cluster, one a GPU generation: what hw_matrix/runners.toml asks its scheduler for, and
the container that the user names.

LOWLAT_REMOTE_IMAGE (docker://registry/image@sha256:...) has Python with the packages of requirements/*.lock, the NVIDIA
driver's libraries come from the host; LOWLAT_REMOTE_PYTHON is that interpreter's path in it (python_env.bzl).
"""

load("//hw_matrix/platforms:runners.bzl", "EXEC_PROPERTIES")

_PLATFORM = """
platform(
    name = "{name}",
    constraint_values = [
        "@lowlat//hw_matrix/platforms:{name}",
        "@platforms//cpu:x86_64",
        "@platforms//os:linux",
    ],
    exec_properties = {{{properties}}},
    visibility = ["//visibility:public"],
)
"""

def _remote_platforms_impl(repository_ctx):
    image = repository_ctx.os.environ.get("LOWLAT_REMOTE_IMAGE", "")
    if repository_ctx.os.environ.get("LOWLAT_REMOTE") and not image:
        fail("lowlat_gemm: --config=rbe-* needs LOWLAT_REMOTE_IMAGE=docker://registry/image@sha256:... in the environment")
    platforms = []
    for name, asked in EXEC_PROPERTIES.items():
        properties = dict(asked)
        if image:
            properties["container-image"] = image
        pairs = ", ".join(["{}: {}".format(repr(key), repr(value)) for key, value in properties.items()])
        platforms.append(_PLATFORM.format(name = name, properties = pairs))
    repository_ctx.file("BUILD", "".join(platforms), executable = False)

remote_platforms = repository_rule(
    implementation = _remote_platforms_impl,
    environ = ["LOWLAT_REMOTE", "LOWLAT_REMOTE_IMAGE"],
    local = True,
)
