"""A performance model of the TLX kernels; see docs/performance-model.md.

A package of its own, beside ``bench``: it runs nothing on a device and imports no Triton, so that it predicts kernels
for GPUs that are not there, and ``bench`` stays what times things that run.
"""
