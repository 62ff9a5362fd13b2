"""Helpers for tests and benchmarks: seeded inputs, derived tolerances, and an emulator for TLX kernels."""
