"""Fixtures of the tests between GPUs."""

from __future__ import annotations

from kernel_pool import kernel_pool

__all__ = ["kernel_pool"]
