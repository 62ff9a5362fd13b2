"""The portable backend: plain Triton, from sm_80 on, AMD in principle, and Triton's interpreter on a CPU."""
