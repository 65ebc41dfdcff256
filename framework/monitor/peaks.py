"""What a device can do at most: a table of data sheets, or measured: ``python -m framework.monitor.peaks``.

The measurement multiplies two square matrices in a loop on one device; its best of several rounds is what to pass as
``--peak_tflops``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence

# Dense matrix products, TFLOP/s, from NVIDIA's data sheets (figures "with sparsity" are halved there): half precision
# (bfloat16 or float16, summed in float32), TF32, float32 without TF32. The first expression found in the driver's name
# counts, so the special ones come first.
_HALF, _TF32, _FLOAT32 = "half", "tf32", "float32"
TABLE: tuple[tuple[str, dict[str, float], str], ...] = (
    (r"H200", {_HALF: 989.5, _TF32: 494.7, _FLOAT32: 67.0}, "NVIDIA H200 data sheet, SXM"),
    (r"H100.*NVL", {_HALF: 835.5, _TF32: 417.5, _FLOAT32: 60.0}, "NVIDIA H100 data sheet, NVL"),
    (r"H100.*PCIe", {_HALF: 756.0, _TF32: 378.0, _FLOAT32: 51.0}, "NVIDIA H100 data sheet, PCIe"),
    (r"H100", {_HALF: 989.4, _TF32: 494.7, _FLOAT32: 67.0}, "NVIDIA H100 data sheet, SXM"),
    (r"A100", {_HALF: 312.0, _TF32: 156.0, _FLOAT32: 19.5}, "NVIDIA A100 data sheet"),
    (r"L40S", {_HALF: 362.0, _TF32: 183.0, _FLOAT32: 91.6}, "NVIDIA L40S data sheet"),
    (r"\bL4\b", {_HALF: 121.0, _TF32: 60.0, _FLOAT32: 30.3}, "NVIDIA L4 data sheet"),
    (r"\bA10\b", {_HALF: 125.0, _TF32: 62.5, _FLOAT32: 31.2}, "NVIDIA A10 data sheet"),
    (r"\bT4\b", {_HALF: 65.0, _FLOAT32: 8.1}, "NVIDIA T4 data sheet"),
    (r"V100.*PCI", {_HALF: 112.0, _FLOAT32: 14.0}, "NVIDIA V100 data sheet, PCIe"),
    (r"V100", {_HALF: 125.0, _FLOAT32: 15.7}, "NVIDIA V100 data sheet, SXM2"),
)


def known_peak(name: str, precision: str, *, tf32: bool) -> tuple[float, str] | None:
    """The peak in TFLOP/s of a GPU of that name and its source; None: not in the table.

    Args:
      name: the driver's, e.g. ``NVIDIA A100-SXM4-80GB``.
      precision: of the config: ``float32``, ``mixed_bfloat16`` or ``mixed_float16``. The V100 and T4 have no fast
        bfloat16.
      tf32: whether TensorFlow may use TF32 for float32 (its default).
    """
    for pattern, peaks, source in TABLE:
        if not re.search(pattern, name):
            continue
        kind = _HALF if precision.startswith("mixed") else _TF32 if tf32 and _TF32 in peaks else _FLOAT32
        if precision == "mixed_bfloat16" and _TF32 not in peaks:
            return None
        return peaks[kind], f"{source}, {kind}"
    return None


def measure(device: str, dtype: str, size: int, seconds: float) -> float:
    """The best rate in TFLOP/s of products of two ``[size, size]`` matrices on a device.

    Args:
      device: TensorFlow's name, e.g. ``GPU:0``.
      dtype: of the matrices.
      size: rows and columns.
      seconds: how long to try.
    """
    import tensorflow as tf

    times = 4

    @tf.function(autograph=False)
    def products(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        for _ in range(times):
            a = tf.matmul(a, b)
        return a

    with tf.device(device):
        a = tf.cast(tf.random.normal([size, size]) / size**0.5, dtype)
        b = tf.cast(tf.random.normal([size, size]) / size**0.5, dtype)
        products(a, b)[0, 0].numpy()
        best, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            products(a, b)[0, 0].numpy()  # reading a number waits for the device
            best = max(best, 2.0 * size**3 * times / (time.perf_counter() - start))
    return best / 1e12


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m framework.monitor.peaks", description=__doc__)
    p.add_argument("--device", default="", help="TensorFlow's name; default: the first GPU, or CPU:0")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--size", type=int, default=0, help="rows and columns; default: 8192 on a GPU, else 2048")
    p.add_argument("--seconds", type=float, default=3.0, help="how long to try")
    args = p.parse_args(argv)
    import tensorflow as tf

    device = args.device or ("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0")
    size = args.size or (8192 if "GPU" in device else 2048)
    found = measure(device, args.dtype, size, args.seconds)
    print(f"{device}, {args.dtype} [{size}, {size}]: {found:.4g} TFLOP/s; pass --peak_tflops={found:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
