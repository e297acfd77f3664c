"""Which GPU generation this machine has, as a constraint on the target platform."""

# compute capability -> name; exact, as in lowlat_gemm/arch.py (a test holds the two together).
CAPABILITIES = {
    "9.0": "sm90",
    "10.0": "sm100",
    "10.3": "sm103",
    "10.7": "sm107",
}

_BUILD = """
platform(
    name = "platform",
    parents = ["@local_config_platform//:host"],
    constraint_values = ["@lowlat//hw_matrix/platforms:{gpu}"],
    visibility = ["//visibility:public"],
)
"""

def _probe(repository_ctx):
    nvidia_smi = repository_ctx.which("nvidia-smi")
    if not nvidia_smi:
        return "no_gpu"
    result = repository_ctx.execute(
        [nvidia_smi, "--query-gpu=compute_cap", "--format=csv,noheader"],
        timeout = 60,
    )
    if result.return_code:
        answer = " ".join((result.stdout + result.stderr).split())
        print("lowlat_gemm: nvidia-smi is here but failed, so no GPU test will run: " + answer)
        return "no_gpu"
    found = {line.strip(): None for line in result.stdout.splitlines() if line.strip()}.keys()
    known = [CAPABILITIES[capability] for capability in found if capability in CAPABILITIES]
    if len(known) != len(found) or len(known) > 1:
        print("lowlat_gemm: GPUs with compute capability {}; GPU tests run for: {}".format(
            ", ".join(found),
            known[0] if known else "none",
        ))
    return known[0] if known else "no_gpu"

def _gpu_probe_impl(repository_ctx):
    repository_ctx.file("BUILD", _BUILD.format(gpu = _probe(repository_ctx)), executable = False)

# configure and local: looked at again whenever a Bazel server starts.
gpu_probe = repository_rule(
    implementation = _gpu_probe_impl,
    configure = True,
    environ = ["PATH"],
    local = True,
)
