"""Loads a small Llama through the real vLLM, the plugin found by its entry point, and says in JSON what came of it.

    python -m conformance.vllm.load_model FOLDER [fail]

FOLDER is scratch. A process of its own: vLLM takes its platform (CPU here) from the environment at its import. The
GPU is a fake one. With ``fail`` the adapter breaks while it installs.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

# What vLLM's own C extension, which is not built for CPU here, would answer.
torch.accelerator.empty_cache = lambda: None
torch.cpu._is_amx_tile_supported = lambda: False

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: qkv_proj of both layers, and the head.
N, K = 512, 256


def use_default_gemm() -> None:
    """On vLLM's CPU platform unquantized layers get a GEMM of that platform: here they get the one that GPUs have."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    from lowlat_gemm.adapters import vllm_methods

    for module in (linear, utils, vocab_parallel_embedding, vllm_methods):
        module.dispatch_unquantized_gemm = lambda *args: utils.default_unquantized_gemm


def main(folder: Path, fail: bool) -> dict:
    from conformance.fakes import bf16, cuda, device_of, fake_table
    from lowlat_gemm import dispatch
    from lowlat_gemm.arch import SM90
    from lowlat_gemm.reference import parity, reference_gemm

    cells = {m: ("skinny", {"block_size": 32, "outputs_per_block": 2, "k_unroll": 1, "vector_width": 8}) for m in (1, 2)}
    table = fake_table(cells, n=N, k=K)
    dispatch.available_tables, dispatch.load_table = lambda: [(table.family, table.arch)], lambda family, arch: table
    (folder / "config.json").write_text(json.dumps(CONFIG))

    from vllm.engine.arg_utils import EngineArgs

    engine = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True)
    config = engine.create_engine_config()
    registered = "lowlat_gemm.adapters.vllm" in sys.modules
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model

    from lowlat_gemm.adapters import vllm as adapter

    use_default_gemm()
    with ExitStack() as stack:
        fakes, real_install = [], adapter.install

        def install(model):
            if not fakes:
                fakes.append(stack.enter_context(cuda(device_of(SM90))))
            if fail:
                raise RuntimeError("broken on purpose")
            return real_install(model)

        adapter.install = install
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(1, 0, f"file://{folder}/groups", 0, "gloo")
        initialize_model_parallel(1)
        before = config.compute_hash()
        model = get_model(vllm_config=config)
        fake = fakes[0] if fakes else None
        answer = {
            "registered": registered,
            "installed": adapter.report(model).installed,
            "skipped": {name: refusal.reason.value for name, refusal in adapter.report(model).skipped.items()},
            "compiles": fake.cache.compiles if fake else 0,
            "key_changed": config.compute_hash() != before,
        }
        with torch.no_grad():
            x, layer = bf16(2, K), model.model.layers[0].self_attn.qkv_proj
            answer["right"] = bool(parity(layer(x)[0], reference_gemm(x, layer.weight.data)).ok)
            logits = model.compute_logits(x)
            answer["logits_right"] = bool(parity(logits.bfloat16(), reference_gemm(x, model.lm_head.weight.data)).ok)
            answer["launches"] = len(fake.calls) if fake else 0
        return answer


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]), "fail" in sys.argv[2:])))
