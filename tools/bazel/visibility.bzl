"""For each room of the repository, the targets that it may depend on, as Bazel's own `visible()` answers."""

# room -> a target in it that asks
ASKING = {
    "adapters": "//lowlat_gemm/adapters:vllm",
    "conformance": "//conformance:lib",
    "kernels": "//lowlat_gemm/kernels:kernels",
    "library": "//lowlat_gemm:dispatch",
    "tables": "//lowlat_gemm/tables:tables",
    "tools": "//tools:lowlat_cli",
}

ASKED = [
    "//conformance:lib",
    "//lowlat_gemm:arch",
    "//lowlat_gemm:backends",
    "//lowlat_gemm:dispatch",
    "//lowlat_gemm:execute",
    "//lowlat_gemm:init",
    "//lowlat_gemm:lowlat_gemm",
    "//lowlat_gemm:models",
    "//lowlat_gemm:operands",
    "//lowlat_gemm:ready",
    "//lowlat_gemm:reference",
    "//lowlat_gemm:settings",
    "//lowlat_gemm:torch_op",
    "//lowlat_gemm:warmup",
    "//lowlat_gemm/adapters:sglang",
    "//lowlat_gemm/adapters:torch_nn",
    "//lowlat_gemm/adapters:vllm",
    "//lowlat_gemm/kernels:kernels",
    "//lowlat_gemm/tables:tables",
    "//tools:lowlat_cli",
]

def visibility_report(name):
    """A file per room, <name>_<room>.txt, and all of them as <name>."""
    for room, target in ASKING.items():
        native.genquery(
            name = name + "_" + room + ".txt",
            expression = "visible({}, set({}))".format(target, " ".join(ASKED)),
            scope = ASKED,
        )
    native.filegroup(
        name = name,
        srcs = [name + "_" + room + ".txt" for room in ASKING],
    )
