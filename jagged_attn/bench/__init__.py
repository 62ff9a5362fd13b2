"""Benchmarks: named workloads, our backends and their peers side by side, and no speed for a wrong result.

``python -m jagged_attn.bench --help``; what it measures and how is told in ``docs/benchmarks.md``.
"""
