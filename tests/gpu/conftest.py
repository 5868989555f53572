"""Fixtures of the GPU tests."""

from __future__ import annotations

import os

from kernel_pool import kernel_pool

__all__ = ["kernel_pool"]

# Emulated ranks wait for one another, so that no two may share a hardware queue; by default a GPU has eight.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
