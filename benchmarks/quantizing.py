"""Do weights quantized on the CPU have the bytes of those quantized on the GPU?

    python -m benchmarks.quantizing

Random weights of several dtypes, NF4 and FP4, double quantization; counts differing elements.
"""

import json

import torch


def main() -> None:
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1024, 3584, generator=generator) * 0.02
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in ("nf4", "fp4"):
            made = [
                F.quantize_4bit(
                    weight.to(device, dtype),
                    compress_statistics=True,
                    quant_type=kind,
                    blocksize=64,
                )
                for device in ("cpu", "cuda")
            ]
            parts = [
                {
                    "packed": packed,
                    "absmax": state.absmax,
                    "nested absmax": state.state2.absmax,
                    "offset": state.offset,
                    "code": state.code,
                    "nested code": state.state2.code,
                }
                for packed, state in made
            ]
            differing = {
                name: int((tensor.flatten() != parts[1][name].cpu().flatten()).sum())
                for name, tensor in parts[0].items()
            }
            print(json.dumps({"dtype": str(dtype), "kind": kind, "differing": differing}))


if __name__ == "__main__":
    main()
