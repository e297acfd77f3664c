"""What becomes of a kernel's module on the device when the process drops the kernel: nothing, until the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

from conformance.cases import SPLIT_K_CONFIGS
from conformance.fakes import inner_environment
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.split_k import compile_unit

#: What an object's destructor calls to unload its module, and what its entry calls for arguments that it does not take.
UNLOAD, REFUSE = b"cuda_dialect_unload_library_once", b"TVMFFIErrorSetRaisedFromCStrParts"
DROP = """
import gc
import sys

import cutlass.cute as cute

kernel = cute.runtime.load_module(sys.argv[1], enable_tvm_ffi=True).kernel
try:
    kernel(None, None, None, None, 0)
except Exception:
    print("refused", flush=True)
del kernel
gc.collect()
print("dropped")
"""


def dropped(path, aborting: bytes) -> subprocess.CompletedProcess:
    """A process that loads the object, calls it in vain and drops it; where it would call ``aborting`` it aborts."""
    content = path.read_bytes()
    assert aborting + b"\0" in content, f"the object does not name {aborting} any more"
    changed = path.with_name("changed.o")
    changed.write_bytes(content.replace(aborting + b"\0", b"abort".ljust(len(aborting) + 1, b"\0")))
    command = [sys.executable, "-c", DROP, changed]
    return subprocess.run(command, capture_output=True, text=True, env=inner_environment(), timeout=120)


def test_a_dropped_kernel_is_not_unloaded(arch, tmp_path):
    """A captured graph holds no reference to its kernels, and would launch code that is gone."""
    path = tmp_path / "kernel.o"
    made = compile_now(compile_unit(arch, 1536, 7168, 1, SPLIT_K_CONFIGS[0]))
    made.export_to_c(object_file_path=str(path), function_name="kernel")
    done = dropped(path, UNLOAD)
    assert (done.returncode, done.stdout) == (0, "refused\ndropped\n"), f"{done.returncode}: {done.stdout}{done.stderr}"
    assert dropped(path, REFUSE).returncode == -signal.SIGABRT, "a name that is called, and nothing aborted"
