"""Kernels: one host-side file each (config, predicate; no cutlass) and one with its CuTe DSL code."""
