"""TLX kernels for Blackwell (sm_100): persistent, warp-specialised, with sums in tensor memory."""
